"""Whole runs as a user starts them: `accelerate launch train.py ...` with real vLLM and real FSDP on the CPU."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import FOUR_STEPS, ROOT, flags, launch, read_metrics, run_here
from transformers import AutoModelForCausalLM

TIMES = ("timing_s/", "perf/")


def run(tiny, folder, *more, processes=1):
    """A run of the tiny model in `folder`/run; its metrics and its console."""
    done = launch([*flags(tiny, "--log.default-local-dir", str(folder)), *more], processes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return read_metrics(folder / "run" / ("val-only" if "--trainer.val-only" in more else "")), done.stdout


@pytest.fixture(scope="module")
def one(tiny, engine, tmp_path_factory):
    """A run in this process, which those that are processes are compared with."""
    folder = tmp_path_factory.mktemp("one")
    return folder / "run", *run_here(engine, [*flags(tiny, "--log.default-local-dir", str(folder)), *FOUR_STEPS])


def without_times(metrics):
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in metrics]


def test_same_seed_same_numbers(one, tiny, tmp_path):
    again, _ = run(tiny, tmp_path, *FOUR_STEPS)
    assert without_times(again) == without_times(one[1])


def test_two_ranks_give_the_rewards_and_updates_of_one(one, tiny, tmp_path):
    two, _ = run(tiny, tmp_path, *FOUR_STEPS, processes=2)
    keys = [
        [json.loads(line)["key"] for line in (folder / "rollouts" / "000003.jsonl").read_text().splitlines()]
        for folder in (one[0], tmp_path / "run")
    ]
    assert keys[0] == keys[1]
    for ours, theirs in zip(without_times(two), without_times(one[1])):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            exact = name.startswith(("reward/mean", "reward/std", "response_length", "rollout", "val/"))
            assert ours[name] == (value if exact else pytest.approx(value, rel=2e-3, abs=2e-6)), (theirs["step"], name)


AGENTS = """
import asyncio
import random
import threading
import time

from agent import single_turn_agent
from batch import Trajectory


async def fails_sometimes(task, policy, cfg):
    if task.messages[0]["content"].startswith(("14", "23")):
        raise LookupError("nothing is known of " + task.messages[0]["content"])
    return await single_turn_agent(task, policy, cfg)


async def never_ends(task, policy, cfg):
    while task.messages[0]["content"].startswith(("14", "23", "15", "30")):
        await policy.generate(policy.encode(task.messages))
    return await single_turn_agent(task, policy, cfg)


async def leaves_a_thread(task, policy, cfg):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return await single_turn_agent(task, policy, cfg)


async def waits(task, policy, cfg):
    t = Trajectory(task)
    t.observe(policy.encode(task.messages))
    for _ in range(2):
        reply = await policy.generate(t.tokens, max_tokens=4)
        t.act(reply.tokens, reply.logprobs)
        await asyncio.sleep(random.random() / 5)  # seeded by nothing: another time in every run
    return t
"""


@pytest.fixture
def agents(tmp_path):
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    return lambda name: ("--agent.custom-path", f"{path}:{name}")


@pytest.mark.slow
def test_groups_that_fail_on_one_rank_of_two_are_dropped(tiny, tmp_path, agents):
    """32 rows an epoch, two of which always fail: the ranks agree on what is left, and the run goes on."""
    metrics, console = run(
        tiny,
        tmp_path,
        *agents("fails_sometimes"),
        "--trainer.total-training-steps",
        "4",
        "--checkpoint.save-freq",
        "0",
        processes=2,
    )
    assert sum(record["rollout/groups_lost"] for record in metrics[:4]) == 2
    assert sum(record["rollout/num_trajectories"] / 4 for record in metrics[:4]) == 30
    failures = "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if "fail" in path.name)
    assert "LookupError: nothing is known of 14+17=" in failures
    assert metrics[0]["val/exact/failed_sessions"] == 0


def test_run_ends_whatever_threads_its_agents_left(tiny, tmp_path, agents):
    run(
        tiny, tmp_path, *agents("leaves_a_thread"), "--trainer.total-training-steps", "1", "--checkpoint.save-freq", "0"
    )


@pytest.mark.slow
def test_failed_sessions_that_are_not_to_pass_stop_every_rank(tiny, tmp_path, agents):
    done = launch(
        [
            *flags(tiny, "--log.default-local-dir", str(tmp_path)),
            *agents("fails_sometimes"),
            "--rollout.failed-groups",
            "raise",
            "--trainer.total-training-steps",
            "4",
        ],
        2,
    )
    assert done.returncode != 0 and "LookupError: nothing is known of" in done.stderr


HANGS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open({path!r}, "a") as file:
        file.write(f"{{time.time()}}\\n")
    while True:
        pass
"""


@pytest.mark.slow
def test_reward_that_hangs_stops_every_rank_soon(tiny, tmp_path):
    """Each score is given up after a second; the run, once a tenth of the step's 32 are lost, and not after all of them."""
    (tmp_path / "hangs.py").write_text(HANGS.format(path=str(tmp_path / "calls")))
    args = flags(
        tiny,
        "--log.default-local-dir",
        str(tmp_path),
        "--reward.timeout-s",
        "1",
        "--trainer.no-val-before-train",
        "--reward.num-workers",
        "2",
    )
    args[args.index("--reward.custom-path") + 1] = str(tmp_path / "hangs.py")
    done, ended = launch(args, 2), time.time()
    assert (
        done.returncode != 0
        and "more than reward.max_failed_fraction=0.1" in done.stderr
        and "took more than reward.timeout_s=1" in done.stderr
    )
    calls = [float(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) < 16 and ended - max(calls) < 10


def test_two_ranks_that_share_a_vllm_sample_what_one_samples(tiny, tmp_path, agents):
    """Tensor parallel: identical requests in identical order on both ranks, also when sessions come back at times that no two runs share."""
    one, _ = run(tiny, tmp_path / "one", *agents("waits"), "--checkpoint.save-freq", "0")
    two, _ = run(
        tiny,
        tmp_path / "two",
        *agents("waits"),
        "--checkpoint.save-freq",
        "0",
        "--rollout.tensor-model-parallel-size",
        "2",
        processes=2,
    )
    texts = [
        [
            json.loads(line)["response"]
            for line in (tmp_path / name / "run" / "rollouts" / "000000.jsonl").read_text().splitlines()
        ]
        for name in ("one", "two")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 32
    for ours, theirs in zip(two[:2], one):
        assert ours["sync/probe_diff_max"] < 1e-4
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"]) and ours["actor/grad_norm"] == pytest.approx(
            theirs["actor/grad_norm"], rel=2e-3
        )


@pytest.mark.slow
def test_sessions_given_up_leave_the_vllm_that_ranks_share(tiny, tmp_path, agents):
    """A session that passes its deadline while it generates: the other rank has to drop its request too."""
    steps = ("--trainer.no-val-before-train", "--trainer.total-training-steps", "3", "--checkpoint.save-freq", "0")
    metrics, _ = run(
        tiny,
        tmp_path,
        *agents("never_ends"),
        *steps,
        "--rollout.session-timeout-s",
        "2.5",
        "--rollout.tensor-model-parallel-size",
        "2",
        processes=2,
    )
    assert sum(record.get("rollout/groups_lost", 0) for record in metrics) >= 2
    assert all(record["sync/probe_diff_max"] < 1e-4 for record in metrics)


def test_resumed_run_is_the_one_that_never_stopped(one, tiny, tmp_path):
    """The first two steps, as if killed there, then the same command again."""
    short = [word if word != "4" else "2" for word in FOUR_STEPS]
    run(tiny, tmp_path, *short)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward/me')  # a line that the kill cut short
    resumed, console = run(tiny, tmp_path, *FOUR_STEPS)
    assert "resuming from" in console and "step-000002" in console
    assert without_times(resumed)[2:] == [{k: v for k, v in record.items()} for record in without_times(one[1])[2:]]
    assert [record["step"] for record in resumed] == [0, 1, 2, 3, 4]


def test_reward_that_raises_in_validation_stops_the_run(tiny, tmp_path):
    (tmp_path / "raises.py").write_text("def compute_score(**row):\n    raise SystemExit('no judge')\n")
    done = launch(
        [
            *flags(tiny, "--log.default-local-dir", str(tmp_path)),
            "--reward.custom-path",
            str(tmp_path / "raises.py"),
            "--trainer.val-only",
        ]
    )
    assert done.returncode != 0 and "no judge" in done.stderr and "max_failed_fraction" in done.stderr


@pytest.mark.slow
def test_untied_model_in_bfloat16_by_rows(tiny, tmp_path):
    metrics, _ = run(
        tiny,
        tmp_path,
        "--actor.path",
        str(tiny / "untied"),
        "--actor.dtype",
        "bfloat16",
        "--actor.no-use-dynamic-bsz",
        "--actor.ppo-micro-batch-size-per-gpu",
        "5",
        "--log.logger",
        "console",
        "wandb",
        "--checkpoint.save-freq",
        "0",
    )
    assert 1e-5 < metrics[1]["sync/probe_diff_mean"] < 0.1  # bfloat16 really: not float32's agreement
    assert not (tmp_path / "run" / "checkpoints").exists() and (tmp_path / "run" / "wandb").exists()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert exported.dtype == torch.bfloat16 and exported.lm_head.weight is not exported.model.embed_tokens.weight


def test_dynamic_sampling_gives_up_with_counts(tiny, tmp_path):
    """A random model never adds: every group's scores are equal, and two batches of eight is all that may be tried."""
    line = fails(
        tiny,
        tmp_path,
        "--reward.custom-path",
        "None",
        "--algorithm.filter-groups",
        "--algorithm.max-num-gen-batches",
        "2",
        "--trainer.no-val-before-train",
    )
    assert (
        "algorithm.max_num_gen_batches=2" in line
        and "0 groups to train on, 8 are needed: 0 groups were solved, 16 failed" in line
    )


def fails(tiny, tmp_path, *more, processes=1):
    """Exit code not 0, one line `error: ...` and no traceback; nothing of it is left running. Returns the line."""
    done = launch([*flags(tiny, "--log.default-local-dir", str(tmp_path)), *more], processes)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == processes, done.stderr[-3000:]
    assert not any('File "' in line and "train.py" in line for line in done.stderr.splitlines())
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    return lines[0]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_prompt_too_long_for_the_rollout_stops_every_rank(tiny, tmp_path):
    """With the filter off it is found when the session starts, on the rank that has it; the other must not wait for it."""
    rows = [
        {"prompt": [{"role": "user", "content": "1+" * (20 if i == 7 else 2)}], "data_source": "exact", "answer": "3"}
        for i in range(8)
    ]
    files = write(tmp_path / "long.jsonl", *rows)
    done = launch(
        [
            *flags(tiny, "--log.default-local-dir", str(tmp_path)),
            "--data.train-files",
            files,
            "--data.no-filter-overlong-prompts",
            "--data.no-shuffle",
            "--trainer.no-val-before-train",
            "--sync.probe-prompts",
            "1",
        ],
        processes=2,
    )
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("error: the prompt of row 7 has 45 tokens")]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_launcher_without_the_number_of_processes_is_refused(tiny):
    """accelerate's simple launcher starts one process and only sets MASTER_ADDR: never train on one rank in silence."""
    env = os.environ | {"MASTER_ADDR": "127.0.0.1"}
    env.pop("LOCAL_RANK", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *flags(tiny)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "--num_processes N" in done.stderr
