"""What a run leaves on disk and on the console."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from batch import Task, Trajectory
from checkpoint import RunState
from log import LogConfig, Logger, start_log


@pytest.fixture
def log(tmp_path):
    return Logger(LogConfig(), tmp_path, 0, 2, {}, None)


def strict(line):
    """JSON without Python's own NaN and Infinity."""
    return json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_numbers_that_json_lacks_are_null(log, tmp_path):
    log.add({"actor/kl_loss": math.nan, "correction/max": math.inf, "reward/mean": 0.5})
    log.end_step(0)
    record = strict((tmp_path / "metrics.jsonl").read_text())
    assert record["actor/kl_loss"] is None and record["correction/max"] is None and record["reward/mean"] == 0.5


def test_dump_is_json_whatever_a_row_and_its_reward_hold(log, tmp_path):
    log.dump(
        "000000",
        [
            Trajectory(
                Task("1", "exact", {"numbers": (1, math.nan), 2: {3}}),
                tokens=[1],
                response_mask=[1],
                score_parts={"x": -math.inf},
            )
        ],
    )
    record = strict((tmp_path / "rollouts" / "000000.jsonl").read_text())
    assert (
        record["score"] is None
        and record["score_parts"] == {"x": None}
        and record["ground_truth"] == {"numbers": [1, None], "2": "{3}"}
    )


def test_console_shows_validation_means_only(log, capsys):
    log.add({"val/mean": 0.25, "val/a/b/mean@4": 0.25, "val/a/b/mean@4/stderr": 0.111, "val/a/b/pass@4": 0.9})
    log.end_step(2)
    log.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "end of 2 steps  a/b/mean@4 0.250" and lines[1] == "val/a/b/mean@4: 0.2500 before, 0.2500 after"


def test_failed_sessions_are_kept_with_their_tracebacks(log, tmp_path, capsys):
    groups = [
        SimpleNamespace(task=Task("", "exact", 0, index=7), index=1, errors=["Traceback:\nKeyError: 'x'\n", "late\n"]),
        SimpleNamespace(task=Task("", "exact", 0), index=2, errors=[]),
    ]
    log.failures("000003", groups[1:])
    assert not (tmp_path / "rollouts").exists()
    log.failures("000003", groups)
    records = [strict(line) for line in (tmp_path / "rollouts" / "000003.failed.jsonl").read_text().splitlines()]
    assert [(r["row"], r["place"], r["error"]) for r in records] == [
        (7, 1, "Traceback:\nKeyError: 'x'\n"),
        (7, 1, "late\n"),
    ]
    Logger(LogConfig(), tmp_path, 3, 4, {}, None)  # resumed: step 3 is done again
    assert not list((tmp_path / "rollouts").iterdir())
    assert "2 sessions of 1 groups failed" in (line := capsys.readouterr().out) and "KeyError: 'x'" in line


@pytest.mark.parametrize("val_only, wandb_id", [(False, "abc"), (True, None)])
def test_validation_alone_has_its_own_folder_and_wandb_run(cfg, tmp_path, monkeypatch, val_only, wandb_id):
    seen = []
    monkeypatch.setattr("look.tracking.Trackers", lambda *args: seen.append(args))
    cfg = replace(
        cfg,
        log=replace(cfg.log, default_local_dir=str(tmp_path), logger=("console", "wandb")),
        trainer=replace(cfg.trainer, val_only=val_only),
    )
    start_log(cfg, RunState(step=1, wandb_id="abc"), tmp_path / "checkpoint", 1)
    assert seen[0][1] == tmp_path / "run" / ("val-only" if val_only else "") and seen[0][4] == wandb_id


def test_memory_of_a_phase_that_runs_twice_is_that_of_its_fuller_run(log, monkeypatch):
    """Torch's peak in the phase and what else the card holds, without what torch keeps idle: a refill of the sampling is the smaller run."""
    gib, peaks = 2**30, iter([30, 20, 25])
    fakes = {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda: (100 * gib, 140 * gib),
        "memory_reserved": lambda: 35 * gib,
        "max_memory_allocated": lambda: next(peaks) * gib,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    monkeypatch.setattr("log.LEAST_S", 0.0)
    for phase in ("gen", "gen", "adv", None):
        log.phase(phase)
    assert {phase: log.metrics[f"perf/memory_gb/{phase}"] for phase in ("gen", "adv")} == {"gen": 35.0, "adv": 30.0}
