"""The trace of a step, and what `python -m look` tells of a run: of whole runs with real vLLM."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, flags, launch, read_metrics

GROUPS, SESSIONS = 8, 4  # of conftest.flags: two optimizer steps of four groups


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one_rank", "two_ranks"])
def run_dir(tiny, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("shown")
    more = [
        "--log.default-local-dir",
        str(folder),
        "--trainer.trace-groups",
        str(GROUPS),
        "--trainer.trace-freq",
        "1",
        "--checkpoint.save-freq",
        "0",
        "--checkpoint.no-export-hf",
        "--actor.ppo-max-token-len-per-gpu",
        "128",
    ]
    done = launch(flags(tiny, *more), processes=request.param)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def traced(run_dir, step):
    return [json.loads(line) for line in (run_dir / "traces" / f"{step:06d}.jsonl").read_text().splitlines()]


def mean(values):
    return math.fsum(values) / len(values)


def test_trace_has_every_number_of_a_step(run_dir):
    """Where the step's record has a number too, the trace's tokens add up to it."""
    for step in (0, 1):
        trace, record = traced(run_dir, step), read_metrics(run_dir)[step]
        assert len(trace) == GROUPS * SESSIONS and len({t["uid"] for t in trace}) == GROUPS
        for t in trace:
            assert (
                t["key"] == f"{t['uid']}_{t['session_id']}_{t['index']}"
                and t["weight_version"] == step
                and t["sync_step"] == step + 1
            )
            assert (
                t["mask_sum"] == sum(t["response_mask"]) == t["response_length"]
                and t["seq_length"] == len(t["tokens"]) == t["prompt_length"] + t["response_length"]
            )
            assert (
                re.sub(r"<\|(im_start|im_end|endoftext|unk)\|>", "", "".join(t["pieces"][t["prompt_length"] :]))
                == t["response"]
            )
            assert math.isclose(sum(t["token_level_rewards"]), t["score"], abs_tol=1e-5) and t["token_level_rewards"][
                -1
            ] == pytest.approx(t["score"], abs=1e-5)
            assert all(value == pytest.approx(t["score"], abs=1e-5) for value in t["returns"][t["prompt_length"] :]), (
                "gamma is 1"
            )
            assert (
                t["ref_logprobs"] is None
                and not any(t["advantages"][: t["prompt_length"]])
                and not any(t["entropy"][: t["prompt_length"]])
            )
        acted = [(t, i) for t in trace for i, m in enumerate(t["response_mask"]) if m]
        assert mean([t["entropy"][i] for t, i in acted]) == pytest.approx(
            record["actor/entropy"], rel=2e-2
        )  # of two updates: the second meets other weights
        gaps = [abs(math.exp(t["old_logprobs"][i]) - math.exp(t["rollout_logprobs"][i])) for t, i in acted]
        assert max(gaps) == pytest.approx(record["correction/prob_diff_max"], abs=1e-6)
        assert max(t["advantages"][i] for t, i in acted) == pytest.approx(record["critic/advantages/max"], rel=1e-4)
        assert mean([t["score"] for t in trace]) == pytest.approx(record["reward/mean"], rel=1e-6)


def test_trace_says_which_update_micro_batch_and_rank_took_a_trajectory(run_dir, request):
    ranks = 2 if "two" in request.node.name else 1
    for step in (0, 1):
        trace = traced(run_dir, step)
        for i, t in enumerate(trace):
            assert [c["update"] for c in t["consumed"]] == [i // (GROUPS * SESSIONS // 2)], (
                "the first four groups are the first mini-batch"
            )
        assert {c["rank"] for t in trace for c in t["consumed"]} == set(range(ranks))
        tokens = {}
        for t in trace:
            [c] = t["consumed"]
            tokens[tuple(c.values())] = tokens.get(tuple(c.values()), 0) + t["seq_length"]
        assert max(tokens.values()) <= 128 and len(tokens) >= 2 * ranks, "actor.ppo_max_token_len_per_gpu"


def show(*args, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "look", *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_group_from_uid_to_weights(run_dir):
    out, [first, *_] = show(run_dir, "--step", 0, "--group", 2), traced(run_dir, 0)[2 * SESSIONS :]
    for said in (
        first["uid"],
        "algorithm.adv_estimator=grpo",
        "rollout.n=4",
        f"row {first['row']} of exact",
        f"{first['uid'][:8]}…_3_0",
        "old_logprobs",
        "|old - rollout|",
        "num_updates 2",
    ):
        assert said in out, said
    [c] = first["consumed"]
    row = next(line for line in out.splitlines() if line.startswith(f"{first['uid'][:8]}…_0_0"))
    assert row.split()[1:6] == [
        str(first[k]) for k in ("prompt_length", "response_length", "seq_length", "mask_sum", "loss_mask_sum")
    ]
    assert row.split()[-1] == f"{c['update']}.{c['micro_batch']}@{c['rank']}" and "v0" in row
    assert "the sync of step 1 brought weights v1 to vLLM" in out
    assert "the sync of step 2 brought weights v2" in show(run_dir, "--step", 1), "the last record, of the validation"


def test_group_token_by_token(run_dir):
    out, [t, *_] = show(run_dir, "--step", 1, "--tokens"), traced(run_dir, 1)
    start = next(i for i, line in enumerate(out.splitlines()) if line.split()[:3] == ["t", "id", "token"])
    lines = out.splitlines()[start + 1 : start + 1 + t["seq_length"]]
    assert [line.split()[:2] for line in lines] == [[str(i), str(token)] for i, token in enumerate(t["tokens"])]
    assert f"{t['old_logprobs'][-1]:.4g}" in lines[-1].split() and f"{t['entropy'][-1]:.4g}" in lines[-1].split()


def test_what_is_not_there_gets_one_line(run_dir, tmp_path):
    assert "the trace of step 1 has 8 groups" in show(run_dir, "--step", 1, "--group", 8, code=1)
    assert (
        "no trace of step 7" in (line := show(run_dir, "--step", 7, code=1))
        and "there are the steps 0, 1" in line
        and line.count("\n") == 1
    )
    assert "is not the folder of a run: it has no metrics.jsonl" in show(tmp_path, "--doctor", code=1)
    shutil.copy(run_dir / "metrics.jsonl", tmp_path)
    shutil.copy(run_dir / "config.yaml", tmp_path)
    assert "trainer.trace_groups" in show(tmp_path, "--step", 0, code=1)


def test_summary_and_doctor_of_a_run_that_a_kill_cut_short(run_dir, tmp_path):
    for name in ("metrics.jsonl", "config.yaml"):
        shutil.copy(run_dir / name, tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    assert "2 steps of" in show(tmp_path) and "val/exact/mean@1" in show(tmp_path)
    assert show(tmp_path, "--doctor").strip()


def damaged(run_dir, folder, name, text):
    """A copy of a run, one of whose files is not what it was."""
    copied = folder / "copied"
    shutil.copytree(run_dir, copied)
    (copied / name).write_text(text)
    return copied


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("traces/000000.jsonl", lambda text: "{\n" + text, "000000.jsonl, line 1, is not JSON"),
        ("traces/000000.jsonl", lambda text: "5\n" + text, "000000.jsonl holds a line that is no traced trajectory"),
        ("traces/000000.jsonl", lambda text: "", "has 0 groups"),
        ("metrics.jsonl", lambda text: "{}\n" + text, "metrics.jsonl, line 1, is no metrics record"),
        ("config.yaml", lambda text: "- 1\n", "config.yaml is no run's configuration"),
        ("config.yaml", lambda text: "a: [", "config.yaml is no run's configuration"),
    ],
)
def test_damaged_file_is_named(run_dir, tmp_path, name, change, says):
    line = show(damaged(run_dir, tmp_path, name, change((run_dir / name).read_text())), "--step", "0", code=1)
    assert says in line and line.count("\n") == 1, line


def test_run_that_is_being_written_can_be_looked_at(run_dir, tmp_path):
    """Lines that are not whole yet, an empty one, a config of another version, a file that is none of ours."""
    copied = damaged(run_dir, tmp_path, "config.yaml", "{}\n")
    for name, more in (("metrics.jsonl", '\n{"step": 9, "rew'), ("traces/000000.jsonl", '{"uid": "x", ')):
        (copied / name).write_text((copied / name).read_text() + more)
    (copied / "traces" / "notes.jsonl").write_text("mine\n")
    assert (
        "2 steps of" in show(copied)
        and "session 3 output 0" in show(copied, "--step", "0")
        and show(copied, "--doctor")
    )


def test_hostile_and_unfinite_numbers_are_shown(run_dir, tmp_path):
    trace = traced(run_dir, 0)
    for t in trace:
        t |= {
            "data_source": "\x1b[2J",
            "score_parts": {"[/b]": 1.0, "[red]": 2.0},
            "ground_truth": "[bold]",
            "entropy": [None] * t["seq_length"],
            "old_logprobs": [None] * t["seq_length"],
            "score": None,
        }
    out = show(
        damaged(run_dir, tmp_path, "traces/000000.jsonl", "".join(json.dumps(t) + "\n" for t in trace)),
        "--step",
        "0",
        "--tokens",
    )
    assert "\x1b" not in out and "\\x1b[2J" in out and "[/b]=1 [red]=2" in out and "[bold]" in out
    assert "entropy               not a finite number on" in out


def test_options_that_do_not_go_together_are_refused(run_dir):
    assert "--tokens and --group go with --step" in show(run_dir, "--tokens", code=2)
    assert "--tokens and --group go with --step" in show(run_dir, "--doctor", "--step", "0", code=2)
    assert show(run_dir, "--html", "/proc/page.html", code=1).startswith("error: ")


def test_signal_of_a_fork_is_shown_under_its_own_name(run_dir, tmp_path):
    """One that batch.PER_TOKEN names besides ours; older traces, which lack it, are shown as they were."""
    trace = traced(run_dir, 0)
    for t in trace:
        t["surprise[red]"] = [None] * t["prompt_length"] + [0.125] * t["response_length"]
        t["notes"] = ["text"] * t["seq_length"]  # no number a token
    copied = damaged(run_dir, tmp_path, "traces/000000.jsonl", "".join(json.dumps(t) + "\n" for t in trace))
    line = f"surprise[red]         0.125 on all {trace[0]['response_length']} tokens"
    assert line in show(copied, "--step", "0")
    out = show(copied, "--step", "0", "--tokens")
    header = next(line for line in out.splitlines() if line.split()[:3] == ["t", "id", "token"])
    assert header.split()[-2:] == ["entropy", "surprise[red]"] and "notes" not in out
    assert "surprise" not in show(run_dir, "--step", "0", "--tokens")


def test_program_says_what_it_is_called(run_dir):
    assert "usage: python -m look " in show("--tokens", run_dir, code=2)
