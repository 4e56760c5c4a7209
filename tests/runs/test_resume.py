"""A run that is killed and started again is the one that never stopped. (The same at 20 moments, in ten minutes: `python tests/tools/kill_resume.py`.)"""

import json
import random
from pathlib import Path

import pytest
from conftest import ROOT, flags, launch, read_metrics
from kill_resume import Kill, Run, kill_chain

from log import LogConfig, Logger


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Eight steps by one process, and by two, that nobody kills."""
    runs = {processes: Run(tiny, tmp_path_factory.mktemp("whole") / "whole", processes) for processes in (1, 2)}
    for run in runs.values():
        run.start()
    return runs


@pytest.mark.slow
def test_two_ranks_killed_four_times_are_the_run_that_never_stopped(whole, tiny, tmp_path, capsys):
    """Every number, dump, weight and random state; where one rank dies, the other has to end by itself."""
    random.seed(1)
    kills = [
        Kill("between two updates", range(5, 8, 2), rank=1, alone=True),
        Kill("resume: half of metrics.jsonl"),
        Kill("inside a checkpoint's file", range(20, 40)),
        Kill("between the ranks' writes", (1, 2), rank=1, alone=True),
    ]
    differences = kill_chain(Run(tiny, tmp_path / "killed", 2), whole[2], kills)
    assert not differences, capsys.readouterr().out


@pytest.mark.slow
def test_number_of_ranks_changes_neither_prompts_nor_seeds(whole):
    """Failing groups are replaced, so that later prompts depend on earlier ones. Responses are compared while the weights are the same bits."""
    names = [sorted(path.name for path in (run.run_dir / "rollouts").iterdir()) for run in whole.values()]
    assert names[0] == names[1] and any("failed" in name for name in names[0])
    for step in range(8):
        one, two = (
            [json.loads(line) for line in (run.run_dir / "rollouts" / f"{step:06d}.jsonl").read_text().splitlines()]
            for run in whole.values()
        )
        assert len(one) == 32 and [(r["key"], r["row"], r["prompt"]) for r in one] == [
            (r["key"], r["row"], r["prompt"]) for r in two
        ]
        assert step or [r["response"] for r in one] == [r["response"] for r in two]


LINES = '{"step": 0, "val/exact/mean@1": 0.125}\n{"step": 1, "val/exact/mean@1": 0.25}\n{"step": 2}\n{"step": 3, "rewa'


def test_kill_while_metrics_are_rewritten_loses_none(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(LINES)

    def half(path, text):
        with open(path, "w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", half)
        Logger(LogConfig(), tmp_path, 2, 4, {}, None)
    assert (tmp_path / "metrics.jsonl").read_text() == LINES
    Logger(LogConfig(), tmp_path, 2, 4, {}, None)
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]


def test_records_are_kept_as_they_were_but_for_one_cut_short(tmp_path):
    """A last one that lacks its newline only is whole. One in the middle that is none says where it stands."""
    (path := tmp_path / "metrics.jsonl").write_text(
        LINES.splitlines()[0] + "\n\n" + '{"step": 1, "a": 1e-06, "b": null, "c": 0.1}'
    )
    for _ in range(2):
        Logger(LogConfig(), tmp_path, 2, 4, {}, None)
        assert path.read_text() == LINES.splitlines()[0] + "\n" + '{"step": 1, "a": 1e-06, "b": null, "c": 0.1}\n'
    path.write_text(LINES + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 4, is not JSON"):
        Logger(LogConfig(), tmp_path, 2, 4, {}, None)
    assert path.read_text() == LINES + "\n"


def test_last_lines_of_a_resumed_run_are_about_the_whole(tmp_path, capsys):
    """Before: the first validation of all, not the resume's; and of one that was not done before, no number."""
    (tmp_path / "metrics.jsonl").write_text(LINES)
    log = Logger(LogConfig(), tmp_path, 2, 4, {}, None)
    log.add({"val/exact/mean@1": 0.75, "val/other/mean@1": 0.5})
    log.end_step(4)
    log.finish()
    assert (
        "exact/mean@1: 0.1250 before, 0.7500 after" in (out := capsys.readouterr().out)
        and "other/mean@1: nan before, 0.5000 after" in out
    )


BREAKS = """
import sys
sys.path.insert(0, {root!r})
from host import rank
import train

whole = train.compute_advantages

def broken(trajectories, cfg):
    metrics = whole(trajectories, cfg)
    trajectories[9].advantages[-1] = float("nan")
    return metrics

train.compute_advantages = broken
rank.run(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_skipped_steps_in_a_row_are_counted_across_a_resume(tiny, tmp_path):
    """The third in a row ends the run, and ends it again when it is started again after the second."""
    (script := tmp_path / "breaks.py").write_text(BREAKS.format(root=str(ROOT)))
    for again in (False, True):
        done = launch(
            flags(
                tiny,
                "--log.default-local-dir",
                str(tmp_path),
                "--trainer.total-training-steps",
                "6",
                "--checkpoint.save-freq",
                "1",
            ),
            script=script,
        )
        assert done.returncode != 0 and f"python -m look.replay {tmp_path}/run/replays/000000" in done.stderr, (
            done.stderr[-3000:]
        )
        assert ("resuming from" in done.stdout) == again
        assert [record["step"] for record in read_metrics(tmp_path / "run")] == [0, 1]
