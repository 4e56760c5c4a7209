"""Ranks as processes: one that fails ends all, with its own error; SIGTERM lets the step end; nothing outlives its launcher."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, flags, launch, launch_command, launch_environment, read_metrics, slow

BREAKS = """
import os, sys, time
sys.path.insert(0, {root!r})
import actor
from host import rank
import rollout
import train
from config import load_config

places = {{"rollout": (rollout.Rollout, "run_session"), "update": (actor.Actor, "optimizer_step"), "save": (train, "save")}}
owner, name = places[os.environ["BREAKS_IN"]]
whole = getattr(owner, name)

def broken(*args, **kwargs):
    if os.environ["RANK"] == os.environ["BREAKS_ON"]:
        open(os.environ["BROKE_AT"], "w").write(str(time.time()))
        raise ArithmeticError("broken " + os.environ["BREAKS_IN"])
    return whole(*args, **kwargs)

setattr(owner, name, broken)
rank.run(lambda: train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("place, rank", [slow("rollout", 1), ("update", 1), slow("save", 0)])
def test_failure_of_one_rank_ends_both_with_its_traceback(tiny, tmp_path, place, rank):
    """The other rank is inside a collective, and its own error, if it has one, is not what the user is to read."""
    script = tmp_path / "breaks.py"
    script.write_text(BREAKS.format(root=str(ROOT)))
    env = {"BREAKS_IN": place, "BREAKS_ON": str(rank), "BROKE_AT": str(tmp_path / "time")}
    result = launch(
        flags(tiny, "--log.default-local-dir", str(tmp_path), "--checkpoint.save-freq", "1"),
        2,
        script=script,
        env=env,
        accelerate=True,
    )
    took = time.time() - float((tmp_path / "time").read_text())
    assert result.returncode != 0 and took < 60
    assert f"ArithmeticError: broken {place}" in result.stderr
    tracebacks = [
        part
        for part in result.stderr.split("Traceback (most recent call last):")
        if "elastic" not in part and "accelerate/commands" not in part
    ]
    assert f"broken {place}" in tracebacks[-1]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]


def start(tiny, tmp_path, processes, *more, **kwargs):
    """A run that would take minutes, once it has done a step or two."""
    args = flags(tiny, "--log.default-local-dir", str(tmp_path), "--trainer.total-training-steps", "2000", *more)
    with open(tmp_path / "out", "w") as out:
        process = subprocess.Popen(
            launch_command(args, processes), env=launch_environment(), stdout=out, stderr=subprocess.STDOUT, **kwargs
        )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.time() + 250
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert process.poll() is None and time.time() < deadline, (tmp_path / "out").read_text()[-3000:]
        time.sleep(0.1)
    return process, metrics


def ranks(tmp_path):
    """Processes of this run that train: not launchers, which name train.py as an argument to something else."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in (p.info["cmdline"] or [])
        and "torch.distributed.run" not in p.info["cmdline"]
        and "launch" not in p.info["cmdline"]
    ]


def wait_until_gone(tmp_path, seconds):
    deadline = time.time() + seconds
    while left := ranks(tmp_path):
        assert time.time() < deadline, f"still there: {left}"
        time.sleep(0.1)


@pytest.mark.slow
def test_sigterm_to_the_launcher_ends_the_step_and_saves(tiny, tmp_path):
    """accelerate's launcher dies of it and passes nothing on."""
    process, metrics = start(tiny, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    wait_until_gone(tmp_path, 100)
    steps = len(read_metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{steps:06d}"
    assert "told to stop (SIGTERM or Ctrl-C)" in (tmp_path / "out").read_text()


def test_sigterm_to_the_run_exits_0_and_it_goes_on_from_there(tiny, tmp_path):
    process, metrics = start(tiny, tmp_path, 1)
    ranks(tmp_path)[0].send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    steps = len(read_metrics(tmp_path / "run"))
    result = launch(
        flags(tiny, "--log.default-local-dir", str(tmp_path), "--trainer.total-training-steps", str(steps + 1)),
        accelerate=True,
    )
    assert result.returncode == 0 and f"step-{steps:06d}" in result.stdout
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == list(range(steps + 2))


SLOW = """import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if os.path.exists({slow!r}):
        open({waits!r}, "w").close()
        time.sleep(9)
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""


@pytest.mark.parametrize("engine_ranks, estimator", [("1", "grpo"), slow("2", "grpo"), slow("2", "remax")])
def test_a_step_that_samples_is_given_up_and_the_last_one_saved(tiny, tmp_path, engine_ranks, estimator):
    """Weights change in the update alone: nothing is lost but the sampling, and the rows of the step come again. With
    remax no rank goes on to the greedy sessions alone."""
    (tmp_path / "slow.py").write_text(SLOW.format(slow=str(tmp_path / "now"), waits=str(tmp_path / "waits")))
    reward = ["--reward.custom-path", str(tmp_path / "slow.py"), "--reward.num-workers", "1"]
    shared = ["--rollout.tensor-model-parallel-size", engine_ranks, "--algorithm.adv-estimator", estimator]
    process, metrics = start(tiny, tmp_path, 2, *reward, *shared, "--rollout.session-timeout-s", "600")
    (tmp_path / "now").touch()
    while not (tmp_path / "waits").exists():  # for its rewards: 32 of 9 s, one at a time a rank
        time.sleep(0.1)
    steps, told = len(read_metrics(tmp_path / "run")), time.time()
    process.send_signal(signal.SIGTERM)
    wait_until_gone(tmp_path, 100)
    assert time.time() - told < 100 and len(read_metrics(tmp_path / "run")) == steps
    assert f"told to stop (SIGTERM or Ctrl-C) after {steps} steps: saved" in (tmp_path / "out").read_text()
    state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{steps:06d}" / "state.json").read_text())
    rows, batch = 32, 8
    assert state["stream"]["epoch"] * rows + state["stream"]["position"] == steps * batch


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_stops_as_sigterm_does(tiny, tmp_path, processes):
    """A terminal sends it to the launcher too, which dies of it."""
    process, metrics = start(tiny, tmp_path, processes, start_new_session=True)
    os.killpg(process.pid, signal.SIGINT)
    wait_until_gone(tmp_path, 100)
    steps = len(read_metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == f"step-{steps:06d}"
    assert f"after {steps} steps: saved" in (tmp_path / "out").read_text()


@pytest.mark.slow
def test_killed_rank_ends_the_other(tiny, tmp_path):
    process, metrics = start(tiny, tmp_path, 2)
    killed = time.time()
    ranks(tmp_path)[-1].kill()
    assert process.wait(60) != 0 and time.time() - killed < 60
    assert not ranks(tmp_path)


@pytest.mark.slow
def test_killed_launcher_leaves_nothing_behind(tiny, tmp_path):
    process, metrics = start(tiny, tmp_path, 2)
    process.kill()
    wait_until_gone(tmp_path, 100)


@pytest.mark.parametrize("processes", [slow(1), 2])
def test_error_that_quotes_what_a_policy_wrote_is_spelt_out(tmp_path, processes):
    """Its own, and that of what it came from; also where torchrun shows it again."""
    script = tmp_path / "quotes.py"
    script.write_text(rf"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from host import rank
def main():
    try:
        int("4\x1b[2J")
    except ValueError as error:
        raise RuntimeError("no number: \x1b]0;title\x07") from error
rank.run(main)
""")
    result = launch([], processes, script=script, accelerate=True)
    assert (
        result.returncode != 0 and "no number: \\x1b]0;title\\x07" in result.stderr and "'4\\x1b[2J'" in result.stderr
    )
    assert not {"\x1b[2J", "\x1b]0", "\x07"} & {word for word in ("\x1b[2J", "\x1b]0", "\x07") if word in result.stderr}


FORKS = """
import os, sys, time
sys.path.insert(0, {root!r})
from host import rank
def main():
    if not os.fork():
        time.sleep(100)
    open({ready!r}, "w").close()
    while not rank.told():
        time.sleep(0.05)
    time.sleep(1)  # a second order of the child's would end it here
    print("told once")
rank.run(main)
"""


def test_ctrl_c_that_reaches_a_forked_child_too_is_one_order(tmp_path):
    """A terminal sends it to the whole group; an agent's own process has inherited what it is written to."""
    (tmp_path / "forks.py").write_text(FORKS.format(root=str(ROOT), ready=str(tmp_path / "ready")))
    command = [sys.executable, str(tmp_path / "forks.py")]
    process = subprocess.Popen(
        command, env=launch_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=100)[0] == "told once\n" and process.returncode == 0


@pytest.mark.parametrize("ranks, parent", [("1", 0), ("2", 0), ("2", None)])
def test_whoever_has_no_parent_or_siblings_is_told_all_the_same(monkeypatch, ranks, parent):
    """The first process of a container has a parent of pid 0, which is none."""
    from host import rank

    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    if parent is not None:
        monkeypatch.setattr(os, "getppid", lambda: parent)
    assert rank.sibling_ended() is (parent is None and len(psutil.Process(os.getppid()).children()) < 2)
