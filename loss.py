"""Policy losses, KL, rollout correction and aggregation, for one packed micro-batch.

A loss returns per-token values, never a mean: `(logprobs [T], old_logprobs [T], advantages [T], mask [T], seq_ids [T],
cfg) -> (loss [T], {metric: [T]})`. Clipping, KL, correction and aggregation stay orthogonal. To add one, write the
function and put it into LOSSES. Denominators are those of the whole mini-batch over all ranks, so the gradient does not
depend on how the mini-batch is cut.
"""
from dataclasses import dataclass
from typing import Literal

import torch

from batch import Batch, Trajectory

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class LossConfig:
    loss_mode: str = "vanilla"
    """Policy loss, a key of LOSSES: vanilla (PPO's clipped ratio)."""
    loss_agg_mode: str = "token-mean"
    """token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; data.max_response_length when not given (load_config fills it in)."""
    clip_ratio: float = 0.2
    """PPO's clip range, used for each side that has no value of its own."""
    clip_ratio_low: float | None = None
    """Lower clip: the ratio is clipped at 1 - clip_ratio_low."""
    clip_ratio_high: float | None = None
    """Upper clip: the ratio is clipped at 1 + clip_ratio_high (DAPO's clip-higher)."""
    clip_ratio_c: float = 3.0
    """Dual clip: with a negative advantage the loss is at most -A * clip_ratio_c (arXiv:1912.09729)."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(policy, reference) to the loss. Needs the reference model."""
    kl_loss_coef: float = 0.001
    """Weight of the KL loss."""
    kl_loss_type: str = "low_var_kl"
    """k1 | k2 | k3 (= low_var_kl) | abs; with a + (k1+, k3+, ...) the value is the estimator's and the gradient k2's."""
    bypass_mode: bool = False
    """Take vLLM's log-probs as the old ones instead of scoring the batch with the actor before the first update."""
    rollout_is: Literal["none", "token"] = "none"
    """Correct for the difference between vLLM and the actor by weighting each token's loss with exp(old - rollout)."""
    rollout_is_threshold: float = 2.0
    """Truncate the correction's weights here (TIS)."""

    def __post_init__(self):
        if self.kl_loss_type.removesuffix("+") not in KL_ESTIMATORS:
            raise ValueError(f"loss.kl_loss_type={self.kl_loss_type} is not known; known: {', '.join(KL_ESTIMATORS)}, each also with a +")
        if self.loss_agg_mode not in AGGREGATIONS:
            raise ValueError(f"loss.loss_agg_mode={self.loss_agg_mode} is not known; known: {', '.join(AGGREGATIONS)}")
        if self.clip_ratio_c <= 1:
            raise ValueError(f"loss.clip_ratio_c={self.clip_ratio_c} must be above 1")
        if self.rollout_is_threshold <= 0:
            raise ValueError(f"loss.rollout_is_threshold={self.rollout_is_threshold} must be positive")
        if self.loss_scale_factor is not None and self.loss_scale_factor <= 0:
            raise ValueError(f"loss.loss_scale_factor={self.loss_scale_factor} must be positive")
        low, high = self.clip_range
        if not 0 <= low <= 1 or high < 0:
            raise ValueError(f"loss.clip_ratio_low={low} must be in 0..1 and loss.clip_ratio_high={high} not negative")

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high): the ratio is kept in [1 - low, 1 + high]."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        return low, self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class Totals:
    """What a loss is divided by: counts over the whole mini-batch, on all ranks."""

    tokens: int  # 1-tokens
    seqs: int  # trajectories with at least one


def count_totals(trajectories: list[Trajectory]) -> Totals:
    counts = [int(t.loss_mask.sum()) for t in trajectories]
    return Totals(tokens=sum(counts), seqs=sum(count > 0 for count in counts))


def vanilla(logprobs, old_logprobs, advantages, mask, seq_ids, cfg):
    """PPO's clipped surrogate (arXiv:1707.06347) with separate clips (DAPO, arXiv:2503.14476) and the dual clip (arXiv:1912.09729)."""
    low, high = cfg.clip_range
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()  # [T]
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    floor = -advantages * cfg.clip_ratio_c
    dual = (advantages < 0) & (loss > floor)
    return torch.where(dual, floor, loss), {"actor/pg_clipfrac": clipped > plain, "actor/pg_clipfrac_lower": dual, "actor/ratio": ratio.detach()}


def log_ratio(logprobs, old_logprobs, mask):
    """log(pi / pi_old) [T], 0 at masked positions whatever they hold, clamped to +-20."""
    return (torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)).clamp(-20, 20)


def kl_divergence(logprobs, ref_logprobs, kind: str):
    """Per-token estimate of KL(policy, reference) from tokens that the policy sampled (Schulman, "Approximating KL divergence", 2020).

    With a "+" the value is the estimator's and the gradient is k2's, whose expectation is the true KL gradient.
    """
    d = (ref_logprobs - logprobs).clamp(-20, 20)
    base = kind.removesuffix("+")
    value = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.exp() - d - 1, "abs": lambda: d.abs()}["k3" if base == "low_var_kl" else base]()
    if kind.endswith("+"):
        with_gradient = d.square() / 2
        value = with_gradient + (value - with_gradient).detach()
    return value


def correction_weights(old_logprobs, rollout_logprobs, mask, cfg: LossConfig):
    """exp(old - rollout) [T], truncated, without gradient (TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training")."""
    return log_ratio(old_logprobs, rollout_logprobs, mask).exp().clamp(max=cfg.rollout_is_threshold).detach()


def aggregation_weights(mask, seq_ids, num_seqs: int, totals: Totals, cfg: LossConfig):
    """[T]: what each token's loss is multiplied by, so that the sum over a mini-batch is its aggregated loss."""
    if cfg.loss_agg_mode == "token-mean":
        weight = mask / max(totals.tokens, 1)
    elif cfg.loss_agg_mode == "seq-mean-token-mean":
        lengths = torch.zeros(num_seqs, device=mask.device).index_add_(0, seq_ids, mask.float())  # [S]
        weight = mask / lengths.clamp(min=1)[seq_ids] / max(totals.seqs, 1)
    else:
        norm = cfg.loss_scale_factor if cfg.loss_agg_mode == "seq-mean-token-sum-norm" else 1
        weight = mask / (max(totals.seqs, 1) * norm)
    return weight


def policy_loss(batch: Batch, logprobs, entropy, cfg: LossConfig, totals: Totals):
    """This micro-batch's share of the mini-batch's loss (a scalar with gradient), and `{metric: (sum, count)}`.

    logprobs and entropy [T] are the actor's now. Values at masked positions are never looked at. A batch without
    old_logprobs is on its only update: the old ones are the current ones, and the ratio is exactly 1.
    """
    mask = batch.loss_mask
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs

    def keep(x):
        return torch.where(mask, x, 0.0)

    weights = aggregation_weights(mask, batch.seq_ids, batch.num_seqs, totals, cfg)
    loss, metrics = LOSSES[cfg.loss_mode](keep(logprobs), keep(old_logprobs), keep(batch.advantages), mask, batch.seq_ids, cfg)
    if cfg.rollout_is == "token":
        loss = loss * correction_weights(old_logprobs, batch.rollout_logprobs, mask, cfg)
    metrics |= {"actor/entropy": entropy.detach(), "actor/ppo_kl": -log_ratio(logprobs, old_logprobs, mask).detach()}
    total = loss
    if cfg.entropy_coeff:
        total = total - cfg.entropy_coeff * keep(entropy)
    shares = {"actor/pg_loss": (keep(loss.detach()) * weights).sum()}
    if cfg.use_kl_loss:
        kl = kl_divergence(keep(logprobs), keep(batch.ref_logprobs), cfg.kl_loss_type)
        total = total + cfg.kl_loss_coef * kl
        shares["actor/kl_loss"] = (keep(kl.detach()) * weights).sum()
    total = (keep(total) * weights).sum()
    count = mask.sum()
    sums = {name: (keep(value.float()).sum(), count) for name, value in metrics.items()}
    portion = count / max(totals.tokens, 1)  # adds up to 1 over the mini-batch
    sums |= {name: (value, portion) for name, value in (shares | {"actor/loss": total.detach()}).items()}
    return total, sums


def rollout_mismatch(trajectories: list[Trajectory]) -> dict[str, float]:
    """How far vLLM's log-probs are from the actor's on the tokens that count: always logged, correction on or off."""
    mask = torch.cat([t.loss_mask for t in trajectories])
    old = torch.cat([t.old_logprobs for t in trajectories])[mask].double()
    rollout = torch.tensor([x for t in trajectories for x in t.rollout_logprobs])[mask].double()
    if not old.numel():
        return {}
    gap = (old.exp() - rollout.exp()).abs()
    d = (old - rollout).clamp(-20, 20)
    w = d.exp()
    return {
        "correction/prob_diff_mean": float(gap.mean()),
        "correction/prob_diff_max": float(gap.max()),
        "correction/k3": float((w - d - 1).mean()),
        "correction/ess": float(w.sum() ** 2 / (w.square().sum() * len(w))),  # effective sample size, as a share
    }


LOSSES = {"vanilla": vanilla}
