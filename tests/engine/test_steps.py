"""Whole runs in this process, on one vLLM: real data, rewards, FSDP and syncs through `train.start(cfg, engine)`."""

import json
import shutil

import pytest
import torch
import yaml
from conftest import FOUR_STEPS, ROOT, flags, run_here
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from config import load_config
from host.rank import is_users_mistake


def run(engine, tiny, folder, *more):
    """A run of the tiny model in `folder`/run; its metrics and its console."""
    return run_here(engine, [*flags(tiny, "--log.default-local-dir", str(folder)), *more])


@pytest.fixture(scope="module")
def one(tiny, tmp_path_factory, engine):
    """Four steps of two updates, KL in loss and reward against an offloaded reference, a checkpoint after two; the run that others are compared with."""
    folder = tmp_path_factory.mktemp("one")
    return folder / "run", *run(engine, tiny, folder, *FOUR_STEPS)


def test_run_leaves_metrics_rollouts_config_and_checkpoints(one, tiny):
    run_dir, metrics, console = one
    assert [record["step"] for record in metrics] == [0, 1, 2, 3, 4]
    assert [any(name.startswith("val/") for name in record) for record in metrics] == [
        True,
        False,
        False,
        True,
        True,
    ]  # before, every 3, at the end
    last = metrics[3]
    for name in (
        "reward/mean",
        "actor/pg_loss",
        "actor/kl_loss",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
        "critic/advantages/mean",
        "response_length/clip_ratio",
        "reward/kl",
        "reward/frac_zero_std",
        "correction/k3",
        "correction/ess",
        "sync/probe_diff_max",
        "timing_s/gen",
        "timing_s/update_actor",
        "perf/throughput",
        "perf/gen_tokens_per_s",
        "perf/train_tokens_per_s",
        "perf/max_memory_gb",
    ):
        assert name in last, name
    assert last["actor/num_updates"] == 2 and last["rollout/weight_version"] == 3
    assert all(record["sync/probe_diff_max"] < 1e-4 for record in metrics)
    rollouts = [json.loads(line) for line in (run_dir / "rollouts" / "000003.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8 * 4 and len({r["key"] for r in rollouts}) == 32
    assert set(rollouts[0]) >= {
        "prompt",
        "response",
        "ground_truth",
        "score",
        "advantage",
        "finish_reason",
        "weight_version",
    }
    assert sum(r["score"] for r in rollouts) / 32 == pytest.approx(last["reward/mean"])
    assert len((run_dir / "rollouts" / "val-000004.jsonl").read_text().splitlines()) == 8
    settings = (run_dir / "config.yaml").read_text()
    assert settings in console and settings.startswith("# Lockstep ")
    assert yaml.safe_load(settings)["loss"]["use_kl_loss"] is True
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-000004"
    assert "before" in console and "after" in console and f"the run's files are in {run_dir}" in console
    assert console.count("\nstep ") == 4


def test_kl_coefficient_is_steered(one):
    coefficients = [record["reward/kl_coef"] for record in one[1][:4]]
    for record, now, then in zip(one[1], coefficients, coefficients[1:]):
        error = min(max(record["reward/kl"] / 0.1 - 1, -0.2), 0.2)
        assert then == pytest.approx(now * (1 + error * 32 / 10_000))


def test_finished_run_can_be_validated_and_not_be_asked_for_fewer_steps(one, tiny, tmp_path, engine):
    shutil.copytree(one[0], tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    metrics, _ = run(engine, tiny, tmp_path, "--trainer.val-only")
    assert metrics[-1]["step"] == 4 and metrics[-1]["val/exact/mean@1"] == one[1][-1]["val/exact/mean@1"]
    earlier = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[0]
    metrics, _ = run(engine, tiny, tmp_path, "--trainer.val-only", "--checkpoint.resume", str(earlier))
    assert metrics[-1]["step"] < 4 and (tmp_path / "run" / "val-only.1" / "metrics.jsonl").exists()
    assert all(path.read_bytes() == content for path, content in before.items()), "the run itself is as it was"
    with pytest.raises(ValueError, match="has done 4 steps, more than the 2 asked for: raise trainer.total_training"):
        run(engine, tiny, tmp_path, "--trainer.total-training-steps", "2")


def test_export_loads_and_is_the_trained_model(one, tiny, tmp_path, engine):
    exported = AutoModelForCausalLM.from_pretrained(one[0] / "hf")
    initial = AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict()
    assert AutoTokenizer.from_pretrained(one[0] / "hf").chat_template
    assert not torch.equal(exported.state_dict()["model.norm.weight"], initial["model.norm.weight"])
    metrics, _ = run(engine, tiny, tmp_path, "--actor.path", str(one[0] / "hf"), "--trainer.val-only")
    assert metrics[0]["val/exact/mean@1"] == one[1][-1]["val/exact/mean@1"]


def test_fresh_start_moves_an_earlier_run_aside(tiny, tmp_path, engine):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "old": 1}\n')
    metrics, console = run(
        engine,
        tiny,
        tmp_path,
        "--checkpoint.resume",
        "never",
        "--trainer.total-training-steps",
        "1",
        "--checkpoint.save-freq",
        "0",
        "--checkpoint.no-export-hf",
    )
    assert len(metrics) == 2 and "old" not in metrics[0]
    assert "old" in (tmp_path / "run.1" / "metrics.jsonl").read_text() and "run.1" in console


@pytest.mark.parametrize("recipe", ["dapo", "dr_grpo", "gspo", "cispo", "reinforce_pp", "rloo"])
def test_recipe_runs(tiny, tmp_path, recipe, engine):
    """The published settings on the tiny model: sizes from `flags`, everything else from the file."""
    more = (
        ["--algorithm.overlong-buffer-len", "4"]
        if recipe == "dapo"
        else ["--rollout.n", "1"]
        if recipe == "reinforce_pp"
        else []
    )
    file = "--config", str(ROOT / "configs" / f"{recipe}.yaml")
    name = "--log.experiment-name", "run"
    metrics, _ = run_here(engine, [*file, *flags(tiny, "--log.default-local-dir", str(tmp_path)), *name, *more])
    updated = [record for record in metrics if "actor/grad_norm" in record]
    assert len(updated) == 2 and all(
        record["actor/grad_norm"] > 0 and record["actor/skipped_steps"] == 0 for record in updated
    )
    assert all(record["sync/probe_diff_max"] < 0.5 for record in metrics)
    if recipe == "dapo":
        assert all(record["reward/frac_zero_std"] == 0 and record["reward/overlong_penalty"] > 0 for record in updated)


def test_remax_compares_with_a_greedy_session(tiny, tmp_path, engine):
    metrics, _ = run(
        engine,
        tiny,
        tmp_path,
        "--algorithm.adv-estimator",
        "remax",
        "--loss.rollout-rs",
        "token",
        "--loss.rollout-rs-threshold-low",
        "0.99999999",
        "--loss.rollout-rs-threshold-high",
        "1.00000001",
    )
    assert metrics[0]["actor/num_updates"] == 2 and 0 < metrics[0]["correction/rejected_frac"] < 1
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "000000.jsonl").read_text().splitlines()]
    for group in [rollouts[i : i + 4] for i in range(0, 32, 4)]:
        baselines = {round(r["score"] - r["advantage"], 4) for r in group if r["advantage"]}
        assert len(baselines) <= 1, "all sessions of a prompt are compared with the same one"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda d, t: ("--data.train-files", "nowhere.jsonl"), ["data.train_files", "nowhere.jsonl"]),
        (
            lambda d, t: ("--data.train-files", write(d / "odd.jsonl", {"question": "2+2", "answer": "4"})),
            ["odd.jsonl line 1", "'prompt'", "question, answer", "data.prompt_key"],
        ),
        (lambda d, t: ("--data.train-files", write(d / "empty.jsonl")), ["data.train_files", "empty.jsonl", "no rows"]),
        (lambda d, t: ("--data.val-files", "nowhere.jsonl"), ["data.val_files", "nowhere.jsonl"]),
        (lambda d, t: ("--actor.path", str(d / "gone")), ["actor.path", "no such folder"]),
        (lambda d, t: ("--actor.path", no_tokenizer(d, t)), ["actor.path", "no tokenizer"]),
        (lambda d, t: ("--data.train-batch-size", "64"), ["32 rows", "data.train_batch_size=64"]),
        (lambda d, t: ("--data.max-prompt-length", "3"), ["data.max_prompt_length=3"]),
        (lambda d, t: ("--actor.path", str(d)), ["actor.path", "no tokenizer"]),
        (lambda d, t: ("--actor.path", no_template(d, t)), ["row 0", "no chat template"]),
        (lambda d, t: ("--reward.custom-path", str(d / "no.py")), ["reward.custom_path", "no.py"]),
    ],
)
def test_bad_input_is_the_users_mistake(tiny, tmp_path, change, named):
    """Before a model loads, and as an error of the user's: `host.rank.run` shows its text alone."""
    with pytest.raises((ValueError, OSError)) as raised:
        train.start(load_config([*flags(tiny, "--log.default-local-dir", str(tmp_path)), *change(tmp_path, tiny)]))
    assert is_users_mistake(raised.value) and not (tmp_path / "run").exists()
    for words in named:
        assert words in str(raised.value)


def no_tokenizer(folder, tiny):
    shutil.copytree(tiny / "model", folder / "model", ignore=shutil.ignore_patterns("*token*", "chat*"))
    return str(folder / "model")


def no_template(folder, tiny):
    shutil.copytree(tiny / "model", folder / "model")
    (folder / "model" / "chat_template.jinja").unlink()
    return str(folder / "model")
