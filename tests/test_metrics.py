"""Numbers of a step and of a validation, against what a reader would count by hand."""

import itertools
import math

import pytest

from batch import Task, Trajectory
from metrics import pass_at_k, rollout_metrics, validation_metrics


def session(row, session_id, score, length=2, source="exact", index=0, **fields):
    t = Trajectory(
        Task("1+2", source, "3", index=row),
        session_id=session_id,
        index=index,
        score=score,
        finish_reason="stop",
        num_turns=1,
        **fields,
    )
    t.tokens, t.response_mask = [1] * (3 + length), [0] * 3 + [1] * length
    return t


def tasks(count, source="exact", first=0):
    return [Task("1+2", source, "3", index=first + i) for i in range(count)]


@pytest.mark.parametrize("n, correct, k", [(1, 0, 1), (1, 1, 1), (4, 1, 2), (5, 2, 4), (6, 3, 2), (8, 0, 8), (8, 1, 8)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one(n, correct, k):
    draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_means_and_standard_errors_over_prompts():
    scores = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    m = validation_metrics(
        [session(row, i, float(s)) for row, group in enumerate(scores) for i, s in enumerate(group)], tasks(3), 4
    )
    assert m["val/exact/mean@4"] == m["val/mean"] == pytest.approx(1.25 / 3)
    spread = math.sqrt(sum((x - 1.25 / 3) ** 2 for x in (0.25, 1, 0)) / 2)
    assert m["val/exact/mean@4/stderr"] == pytest.approx(spread / math.sqrt(3))
    assert [m[f"val/exact/pass@{k}"] for k in (1, 2, 4)] == pytest.approx([1.25 / 3, 1.5 / 3, 2 / 3])
    assert m["val/exact/pass@4/stderr"] == pytest.approx(1 / 3)
    assert (
        m["val/exact/best@4"] == pytest.approx(2 / 3)
        and m["val/exact/num_sessions"] == 12
        and m["val/exact/failed_sessions"] == 0
    )


@pytest.mark.parametrize("n, ks", [(1, {1}), (2, {1, 2}), (6, {1, 2, 4, 6}), (8, {1, 2, 4, 8})])
def test_k_are_the_powers_of_two_up_to_n_and_n(n, ks):
    m = validation_metrics([session(0, i, 1.0) for i in range(n)], tasks(1), n)
    assert {name for name in m if "pass@" in name} == {f"val/exact/pass@{k}" for k in ks}


def test_failed_and_unscored_sessions_are_wrong_and_counted():
    """Row 0 lost a session, row 1 has one without a score, row 2 lost both: nothing of it is in the list."""
    m = validation_metrics([session(0, 1, 1.0), session(1, 0, math.nan), session(1, 1, 1.0)], tasks(3), 2)
    assert m["val/exact/mean@2"] == pytest.approx(1 / 3) and m["val/exact/pass@2"] == pytest.approx(2 / 3)
    assert m["val/exact/failed_sessions"] == pytest.approx(4 / 6) and m["val/exact/num_sessions"] == 6


def test_reward_of_the_responses_cut_at_the_limit():
    step = [session(0, i, score, weight_version=0) for i, score in enumerate((1.0, 0.5, 0.0, math.nan))]
    assert "reward/truncated" not in rollout_metrics(step)
    for t in step[1:]:
        t.finish_reason = "length"
    m = rollout_metrics(step)
    assert m["response_length/clip_ratio"] == 0.75 and m["reward/mean"] == 0.5 and m["reward/truncated"] == 0.25


def test_a_source_that_lost_everything_is_zero():
    m = validation_metrics([session(0, 0, 1.0)], tasks(1) + tasks(2, "gsm8k", first=1), 1)
    assert m["val/gsm8k/mean@1"] == 0 and m["val/gsm8k/failed_sessions"] == 1 and m["val/mean"] == 0.5
    assert not any(math.isnan(value) for value in m.values())


def test_failed_is_worth_no_more_than_wrong():
    """With rewards of -1 and 1 a crash must not count for more than a wrong answer."""
    m = validation_metrics([session(0, 0, 1.0), session(1, 0, -1.0)], tasks(3), 1)
    assert m["val/exact/mean@1"] == pytest.approx(-1 / 3)
    assert m["val/exact/pass@1"] == pytest.approx(1 / 3)


def test_part_credit_is_not_correct_and_acc_decides_where_there_is_one():
    m = validation_metrics([session(0, 0, 0.5), session(0, 1, 0.9)], tasks(1), 2)
    assert m["val/exact/mean@2"] == pytest.approx(0.7) and m["val/exact/pass@2"] == 0 and m["val/exact/best@2"] == 0.9
    m = validation_metrics(
        [session(0, 0, -1.0, score_parts={"acc": 0.0}), session(0, 1, 0.8, score_parts={"acc": 1.0})], tasks(1), 2
    )
    assert m["val/exact/mean@2"] == 0.5 and m["val/exact/pass@1"] == 0.5 and m["val/exact/pass@2"] == 1


def test_last_output_stands_for_its_session():
    outputs = [
        session(0, 0, 1.0, index=1),
        session(0, 0, 0.0, index=0),
        session(0, 1, 1.0, index=2),
        session(0, 1, 0.5, index=0),
    ]
    m = validation_metrics(outputs, tasks(1), 2)
    assert m["val/exact/mean@2"] == 1 and m["val/exact/num_sessions"] == 2


def test_sources_weigh_the_same_in_the_overall_mean():
    rows = [session(i, 0, 0.0) for i in range(3)] + [session(3, 0, 1.0, source="gsm8k", length=9)]
    m = validation_metrics(rows, tasks(3) + tasks(1, "gsm8k", first=3), 1)
    assert m["val/mean"] == 0.5 and m["val/exact/response_length"] == 2 and m["val/gsm8k/response_length"] == 9
    assert "val/gsm8k/mean@1/stderr" not in m, "one prompt has no standard error"


def test_step_counts_lengths_rewards_and_what_agents_measured():
    a, b, c = session(0, 0, 1.0, 4), session(0, 1, 0.0, 2), session(1, 0, math.nan, 3)
    b.finish_reason, b.num_turns = "length", 3
    a.score_parts, b.score_parts, a.metrics, c.metrics = (
        {"format": 1.0},
        {"format": 0.0},
        {"tool_calls": 2.0},
        {"tool_calls": 1.0, "retries": 4.0},
    )
    m = rollout_metrics([a, b, c])
    assert [m[f"response_length/{name}"] for name in ("mean", "max", "min", "clip_ratio")] == [
        3,
        4,
        2,
        pytest.approx(1 / 3),
    ]
    assert [m[f"reward/{name}"] for name in ("mean", "std", "max", "min", "format/mean")] == [0.5, 0.5, 1, 0, 0.5]
    assert (
        m["agent/tool_calls/mean"] == 1.5
        and m["agent/retries/mean"] == 4
        and m["rollout/num_turns/mean"] == pytest.approx(5 / 3)
    )
    assert m["perf/total_num_tokens"] == 18 and m["perf/response_tokens"] == 9 and m["rollout/num_trajectories"] == 3
    assert all(type(value) is float for value in m.values())
