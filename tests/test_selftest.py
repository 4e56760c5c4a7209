"""look/selftest.py: it passes here, and each check fails when what it looks at is broken."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch_environment

import engine
import fast.engine
from config import PLAIN
from look import run_checks, selftest
from look.kernel_checks import Check, NotHere, Wrong, compare

NAMES = list(selftest.all_checks(None))
OF_GPUS = [name for name in NAMES if name.startswith(("flash", "triton-backward-64", "kernels-at-work"))]


def run(*words, cwd=ROOT):
    """The program as a user starts it: its exit code, its lines by name, all lines."""
    command = [sys.executable, "-m", "look.selftest", *words]
    done = subprocess.run(command, cwd=cwd, env=launch_environment(), capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    marked = [line for line in lines if line.startswith(("ok ", "FAIL ", "-- "))]
    return done.returncode, {line.split()[1]: line for line in marked}, lines, done.stderr


@pytest.mark.slow
def test_all_checks_pass_on_a_cpu():
    code, found, lines, errors = run()
    assert code == 0, lines + [errors]
    assert lines[0].startswith("no GPU") and lines[1].startswith("Lockstep") and "torch 2" in lines[2]
    assert list(found) == NAMES
    assert [name for name in NAMES if found[name].startswith("--")] == OF_GPUS
    assert re.fullmatch(
        rf"all {len(NAMES) - len(OF_GPUS)} checks passed, {len(OF_GPUS)} do not apply here, in \d+ s", lines[-1]
    )
    assert "interpreter" in found["decode-64"] and "allowed" in found["triton-backward-128-shared"]
    assert "bits equal 3 times, 2 by noted copies" in found["sync-default"]
    assert "bits equal 3 times;" in found["sync-plain"] and "differ by 0 " in found["agrees-with-plain"]


# Kernels

BROKEN = """
import os, sys
sys.path[:0] = [{root!r}]
os.environ["TRITON_INTERPRET"] = "1"
import torch
from fast import attention_kernels, decoding, kernels
from look import selftest

def spoil(names, holder, attribute, change):
    kept = getattr(holder, attribute)
    setattr(holder, attribute, lambda *args, **kwargs: change(kept(*args, **kwargs)))
    code = selftest.main(selftest.parse(names.split()))
    print("code", code, flush=True)
    setattr(holder, attribute, kept)

def one_number(*tensors):
    tensors[-1].view(-1)[-1] = torch.nan
    return tensors

def raises(_):
    raise ZeroDivisionError("oops")

spoil("head-statistics", kernels, "block_statistics", lambda out: (out[0], out[1] * 1.0001, out[2]))
spoil("head-gradient", kernels, "logit_gradient", lambda out: out * 1.0001)
spoil("decode-64", decoding, "find_shared", lambda out: (out[0] + 1, *out[1:]))
spoil("sample-tokens", kernels, "choose_token", lambda out: (out[0] + 1, out[1]))
spoil("sample-tokens", kernels, "choose_token", lambda out: (out[0], out[1] + 1e-3))
spoil("sample-distribution", kernels, "choose_token", lambda out: (out[0] * 0, out[1]))
spoil("triton-backward-128", attention_kernels, "flash_backward", lambda out: (out[0] * 1.001, *out[1:]))
spoil("triton-backward-128-shared", attention_kernels, "flash_backward", lambda out: one_number(*out))
spoil("merge decode-128", kernels, "merge", raises)
"""


def test_a_kernel_that_is_broken_fails_its_check():
    """Each by a little, and for the reason that is said; a check that raises does not stop the next one."""
    script = [sys.executable, "-c", BROKEN.format(root=str(ROOT))]
    done = subprocess.run(script, cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "FAIL ", "1 of", "code"))]
    for name, reason, knob in (
        ("head-statistics", r"largest, mass and mean of 5,000 logits' blocks: off by .* allowed", "actor"),
        ("head-gradient", r"gradients of 5,000 logits: off by 1.0e-04 of (a row|all), .* allowed", "actor"),
        ("decode-64", r"16 sequences of up to 310 tokens, heads of 64: off by .* allowed", "rollout"),
        ("sample-tokens", r"20 of 20 tokens are others than torch samples", "rollout"),
        ("sample-tokens", r"20 of 20 tokens are those that torch samples, log-probs: off by .* allowed", "rollout"),
        ("sample-distribution", r"a chi-square of \d+, \d+ expected .*", "rollout"),
        ("triton-backward-128", r"dq, dk and dv: off by 1.0e-03 of (a row|all), .* allowed", "actor"),
        ("triton-backward-128-shared", r"dq, dk and dv: off by nan of (a row|all), .* allowed", "actor"),
    ):
        failed, last, code = lines[:3]
        assert re.fullmatch(rf"FAIL  {name} +{reason}", failed), failed
        assert last == (
            f"1 of 1 checks FAILED: {name}; until they are mended: --trainer.plain, or --{knob}.no-lean-kernels"
        )
        assert code == "code 1"
        lines = lines[3:]
    assert re.fullmatch(r"FAIL  merge +ZeroDivisionError: oops", lines[0]) and lines[1].startswith("ok    decode-128")
    assert lines[2].startswith("1 of 2 checks FAILED: merge;") and lines[3:] == ["code 1"]


def test_what_is_allowed_follows_from_the_type_and_the_plain_twin():
    exact = torch.randn(20, 64, dtype=torch.float64)
    twins = exact.bfloat16()
    assert "what: off by" in compare("what", [(twins + 0, twins, exact)])
    compare("what", [(twins * 1.01, twins, exact)])  # as a bfloat16 may round twice
    for worse in (twins * 1.05, twins.clone().index_fill_(0, torch.tensor([3]), 0), twins.roll(1, 0)):
        with pytest.raises(Wrong, match="off by"):
            compare("what", [(worse, twins, exact)])
    with pytest.raises(Wrong, match="off by"):
        compare("what", [(twins.float() * 1.001, exact.float(), exact)])
    with pytest.raises(Wrong, match="float32"):
        compare("what", [(twins.float(), twins, exact)])


# Runs


def record(step, **changes):
    numbers = {
        "step": step,
        "reward/mean": 0.3,
        "reward/std": 0.2,
        "actor/grad_norm": 1.0,
        "actor/skipped_steps": 0,
        "actor/entropy": 4.0,
        "timing_s/step": 1.0,
        "rollout/num_trajectories": 32,
        "sync/probe_diff_max": 1e-6,
        "sync/probe_diff_mean": 1e-7,
        "correction/k3": 5e-13,
    }
    return numbers | {name.replace("__", "/"): value for name, value in changes.items()}


class TheirRuns:
    """Runs that have ended."""

    def __init__(self, default=(), plain=(), calls=()):
        self.by_name = {"default": list(default), "plain": list(plain)}
        self.called = dict(calls)

    def records(self, name):
        return self.by_name[name]

    def calls(self):
        return {"load_again": 2} | self.called


GOOD = [record(0), record(1), record(2)]


@pytest.mark.parametrize(
    "records, reason",
    [
        (GOOD, None),
        (GOOD[:2], r"records of the steps \[0, 1\]"),
        ([record(0, actor__grad_norm=None), *GOOD[1:]], "step 0: a gradient of norm None"),
        ([GOOD[0], record(1, actor__grad_norm=0.0), GOOD[2]], "step 1: a gradient of norm 0.0"),
        ([GOOD[0], record(1, actor__skipped_steps=1), GOOD[2]], "step 1: .*1 skipped"),
    ],
)
def test_steps(records, reason):
    if reason is None:
        assert "rewards 0.3, 0.3; gradients 1, 1" in run_checks.steps(TheirRuns(records), "default")
        return
    with pytest.raises(Wrong, match=reason):
        run_checks.steps(TheirRuns(records), "default")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"sync__probe_diff_max": 0.1}, "differ by 1.0e-01 at most"),
        ({"sync__probe_diff_mean": 0.1}, "1.0e-01 on average"),
        ({"sync__probe_diff_max": float("nan")}, "differ"),
    ],
)
def test_sync(change, reason):
    records = [record(0, **change), *GOOD[1:]]
    if reason is None:
        assert "bits equal 3 times, 2 by noted copies" in run_checks.sync(TheirRuns(records), "default")
        return
    with pytest.raises(Wrong, match=reason):
        run_checks.sync(TheirRuns(records), "default")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"reward__mean": 0.31}, None),
        ({"reward__mean": 0.9}, "rewards differ by 0.6 "),
        ({"sync__probe_diff_mean": 1e-4}, "the probe's log-probs off by 1.0e-04"),
        ({"correction__k3": 5e-7}, "the rollouts' log-probs off by 1.0e-03"),
    ],
)
def test_default_and_plain_run_agree(change, reason):
    runs = TheirRuns([record(0, **change)], GOOD)
    if reason is None:
        assert "rewards differ" in run_checks.agrees(runs)
        return
    with pytest.raises(Wrong, match=reason):
        run_checks.agrees(runs)


def test_kernels_that_a_run_did_not_call_are_named(monkeypatch):
    """As on a Hopper GPU."""
    from fast import attention_kernels

    with pytest.raises(NotHere, match="no GPU"):
        run_checks.kernels_at_work(TheirRuns())
    monkeypatch.setattr(run_checks, "on_gpu", lambda: True)
    monkeypatch.setattr(attention_kernels, "serves", lambda *_: True)
    monkeypatch.setattr(fast.engine, "KERNEL_VERSIONS", ((0,), (99,)))
    names = ("logit_gradient", "flash_forward", "flash_backward", "decode_attention", "sample_tokens")
    calls = dict.fromkeys(names, 4)
    assert run_checks.kernels_at_work(TheirRuns(calls=calls)).startswith(
        "logit_gradient 4 times, flash_forward 4 times"
    )
    with pytest.raises(Wrong, match="never called in two steps: flash_backward, decode_attention"):
        run_checks.kernels_at_work(TheirRuns(calls=calls | {"flash_backward": 0, "decode_attention": 0}))
    monkeypatch.setattr(attention_kernels, "serves", lambda *_: False)
    monkeypatch.setattr(fast.engine, "KERNEL_VERSIONS", ((0,), (0, 1)))
    assert "by its own kernels" in run_checks.kernels_at_work(TheirRuns(calls={name: 1 for name in names[:2]}))


def ended(folder, said, code=1, **more):
    """Runs of which the default one has ended badly."""
    runs = run_checks.Runs(folder, verbose=False, any_vllm=False)
    (folder / "default.err").write_text(said)
    runs.started["default"] = SimpleNamespace(wait=lambda _: code, poll=lambda: code, **more)
    return runs


ARGS = selftest.parse([])


@pytest.mark.parametrize(
    "said, marks",
    [
        ("Traceback ...\nRuntimeError: no kernel image\n\n", ["FAIL", "--", "--", "--"]),
        ("Traceback ...\nsync_weights.SyncError: vLLM holds other bits\n", ["FAIL", "FAIL", "--", "--"]),
    ],
)
def test_a_run_that_fails_is_said_once(tmp_path, capsys, monkeypatch, said, marks):
    monkeypatch.setattr(run_checks, "on_gpu", lambda: True)
    checks = run_checks.run_checks(ended(tmp_path, said))
    names = ["steps-default", "sync-default", "kernels-at-work", "agrees-with-plain"]
    assert [selftest.examine(name, checks[name], ARGS) for name in names] == marks
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"the default run ended with 1: {said.strip().splitlines()[-1]}")
    assert lines[3].endswith("its run failed: see steps-default and steps-plain")


def test_a_run_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_checks, "LONGEST_S", 0.5)
    runs = run_checks.Runs(tmp_path, verbose=False, any_vllm=False)
    (tmp_path / "default.err").write_text("")
    sleeping = runs.started["default"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(run_checks.RunFailed, match="was killed after 0.5 s: it said nothing"):
        runs.records("default")
    assert sleeping.wait(5) < 0
    other = runs.started["plain"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    runs.close()
    assert other.poll() < 0


# The program


@pytest.fixture
def alone(monkeypatch):
    """What the program changes in its process is put back."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(engine, "VLLM_VERSIONS", engine.VLLM_VERSIONS)
    monkeypatch.setattr(fast.engine, "KERNEL_VERSIONS", fast.engine.KERNEL_VERSIONS)
    return monkeypatch


def fails(error):
    def check():
        raise error

    return check


def main(monkeypatch, checks, *words):
    args = selftest.parse(list(words))
    monkeypatch.setattr(selftest, "all_checks", lambda runs: checks)
    return selftest.main(args)


PASSES = Check(lambda: "equal", "actor.lean_kernels")


def test_exit_code_0_when_nothing_failed(alone, capsys):
    assert main(alone, {"one": PASSES, "two": Check(fails(NotHere("torch, since there is no GPU")), None)}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["ok", "one", "equal"] and lines[4].split()[:3] == ["--", "two", "torch,"]
    assert lines[5] == "all 1 checks passed, 1 do not apply here, in 0 s"


def test_exit_code_1_and_the_knobs_of_what_failed(alone, capsys):
    checks = {
        "one": Check(fails(ZeroDivisionError("a\nb")), "actor.lean_kernels"),
        "two": Check(fails(Wrong("off by 3")), "actor.flash_attention"),
        "three": PASSES,
        "four": Check(fails(Wrong("off by 4")), "trainer.plain"),
    }
    assert main(alone, checks, "--verbose") == 1
    out, err = capsys.readouterr()
    assert re.search(r"^FAIL  one +ZeroDivisionError: a", out, re.M) and re.search(r"^FAIL  two +off by 3$", out, re.M)
    assert "Traceback" in err and "Wrong: off by 3" in err and re.search(r"^ok    three +equal$", out, re.M)
    knobs = "--trainer.plain, or --actor.no-lean-kernels --actor.no-flash-attention"
    assert out.splitlines()[-1] == f"3 of 4 checks FAILED: one, two, four; until they are mended: {knobs}"
    assert main(alone, checks) == 1 and capsys.readouterr().err == "", "tracebacks only where they are asked for"


def test_no_knob_is_named_where_plain_fails_too(alone, capsys):
    main(
        alone,
        {"steps-default": Check(fails(Wrong("no")), "trainer.plain"), "steps-plain": Check(fails(Wrong("no")), None)},
    )
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 checks FAILED: steps-default, steps-plain"


def test_every_knob_is_one_that_plain_turns_off():
    knobs = {check.knob for check in selftest.all_checks(None).values()}
    assert knobs - {None, "trainer.plain"} <= set(PLAIN)


def test_names(capsys):
    assert selftest.main(selftest.parse(["--list"])) == 0
    assert capsys.readouterr().out.split() == NAMES
    with pytest.raises(SystemExit) as end:
        selftest.parse(["heads"])
    assert end.value.code == 2 and "heads is no check: vllm, head-statistics" in capsys.readouterr().err
    assert run_checks.with_their_runs(["merge"]) == {"merge"}
    assert run_checks.with_their_runs(["sync-plain"]) == {"sync-plain", "steps-plain"}
    assert run_checks.with_their_runs(["agrees-with-plain"]) >= {"steps-default", "steps-plain"}


# Another vLLM


def test_vllm_that_engine_does_not_know_fails_unless_it_is_let_in(alone):
    assert selftest.vllm().endswith("is let in")
    alone.setattr(engine, "VLLM_VERSIONS", ((0, 1), (0, 2)))
    alone.setattr(selftest, "KNOWN", (((0, 1), (0, 2)), ((0, 1), (0, 2))))
    with pytest.raises(Wrong, match=r"engine.py knows 0.1 up to, not including, 0.2; --any-vllm"):
        selftest.vllm()
    run_checks.let_any_vllm_in()
    assert selftest.vllm().endswith("is let in by --any-vllm")
    assert fast.engine.kernels_fit(selftest.installed_vllm())


@pytest.mark.parametrize(
    "known, at_work, edits",
    [
        (
            ((0, 1), (0, 2)),
            "ok",
            "VLLM_VERSIONS in engine.py, now ((0, 1), (0, 2)) and KERNEL_VERSIONS in fast/engine.py",
        ),
        (((0, 1), (0, 2)), "--", "VLLM_VERSIONS in engine.py, now ((0, 1), (0, 2))"),
        (((0, 1), (9, 0)), "--", None),
    ],
)
def test_last_line_says_what_to_edit(alone, capsys, known, at_work, edits):
    alone.setattr(selftest, "KNOWN", (known, ((0, 1), (0, 2))))
    idle = Check(fails(NotHere("there is no GPU")), None)
    checks = {"one": PASSES, "kernels-at-work": PASSES if at_work == "ok" else idle}
    assert main(alone, checks, "--any-vllm") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"in, widen {edits}" in last if edits else last.startswith("all 1 checks passed")
    assert main(alone, checks | {"two": Check(fails(Wrong("")), None)}, "--any-vllm") == 1
    assert "widen" not in capsys.readouterr().out


def copy_of_the_code(folder, file, old, new):
    """The code with a change."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for room in ("host", "tasks", "fast", "look"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / file).read_text()
    assert text.count(old) == 1
    (folder / file).write_text(text.replace(old, new))
    return folder


@pytest.mark.slow
def test_any_vllm_is_let_in_for_the_checks(tmp_path):
    """Of an engine that knows older ones only."""
    versions = re.search(r"^VLLM_VERSIONS = .*$", (ROOT / "engine.py").read_text(), re.M)[0]
    tree = copy_of_the_code(tmp_path, "engine.py", versions, "VLLM_VERSIONS = ((0, 1), (0, 2))")
    code, found, lines, _ = run("vllm", "steps-default", cwd=tree)
    assert code == 1 and "engine.py knows 0.1 up to, not including, 0.2" in found["vllm"]
    assert "the default run ended with 2: error: vLLM" in found["steps-default"]
    code, found, lines, errors = run("--any-vllm", cwd=tree)
    assert code == 0, lines + [errors]
    assert "by --any-vllm" in found["vllm"] and found["steps-plain"].startswith("ok")
    assert lines[-1].endswith("in, widen VLLM_VERSIONS in engine.py, now ((0, 1), (0, 2))")


@pytest.mark.slow
def test_sync_that_does_not_arrive_fails_its_check(tmp_path):
    """Copies that are not made again leave the weights of before, which the bits tell; the plain run has no such copies."""
    tree = copy_of_the_code(tmp_path, "fast/copies.py", "torch._foreach_copy_(targets, sources)", "pass")
    code, found, lines, _ = run("sync-default", "sync-plain", cwd=tree)
    assert code == 1
    assert re.match(r"FAIL  sync-default .*SyncError: vLLM holds other bits than the actor sent", found["sync-default"])
    assert found["sync-plain"].startswith("ok") and found["steps-plain"].startswith("ok")
    assert lines[-1].endswith("until they are mended: --trainer.plain, or --sync.no-replay-copies")
