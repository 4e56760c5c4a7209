"""Whole runs that are ill, and what the doctor says of them."""

import pytest
import yaml
from conftest import flags, run_here

from look.doctor import diagnose


def doctor_of(engine, tiny, folder, *more) -> tuple[str, list[dict]]:
    """The diagnosis of a whole run, from its files."""
    run, _ = run_here(
        engine, [*flags(tiny, "--log.default-local-dir", str(folder), "--checkpoint.save-freq", "0"), *more]
    )
    return "\n".join(diagnose(run, yaml.safe_load((folder / "run" / "config.yaml").read_text()))), run


@pytest.fixture
def endless(engine, monkeypatch):
    """An engine made for rollout.ignore_eos."""
    monkeypatch.setattr(engine, "stop_token_ids", [])
    return engine


def test_run_with_a_constant_reward_and_cut_responses(endless, tiny, tmp_path):
    (tmp_path / "constant.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
    )
    said, _ = doctor_of(
        endless,
        tiny,
        tmp_path,
        "--reward.custom-path",
        str(tmp_path / "constant.py"),
        "--rollout.ignore-eos",
        "--actor.lr-warmup-steps",
        "1",
    )
    assert "problem: steps 0-1, 2 of 2: all 8 groups had equal rewards, each 0.5: nothing was learned this step" in said
    assert "warning: steps 0-1, 2 of 2: 100% of responses hit data.max_response_length=12: raise it" in said
    assert "note: the learning rate is 0 in the first step of the warm-up: normal" in said
    assert len(said.splitlines()) == 3, said


def test_run_whose_sampler_cuts_and_whose_step_is_one_update(endless, tiny, tmp_path):
    """Two learning signs that look wrong and are normal, beside what is wrong: rollout.top_p below 1."""
    said, run = doctor_of(
        endless,
        tiny,
        tmp_path,
        "--rollout.top-p",
        "0.5",
        "--rollout.ignore-eos",
        "--data.val-files",
        "--actor.ppo-mini-batch-size",
        "8",
    )
    assert all(record["actor/num_updates"] == 1 and record["actor/grad_norm"] > 0 for record in run[:2])
    assert (
        "problem: steps 0-1, 2 of 2: the sampler and the actor disagree (k3" in said
        and "rollout.top_p=0.5, top_k=0 cut what the actor does not" in said
    )
    assert (
        "note: the loss is 0 because the ratio is 1 on a step's only update and the advantages add up to 0: normal"
        in said
    )
    assert "note: 100% of responses hit data.max_response_length=12 and rewards still differ: normal" in said
    assert "note: no validation is configured" in said


ILL = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if "1" in ground_truth:
        raise LookupError("no answer is known for " + ground_truth)
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""
AGENT = """
from agent import single_turn_agent


async def fails_sometimes(task, policy, cfg):
    if task.messages[0]["content"].startswith(("14", "23", "30", "37")):
        raise LookupError("nothing is known of " + task.messages[0]["content"])
    return await single_turn_agent(task, policy, cfg)
"""


def test_run_whose_rewards_raise_and_whose_agent_fails(engine, tiny, tmp_path):
    (tmp_path / "ill.py").write_text(ILL)
    (tmp_path / "agents.py").write_text(AGENT)
    said, run = doctor_of(
        engine,
        tiny,
        tmp_path,
        "--reward.custom-path",
        str(tmp_path / "ill.py"),
        "--reward.max-failed-fraction",
        "1",
        "--agent.custom-path",
        f"{tmp_path / 'agents.py'}:fails_sometimes",
        "--trainer.total-training-steps",
        "4",
        "--rollout.max-failed-fraction",
        "1",
        "--actor.lr",
        "1e-3",
    )
    errors, lost = ([record.get(name, 0) for record in run] for name in ("reward/error", "rollout/groups_lost"))
    assert sum(lost) == 4 and max(errors) > 0
    assert f"{sum(e > 0 for e in errors)} of 4: " in said and "of the rewards raised and were left out" in said
    assert f"{sum(n > 0 for n in lost)} of 4: " in said and "of the groups lost a session" in said
    assert "sessions of the validation failed or could not be scored, and count as wrong" in said
