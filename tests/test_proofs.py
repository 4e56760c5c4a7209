"""Proofs of what the algorithm promises, one function a proof, over every loss, aggregation and correction: `make
prove`.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from conftest import pairwise
from fakes import make_trajectory
from test_loss import (
    GOLDEN,
    KL_TYPES,
    KNOBS,
    POLICY,
    backward,
    combination,
    golden_batch,
    loss_and_grad_norm,
    random_mini_batch,
)

from actor import Actor, ActorConfig
from advantage import ESTIMATORS, AlgorithmConfig, compute_advantages, set_loss_mask, set_token_level_rewards
from batch import collate, pack
from loss import (
    AGGREGATIONS,
    LOSSES,
    LossConfig,
    correction_weights,
    count_totals,
    kl_divergence,
    policy_loss,
    reject_mismatched,
)
from model import forward, replace_head

NAN, INF = math.nan, math.inf
CORRECTIONS = [
    ("none", "none"),
    ("token", "none"),
    ("sequence", "none"),
    ("none", "token"),
    ("none", "sequence"),
    ("token", "sequence"),
]  # rollout_is, rollout_rs


def config(mode, aggregation, correction=("none", "none")) -> LossConfig:
    """With an entropy bonus and a KL loss."""
    return replace(combination(aggregation, True, 0.01, correction[0], mode), rollout_rs=correction[1])


def mini_batch(cfg):
    """11 trajectories with observations in them, one unscorable, one truncated and masked, tokens or sequences rejected
    as cfg says; and their leaves.
    """
    trajectories, leaves = random_mini_batch()
    trajectories[5].finish_reason = "length"
    for t in trajectories[::2]:  # half of them near vLLM's, so that some sequences stay
        t.rollout_logprobs = (t.old_logprobs - 0.1).tolist()
    set_loss_mask(trajectories, AlgorithmConfig(mask_truncated=True))
    reject_mismatched(trajectories, cfg)
    return trajectories, leaves


# 1. Golden values


@pytest.mark.parametrize("name", POLICY["expected_loss_and_grad_norm"])
def test_golden_policy_loss(name):
    """Losses and gradients are the independent implementation's."""
    mode, aggregation = name.split()
    knobs = {k: v for k, v in POLICY["knobs"].items() if k.startswith("clip")}
    cfg = LossConfig(
        loss_mode=mode,
        loss_agg_mode=aggregation,
        loss_scale_factor=POLICY["knobs"]["seq-mean-token-sum-norm divisor"],
        **knobs,
    )
    assert loss_and_grad_norm(cfg, *golden_batch())[0] == pytest.approx(
        POLICY["expected_loss_and_grad_norm"][name], abs=1e-6
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_golden_kl(kind):
    """The KL loss is: with advantages of 0 it is all that policy_loss has left."""
    batch, logprobs, totals = golden_batch()
    batch.advantages.zero_()
    result, metrics = loss_and_grad_norm(
        LossConfig(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=kind), batch, logprobs, totals
    )
    expected = GOLDEN["kl_token_mean_loss_and_grad_norm"][kind]
    assert result == pytest.approx(expected, abs=1e-6)
    assert [float(x) for x in metrics["actor/kl_loss"]] == pytest.approx([expected[0], 1], abs=1e-6)


def test_golden_rollout_correction():
    """The correction's weights are, and carry no gradient."""
    golden = GOLDEN["rollout_correction"]
    mask = torch.tensor(golden["mask"], dtype=torch.bool)
    old, rollout = torch.tensor(golden["old_logprobs"], requires_grad=True), torch.tensor(golden["rollout_logprobs"])
    seq_ids = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
    weights = correction_weights(
        old.flatten(),
        rollout.flatten(),
        mask.flatten(),
        seq_ids,
        LossConfig(rollout_is="token", rollout_is_threshold=2.0),
    )
    expected = torch.tensor(golden["expected_weights"]["token, truncate at 2.0"])
    assert torch.allclose(weights[mask.flatten()], expected[mask], atol=1e-5)
    assert not weights.requires_grad


def test_golden_leaves_nothing_out():
    """Every entry of golden.json has a test: advantages in test_advantage.py, lr_factor in test_loss.py, the others
    here.
    """
    assert set(GOLDEN) == {
        "about",
        "advantage",
        "policy_loss",
        "kl_token_mean_loss_and_grad_norm",
        "rollout_correction",
        "lr_factor",
    }
    assert set(GOLDEN["kl_token_mean_loss_and_grad_norm"]) - {"about"} == {"k1", "k2", "k3"}
    assert (
        set(GOLDEN["rollout_correction"]["expected_weights"]) == {"token, truncate at 2.0"}
        and len(GOLDEN["lr_factor"]) == 1
    )
    assert {f"vanilla {aggregation}" for aggregation in AGGREGATIONS} <= set(POLICY["expected_loss_and_grad_norm"])


# 2. The gradient does not depend on how a mini-batch is cut, or spread over ranks


@pytest.mark.parametrize("mode, aggregation, correction", pairwise(list(LOSSES), AGGREGATIONS, CORRECTIONS))
def test_the_gradient_does_not_depend_on_the_cut(mode, aggregation, correction):
    """1, 2, 5 or as many micro-batches as trajectories, token budgets that cut differently, rows: one loss, one
    gradient, one set of metrics.
    """
    cfg = config(mode, aggregation, correction)
    trajectories, leaves = mini_batch(cfg)
    size, lengths = len(trajectories), [len(t.tokens) for t in trajectories]
    assert (
        sum(not t.loss_mask.any() for t in trajectories) >= 2
        and sum(bool(t.loss_mask.any()) for t in trajectories) >= 4
    )
    loss, grads, metrics = backward(trajectories, leaves, [range(size)], cfg)
    assert grads.norm() > 0.01 and all(map(math.isfinite, metrics.values()))
    cuts = {f"{n} in order": [range(size)[i * size // n : (i + 1) * size // n] for i in range(n)] for n in (2, 5, size)}
    cuts |= {
        f"{d} ranks of {budget} tokens": [m for rank in pack(lengths, d, budget) for m in rank if m]
        for d, budget in [(1, 48), (2, 64), (4, 100)]
    }
    cuts["3 rows"] = [m for rank in pack(lengths, 1, None, 3) for m in rank if m]
    for name, cut in cuts.items():
        cut_loss, cut_grads, cut_metrics = backward(trajectories, leaves, cut, cfg)
        assert cut_loss == pytest.approx(loss, rel=1e-5), name
        assert torch.allclose(cut_grads, grads, rtol=1e-5, atol=1e-9), name
        assert cut_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7), name


class ToyModel(torch.nn.Module):
    """What `actor.forward` needs of a language model: it looks one token back, and at the position in the sequence."""

    def __init__(self, num_tokens=160):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position, self.head = (
            torch.nn.Embedding(num_tokens, 8),
            torch.nn.Embedding(64, 8),
            torch.nn.Linear(8, num_tokens),
        )
        replace_head(self.head, num_tokens, 0.8)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, position_ids, logits_to_keep, **_):
        hidden = self.embedding(input_ids) + self.position(position_ids)
        return SimpleNamespace(logits=self.head(hidden[:, logits_to_keep]))

    def set_requires_all_reduce(self, on):
        """FSDP's: the toy is averaged by ToyActor."""


class ToyActor(Actor):
    """The real `Actor.update` on a model that is whole on every rank: gradients are averaged as FSDP averages them, and
    kept, not applied.
    """

    def __init__(self, max_tokens):
        self.cfg, self.device = ActorConfig(ppo_mini_batch_size=1, ppo_max_token_len_per_gpu=max_tokens), "cpu"
        self.model, self.optimizer = ToyModel(), SimpleNamespace(param_groups=[])
        self.accelerator = SimpleNamespace(backward=lambda loss: loss.backward())
        self.moments, self.num_shards = None, None
        self.recorder = None
        self.gradients = []  # of each mini-batch

    def optimizer_step(self):
        gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        dist.all_reduce(gradient)
        self.gradients.append(gradient / dist.get_world_size())
        self.model.zero_grad()
        return float(self.gradients[-1].norm())


EVERYTHING = list(itertools.product(LOSSES, AGGREGATIONS, CORRECTIONS))
MAX_TOKENS = {1: 1000, 2: 64, 3: 48}  # by world size: one micro-batch, and cuts that differ


def gradients_of_a_world(rank, world_size, folder):
    """Two mini-batches, of nine trajectories and of two (fewer than three ranks), with every loss, aggregation and
    correction.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world_size}", rank=rank, world_size=world_size)
    actor, results = ToyActor(MAX_TOKENS[world_size]), {}
    trajectories, _ = random_mini_batch()
    with torch.no_grad():
        logprobs = forward(actor.model, collate(trajectories))[0].split([len(t.tokens) for t in trajectories])
    generator = torch.Generator().manual_seed(1)
    for i, (t, now) in enumerate(zip(trajectories, logprobs)):
        t.old_logprobs, t.ref_logprobs, rollout = (
            now + 0.3 * torch.randn(len(now), generator=generator) for _ in range(3)
        )
        t.rollout_logprobs, t.uid = (rollout + (2.0 if i == 2 else 0.0)).tolist(), "first" if i < 9 else "second"
    trajectories[5].finish_reason = "length"
    for mode, aggregation, correction in EVERYTHING:
        cfg = config(mode, aggregation, correction)
        set_loss_mask(trajectories, AlgorithmConfig(mask_truncated=True))
        reject_mismatched(trajectories, cfg)
        metrics = actor.update(trajectories, cfg, step=0, total_steps=1, seed=0)
        results[mode, aggregation, correction] = actor.gradients, metrics
        actor.gradients = []
    if rank == 0:
        torch.save(results, f"{folder}/{world_size}.pt")
    dist.destroy_process_group()


def gradients_of_all_worlds(rank, folder):
    torch.set_num_threads(1)
    for world_size in MAX_TOKENS:
        if rank < world_size:
            gradients_of_a_world(rank, world_size, folder)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    torch.multiprocessing.spawn(gradients_of_all_worlds, (str(folder),), nprocs=max(MAX_TOKENS))
    return {world_size: torch.load(folder / f"{world_size}.pt", weights_only=True) for world_size in MAX_TOKENS}


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_gradient_does_not_depend_on_the_ranks(worlds, world_size):
    """`Actor.update` over gloo, every loss, aggregation and correction: 2 and 3 ranks have the gradients and metrics of
    1.
    """
    for name in EVERYTHING:
        (expected, metrics), (gradients, its_metrics) = worlds[1][name], worlds[world_size][name]
        metrics, its_metrics = (
            {k: v for k, v in m.items() if k != "perf/token_imbalance"} for m in (metrics, its_metrics)
        )
        assert len(expected) == len(gradients) == 2
        for one, other in zip(expected, gradients):
            assert one.norm() > 1e-4 and (one - other).norm() < 1e-5 * one.norm(), name
        assert its_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6), name


# 3. The first update


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", LOSSES)
def test_the_first_update_has_ratio_one(mode, aggregation):
    """With old log-probs that equal the current ones, or none: ratios exactly 1, nothing clipped, the same loss and
    gradient to the bit.
    """
    trajectories, leaves = random_mini_batch()
    logprobs = torch.cat([lp.detach() for lp, _ in leaves]).float().requires_grad_()
    results, cfg = [], LossConfig(loss_mode=mode, loss_agg_mode=aggregation, **KNOBS)
    for old in (None, logprobs.detach().clone()):
        batch = replace(collate(trajectories), old_logprobs=old)
        loss, metrics = policy_loss(batch, logprobs, torch.zeros_like(logprobs), cfg, count_totals(trajectories))
        (grad,) = torch.autograd.grad(loss, logprobs)
        results.append((loss.detach(), grad))
        assert mode == "gpg" or "actor/ratio" in metrics
        if "actor/ratio" in metrics:
            assert metrics["actor/ratio"][0] == metrics["actor/ratio"][1] > 0, "a ratio is not exactly 1"
        assert all(value == 0 for name, (value, _) in metrics.items() if "clipfrac" in name)
        assert metrics["actor/ppo_kl"][0] == 0
        assert torch.equal(grad != 0, batch.loss_mask), "the gradient must reach every sampled token, and no other"
    assert all(torch.equal(a, b) for a, b in zip(*results)) and results[0][1].norm() > 0


# 4. Observations


@pytest.mark.parametrize("mode, correction, estimator", pairwise(list(LOSSES), CORRECTIONS, list(ESTIMATORS)))
def test_observations_have_no_gradient(mode, correction, estimator):
    """From the scores on: whatever vLLM, actor and reference say about the tokens of a tool changes no advantage, no
    loss and no gradient, bitwise.
    """
    aggregation = AGGREGATIONS[sum(map(ord, estimator)) % 4]
    cfg, algorithm = (
        config(mode, aggregation, correction),
        AlgorithmConfig(adv_estimator=estimator, gamma=0.9, use_kl_in_reward=True),
    )
    results = []
    for value in (-0.3, -7.0):
        trajectories, leaves = random_mini_batch()
        for i, (t, pair) in enumerate(zip(trajectories, leaves)):
            t.score, t.uid, observed = t.score * (i % 3), str(i // 4), ~torch.tensor(t.response_mask, dtype=torch.bool)
            t.old_logprobs[observed] = t.ref_logprobs[observed] = value / 2
            t.rollout_logprobs = [r if bit else value for r, bit in zip(t.rollout_logprobs, t.response_mask)]
            for leaf in pair:
                leaf.detach()[observed] = value / 3
        set_loss_mask(trajectories)
        reject_mismatched(trajectories, cfg)
        set_token_level_rewards(trajectories, algorithm, kl_coef=0.1)
        compute_advantages(trajectories, algorithm)
        batch = collate(trajectories)
        assert (batch.advantages[~batch.response_mask] == 0).all()
        batch.advantages[~batch.response_mask] = value  # even a wrong weight on a tool's token
        logprobs, entropy = (torch.cat([pair[k].detach() for pair in leaves]).requires_grad_() for k in (0, 1))
        loss, _ = policy_loss(batch, logprobs, entropy, cfg, count_totals(trajectories))
        grads = torch.autograd.grad(loss, (logprobs, entropy))
        assert all((grad[~batch.response_mask] == 0).all() for grad in grads) and grads[0].norm() > 0
        results.append((loss.detach(), *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results))


# 5. Finite differences


def difference(function, x, eps=1e-6):
    """Central difference of a function at x [T], a coordinate at a time; the function may return a scalar or [T], whose
    sum is meant.
    """
    steps = eps * torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(function(x + step).sum() - function(x - step).sum()) / (2 * eps) for step in steps])


def geometric_mean(ratio, seq_ids):
    return torch.stack([ratio[seq_ids == s].prod() ** (1 / (seq_ids == s).sum()) for s in seq_ids])


def surrogate(mode, x, at, old, a, seq_ids, cfg):
    """The loss of semantics.md, section 8, whose true gradient at x = `at` the loss promises: what it stops the
    gradient of is computed from `at`.
    """
    low, high = cfg.clip_range
    now, then = (x - old).exp(), (at - old).exp()  # ratios with and without gradient

    def clipped(ratio):
        return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))

    moved = at.exp() - old.exp()
    allowed = torch.where(a > 0, moved <= high, moved >= -low)
    tau = torch.where(a > 0, cfg.tau_pos, cfg.tau_neg)
    return {
        "vanilla": lambda: torch.where(a < 0, torch.minimum(clipped(now), -a * cfg.clip_ratio_c), clipped(now)),
        "gspo": lambda: clipped(geometric_mean(then, seq_ids) * (x - at).exp()),
        "cispo": lambda: -then.clamp(1 - low, 1 + high) * a * x,
        "gpg": lambda: -a * x,
        "sapo": lambda: -a * 4 / tau / (1 + (-tau * (now - 1)).exp()),
        "geo_mean": lambda: (
            -a
            * geometric_mean(torch.where(a > 0, now.clamp(max=math.exp(high)), now.clamp(min=math.exp(-low))), seq_ids)
        ),
        "dppo_tv": lambda: torch.where(allowed, -a * then.clamp(max=cfg.clip_ratio_c) * x, 0.0),
    }[mode]()


@pytest.mark.parametrize("mode", LOSSES)
def test_finite_differences_agree_with_the_gradient_of_the_loss(mode):
    """In float64, on 120 tokens in 24 sequences. Where a loss stops a gradient, of the surrogate that its paper
    documents.
    """
    generator = torch.Generator().manual_seed(0)
    old, noise, a = torch.randn(3, 120, dtype=torch.float64, generator=generator)
    old = -old.abs()
    at, seq_ids, mask, cfg = (
        old + 0.8 * noise,
        torch.arange(24).repeat_interleave(5),
        torch.ones(120, dtype=torch.bool),
        LossConfig(clip_ratio_c=2.0, clip_ratio_high=0.3),
    )
    x = at.clone().requires_grad_()
    loss, metrics = LOSSES[mode](x, old, a, mask, seq_ids, cfg)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert torch.allclose(loss, surrogate(mode, at, at, old, a, seq_ids, cfg), atol=1e-6)
    assert torch.allclose(grad, difference(lambda y: surrogate(mode, y, at, old, a, seq_ids, cfg), at), atol=1e-6)
    if mode in ("vanilla", "sapo", "geo_mean", "gpg"):  # nothing stopped: the loss's own differences too
        assert torch.allclose(grad, difference(lambda y: LOSSES[mode](y, old, a, mask, seq_ids, cfg)[0], at), atol=1e-6)
    if "actor/pg_clipfrac" in metrics:
        assert 0 < metrics["actor/pg_clipfrac"].double().mean() < 1, "both sides of the clip must be looked at"


@pytest.mark.parametrize("kind", KL_TYPES)
def test_finite_differences_agree_with_the_gradient_of_kl(kind):
    """With a + the value is the estimator's and the gradient k2's."""
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = torch.randn(2, 100, dtype=torch.float64, generator=generator)
    x = logprobs.clone().requires_grad_()
    value = kl_divergence(x, ref, kind)
    (grad,) = torch.autograd.grad(value.sum(), x)
    base = kind.removesuffix("+")
    assert torch.allclose(value, kl_divergence(logprobs, ref, base))
    assert torch.allclose(
        grad, difference(lambda y: kl_divergence(y, ref, "k2" if kind.endswith("+") else base), logprobs), atol=1e-6
    )


@pytest.mark.parametrize(
    "mode, aggregation, correction", pairwise(["vanilla", "sapo", "geo_mean"], AGGREGATIONS, CORRECTIONS)
)
def test_finite_differences_agree_with_the_gradient_of_the_whole_loss(mode, aggregation, correction):
    """policy_loss with KL, entropy bonus and correction (its weights are constants), by the log-probs and by the
    entropy.
    """
    cfg = config(mode, aggregation, correction)
    trajectories, leaves = mini_batch(cfg)
    batch, totals = collate(trajectories), count_totals(trajectories)
    logprobs, entropy = (torch.cat([pair[k].detach() for pair in leaves]).requires_grad_() for k in (0, 1))
    grads = torch.autograd.grad(policy_loss(batch, logprobs, entropy, cfg, totals)[0], (logprobs, entropy))
    differences = (
        difference(lambda y: policy_loss(batch, y, entropy, cfg, totals)[0], logprobs.detach()),
        difference(lambda y: policy_loss(batch, logprobs, y, cfg, totals)[0], entropy.detach()),
    )
    for grad, expected in zip(grads, differences):
        assert torch.allclose(grad, expected.detach(), atol=1e-7)


# 6. Masked positions


@pytest.mark.parametrize(
    "mode, kind, fill", pairwise(list(LOSSES), [None, "k1", "k2", "k3", "abs", "k3+"], [NAN, INF, -INF])
)
def test_what_masked_positions_hold_does_not_matter(mode, kind, fill):
    """NaN or inf where the mask is 0: loss, gradient and metrics are bitwise those of finite values. (0 * NaN is NaN:
    masking by multiplication fails here.)
    """
    for aggregation, correction in zip(AGGREGATIONS * 2, (*CORRECTIONS, *CORRECTIONS[1:3])):
        cfg = config(mode, aggregation, correction)
        cfg = replace(cfg, use_kl_loss=kind is not None, kl_loss_type=kind or cfg.kl_loss_type)
        results = []
        for value in (-1.0, fill):
            trajectories, leaves = random_mini_batch()
            for t in trajectories:
                t.rollout_logprobs = [x if m else value for x, m in zip(t.rollout_logprobs, t.loss_mask)]
                t.old_logprobs = torch.where(t.loss_mask, t.old_logprobs, value)
            reject_mismatched(trajectories, cfg)
            batch = collate(trajectories)
            masked = ~batch.loss_mask
            for name in ("old_logprobs", "ref_logprobs", "advantages", "rollout_logprobs"):
                getattr(batch, name)[masked] = value
            logprobs, entropy = (
                torch.where(masked, value, torch.cat([pair[k].detach() for pair in leaves])).requires_grad_()
                for k in (0, 1)
            )
            loss, metrics = policy_loss(batch, logprobs, entropy, cfg, count_totals(trajectories))
            numbers = torch.tensor([float(x) for pair in metrics.values() for x in pair])
            results.append((loss.detach(), *torch.autograd.grad(loss, (logprobs, entropy)), numbers))
        for finite, filled in zip(*results):
            assert torch.isfinite(filled).all() and torch.equal(finite, filled), (aggregation, correction)


# 7. One step


@pytest.mark.parametrize("mode, aggregation, correction", pairwise(list(LOSSES), AGGREGATIONS, CORRECTIONS))
def test_one_step_raises_what_was_good_and_lowers_what_was_bad(mode, aggregation, correction):
    """The log-prob of every token of a positive advantage goes up, of a negative one down, an observation's stays."""
    good = make_trajectory(prompt=1, response=(1, 1), advantages=[1.5, 1.5])
    bad = make_trajectory(prompt=1, response=(1, 0, 1), session_id=1, advantages=[-0.5, -0.5, -0.5])
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def current():
        return logits.log_softmax(-1)[torch.arange(7), torch.tensor([*good.tokens, *bad.tokens]) % 5]

    before = current()
    good.old_logprobs, bad.old_logprobs = before.detach().float().split([3, 4])
    for t in (good, bad):
        t.rollout_logprobs = (t.old_logprobs - 0.2).tolist()
    cfg = LossConfig(
        loss_mode=mode, loss_agg_mode=aggregation, rollout_is=correction[0], rollout_rs=correction[1], **KNOBS
    )
    set_loss_mask([good, bad])
    reject_mismatched([good, bad], cfg)
    batch = collate([good, bad])
    loss, _ = policy_loss(batch, before, torch.zeros(7), cfg, count_totals([good, bad]))
    with torch.no_grad():
        logits -= 0.1 * torch.autograd.grad(loss, logits)[0]
    assert torch.sign(current() - before).tolist() == [0, 1, 1, 0, -1, 0, -1]
