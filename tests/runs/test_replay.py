"""A gradient that is not finite: the step is skipped, counted, dumped and can be recomputed; several in a row stop the run."""

import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT, flags, launch, read_metrics

BREAKS = """
import sys
sys.path.insert(0, {root!r})
from host import rank
import train

whole = train.compute_advantages

def broken(trajectories, cfg):
    metrics = whole(trajectories, cfg)
    if trajectories[0].weight_version in (1, 3, 4, 5):
        trajectories[9].advantages[-1] = float({value!r})
    return metrics

train.compute_advantages = broken
rank.run(lambda: train.main(sys.argv[1:]))
"""


def run_replay(folder) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "look.replay", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def recomputed(folder) -> dict[str, tuple[float, float]]:
    done = run_replay(folder)
    assert done.returncode == 0, done.stderr
    return {
        name: (float(then), float(now)) for name, then, now in (line.split() for line in done.stdout.splitlines()[1:])
    }


@pytest.mark.parametrize("value, processes", [("inf", 1)])
def test_steps_whose_gradient_is_not_finite(tiny, tmp_path, value, processes):
    script = tmp_path / "breaks.py"
    script.write_text(BREAKS.format(root=str(ROOT), value=value))
    args = [
        "--log.default-local-dir",
        str(tmp_path),
        "--log.replay-steps",
        "0",
        "--trainer.total-training-steps",
        "8",
        "--loss.entropy-coeff",
        "0.1",
    ]
    done = launch(flags(tiny, *args), processes, script=script)
    run_dir = tmp_path / "run"
    assert (
        done.returncode != 0
        and "the gradient was not finite in 3 steps in a row" in done.stderr
        and f"python -m look.replay {run_dir}/replays/000003" in done.stderr
    )
    assert "SKIPPED 1 updates" in done.stdout
    text = (run_dir / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text  # which are no JSON
    metrics = read_metrics(run_dir)
    assert [m["actor/skipped_steps"] for m in metrics] == [0, 1, 0, 1, 1]
    assert [m["actor/grad_norm"] is None for m in metrics] == [False, True, False, True, True]
    assert [m["actor/num_updates"] for m in metrics] == [2, 1, 2, 1, 1]  # after it the rest of the step is left out
    assert sorted(path.name for path in (run_dir / "replays").iterdir()) == [
        "000000",
        "000001",
        "000003",
    ]  # the first of a row, and what was asked for

    first = recomputed(run_dir / "replays" / "000000")
    for name, (then, now) in first.items():
        assert now == pytest.approx(then, rel=1e-3, abs=1e-6), name
    assert first["actor/grad_norm"][0] > 0
    for folder in ("000001", "000003"):
        skipped = recomputed(run_dir / "replays" / folder)
        assert not math.isfinite(skipped["actor/grad_norm"][0]) and not math.isfinite(skipped["actor/grad_norm"][1])
        assert skipped["actor/entropy"][1] == pytest.approx(
            skipped["actor/entropy"][0], rel=1e-4
        )  # the weights are those that the mini-batch met
    rows = [json.loads(line) for line in (run_dir / "replays" / "000001" / "mini_batch.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and [i for i, row in enumerate(rows) if not all(map(math.isfinite, row["advantages"]))] == [
        9
    ]


def test_folder_without_a_dump_is_one_line(tmp_path):
    done = run_replay(tmp_path)
    assert done.returncode == 1 and done.stderr == f"error: {tmp_path} holds no dumped mini-batch (found.json)\n"
