import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import make_trajectory

from actor import ActorConfig, lr_factor
from advantage import set_loss_mask
from batch import collate
from loss import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    LOSSES,
    LossConfig,
    Totals,
    correction_weights,
    count_totals,
    kl_divergence,
    log_ratio,
    policy_loss,
    reject_mismatched,
    rollout_mismatch,
)

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())
POLICY = GOLDEN["policy_loss"]
NAN, INF = math.nan, math.inf
KL_TYPES = [kind + plus for kind in KL_ESTIMATORS for plus in ("", "+")]
KNOBS = {"loss_scale_factor": 7.0, "clip_ratio_high": 0.28}


def golden_batch():
    """The golden rows, packed, their logprobs [T] as a leaf in float64, and the mini-batch's totals."""
    rows = enumerate(zip(POLICY["mask"], POLICY["old_logprobs"], POLICY["advantage_per_row"]))
    trajectories = [
        make_trajectory(prompt=i + 1, response=mask, session_id=i, old=old, ref=old, advantages=[a] * 4)
        for i, (mask, old, a) in rows
    ]
    set_loss_mask(trajectories)
    logprobs = torch.cat(
        [
            torch.tensor([0.0] * t.prompt_length + row, dtype=torch.float64)
            for t, row in zip(trajectories, POLICY["logprobs"])
        ]
    )
    return collate(trajectories), logprobs.requires_grad_(), count_totals(trajectories)


def loss_and_grad_norm(cfg, batch, logprobs, totals):
    loss, metrics = policy_loss(batch, logprobs, torch.zeros_like(logprobs), cfg, totals)
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert (grad[~batch.loss_mask] == 0).all()
    return [loss.item(), grad.norm().item()], metrics


def test_golden_lr_factor():
    ((name, expected),) = GOLDEN["lr_factor"].items()
    cfg = ActorConfig(lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    assert name.startswith("cosine, warmup 2 of 10, min_lr_ratio 0.1")
    assert [lr_factor(step, 10, cfg) for step in range(11)] == pytest.approx(expected, abs=1e-6)


def test_lr_factor_constant_is_one_after_the_warm_up():
    assert [lr_factor(step, 10, ActorConfig(lr_warmup_steps=2)) for step in range(4)] == [0, 0.5, 1, 1]
    assert lr_factor(0, 10, ActorConfig()) == 1


# A mini-batch, however it is cut


def random_mini_batch(seed=0, size=11):
    """Trajectories of different lengths and masks with all log-probs, the fourth without a score, one of 40 tokens."""
    rng = random.Random(seed)
    trajectories = []
    for i in range(size):
        bits = [1, *(int(rng.random() < 0.7) for _ in range(39 if i == 6 else rng.randint(0, 12)))]
        fields = {name: [rng.uniform(-3, 0) for _ in bits] for name in ("rollout", "old", "ref")}
        fields["advantages"] = [rng.uniform(-2, 2)] * len(bits)
        trajectories.append(make_trajectory(rng.randint(1, 5), bits, NAN if i == 3 else 1.0, session_id=i, **fields))
    set_loss_mask(trajectories)
    generator = torch.Generator().manual_seed(seed)

    def near(x):
        return (x.double() + 0.3 * torch.randn(len(x), generator=generator)).requires_grad_()

    leaves = [(near(t.old_logprobs), near(t.old_logprobs.abs())) for t in trajectories]  # logprobs [L], entropy [L]
    return trajectories, leaves


def backward(trajectories, leaves, cuts, cfg):
    """Loss, gradients and metrics, added up over the micro-batches `cuts` (lists of indices)."""
    totals, loss, sums = count_totals(trajectories), 0.0, {}
    flat = [x for pair in leaves for x in pair]
    grads = [torch.zeros_like(x) for x in flat]
    for indices in cuts:
        logprobs, entropy = (torch.cat([leaves[i][k] for i in indices]) for k in (0, 1))
        part, metrics = policy_loss(collate([trajectories[i] for i in indices]), logprobs, entropy, cfg, totals)
        for total, grad in zip(grads, torch.autograd.grad(part, flat, allow_unused=True)):
            total += 0 if grad is None else grad
        loss += part.item()
        for name, pair in metrics.items():
            sums[name] = [a + float(b) for a, b in zip(sums.get(name, (0.0, 0.0)), pair)]
    return loss, torch.cat(grads), {name: total / count for name, (total, count) in sums.items()}


def by_the_book(trajectories, leaves, cfg):
    """semantics.md, section 8, a trajectory at a time: the loss of a whole mini-batch with the vanilla policy loss."""
    low, high = cfg.clip_range
    rows = []
    for t, (logprobs, entropy) in zip(trajectories, leaves):
        m = t.loss_mask
        if not m.any():
            continue
        lp, a, ref = logprobs[m], t.advantages[m], t.ref_logprobs[m]
        ratio = (lp - t.old_logprobs[m]).exp()
        row = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
        row = torch.where(a < 0, torch.minimum(row, -a * cfg.clip_ratio_c), row)
        gap = t.old_logprobs[m] - torch.tensor(t.rollout_logprobs)[m]
        if cfg.rollout_is != "none":
            row = row * (gap if cfg.rollout_is == "token" else gap.sum()).exp().clamp(max=cfg.rollout_is_threshold)
        row = row - cfg.entropy_coeff * entropy[m]
        if cfg.use_kl_loss:
            row = row + cfg.kl_loss_coef * ((ref - lp).exp() - (ref - lp) - 1)
        rows.append(row)
    return {
        "token-mean": lambda: torch.cat(rows).sum() / sum(map(len, rows)),
        "seq-mean-token-sum": lambda: sum(r.sum() for r in rows) / len(rows),
        "seq-mean-token-mean": lambda: sum(r.mean() for r in rows) / len(rows),
        "seq-mean-token-sum-norm": lambda: sum(r.sum() for r in rows) / (len(rows) * cfg.loss_scale_factor),
    }[cfg.loss_agg_mode]()


COMBINATIONS = list(itertools.product(AGGREGATIONS, (False, True), (0.0, 0.01), ("none", "token", "sequence")))


def combination(aggregation, kl, entropy, correction, mode="vanilla"):
    return LossConfig(
        loss_mode=mode,
        loss_agg_mode=aggregation,
        use_kl_loss=kl,
        kl_loss_coef=0.1,
        entropy_coeff=entropy,
        rollout_is=correction,
        **KNOBS,
    )


@pytest.mark.parametrize("knobs", COMBINATIONS)
def test_the_whole_mini_batch_is_by_the_book(knobs):
    trajectories, leaves = random_mini_batch()
    cfg = combination(*knobs)
    loss, grads, metrics = backward(trajectories, leaves, [range(len(trajectories))], cfg)
    expected = by_the_book(trajectories, leaves, cfg)
    flat = [x for pair in leaves for x in pair]
    expected_grads = torch.cat(
        [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(flat, torch.autograd.grad(expected, flat, allow_unused=True))
        ]
    )
    assert loss == pytest.approx(expected.item(), rel=1e-5) == metrics["actor/loss"]
    assert torch.allclose(grads, expected_grads, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_unscorable_trajectory_is_as_good_as_absent(aggregation):
    trajectories, leaves = random_mini_batch()
    cfg = combination(aggregation, True, 0.01, "token")
    loss, grads, metrics = backward(trajectories, leaves, [range(11)], cfg)
    keep = [i for i in range(11) if i != 3]
    without = backward([trajectories[i] for i in keep], [leaves[i] for i in keep], [range(10)], cfg)
    assert loss == pytest.approx(without[0], rel=1e-6) and metrics == pytest.approx(without[2], rel=1e-6)
    start, end = (sum(2 * len(t.tokens) for t in trajectories[:i]) for i in (3, 4))
    assert (grads[start:end] == 0).all()
    assert torch.allclose(torch.cat([grads[:start], grads[end:]]), without[1])


def test_count_totals():
    trajectories = [
        make_trajectory(response=(1, 0, 1)),
        make_trajectory(score=NAN),
        make_trajectory(response=(1,), score=0.0),
        make_trajectory(response=()),
    ]
    set_loss_mask(trajectories)
    assert count_totals(trajectories) == Totals(tokens=3, seqs=2)


def test_a_mini_batch_without_a_token_adds_nothing():
    trajectories = [make_trajectory(score=NAN, old=[0] * 3, advantages=[0] * 3)]
    set_loss_mask(trajectories)
    logprobs = torch.randn(6, requires_grad=True)
    for aggregation in AGGREGATIONS:
        loss, metrics = policy_loss(
            collate(trajectories),
            logprobs,
            torch.zeros(6),
            LossConfig(loss_agg_mode=aggregation, **KNOBS),
            count_totals(trajectories),
        )
        assert loss.item() == 0 and (torch.autograd.grad(loss, logprobs)[0] == 0).all()
        assert all(math.isfinite(float(x)) for pair in metrics.values() for x in pair)


# Masked positions


def test_log_ratio_is_zero_at_masked_positions_whatever_they_hold():
    x = torch.tensor([NAN, INF, -INF, -1.0, -1.0], requires_grad=True)
    mask = torch.tensor([False, False, False, False, True])
    for first, second, slope in [
        (x, torch.tensor([0.0, INF, 0.0, NAN, -1.5]), 1.0),
        (torch.tensor([0.0, INF, 0.0, NAN, -0.5]), x, -1.0),
    ]:
        ratio = log_ratio(first, second, mask)
        assert ratio.tolist() == [0, 0, 0, 0, 0.5]
        assert torch.autograd.grad(ratio.sum(), x)[0].tolist() == [0, 0, 0, 0, slope]


# The policy loss


def one_token_losses(ratios, advantages, **knobs):
    """Per-token loss and its derivative by the log-prob, through LOSSES["vanilla"]."""
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    mask, seq_ids = torch.ones(len(ratios), dtype=torch.bool), torch.zeros(len(ratios), dtype=torch.int64)
    loss, metrics = LOSSES["vanilla"](
        logprobs, old, torch.tensor(advantages, dtype=torch.float64), mask, seq_ids, LossConfig(**knobs)
    )
    return (
        loss.tolist(),
        torch.autograd.grad(loss.sum(), logprobs)[0].tolist(),
        {name: value.tolist() for name, value in metrics.items()},
    )


def test_clipping_is_asymmetric_and_one_sided():
    """Only a move in the direction that the advantage asks for is clipped: up with A > 0 at 1.28, down with A < 0 at
    0.8.
    """
    ratios, advantages = [1.27, 1.29, 0.5, 0.81, 0.79, 1.29], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    loss, grad, metrics = one_token_losses(ratios, advantages, clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert loss == pytest.approx([-1.27, -1.28, -0.5, 0.81, 0.8, 1.29])
    assert grad == pytest.approx([-1.27, 0, -0.5, 0.81, 0, 1.29])
    assert metrics["actor/pg_clipfrac"] == [False, True, False, False, True, False]
    assert metrics["actor/ratio"] == pytest.approx(ratios)


def test_clip_ratio_is_used_for_a_side_without_its_own():
    assert LossConfig(clip_ratio=0.1).clip_range == (0.1, 0.1)
    assert LossConfig(clip_ratio=0.1, clip_ratio_high=0.3).clip_range == (0.1, 0.3)
    assert LossConfig(clip_ratio=0.1, clip_ratio_low=0.0).clip_range == (0.0, 0.1)


def test_dual_clip_bounds_negative_advantages_only():
    loss, grad, metrics = one_token_losses(
        [2.9, 3.1, 50.0, 50.0, 0.01], [-2.0, -2.0, -2.0, 2.0, 2.0], clip_ratio_c=3.0, clip_ratio=0.2
    )
    assert loss == pytest.approx([5.8, 6.0, 6.0, -2.4, -0.02])
    assert grad == pytest.approx([5.8, 0, 0, 0, -0.02])
    assert metrics["actor/pg_clipfrac_lower"] == [False, True, True, False, False]


@pytest.mark.parametrize("gap", [25.0, -25.0, 1000.0])
def test_a_wild_ratio_stays_finite(gap):
    mask, seq_ids = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    _, metrics = LOSSES["vanilla"](
        torch.tensor([gap]), torch.tensor([0.0]), torch.tensor([1.0]), mask, seq_ids, LossConfig()
    )
    assert float(metrics["actor/ratio"]) == pytest.approx(math.exp(20 if gap > 0 else -20), rel=1e-5)


def test_at_ratio_one_the_gradient_is_the_advantage():
    trajectories, leaves = random_mini_batch()
    logprobs, batch, totals = torch.cat([lp for lp, _ in leaves]), collate(trajectories), count_totals(trajectories)
    loss, _ = policy_loss(replace(batch, old_logprobs=None), logprobs, torch.zeros_like(logprobs), LossConfig(), totals)
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(
        grad, torch.where(batch.loss_mask, -batch.advantages / totals.tokens, 0.0).double(), rtol=1e-5
    )


def test_entropy_bonus_lowers_the_loss():
    trajectories, leaves = random_mini_batch()
    logprobs, entropy = (torch.cat([pair[k] for pair in leaves]) for k in (0, 1))
    batch, totals = collate(trajectories), count_totals(trajectories)
    without, with_bonus = (
        policy_loss(batch, logprobs, entropy, LossConfig(entropy_coeff=c), totals)[0] for c in (0.0, 0.5)
    )
    mean = entropy[batch.loss_mask].mean()
    assert (with_bonus - without).item() == pytest.approx(-0.5 * mean.item(), rel=1e-5)


def test_metrics_are_what_their_names_say():
    trajectories, leaves = random_mini_batch()
    cfg = combination("seq-mean-token-mean", True, 0.01, "none")
    _, _, metrics = backward(trajectories, leaves, [range(11)], cfg)
    batch = collate(trajectories)
    logprobs, entropy = (torch.cat([pair[k] for pair in leaves]).detach() for k in (0, 1))
    mask = batch.loss_mask
    assert metrics["actor/entropy"] == pytest.approx(float(entropy[mask].mean()), rel=1e-5)
    assert metrics["actor/ppo_kl"] == pytest.approx(float((batch.old_logprobs - logprobs)[mask].mean()), rel=1e-5)
    without = replace(cfg, use_kl_loss=False, entropy_coeff=0.0)
    pg, kl = (
        by_the_book(trajectories, leaves, c).item()
        for c in (without, replace(without, use_kl_loss=True, kl_loss_coef=1.0))
    )
    assert metrics["actor/pg_loss"] == pytest.approx(pg, rel=1e-5)
    assert metrics["actor/kl_loss"] == pytest.approx(kl - pg, rel=1e-4), "without its coefficient"


# The other losses, by hand


def by_hand(mode, probs, old_probs, advantages, seq_ids=None, mask=None, **knobs):
    """Per-token loss, the gradient of its sum by the log-probs, and the share that was clipped."""
    logprobs, old, a = (torch.tensor(x, dtype=torch.float64) for x in (probs, old_probs, advantages))
    logprobs, old = logprobs.log().requires_grad_(), old.log()
    mask = torch.tensor(mask or [True] * len(probs))
    loss, metrics = LOSSES[mode](
        logprobs,
        old,
        a,
        mask,
        torch.tensor(seq_ids or [0] * len(probs)),
        LossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, **knobs),
    )
    return (
        loss.tolist(),
        torch.autograd.grad(loss.sum(), logprobs)[0].tolist(),
        metrics["actor/pg_clipfrac"].tolist() if "actor/pg_clipfrac" in metrics else None,
    )


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_gspo_by_hand():
    """Ratios 2 and 1/2 of one sequence: its own is 1, unclipped, though each token's would be; 2 and 2 are clipped for
    A > 0 alone.
    """
    loss, grad, clipped = by_hand(
        "gspo", [0.4, 0.2, 0.4, 0.4, 0.4], [0.2, 0.4, 0.2, 0.2, 0.2], [1.0, 1.0, 1.0, 1.0, -1.0], [0, 0, 1, 1, 2]
    )
    assert loss == pytest.approx([-1, -1, -1.28, -1.28, 2])
    assert grad == pytest.approx([-1, -1, 0, 0, 2])
    assert clipped == [False, False, True, True, False]


def test_cispo_by_hand():
    """The clip bounds the weight, and the token keeps its gradient."""
    loss, grad, clipped = by_hand("cispo", [0.4, 0.44, 0.1], [0.2, 0.4, 0.4], [2.0, 2.0, -1.0])
    assert loss == pytest.approx([-1.28 * 2 * math.log(0.4), -1.1 * 2 * math.log(0.44), 0.8 * math.log(0.1)])
    assert grad == pytest.approx([-2.56, -2.2, 0.8])
    assert clipped == [True, False, True]


def test_gpg_by_hand():
    loss, grad, _ = by_hand("gpg", [0.4, 0.1], [0.1, 0.4], [2.0, -1.0])
    assert loss == pytest.approx([-2 * math.log(0.4), math.log(0.1)]) and grad == pytest.approx([-2, 1])


def test_sapo_by_hand():
    """Ratios 1.5 and 0.5 with temperature 1.0 for A > 0 and 1.05 for the others; at ratio 1 the gradient is -A whatever
    the temperature.
    """
    loss, grad, _ = by_hand("sapo", [0.3, 0.2, 0.5, 0.5], [0.2, 0.4, 0.5, 0.5], [2.0, -1.0, 3.0, -3.0])
    up, down = sigmoid(0.5), sigmoid(-0.5 * 1.05)
    assert loss == pytest.approx([-2 * up * 4, down * 4 / 1.05, -3 * 2, 3 * 2 / 1.05], rel=1e-6)
    assert grad == pytest.approx([-2 * 4 * up * (1 - up) * 1.5, 4 * down * (1 - down) * 0.5, -3, 3], rel=1e-6)


def test_geo_mean_by_hand():
    """Log-ratios 0.5 and -0.4: for A > 0 the first is clipped to 0.28, for A < 0 the second to -0.2; a masked token
    takes no part.
    """
    old = [0.1] * 5
    probs = [0.1 * math.exp(x) for x in (0.5, -0.4, 0.5, 2.0, -0.4)]
    loss, grad, clipped = by_hand(
        "geo_mean", probs, old, [1.0, 1.0, -1.0, 0.0, -1.0], [0, 0, 1, 1, 1], [True, True, True, False, True]
    )
    good, bad = math.exp((0.28 - 0.4) / 2), math.exp((0.5 - 0.2) / 2)
    assert loss == pytest.approx([-good, -good, bad, 0, bad])
    assert grad == pytest.approx([0, -good, bad, 0, 0])  # each of the two tokens' losses passes half
    assert [clipped[i] for i in (0, 1, 2, 4)] == [True, False, False, True]


def test_dppo_tv_by_hand():
    """The probability may move by the clip, whatever the ratio: 0.2 -> 0.1 is inside, 0.5 -> 0.25 is not; only moves
    that the advantage asks for are cut.
    """
    probs, old = [0.7, 0.85, 0.25, 0.1, 0.1, 0.25], [0.5, 0.5, 0.5, 0.2, 0.01, 0.5]
    loss, grad, clipped = by_hand("dppo_tv", probs, old, [1.0, 1.0, -1.0, -1.0, 2.0, 1.0], clip_ratio_c=3.0)
    assert clipped == [False, True, True, False, False, False]
    weights = [-1.4, 0, 0, 0.5, -2 * 3.0, -0.5]  # -A * min(ratio, 3)
    assert grad == pytest.approx(weights) and loss == pytest.approx([w * math.log(p) for w, p in zip(weights, probs)])


# KL


@pytest.mark.parametrize(
    "kind, expected",
    [("k1", 0.7), ("k2", 0.245), ("k3", math.exp(-0.7) - 0.3), ("low_var_kl", math.exp(-0.7) - 0.3), ("abs", 0.7)],
)
def test_kl_by_hand(kind, expected):
    logprobs, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.7], dtype=torch.float64)
    assert float(kl_divergence(logprobs, ref, kind)) == pytest.approx(expected)
    assert float(kl_divergence(logprobs, logprobs, kind)) == 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimators_have_the_kl_as_their_mean(kind):
    """Expectation over the policy's own distribution."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    assert float((p * kl_divergence(p.log(), q.log(), kind)).sum()) == pytest.approx(float((p * (p / q).log()).sum()))


@pytest.mark.parametrize("kind", KL_TYPES)
def test_a_wild_kl_stays_finite(kind):
    assert torch.isfinite(kl_divergence(torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0]), kind)).all()


# The engine's log-probs and the actor's


def mismatched(rollout, old, response):
    t = make_trajectory(response=response, rollout=[math.log(p) for p in rollout], old=[math.log(p) for p in old])
    unscored = make_trajectory(score=NAN, session_id=1, rollout=[-9.0] * 3, old=[-0.1] * 3)
    set_loss_mask([t, unscored])
    return rollout_mismatch([t, unscored])


def test_rollout_mismatch_by_hand():
    """Ratios 0.5/0.4 = 1.25 and 0.2/0.4 = 0.5 on two sampled tokens; the observed token between them and the unscorable
    trajectory stay out.
    """
    assert mismatched([0.4, 1.0, 0.4], [0.5, 0.01, 0.2], (1, 0, 1)) == pytest.approx(
        {
            "correction/prob_diff_mean": 0.15,
            "correction/prob_diff_max": 0.2,
            "correction/k3": ((0.25 - math.log(1.25)) + (-0.5 - math.log(0.5))) / 2,
            "correction/ess": 1.75**2 / (2 * (1.25**2 + 0.5**2)),
        },
        rel=1e-5,
    )


def test_rollout_mismatch_is_nothing_when_they_agree():
    metrics = mismatched([0.4, 0.3, 0.9], [0.4, 0.3, 0.9], (1, 1, 1))
    assert metrics == {
        "correction/prob_diff_mean": 0,
        "correction/prob_diff_max": 0,
        "correction/k3": 0,
        "correction/ess": 1,
    }


def test_rollout_mismatch_without_a_token_says_nothing():
    t = make_trajectory(score=NAN, old=[0.0] * 3)
    set_loss_mask([t])
    assert rollout_mismatch([t]) == {}


def test_sequence_correction_by_hand():
    """The product of a sequence's ratios, on each of its tokens, truncated; masked tokens hold anything."""
    mask = torch.tensor([True, False, True, True, True, True])
    ratios = torch.tensor([1.5, NAN, 0.8, 2.0, 2.0, 0.25])
    old = torch.full((6,), -1.0).requires_grad_()
    seq_ids = torch.tensor([0, 0, 0, 1, 1, 2])
    cfg = LossConfig(rollout_is="sequence", rollout_is_threshold=2.5)
    weights = correction_weights(old, old.detach() - ratios.log(), mask, seq_ids, cfg)
    assert weights[mask].tolist() == pytest.approx([1.2, 1.2, 2.5, 2.5, 0.25], rel=1e-5) and not weights.requires_grad
    token = correction_weights(old, old.detach() - ratios.log(), mask, seq_ids, replace(cfg, rollout_is="token"))
    assert token[mask].tolist() == pytest.approx([1.5, 0.8, 2.0, 2.0, 0.25], rel=1e-5)


def with_ratios(*ratios, response=None, session_id=0):
    """A trajectory whose pi_actor / pi_vLLM are `ratios`."""
    rollout = [-3.0] * len(ratios)
    return make_trajectory(
        1,
        response or (1,) * len(ratios),
        session_id=session_id,
        rollout=rollout,
        old=[-3.0 + math.log(r) for r in ratios],
        advantages=[1.0] * len(ratios),
    )


@pytest.mark.parametrize(
    # In the band 0.5..2; of the third the geometric mean is 1, of the fourth 2.25, of the last 1.6 (the product 2.56).
    "kind, kept",
    [
        ("none", ["0111", "01101", "011", "011", "01", "011"]),
        ("token", ["0101", "01100", "000", "001", "00", "011"]),
        ("sequence", ["0111", "01101", "011", "000", "00", "011"]),
    ],
)
def test_rejected_tokens_and_sequences_leave_the_mask(kind, kept):
    """Observations (here of ratio 100) are looked at by neither; bounds are pi_actor / pi_vLLM."""
    trajectories = [
        with_ratios(1.0, 2.2, 0.6),
        with_ratios(1.0, 1.9, 100.0, 0.4, response=(1, 1, 0, 1)),
        with_ratios(4.0, 0.25),
        with_ratios(2.7, 1.875),
        with_ratios(0.45),
    ]
    trajectories.append(with_ratios(1.6, 1.6))
    set_loss_mask(trajectories)
    metrics = reject_mismatched(trajectories, LossConfig(rollout_rs=kind))
    assert ["".join(str(int(x)) for x in t.loss_mask) for t in trajectories] == kept
    left = sum(mask.count("1") for mask in kept)
    assert metrics == ({} if kind == "none" else {"correction/rejected_frac": pytest.approx(1 - left / 13)})
    assert count_totals(trajectories) == Totals(tokens=left, seqs=sum("1" in mask for mask in kept))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rejected_tokens_leave_numerator_and_denominator(aggregation):
    """The loss is that of the trajectories without them (as observations), and of the batch without the sequence that
    lost all.
    """
    cfg = LossConfig(loss_agg_mode=aggregation, rollout_rs="token", **KNOBS)
    rejected = [with_ratios(1.0, 3.0, 1.2), with_ratios(9.0, 0.1, session_id=1), with_ratios(1.0, session_id=2)]
    without = [with_ratios(1.0, 1.0, 1.2, response=(1, 0, 1)), with_ratios(1.0, session_id=2)]
    losses = []
    for trajectories in (rejected, without):
        set_loss_mask(trajectories)
        reject_mismatched(trajectories, cfg)
        logprobs = torch.where(collate(trajectories).loss_mask, -2.8, 0.0)
        losses.append(
            float(
                policy_loss(
                    collate(trajectories), logprobs, torch.zeros_like(logprobs), cfg, count_totals(trajectories)
                )[0]
            )
        )
    assert losses[0] == pytest.approx(losses[1]) != 0


def test_correction_weighs_the_policy_loss_but_not_kl_and_entropy():
    trajectories, leaves = random_mini_batch()
    for t in trajectories:
        t.rollout_logprobs = (t.old_logprobs - math.log(1.5)).tolist()  # every weight is 1.5
    plain, weighed = (
        backward(trajectories, leaves, [range(11)], combination("token-mean", True, 0.01, c))[2]
        for c in ("none", "token")
    )
    assert weighed["actor/pg_loss"] == pytest.approx(1.5 * plain["actor/pg_loss"], rel=1e-5)
    assert weighed["actor/kl_loss"] == pytest.approx(plain["actor/kl_loss"])
    assert weighed["actor/loss"] - plain["actor/loss"] == pytest.approx(0.5 * plain["actor/pg_loss"], rel=1e-4)


def test_without_old_logprobs_the_correction_is_from_the_current_ones():
    trajectories, leaves = random_mini_batch()
    logprobs = torch.cat([lp for lp, _ in leaves])
    batch, totals, cfg = collate(trajectories), count_totals(trajectories), LossConfig(rollout_is="token")
    none, equal = (
        policy_loss(replace(batch, old_logprobs=old), logprobs, torch.zeros_like(logprobs), cfg, totals)[0]
        for old in (None, logprobs.detach())
    )
    assert torch.equal(*(torch.autograd.grad(loss, logprobs)[0] for loss in (none, equal))), (
        "the weights must not carry a gradient"
    )


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"kl_loss_type": "k9"}, r"loss\.kl_loss_type='k9' is not known; did you mean k\d\+?\?; known: k1"),
        ({"loss_agg_mode": "mean"}, r"loss\.loss_agg_mode='mean' is not known.*; known: token-mean"),
        ({"clip_ratio": 1.5}, r"loss\.clip_ratio=1\.5"),
        ({"clip_ratio_c": 1.0}, r"loss\.clip_ratio_c=1\.0"),
        ({"rollout_is_threshold": 0.0}, r"loss\.rollout_is_threshold=0\.0"),
        ({"clip_ratio_low": 1.5}, r"loss\.clip_ratio_low=1\.5"),
        ({"clip_ratio_high": -0.1}, r"loss\.clip_ratio_high=-0\.1"),
        ({"loss_scale_factor": 0.0}, r"loss\.loss_scale_factor=0\.0"),
        ({"tau_neg": 0.0}, r"loss\.tau_neg=0\.0"),
        ({"rollout_rs_threshold_low": -0.5}, r"loss\.rollout_rs_threshold_low=-0\.5"),
        (
            {"rollout_rs_threshold_low": 2.0},
            r"loss\.rollout_rs_threshold_low=2\.0 must be below loss\.rollout_rs_threshold_high=2\.0",
        ),
    ],
)
def test_a_knob_that_makes_no_sense_is_named(knobs, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**knobs)
