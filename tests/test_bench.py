"""look/bench.py: a whole run on a dummy, and its floors against numbers from elsewhere: published parameter counts, torch's own count of FLOP, arithmetic by hand."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, launch_environment
from fakes import make_trajectory
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from batch import collate
from look import bench
from model import forward, load_model
from policy import load_tokenizer

RATES = Namespace(peak_tflops=989.0, matmul_tflops=790.0, bandwidth_tbs=4.3)


def work_of(shape, folder, seqs=512, prompt=128, response=512, ranks=1, max_num_seqs=512, tensor_parallel=1):
    bench.make_config(shape).save_pretrained(folder)
    cfg = Namespace(
        old_logprobs_from="actor",
        actor=Namespace(path=str(folder), dtype="bfloat16", ppo_epochs=1),
        rollout=Namespace(max_num_seqs=max_num_seqs, tensor_model_parallel_size=tensor_parallel),
    )
    metrics = {
        "rollout/num_trajectories": seqs,
        "rollout/prompt_length/mean": prompt,
        "response_length/mean": response,
        "response_length/max": response,
    }
    return bench.Work(cfg, metrics | {"perf/total_num_tokens": seqs * (prompt + response)}, ranks)


@pytest.mark.parametrize(
    "shape, parameters",
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_shapes_have_the_published_number_of_parameters(tmp_path, shape, parameters):
    assert work_of(shape, tmp_path).params == parameters


def test_floors_of_the_fixed_workload(tmp_path):
    """By hand: 512 decode steps read 1.19 GB of weights and 114,688 bytes for each of 384 tokens on average in 512 sequences; an update is three forwards."""
    work = work_of("qwen3-0.6b", tmp_path)
    assert work.bytes_moved("gen") == 512 * 2 * 596_049_920 + 512 * 512 * 384 * 114_688
    body, head, tokens = 596_049_920 - 151_936 * 1024, 151_936 * 1024, 512 * 640
    one_forward = 2 * body * tokens + 2 * head * 512 * 512 + 28 * 16 * 512 * 4 * 128 * 640**2 / 2
    assert (
        work.flops("old_log_prob") == one_forward
        and work.flops("update_actor") == 3 * one_forward
        and work.flops("reward") == 0
    )
    work.cfg.old_logprobs_from = "update"
    assert work.flops("old_log_prob") == 0, "the phase only masks"
    two = work_of("qwen3-0.6b", tmp_path, ranks=2)
    assert two.flops("update_actor") == 1.5 * one_forward
    assert (
        two.bytes_moved("gen") == 512 * 2 * 596_049_920 + 512 * 256 * 384 * 114_688
    )  # each GPU still reads all weights in each of 512 steps
    assert work_of("qwen3-0.6b", tmp_path, ranks=2, tensor_parallel=2).bytes_moved("gen") == work.bytes_moved("gen") / 2
    assert (
        work_of("qwen3-0.6b", tmp_path, max_num_seqs=128).bytes_moved("gen")
        == 4 * 512 * 2 * 596_049_920 + 512 * 512 * 384 * 114_688
    )


def test_products_are_those_that_torch_counts(tmp_path):
    bench.write_dummy(tmp_path / "dummy", "tiny", (1, 1))
    work = work_of("tiny", tmp_path / "config", seqs=6, prompt=10, response=20)
    model = load_model(str(tmp_path / "dummy" / "model"), torch.float32, 128, 1.0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(model, collate([make_trajectory(prompt=10, response=(1,) * 20) for _ in range(6)]))
    counted = sum(
        flops
        for name, flops in counter.get_flop_counts()["Global"].items()
        if "mm" in str(name) and "bmm" not in str(name)
    )
    assert counted <= work.products < 1.02 * counted  # the norms are counted as if they were products


def test_measure_takes_medians_and_sets_them_against_the_floors(tmp_path):
    work = work_of("qwen3-0.6b", tmp_path, ranks=2)
    records = [
        {
            "timing_s/step": 10.0 + i,
            "timing_s/gen": 4.0 + i,
            "timing_s/update_actor": 3.0,
            "perf/memory_gb/gen": 50.0 + i,
        }
        for i in range(3)
    ]
    phases = bench.measure(records, work, RATES)
    assert list(phases) == ["step", "gen", "update_actor"]
    gen, update = phases["gen"], phases["update_actor"]
    assert (gen["seconds"], gen["min"], gen["max"], gen["share"], gen["memory_gb"]) == (5.0, 4.0, 6.0, 5 / 11, 52.0)
    assert gen["tokens_per_s"] == 512 * 512 / 2 / 5.0 and phases["step"]["tokens_per_s"] == 512 * 640 / 2 / 11
    assert gen["floor"] == pytest.approx(work.bytes_moved("gen") / 4.3e12) and gen["ratio"] == pytest.approx(
        5.0 / gen["floor"]
    )
    assert update["mfu"] == pytest.approx(work.flops("update_actor") / 3.0 / 989e12) and update[
        "floor"
    ] == pytest.approx(work.flops("update_actor") / 790e12)
    assert phases["step"]["floor"] == pytest.approx(gen["floor"] + update["floor"])
    lines = bench.table(phases, {"make_engine": 12.34}, 2).splitlines()
    assert (
        lines[2].startswith("gen")
        and "45.5%" in lines[2]
        and "26,214" in lines[2]
        and "52.0" in lines[2]
        and "make_engine 12.3" in lines[-1]
    )


def test_dummy_is_a_model_that_loads_with_prompts_of_the_wanted_length(tmp_path):
    bench.write_dummy(tmp_path / "dummy", "tiny", (40, 7))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dummy" / "model")
    assert model.dtype == torch.bfloat16 and float(model.model.embed_tokens.weight.detach().std()) == pytest.approx(
        0.02, rel=0.1
    )
    assert len({tuple(row.tolist()) for row in model.model.embed_tokens.weight}) == 128
    tokenizer = load_tokenizer(str(tmp_path / "dummy" / "model"))
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "dummy" / "prompts.jsonl").read_text().splitlines()]
    ids = tokenizer(prompts).input_ids
    assert (
        len(tokenizer) == 128
        and {len(row) for row in ids} == {7}
        and len({tuple(row) for row in ids}) == 40
        and min(map(min, ids)) >= 3
    )


def run_bench(*args, processes=1):
    accelerate = str(Path(sys.executable).parent / "accelerate")
    command = [accelerate, "launch", "--num_processes", str(processes), "-m", "look.bench"]
    return subprocess.run(
        [*command, "--config", str(ROOT / "configs" / "bench_qwen3_0_6b.yaml"), *args],
        cwd=ROOT,
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_two_processes_run_a_dummy_and_rank_0_prints_the_table(tmp_path):
    done = run_bench(
        "--dummy-weights",
        "tiny",
        "--dummy-dir",
        str(tmp_path),
        "--steps",
        "1",
        "--json",
        str(tmp_path / "out.json"),
        "--data.train-batch-size",
        "4",
        "--actor.ppo-mini-batch-size",
        "4",
        "--data.max-prompt-length",
        "9",
        "--data.max-response-length",
        "12",
        "--rollout.n",
        "2",
        "--rollout.kv-cache-memory-bytes",
        str(32 << 20),
        "--checkpoint.save-freq",
        "1",
        processes=2,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["world_size"] == 2 and report["steps"] == 1
    metrics, phases = report["metrics"][0], report["phases"]
    assert (
        metrics["rollout/prompt_length/mean"] == 9
        and metrics["response_length/min"] == metrics["response_length/max"] == 12
    )
    assert (
        metrics["step"] == 1
        and metrics["actor/num_updates"] == 1
        and metrics["actor/grad_norm"] > 0
        and metrics["reward/std"] > 0
    )
    assert {"step", "gen", "old_log_prob", "update_actor", "sync"} <= set(phases)
    assert "save_checkpoint" in phases  # asked for on the command line: what look.bench turns off, its user can turn on
    parts = ("gen", "old_log_prob", "update_actor", "sync", "sleep")  # the last may be too short to be recorded
    assert phases["update_actor"]["tokens_per_s"] == pytest.approx(8 * 21 / 2 / metrics["timing_s/update_actor"])
    assert sum(phases[p]["share"] for p in parts if p in phases) < 1.01
    assert {"imports", "make_engine", "Actor", "sync_weights"} <= set(report["startup"]) and all(
        seconds >= 0 for seconds in report["startup"].values()
    )
    assert (
        done.stdout.count("\nphase ") == 1
        and "2 process(es)" in done.stdout
        and not (ROOT / "runs" / "bench_qwen3_0_6b").exists()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (("--steps", "0"), "--steps 0 must be above 0"),
        (("--bandwidth-tbs", "nan"), "--bandwidth-tbs nan must be above 0"),
        (("--actor.path", "/nowhere"), "actor.path=/nowhere"),
    ],
)
def test_a_mistake_gets_one_line(flags, message):
    done = run_bench(*flags)
    assert done.returncode != 0 and any(
        line.startswith("error: ") and message in line for line in done.stderr.splitlines()
    ), done.stderr[-2000:]


GROWTH = """
import sys
sys.path[:0] = [{root!r}]
from look import growth
from host import rank
flags = "--rollout.kv-cache-memory-bytes 33554432 --actor.ppo-max-token-len-per-gpu 4096 --actor.log-prob-max-token-len-per-gpu None --data.max-prompt-length 9".split()
flags += "--data.train-batch-size 4 --actor.ppo-mini-batch-size 4 --rollout.n 2 --reward.num-workers 1".split()
rank.run(lambda: growth.run({out!r}, flags, [(4, 8, 2), (2, 16, 1)], "tiny"))
"""


@pytest.mark.slow
def test_growth_takes_the_last_step_of_each_point_from_one_run(tmp_path):
    script = GROWTH.format(root=str(ROOT), out=str(tmp_path / "growth.json"))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "growth.json").read_text())
    assert [(p["sessions"], p["response"]) for p in report["points"]] == [(8, 8), (4, 16)]
    assert [
        (m["rollout/num_trajectories"], m["response_length/min"], m["response_length/max"])
        for m in report["metrics"][:3]
    ] == [(8, 8, 8), (8, 8, 8), (4, 16, 16)]
    assert report["points"][0]["phases"]["step"]["seconds"] == report["metrics"][1]["timing_s/step"]
    assert done.stdout.splitlines()[-1].split()[:2] == ["4", "16"]
