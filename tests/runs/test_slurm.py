"""docs/slurm.sbatch with a stand-in for Slurm: told to stop, the run saves and the job goes back into the queue; started again, it ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, flags, launch_environment, read_metrics

SRUN = """#!/bin/bash
# Runs the step in a process group of its own, which is what Slurm signals.
echo $$ > "$SEEN/srun"
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> "$SEEN/scontrol"
"""


@pytest.fixture
def job(tiny, tmp_path):
    """Starts the job, as Slurm would; its process."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "accelerate").symlink_to(Path(sys.executable).parent / "accelerate")
    env = launch_environment(
        PATH=f"{programs}:{os.environ['PATH']}",
        SEEN=str(tmp_path),
        SLURM_SUBMIT_DIR=str(tmp_path / "tree"),
        SLURM_GPUS_ON_NODE="1",
        SLURM_JOB_ID="4711",
    )
    (tmp_path / "tree").mkdir()
    for path in (*ROOT.glob("*.py"), *(ROOT / room for room in ("fast", "look", "tasks", "host"))):
        (tmp_path / "tree" / path.name).symlink_to(path)

    def start(steps: int) -> subprocess.Popen:
        more = "--log.default-local-dir", str(tmp_path), "--trainer.total-training-steps", str(steps)
        with open(tmp_path / "out", "a") as out:
            return subprocess.Popen(
                ["bash", str(ROOT / "docs" / "slurm.sbatch"), *flags(tiny, *more)],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return start


@pytest.mark.slow
def test_a_job_that_is_preempted_is_queued_again_and_goes_on(job, tmp_path):
    process, metrics = job(2000), tmp_path / "run" / "metrics.jsonl"
    deadline = time.time() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert process.poll() is None and time.time() < deadline, (tmp_path / "out").read_text()[-3000:]
        time.sleep(0.1)
    os.kill(int((tmp_path / "srun").read_text()), signal.SIGTERM)  # the step's task; its children are not told
    assert process.wait(100) == 0, (tmp_path / "out").read_text()[-3000:]
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    done = len(read_metrics(tmp_path / "run"))

    shutil.copy(tmp_path / "out", tmp_path / "before")
    assert job(done + 1).wait(200) == 0, (tmp_path / "out").read_text()[-3000:]
    steps = [record["step"] for record in read_metrics(tmp_path / "run")]
    assert steps == list(range(len(steps))) and len(steps) > done
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"  # it has ended: no further turn


@pytest.mark.slow
def test_a_job_that_fails_ends_with_its_status(job, tmp_path):
    (tmp_path / "tree" / "train.py").unlink()
    (tmp_path / "tree" / "train.py").write_text("raise SystemExit(3)\n")
    assert job(2).wait(100) == 1  # accelerate's, for any
    assert not (tmp_path / "scontrol").exists()
