import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import make_trajectory

from advantage import (
    ESTIMATORS,
    AlgorithmConfig,
    compute_advantages,
    mask_and_punish,
    punish_overlong,
    set_loss_mask,
    set_token_level_rewards,
    update_kl_coef,
)
from batch import group_kind
from loss import LossConfig, count_totals, reject_mismatched
from rollout import set_baselines

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())["advantage"]
CASES = list(GOLDEN["expected_at_last_valid_token"])
NAN = math.nan
# What is said below of groups holds for these.
WITH_BASELINE = sorted(name for name, f in ESTIMATORS.items() if getattr(f, "by_group", True))


def advantages_of(trajectories, estimator="grpo", **knobs):
    """From scores to advantages as a step does it; returns the metrics."""
    cfg = AlgorithmConfig(adv_estimator=estimator, **knobs)
    set_loss_mask(trajectories)
    set_token_level_rewards(trajectories, cfg, 0.0)
    return compute_advantages(trajectories, cfg)


def group(scores, uid="a", lengths=None):
    return [
        make_trajectory(score=s, uid=uid, session_id=i, response=(1,) * (lengths[i] if lengths else 3))
        for i, s in enumerate(scores)
    ]


def value(t):
    """The one advantage on a trajectory's sampled tokens; everything else must be 0."""
    sampled = torch.tensor(t.response_mask, dtype=torch.bool)
    assert t.advantages.shape == sampled.shape and t.advantages.dtype == torch.float32
    assert (t.advantages[~sampled] == 0).all(), "an advantage on a token that the policy did not sample"
    values = set(t.advantages[sampled].tolist())
    assert len(values) == 1, f"advantages differ within a trajectory: {values}"
    return values.pop()


def values(trajectories):
    return [value(t) for t in trajectories]


def golden_trajectories(uids):
    rows = enumerate(zip(GOLDEN["mask"], GOLDEN["score"], uids))
    return [
        make_trajectory(prompt=i + 1, response=mask, score=score, uid=uid, session_id=i)
        for i, (mask, score, uid) in rows
    ]


@pytest.mark.parametrize("case", CASES)
def test_golden_through_compute_advantages(case):
    estimator, grouping = case.split()
    trajectories = golden_trajectories(GOLDEN["groups"][grouping])
    advantages_of(trajectories, estimator)
    assert values(trajectories) == pytest.approx(GOLDEN["expected_at_last_valid_token"][case], abs=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_golden_through_the_estimator(case):
    """[P, G, T] with rows that are not there, and garbage at masked positions."""
    estimator, grouping = case.split()
    uids = GOLDEN["groups"][grouping]
    places, num_groups = [], len(set(uids))
    scores, mask = (
        torch.full((num_groups, 3, 4), 7.0, dtype=torch.float64),
        torch.zeros(num_groups, 3, 4, dtype=torch.bool),
    )
    for i, uid in enumerate(uids):
        p = sorted(set(uids)).index(uid)
        g = uids[:i].count(uid)
        mask[p, g] = torch.tensor(GOLDEN["mask"][i], dtype=torch.bool)
        scores[p, g, mask[p, g]] = 0.0
        scores[p, g, GOLDEN["score_position"][i]] = GOLDEN["score"][i]
        places.append((p, g))
    advantages = ESTIMATORS[estimator](scores, mask, AlgorithmConfig(adv_estimator=estimator))
    assert advantages.dtype == torch.float64 and (advantages[~mask] == 0).all()
    for (p, g), expected in zip(places, GOLDEN["expected_at_last_valid_token"][case]):
        assert advantages[p, g][mask[p, g]].tolist() == pytest.approx([expected] * int(mask[p, g].sum()), abs=2e-6)


def test_the_estimators_with_a_golden_value_have_a_group_baseline():
    assert {case.split()[0] for case in CASES} <= set(WITH_BASELINE) <= set(ESTIMATORS)


def test_grpo_without_the_division_by_std():
    trajectories = group([1, 0, 0]) + group([4, 0], uid="b")
    advantages_of(trajectories, norm_adv_by_std_in_grpo=False)
    assert values(trajectories) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 2, -2])


@pytest.mark.parametrize("estimator", WITH_BASELINE)
@pytest.mark.parametrize(
    "score, size", [(0.9, 15), (0.1 * 3, 7), (0.1, 10), (1 / 3, 5), (-0.7, 11), (0.0, 4), (1.0, 8)]
)
@pytest.mark.parametrize("norm", [True, False])
def test_equal_scores_teach_exactly_nothing(estimator, score, size, norm):
    trajectories = group([score] * size) + group([1.0, 0.0], uid="b")
    metrics = advantages_of(trajectories, estimator, norm_adv_by_std_in_grpo=norm)
    assert all((t.advantages == 0).all() for t in trajectories[:size])
    learning = trajectories[size:]
    if estimator == "grpo_passk":
        learning = learning[:1]  # the best alone
    assert all((t.advantages[t.loss_mask] != 0).all() for t in learning), "the other group lost its advantage"
    assert metrics["reward/frac_zero_std"] == 0.5
    assert metrics["reward/frac_zero_std_positive"] == (0.5 if score > 0 else 0)


def test_a_plain_function_is_an_estimator_that_compares_in_the_group(monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "ones", lambda scores, mask, cfg: mask.double())
    equal, other = group([0.5, 0.5]), group([1.0, 0.0], uid="b")
    advantages_of(equal + other, "ones")
    assert values(equal + other) == [0, 0, 1, 1]


@pytest.mark.parametrize("estimator", WITH_BASELINE)
def test_scores_that_differ_a_little_are_not_taken_for_equal(estimator):
    trajectories = group([0.5, 0.5, 0.5001])
    assert advantages_of(trajectories, estimator)["reward/frac_zero_std"] == 0
    assert value(trajectories[2]) > 0
    assert value(trajectories[0]) == 0 if estimator == "grpo_passk" else value(trajectories[0]) < 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nan_scores_get_nothing_and_change_nothing(estimator):
    """As if the sessions that could not be scored had never been: neither the group's nor the batch's statistics see
    them.
    """
    scores, lengths = [1.0, NAN, 0.0, 0.25, NAN], [3, 9, 2, 5, 1]
    with_nan = group(scores, lengths=lengths) + group([NAN, NAN], uid="b") + group([2.0, NAN, 1.0], uid="c")
    metrics = advantages_of(with_nan, estimator)
    without = [
        make_trajectory(score=t.score, uid=t.uid, session_id=t.session_id, response=(1,) * t.response_length)
        for t in with_nan
        if t.scored
    ]
    advantages_of(without, estimator)
    assert values([t for t in with_nan if t.scored]) == pytest.approx(values(without), rel=1e-6)
    assert all((t.advantages == 0).all() for t in with_nan if not t.scored)
    assert not any(t.loss_mask.any() for t in with_nan if not t.scored), "an unscorable trajectory is still in the loss"
    assert all(math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("estimator", WITH_BASELINE)
def test_nan_beside_equal_scores_is_still_an_equal_group(estimator):
    trajectories = group([0.9] * 15 + [NAN])
    assert advantages_of(trajectories, estimator)["reward/frac_zero_std"] == 1
    assert values(trajectories) == [0.0] * 16


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_step_of_unscorable_sessions_survives(estimator):
    trajectories = group([NAN, NAN])
    metrics = advantages_of(trajectories, estimator)
    assert values(trajectories) == [0, 0] and all(math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "remax"])
@pytest.mark.parametrize("others", [[], [NAN, NAN]])
def test_a_group_of_one_keeps_its_score(estimator, others):
    trajectories = group([0.75, *others])
    advantages_of(trajectories, estimator)
    assert value(trajectories[0]) == pytest.approx(0.75, rel=2e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_do_not_depend_on_the_order_of_trajectories(estimator):
    trajectories = group([1, 0, 0.5], lengths=[2, 5, 3]) + group([0, 3], uid="b")
    advantages_of(trajectories, estimator)
    expected = {t.key: value(t) for t in trajectories}
    random.Random(0).shuffle(trajectories)
    advantages_of(trajectories, estimator)
    assert {t.key: value(t) for t in trajectories} == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_last_output_stands_for_its_session(estimator):
    """Session 0 has three outputs, in no order; their own scores (9, 5) take part in nothing, the advantage goes to
    each on its own mask.
    """
    first = make_trajectory(score=9.0, index=0, response=(1, 0, 0, 1, 1, 1), prompt=2)
    last = make_trajectory(score=1.0, index=2, response=(1, 1, 0, 1), prompt=5)
    middle = make_trajectory(score=5.0, index=1, response=(0, 1), prompt=1)
    others = [make_trajectory(score=s, session_id=i, response=(1,) * i) for i, s in [(1, 0.0), (2, 0.5)]]
    advantages_of([first, last, *others, middle], estimator)

    alone = [
        make_trajectory(score=t.score, session_id=t.session_id, response=t.response_mask[t.prompt_length :])
        for t in (last, *others)
    ]
    advantages_of(alone, estimator)
    assert values([last, *others]) == pytest.approx(values(alone))
    assert value(first) == value(middle) == value(last) != 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_session_whose_last_output_has_no_score_teaches_nothing(estimator):
    trajectories = [make_trajectory(score=1.0, index=0), make_trajectory(score=NAN, index=1), *group([0, 0, 1, 1])[1:]]
    advantages_of(trajectories, estimator)
    assert values(trajectories[:2]) == [0, 0]
    assert not any(t.loss_mask.any() for t in trajectories[:2])  # nor does it count in a denominator
    alone = group([0, 0, 1, 1])[1:]
    advantages_of(alone, estimator)
    assert values(trajectories[2:]) == pytest.approx(values(alone))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_unscorable_output_of_a_scored_session_stays_out_of_the_loss(estimator):
    trajectories = [make_trajectory(score=NAN, index=0), make_trajectory(score=1.0, index=1), *group([0, 0])[1:]]
    advantages_of(trajectories, estimator)
    assert value(trajectories[0]) == 0 and not trajectories[0].loss_mask.any()
    assert value(trajectories[1]) > 0


def test_set_loss_mask_is_the_response_mask_of_what_has_a_score():
    scored, unscored, zero = make_trajectory(response=(1, 0, 1)), make_trajectory(score=NAN), make_trajectory(score=0.0)
    set_loss_mask([scored, unscored, zero])
    assert (
        scored.loss_mask.tolist() == [False, False, False, True, False, True] and scored.loss_mask.dtype == torch.bool
    )
    assert not unscored.loss_mask.any()
    assert zero.loss_mask.sum() == 3, "a score of 0 is a score"


def test_the_score_sits_on_the_last_sampled_token():
    t = make_trajectory(response=(1, 0, 1, 0), score=0.5)
    set_loss_mask([t])
    assert set_token_level_rewards([t], AlgorithmConfig(), 0.3) == (0.0, {})
    assert t.token_level_rewards.tolist() == [0, 0, 0, 0, 0, 0.5, 0]
    assert t.token_level_rewards.dtype == torch.float64


@pytest.mark.parametrize(
    "kind, kl",  # d = ref - old = 0.5, -1.0 on the two sampled tokens
    [
        ("k1", [-0.5, 1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [math.exp(0.5) - 1.5, math.exp(-1.0)]),
        ("low_var_kl", [math.exp(0.5) - 1.5, math.exp(-1.0)]),
        ("abs", [0.5, 1.0]),
    ],
)
def test_kl_in_the_reward(kind, kl):
    t = make_trajectory(response=(1, 0, 1), score=2.0, old=[-1.0, 50.0, -1.0], ref=[-0.5, NAN, -2.0])
    unscored = make_trajectory(score=NAN, session_id=1, old=[NAN] * 3, ref=[NAN] * 3)
    set_loss_mask([t, unscored])
    mean, metrics = set_token_level_rewards(
        [t, unscored], AlgorithmConfig(use_kl_in_reward=True, kl_penalty=kind), kl_coef=0.1
    )
    assert t.token_level_rewards.tolist() == pytest.approx([0, 0, 0, -0.1 * kl[0], 0, 2.0 - 0.1 * kl[1]])
    assert unscored.token_level_rewards.tolist() == [0] * 6
    assert metrics == pytest.approx({"reward/kl": sum(kl) / 2, "reward/kl_coef": 0.1}), (
        "the mean over sequences of the masked token mean"
    )
    assert mean == metrics["reward/kl"]


def test_kl_metric_is_a_mean_over_sequences_of_token_means():
    a = make_trajectory(response=(1,), old=[0.0], ref=[-3.0])
    b = make_trajectory(response=(1, 1, 1), session_id=1, old=[0.0] * 3, ref=[-1.0] * 3)
    set_loss_mask([a, b])
    kl, metrics = set_token_level_rewards([a, b], AlgorithmConfig(use_kl_in_reward=True), 0.1)
    assert kl == metrics["reward/kl"] == pytest.approx(2.0)  # a mean over tokens would be 1.5


def test_kl_in_the_reward_reaches_the_advantage():
    """Equal scores, but one session drifted from the reference: it is the worse one."""
    cfg = AlgorithmConfig(use_kl_in_reward=True, norm_adv_by_std_in_grpo=False)
    near = make_trajectory(session_id=0, response=(1, 1), old=[-1.0, -1.0], ref=[-1.0, -1.0])
    far = make_trajectory(session_id=1, response=(1, 1), old=[-1.0, -1.0], ref=[-2.0, -4.0])
    set_loss_mask([near, far])
    set_token_level_rewards([near, far], cfg, kl_coef=0.1)
    assert compute_advantages([near, far], cfg)["reward/frac_zero_std"] == 0
    assert values([near, far]) == pytest.approx([0.2, -0.2])  # the session's sum: 0.1 * (1 + 3) apart


@pytest.mark.parametrize(
    "kl, expected",  # target 0.1, 1024 trajectories, horizon 10000
    [
        (0.1, 0.02),
        (0.11, 0.02 * (1 + 0.1 * 0.1024)),
        (0.5, 0.02 * (1 + 0.2 * 0.1024)),
        (0.095, 0.02 * (1 - 0.05 * 0.1024)),
        (0.0, 0.02 * (1 - 0.2 * 0.1024)),
    ],
)
def test_adaptive_kl_coef(kl, expected):
    assert update_kl_coef(
        0.02, kl, 1024, AlgorithmConfig(kl_ctrl_type="adaptive", target_kl=0.1, horizon=10_000)
    ) == pytest.approx(expected, rel=1e-9)
    assert update_kl_coef(0.02, kl, 1024, AlgorithmConfig()) == 0.02, "fixed must not move"


def test_metrics():
    trajectories = (
        group([1, 0], lengths=[1, 3]) + group([1, 1], uid="b") + group([0, 0], uid="c") + group([-1, -1], uid="d")
    )
    metrics = advantages_of(trajectories, "rloo")
    assert metrics == pytest.approx(
        {
            "reward/frac_zero_std": 0.75,  # three of four groups taught nothing,
            "reward/frac_zero_std_positive": 0.25,  # one because it is solved
            "critic/advantages/mean": (1 - 3) / 22,  # over tokens: 1 of A = 1, 3 of A = -1, 18 of 0
            "critic/advantages/max": 1.0,
            "critic/advantages/min": -1.0,
        }
    )


def test_a_group_of_one_is_not_a_group_without_signal():
    assert advantages_of(group([1.0]))["reward/frac_zero_std"] == 0


@pytest.mark.parametrize("estimator", WITH_BASELINE)
def test_signs_and_sums_on_random_groups(estimator):
    rng = random.Random(0)
    for _ in range(50):
        trajectories = []
        for p in range(rng.randint(1, 4)):
            size = rng.randint(2, 8)
            scores = [rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in range(size)]
            trajectories += group(scores, uid=f"{p}", lengths=[rng.randint(1, 6) for _ in range(size)])
        advantages_of(trajectories, estimator)
        for uid in {t.uid for t in trajectories}:
            members = [t for t in trajectories if t.uid == uid]
            best, worst = max(members, key=lambda t: t.score), min(members, key=lambda t: t.score)
            if estimator == "grpo_passk":
                assert value(best) >= 0 and all(value(t) == 0 for t in members if t is not best), (
                    "only the best session may have an advantage"
                )
            elif estimator != "reinforce_plus_plus_baseline":  # whitening moves the whole batch
                a, weights = values(members), [t.response_length if estimator == "opo" else 1 for t in members]
                assert sum(x * w for x, w in zip(a, weights)) == pytest.approx(0, abs=1e-5), (
                    "a baseline leaves a group's (opo: length-weighted) sum at 0"
                )
                assert value(best) >= 0 >= value(worst)
            ranked = sorted(members, key=lambda t: t.score)
            assert all(value(x) <= value(y) + 1e-6 for x, y in zip(ranked, ranked[1:])), (
                "a better score must not have a smaller advantage"
            )


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitened_advantages_have_mean_zero_and_unbiased_variance_one_over_the_batchs_tokens(estimator):
    trajectories = group([1, 0, 0.5, NAN], lengths=[2, 5, 3, 9]) + group([0, 3], uid="b", lengths=[4, 1])
    advantages_of(trajectories, estimator)
    whole = torch.cat([t.advantages[t.loss_mask] for t in trajectories]).double()
    assert (
        len(whole) == 15
        and float(whole.mean()) == pytest.approx(0, abs=1e-6)
        and float(whole.var()) == pytest.approx(1, abs=1e-6)
    )


# By hand


def test_reinforce_plus_plus_by_hand():
    """Returns 0.9 and 1 around an observation that neither earns nor discounts, and 0: mean 1.9 / 3, unbiased variance
    0.91 / 3.
    """
    good, bad = (
        make_trajectory(response=(1, 0, 1), score=1.0),
        make_trajectory(prompt=1, response=(1,), score=0.0, session_id=1),
    )
    advantages_of([good, bad], "reinforce_plus_plus", gamma=0.9)
    std = (0.91 / 3) ** 0.5
    assert good.advantages.tolist() == pytest.approx([0, 0, 0, (0.9 - 1.9 / 3) / std, 0, (1 - 1.9 / 3) / std], rel=1e-5)
    assert value(bad) == pytest.approx(-1.9 / 3 / std, rel=1e-5)


def test_reinforce_plus_plus_does_not_look_at_observations():
    scores = torch.tensor([[[0.0, 7.0, 1.0], [0.0, NAN, NAN]]], dtype=torch.float64)
    mask = torch.tensor([[[True, False, True], [True, False, False]]])
    advantages = ESTIMATORS["reinforce_plus_plus"](scores, mask, AlgorithmConfig(gamma=0.9))
    assert (
        advantages[mask].tolist() == pytest.approx([0.484182, 0.665750, -1.149932], abs=1e-5)
        and (advantages[~mask] == 0).all()
    )


def test_reinforce_plus_plus_baseline_by_hand():
    """s - mean is 0.5 (1 token), -0.5 (3 tokens), 1 and -1 (1 token each): over six tokens mean -1/6, unbiased variance
    17/30.
    """
    trajectories = group([1, 0], lengths=[1, 3]) + group([2, 0], uid="b", lengths=[1, 1])
    advantages_of(trajectories, "reinforce_plus_plus_baseline")
    assert values(trajectories) == pytest.approx([(x + 1 / 6) / (17 / 30) ** 0.5 for x in (0.5, -0.5, 1, -1)], rel=1e-5)


@pytest.mark.parametrize(
    "scores, std, expected",
    [
        ([0.25, 1.0, 0.5], False, [0, 0.5, 0]),
        ([0.25, 1.0, 0.5], True, [0, 1.309304, 0]),  # unbiased std 0.381881
        ([NAN, 0.25, 1.0, 0.5], True, [0, 0, 1.309304, 0]),
        ([1.0, 1.0, 0.0], True, [0, 0, 0]),  # the best two tie
        ([-1.0, -3.0], False, [2, 0]),
        ([0.75], True, [0.75]),
        ([NAN, 0.75], True, [0, 0.75]),
    ],
)
def test_grpo_passk_by_hand(scores, std, expected):
    trajectories = group(scores)
    advantages_of(trajectories, "grpo_passk", norm_adv_by_std_in_grpo=std)
    assert values(trajectories) == pytest.approx(expected, abs=2e-6)


def test_remax_by_hand():
    """Against the greedy session of the same prompt: sessions that are equally good still learn when it was worse."""
    groups = [
        group([1.0, 0.25, NAN]),
        group([1.0, 1.0], uid="b"),
        group([1.0, 0.0], uid="c"),
        group([1.0, 0.0], uid="d"),
    ]
    set_baselines(
        groups,
        [
            [make_trajectory(score=0.5, uid="a")],
            [make_trajectory(score=0.25, uid="b")],
            [make_trajectory(score=NAN, uid="c")],
            [],
        ],
    )
    trajectories = sum(groups, [])
    advantages_of(trajectories, "remax")
    assert values(trajectories) == pytest.approx([0.5, -0.25, 0, 0.75, 0.75, 0, 0, 0, 0])
    assert not any(t.loss_mask.any() for t in trajectories[5:]), (
        "a prompt whose greedy session failed or has no score has no advantage either"
    )
    assert "greedy session of this prompt failed" in trajectories[-1].error


def test_the_estimators_that_have_no_baseline_do_not_read_it():
    trajectories = group([1.0, 0.0])
    advantages_of(trajectories, "rloo")
    assert [t.baseline for t in trajectories] == [0, 0] and values(trajectories) == [1, -1]


# What leaves the mask


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_truncated_responses_leave_loss_and_baseline_when_asked_to(estimator):
    trajectories = group([1.0, 0.0, 0.25, 0.75], lengths=[2, 4, 3, 1])
    trajectories[1].finish_reason, trajectories[2].finish_reason = "length", "stop"
    cfg = AlgorithmConfig(adv_estimator=estimator)
    set_loss_mask(trajectories, cfg)
    assert count_totals(trajectories).tokens == 10, "off unless asked for"
    without = group([1.0, 0.25, 0.75], lengths=[2, 3, 1])
    for ts in (trajectories, without):
        set_loss_mask(ts, AlgorithmConfig(mask_truncated=True))
        set_token_level_rewards(ts, cfg, 0.0)
        compute_advantages(ts, cfg)
    assert count_totals(trajectories) == count_totals(without)
    assert value(trajectories[1]) == 0
    assert [value(trajectories[i]) for i in (0, 2, 3)] == pytest.approx(values(without))


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_wholly_rejected_session_leaves_its_groups_baseline(estimator, kind):
    cfg = AlgorithmConfig(adv_estimator=estimator)

    def make(scores):
        ts = [
            make_trajectory(score=s, session_id=i, rollout=[-1.0] * 3, old=[-1.0 if s != 9 else -3.0] * 3)
            for i, s in enumerate(scores)
        ]
        set_loss_mask(ts)
        rejected = reject_mismatched(ts, LossConfig(rollout_rs=kind))["correction/rejected_frac"]
        set_token_level_rewards(ts, cfg, 0.0)
        compute_advantages(ts, cfg)
        return ts, rejected

    (with_it, rejected), (without, none) = make([1.0, 9.0, 0.25]), make([1.0, 0.25])
    assert (rejected, none) == (pytest.approx(1 / 3), 0)
    assert count_totals(with_it) == count_totals(without)
    assert value(with_it[1]) == 0 and values([with_it[0], with_it[2]]) == values(without)


def test_a_session_keeps_its_score_when_its_last_token_is_rejected():
    t = make_trajectory(score=1.0, rollout=[-1.0] * 3, old=[-1.0, -1.0, -3.0])
    set_loss_mask([t])
    reject_mismatched([t], LossConfig(rollout_rs="token"))
    set_token_level_rewards([t], AlgorithmConfig(), 0.0)
    assert t.token_level_rewards.tolist() == [0, 0, 0, 0, 1, 0]


def test_overlong_responses_are_punished_by_hand():
    """Limit 10, buffer 4: nothing up to 6 tokens, then a quarter of the factor a token, and no more than the whole."""
    lengths = [1, 6, 7, 8, 10, 12]
    trajectories = group([1.0] * 6, lengths=lengths) + [
        make_trajectory(prompt=9, response=(1, 1, 0, 0, 0, 1, 1, 1), score=1.0),
        make_trajectory(score=NAN, response=(1,) * 10),
    ]
    metrics = punish_overlong(
        trajectories, AlgorithmConfig(overlong_buffer_len=4, overlong_penalty_factor=0.5), max_response_length=10
    )
    penalties = [0, 0, 0.125, 0.25, 0.5, 0.5, 0.25]  # the last counts the tool's answer too, not the prompt
    assert [1 - t.score for t in trajectories[:7]] == pytest.approx(penalties)
    assert math.isnan(trajectories[7].score)
    assert metrics == {"reward/overlong_penalty": pytest.approx((sum(penalties) + 0.5) / 8)}


def test_a_step_punishes_and_then_masks():
    long, unscored = group([1.0, NAN], lengths=[10, 10])
    cfg = SimpleNamespace(
        algorithm=AlgorithmConfig(overlong_buffer_len=4), data=SimpleNamespace(max_response_length=10)
    )
    assert mask_and_punish([long, unscored], cfg) == {"reward/overlong_penalty": 1.0}
    assert long.score == 0.0 and long.loss_mask.sum() == 10
    assert not unscored.loss_mask.any()


def test_without_a_buffer_nothing_is_punished():
    trajectories = group([1.0], lengths=[50])
    assert punish_overlong(trajectories, AlgorithmConfig(), 10) == {} and trajectories[0].score == 1.0


@pytest.mark.parametrize(
    "scores, kind",
    [
        ([1.0, 0.0], "informative"),
        ([0.5, NAN, 0.25], "informative"),
        ([-1.0, -2.0], "informative"),
        ([1.0, 1.0, NAN], "solved"),
        ([0.3] * 7, "solved"),
        ([0.0, 0.0], "failed"),
        ([-1.0, -1.0], "failed"),
        ([NAN, NAN], "failed"),
    ],
)
def test_kind_of_a_group(scores, kind):
    assert group_kind(group(scores)) == kind
