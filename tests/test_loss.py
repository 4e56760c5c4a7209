import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actor import ActorConfig, lr_factor
from advantage import set_loss_mask
from batch import collate, pack
from fakes import make_trajectory
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
    rollout_mismatch,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
POLICY = GOLDEN["policy_loss"]
NAN, INF = math.nan, math.inf
KL_TYPES = [kind + plus for kind in KL_ESTIMATORS for plus in ("", "+")]
KNOBS = {"loss_scale_factor": 7.0, "clip_ratio_high": 0.28}


def golden_batch():
    """The golden rows, packed, their logprobs [T] as a leaf in float64, and the mini-batch's totals."""
    rows = enumerate(zip(POLICY["mask"], POLICY["old_logprobs"], POLICY["advantage_per_row"]))
    trajectories = [make_trajectory(prompt=i + 1, response=mask, session_id=i, old=old, ref=old, advantages=[a] * 4) for i, (mask, old, a) in rows]
    set_loss_mask(trajectories)
    logprobs = torch.cat([torch.tensor([0.0] * t.prompt_length + row, dtype=torch.float64) for t, row in zip(trajectories, POLICY["logprobs"])])
    return collate(trajectories), logprobs.requires_grad_(), count_totals(trajectories)


def loss_and_grad_norm(cfg, batch, logprobs, totals):
    loss, metrics = policy_loss(batch, logprobs, torch.zeros_like(logprobs), cfg, totals)
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert (grad[~batch.loss_mask] == 0).all()
    return [loss.item(), grad.norm().item()], metrics


GOLDEN_LOSSES = [name for name in POLICY["expected_loss_and_grad_norm"] if name.split()[0] in LOSSES]


@pytest.mark.parametrize("name", GOLDEN_LOSSES)
def test_golden_policy_loss(name):
    mode, aggregation = name.split()
    knobs = {k: v for k, v in POLICY["knobs"].items() if k.startswith("clip")}
    cfg = LossConfig(loss_mode=mode, loss_agg_mode=aggregation, loss_scale_factor=POLICY["knobs"]["seq-mean-token-sum-norm divisor"], **knobs)
    assert loss_and_grad_norm(cfg, *golden_batch())[0] == pytest.approx(POLICY["expected_loss_and_grad_norm"][name], abs=1e-6)


def test_golden_covers_the_four_aggregations():
    assert {f"vanilla {aggregation}" for aggregation in AGGREGATIONS} <= set(GOLDEN_LOSSES)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_golden_kl(kind):
    """Through policy_loss: with advantages of 0 the KL is all that is left."""
    batch, logprobs, totals = golden_batch()
    batch.advantages.zero_()
    result, metrics = loss_and_grad_norm(LossConfig(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind), batch, logprobs, totals)
    expected = GOLDEN["kl_token_mean_loss_and_grad_norm"][kind]
    assert result == pytest.approx(expected, abs=1e-6)
    assert [float(x) for x in metrics["actor/kl_loss"]] == pytest.approx([expected[0], 1], abs=1e-6)


def test_golden_rollout_correction():
    golden = GOLDEN["rollout_correction"]
    mask = torch.tensor(golden["mask"], dtype=torch.bool)
    old, rollout = torch.tensor(golden["old_logprobs"], requires_grad=True), torch.tensor(golden["rollout_logprobs"])
    weights = correction_weights(old, rollout, mask, LossConfig(rollout_is="token", rollout_is_threshold=2.0))
    expected = torch.tensor(golden["expected_weights"]["token, truncate at 2.0"])
    assert torch.allclose(weights[mask], expected[mask], atol=1e-5)
    assert not weights.requires_grad


def test_golden_lr_factor():
    (name, expected), cfg = next(iter(GOLDEN["lr_factor"].items())), ActorConfig(lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
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

    return trajectories, [(near(t.old_logprobs), near(t.old_logprobs.abs())) for t in trajectories]  # leaves: logprobs [L], entropy [L]


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
        if cfg.rollout_is == "token":
            row = row * (t.old_logprobs[m] - torch.tensor(t.rollout_logprobs)[m]).exp().clamp(max=cfg.rollout_is_threshold)
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


COMBINATIONS = list(itertools.product(AGGREGATIONS, (False, True), (0.0, 0.01), ("none", "token")))


def combination(aggregation, kl, entropy, correction, mode="vanilla"):
    return LossConfig(loss_mode=mode, loss_agg_mode=aggregation, use_kl_loss=kl, kl_loss_coef=0.1, entropy_coeff=entropy, rollout_is=correction, **KNOBS)


@pytest.mark.parametrize("knobs", COMBINATIONS)
def test_the_whole_mini_batch_is_by_the_book(knobs):
    trajectories, leaves = random_mini_batch()
    cfg = combination(*knobs)
    loss, grads, metrics = backward(trajectories, leaves, [range(len(trajectories))], cfg)
    expected = by_the_book(trajectories, leaves, cfg)
    flat = [x for pair in leaves for x in pair]
    expected_grads = torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(flat, torch.autograd.grad(expected, flat, allow_unused=True))])
    assert loss == pytest.approx(expected.item(), rel=1e-5) == metrics["actor/loss"]
    assert torch.allclose(grads, expected_grads, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", LOSSES)
@pytest.mark.parametrize("knobs", COMBINATIONS)
def test_the_gradient_does_not_depend_on_the_cut(knobs, mode):
    trajectories, leaves = random_mini_batch()
    size, lengths = len(trajectories), [len(t.tokens) for t in trajectories]
    cfg = combination(*knobs, mode=mode)
    loss, grads, metrics = backward(trajectories, leaves, [range(size)], cfg)
    assert grads.norm() > 0.01 and all(map(math.isfinite, metrics.values()))
    cuts = {f"{n} in order": [range(size)[i * size // n : (i + 1) * size // n] for i in range(n)] for n in (2, 5, size)}
    cuts |= {f"{d} ranks of {budget} tokens": [m for rank in pack(lengths, d, budget) for m in rank if m] for d, budget in [(1, 48), (2, 64), (4, 100)]}
    cuts["3 rows"] = [m for rank in pack(lengths, 1, None, 3) for m in rank if m]
    for name, cut in cuts.items():
        cut_loss, cut_grads, cut_metrics = backward(trajectories, leaves, cut, cfg)
        assert cut_loss == pytest.approx(loss, rel=1e-5), name
        assert torch.allclose(cut_grads, grads, rtol=1e-5, atol=1e-9), name
        assert cut_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7), name


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
    trajectories = [make_trajectory(response=(1, 0, 1)), make_trajectory(score=NAN), make_trajectory(response=(1,), score=0.0), make_trajectory(response=())]
    set_loss_mask(trajectories)
    assert count_totals(trajectories) == Totals(tokens=3, seqs=2)


def test_a_mini_batch_without_a_token_adds_nothing():
    trajectories = [make_trajectory(score=NAN, old=[0] * 3, advantages=[0] * 3)]
    set_loss_mask(trajectories)
    logprobs = torch.randn(6, requires_grad=True)
    for aggregation in AGGREGATIONS:
        loss, metrics = policy_loss(collate(trajectories), logprobs, torch.zeros(6), LossConfig(loss_agg_mode=aggregation, **KNOBS), count_totals(trajectories))
        assert loss.item() == 0 and (torch.autograd.grad(loss, logprobs)[0] == 0).all()
        assert all(math.isfinite(float(x)) for pair in metrics.values() for x in pair)


# Masked positions


@pytest.mark.parametrize("fill", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", [None, "k1", "k2", "k3", "abs", "k3+"])
@pytest.mark.parametrize("mode", LOSSES)
def test_what_masked_positions_hold_does_not_matter(mode, kind, fill):
    """0 * NaN is NaN, in the gradient too: masking by multiplication fails here."""
    for aggregation in AGGREGATIONS:
        cfg = combination(aggregation, kind is not None, 0.1, "token", mode)
        cfg = replace(cfg, kl_loss_type=kind or cfg.kl_loss_type)
        results = []
        for value in (-1.0, fill):
            trajectories, leaves = random_mini_batch()
            batch = collate(trajectories)
            masked = ~batch.loss_mask
            for name in ("old_logprobs", "ref_logprobs", "advantages", "rollout_logprobs"):
                getattr(batch, name)[masked] = value
            logprobs, entropy = (torch.where(masked, value, torch.cat([pair[k].detach() for pair in leaves])).requires_grad_() for k in (0, 1))
            loss, metrics = policy_loss(batch, logprobs, entropy, cfg, count_totals(trajectories))
            numbers = torch.tensor([float(x) for pair in metrics.values() for x in pair])
            results.append((loss.detach(), *torch.autograd.grad(loss, (logprobs, entropy)), numbers))
        for finite, filled in zip(*results):
            assert torch.isfinite(filled).all() and torch.equal(finite, filled), aggregation


def test_log_ratio_is_zero_at_masked_positions_whatever_they_hold():
    x = torch.tensor([NAN, INF, -INF, -1.0, -1.0], requires_grad=True)
    mask = torch.tensor([False, False, False, False, True])
    for first, second, slope in [(x, torch.tensor([0.0, INF, 0.0, NAN, -1.5]), 1.0), (torch.tensor([0.0, INF, 0.0, NAN, -0.5]), x, -1.0)]:
        ratio = log_ratio(first, second, mask)
        assert ratio.tolist() == [0, 0, 0, 0, 0.5]
        assert torch.autograd.grad(ratio.sum(), x)[0].tolist() == [0, 0, 0, 0, slope]


# The policy loss


def one_token_losses(ratios, advantages, **knobs):
    """Per-token loss and its derivative by the log-prob, through LOSSES["vanilla"]."""
    old = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    mask, seq_ids = torch.ones(len(ratios), dtype=torch.bool), torch.zeros(len(ratios), dtype=torch.int64)
    loss, metrics = LOSSES["vanilla"](logprobs, old, torch.tensor(advantages, dtype=torch.float64), mask, seq_ids, LossConfig(**knobs))
    return loss.tolist(), torch.autograd.grad(loss.sum(), logprobs)[0].tolist(), {name: value.tolist() for name, value in metrics.items()}


def test_clipping_is_asymmetric_and_one_sided():
    """Only a move in the direction that the advantage asks for is clipped: up with A > 0 at 1.28, down with A < 0 at 0.8."""
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
    loss, grad, metrics = one_token_losses([2.9, 3.1, 50.0, 50.0, 0.01], [-2.0, -2.0, -2.0, 2.0, 2.0], clip_ratio_c=3.0, clip_ratio=0.2)
    assert loss == pytest.approx([5.8, 6.0, 6.0, -2.4, -0.02])
    assert grad == pytest.approx([5.8, 0, 0, 0, -0.02])
    assert metrics["actor/pg_clipfrac_lower"] == [False, True, True, False, False]


@pytest.mark.parametrize("gap", [25.0, -25.0, 1000.0])
def test_a_wild_ratio_stays_finite(gap):
    mask, seq_ids = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    _, metrics = LOSSES["vanilla"](torch.tensor([gap]), torch.tensor([0.0]), torch.tensor([1.0]), mask, seq_ids, LossConfig())
    assert float(metrics["actor/ratio"]) == pytest.approx(math.exp(20 if gap > 0 else -20), rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", LOSSES)
def test_the_first_update_has_ratio_one(mode, aggregation):
    """Old log-probs that equal the current ones, or none: the same loss and gradient to the bit."""
    trajectories, leaves = random_mini_batch()
    logprobs = torch.cat([lp.detach() for lp, _ in leaves]).float().requires_grad_()
    results, cfg = [], LossConfig(loss_mode=mode, loss_agg_mode=aggregation, **KNOBS)
    for old in (None, logprobs.detach().clone()):
        batch = replace(collate(trajectories), old_logprobs=old)
        loss, metrics = policy_loss(batch, logprobs, torch.zeros_like(logprobs), cfg, count_totals(trajectories))
        (grad,) = torch.autograd.grad(loss, logprobs)
        results.append((loss.detach(), grad))
        if mode == "vanilla":
            assert metrics["actor/ratio"][0] == metrics["actor/ratio"][1] > 0, "a ratio is not exactly 1"
            assert metrics["actor/pg_clipfrac"][0] == metrics["actor/pg_clipfrac_lower"][0] == 0
            assert torch.equal(grad != 0, batch.loss_mask), "the gradient must reach every sampled token, and no other"
        assert metrics["actor/ppo_kl"][0] == 0
    assert all(torch.equal(a, b) for a, b in zip(*results)) and results[0][1].norm() > 0


def test_at_ratio_one_the_gradient_is_the_advantage():
    trajectories, leaves = random_mini_batch()
    logprobs, batch, totals = torch.cat([lp for lp, _ in leaves]), collate(trajectories), count_totals(trajectories)
    loss, _ = policy_loss(replace(batch, old_logprobs=None), logprobs, torch.zeros_like(logprobs), LossConfig(), totals)
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(grad, torch.where(batch.loss_mask, -batch.advantages / totals.tokens, 0.0).double(), rtol=1e-5)


@pytest.mark.parametrize("mode", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_gradient_step_raises_what_was_good_and_lowers_what_was_bad(mode, aggregation):
    good = make_trajectory(prompt=1, response=(1, 1), advantages=[1.5, 1.5])
    bad = make_trajectory(prompt=1, response=(1, 0, 1), session_id=1, advantages=[-0.5, -0.5, -0.5])
    set_loss_mask([good, bad])
    batch = collate([good, bad])
    logits = torch.randn(len(batch.tokens), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def current():
        return logits.log_softmax(-1)[torch.arange(len(logits)), batch.tokens % 5]

    before = current()
    loss, _ = policy_loss(batch, before, torch.zeros(len(logits)), LossConfig(loss_mode=mode, loss_agg_mode=aggregation, **KNOBS), count_totals([good, bad]))
    with torch.no_grad():
        logits -= 0.1 * torch.autograd.grad(loss, logits)[0]
    moved = torch.sign(current() - before).detach()
    assert torch.equal(moved, torch.sign(torch.where(batch.loss_mask, batch.advantages, 0.0)).double())


def test_entropy_bonus_lowers_the_loss():
    trajectories, leaves = random_mini_batch()
    logprobs, entropy = (torch.cat([pair[k] for pair in leaves]) for k in (0, 1))
    batch, totals = collate(trajectories), count_totals(trajectories)
    without, with_bonus = (policy_loss(batch, logprobs, entropy, LossConfig(entropy_coeff=c), totals)[0] for c in (0.0, 0.5))
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
    pg, kl = (by_the_book(trajectories, leaves, c).item() for c in (without, replace(without, use_kl_loss=True, kl_loss_coef=1.0)))
    assert metrics["actor/pg_loss"] == pytest.approx(pg, rel=1e-5)
    assert metrics["actor/kl_loss"] == pytest.approx(kl - pg, rel=1e-4), "without its coefficient"


# Finite differences


def difference(function, x, eps=1e-6):
    """Central difference of an elementwise function at x."""
    return (function(x + eps) - function(x - eps)) / (2 * eps)


def test_autograd_of_vanilla_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages, noise = torch.randn(3, 500, dtype=torch.float64, generator=generator)
    old, mask = logprobs + 0.8 * noise, torch.ones(500, dtype=torch.bool)
    cfg = LossConfig(clip_ratio_c=2.0, clip_ratio_high=0.3)

    def loss(x):
        return LOSSES["vanilla"](x, old, advantages, mask, None, cfg)[0]

    x = logprobs.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(x).sum(), x)
    assert torch.allclose(grad, difference(loss, logprobs), atol=1e-6)
    assert (grad == 0).any() and (grad > 0).any() and (grad < 0).any()


@pytest.mark.parametrize("kind", KL_TYPES)
def test_autograd_of_kl_agrees_with_finite_differences(kind):
    """With a + the value is the estimator's and the gradient k2's."""
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = torch.randn(200, dtype=torch.float64, generator=generator), torch.randn(200, dtype=torch.float64, generator=generator)
    x = logprobs.clone().requires_grad_()
    value = kl_divergence(x, ref, kind)
    (grad,) = torch.autograd.grad(value.sum(), x)
    base = kind.removesuffix("+")
    assert torch.allclose(value, kl_divergence(logprobs, ref, base))
    assert torch.allclose(grad, difference(lambda y: kl_divergence(y, ref, "k2" if kind.endswith("+") else base), logprobs), atol=1e-6)


@pytest.mark.parametrize("kind, expected", [("k1", 0.7), ("k2", 0.245), ("k3", math.exp(-0.7) - 0.3), ("low_var_kl", math.exp(-0.7) - 0.3), ("abs", 0.7)])
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
    """Ratios 0.5/0.4 = 1.25 and 0.2/0.4 = 0.5 on two sampled tokens; the observed token between them and the unscorable trajectory stay out."""
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
    assert metrics == {"correction/prob_diff_mean": 0, "correction/prob_diff_max": 0, "correction/k3": 0, "correction/ess": 1}


def test_rollout_mismatch_without_a_token_says_nothing():
    t = make_trajectory(score=NAN, old=[0.0] * 3)
    set_loss_mask([t])
    assert rollout_mismatch([t]) == {}


def test_correction_weighs_the_policy_loss_but_not_kl_and_entropy():
    trajectories, leaves = random_mini_batch()
    for t in trajectories:
        t.rollout_logprobs = (t.old_logprobs - math.log(1.5)).tolist()  # every weight is 1.5
    plain, weighed = (backward(trajectories, leaves, [range(11)], combination("token-mean", True, 0.01, c))[2] for c in ("none", "token"))
    assert weighed["actor/pg_loss"] == pytest.approx(1.5 * plain["actor/pg_loss"], rel=1e-5)
    assert weighed["actor/kl_loss"] == pytest.approx(plain["actor/kl_loss"])
    assert weighed["actor/loss"] - plain["actor/loss"] == pytest.approx(0.5 * plain["actor/pg_loss"], rel=1e-4)


def test_without_old_logprobs_the_correction_is_from_the_current_ones():
    trajectories, leaves = random_mini_batch()
    logprobs = torch.cat([lp for lp, _ in leaves])
    batch, totals, cfg = collate(trajectories), count_totals(trajectories), LossConfig(rollout_is="token")
    none, equal = (policy_loss(replace(batch, old_logprobs=old), logprobs, torch.zeros_like(logprobs), cfg, totals)[0] for old in (None, logprobs.detach()))
    assert torch.equal(*(torch.autograd.grad(loss, logprobs)[0] for loss in (none, equal))), "the weights must not carry a gradient"


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"kl_loss_type": "k9"}, r"loss\.kl_loss_type=k9 is not known; known: k1"),
        ({"loss_agg_mode": "mean"}, r"loss\.loss_agg_mode=mean is not known; known: token-mean"),
        ({"clip_ratio_c": 1.0}, r"loss\.clip_ratio_c=1\.0"),
        ({"rollout_is_threshold": 0.0}, r"loss\.rollout_is_threshold=0\.0"),
        ({"clip_ratio_low": 1.5}, r"loss\.clip_ratio_low=1\.5"),
        ({"clip_ratio_high": -0.1}, r"loss\.clip_ratio_high=-0\.1"),
        ({"loss_scale_factor": 0.0}, r"loss\.loss_scale_factor=0\.0"),
    ],
)
def test_a_knob_that_makes_no_sense_is_named(knobs, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**knobs)
