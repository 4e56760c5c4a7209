"""Which checkpoints are on disk, and which one a run goes on from. (What is in them: tests/test_train.py resumes a run.)"""
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoint import CheckpointConfig, find, read_state, save


@pytest.fixture
def write(tmp_path, accelerator):
    fake = SimpleNamespace(save_state=lambda folder: Path(folder).mkdir(), wait_for_everyone=lambda: None)
    return lambda step, keep=9: save(CheckpointConfig(max_ckpt_to_keep=keep), tmp_path, step, SimpleNamespace(accelerator=fake), {"place": step})


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def test_oldest_go_first(tmp_path, write):
    for step in range(1, 5):
        write(step, keep=2)
    assert names(tmp_path) == ["step-000003", "step-000004"]
    assert read_state(find(CheckpointConfig(), tmp_path)) == {"step": 4, "place": 4}


def test_run_that_went_back_keeps_what_it_just_saved(tmp_path, write):
    for step in (1, 5, 6):
        write(step)
    write(2, keep=1)
    assert find(CheckpointConfig(), tmp_path).name == "step-000002" and "step-000001" not in names(tmp_path)


def test_same_step_again_replaces_it(tmp_path, write):
    write(3)
    write(3)
    assert names(tmp_path) == ["step-000003"]


def test_marker_of_a_checkpoint_that_is_gone_is_one_line(tmp_path, write):
    shutil.rmtree(write(1))
    with pytest.raises(ValueError, match="names step-000001, which is gone: set checkpoint.resume"):
        find(CheckpointConfig(), tmp_path)


def test_fresh_start_and_no_resume(tmp_path, write):
    assert find(CheckpointConfig(), tmp_path) is None and read_state(None) == {"step": 0}
    write(1)
    assert find(CheckpointConfig(resume="never"), tmp_path) is None
    with pytest.raises(ValueError, match="checkpoint.resume=nowhere"):
        find(CheckpointConfig(resume="nowhere"), tmp_path)
