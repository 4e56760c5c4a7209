"""Policy losses, KL, rollout correction and aggregation, for one packed micro-batch.

A loss returns per-token values, never a mean: `(logprobs [T], old_logprobs [T], advantages [T], mask [T], seq_ids [T],
cfg) -> (loss [T], {metric: [T]})`. Clipping, KL, correction and aggregation stay orthogonal. To add one, write the
function and put it into LOSSES; with `@facts(clips_much=True)` no alarm is raised when it clips many tokens.
Denominators are those of the whole mini-batch over all ranks, so the gradient does not depend on how the mini-batch is
cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from batch import Batch, Trajectory, flat
from host.lookup import check_bounds, unknown

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
PerToken = tuple[Tensor, dict[str, Tensor]]  # loss [T], {metric: [T]}


@dataclass(frozen=True)
class LossConfig:
    loss_mode: str = "vanilla"
    """Policy loss, a key of LOSSES: vanilla (PPO's clipped ratio), gspo, cispo, gpg, sapo, geo_mean, dppo_tv."""
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
    """k1 | k2 | k3 (= low_var_kl) | abs; with a + (k1+, k3+, ...) the value is the estimator's, the gradient k2's."""
    bypass_mode: bool = False
    """Take vLLM's log-probs as the old ones instead of scoring the batch with the actor before the first update."""
    tau_pos: float = 1.0
    """sapo's temperature for positive advantages."""
    tau_neg: float = 1.05
    """sapo's temperature for the others."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Weight the loss with exp(old - rollout), a token's or its sequence's: corrects for vLLM not being the actor."""
    rollout_is_threshold: float = 2.0
    """Truncate the correction's weights here (TIS)."""
    rollout_rs: Literal["none", "token", "sequence"] = "none"
    """Leave out tokens (IcePop), or sequences by their mean (MIS), where exp(old - rollout) is out of bounds."""
    rollout_rs_threshold_low: float = 0.5
    """Smallest pi_actor / pi_vLLM that rollout_rs keeps."""
    rollout_rs_threshold_high: float = 2.0
    """Largest pi_actor / pi_vLLM that rollout_rs keeps."""

    def __post_init__(self) -> None:
        kl_types = (*KL_ESTIMATORS, *(f"{kind}+" for kind in KL_ESTIMATORS))
        if self.kl_loss_type not in kl_types:
            raise unknown("loss.kl_loss_type", self.kl_loss_type, kl_types)
        if self.loss_agg_mode not in AGGREGATIONS:
            raise unknown("loss.loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        check_bounds(
            "loss",
            self,
            loss_scale_factor="(0, inf)",
            clip_ratio="[0, 1]" if self.clip_ratio_low is None else "[0, inf]",
            clip_ratio_low="[0, 1]",
            clip_ratio_high="[0, inf]",
            clip_ratio_c="(1, inf]",
            tau_pos="(0, inf)",
            tau_neg="(0, inf)",
            rollout_is_threshold="(0, inf]",
            rollout_rs_threshold_low="[0, inf)",
            rollout_rs_threshold_high="(0, inf]",
        )
        if self.rollout_rs_threshold_low >= self.rollout_rs_threshold_high:
            raise ValueError(
                f"loss.rollout_rs_threshold_low={self.rollout_rs_threshold_low} must be below "
                f"loss.rollout_rs_threshold_high={self.rollout_rs_threshold_high}"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high): the ratio is kept in [1 - low, 1 + high]."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


@dataclass(frozen=True)
class Totals:
    """What a loss is divided by: counts over the whole mini-batch, on all ranks."""

    tokens: int  # those that count
    seqs: int  # trajectories with at least one


def count_totals(trajectories: list[Trajectory]) -> Totals:
    """The totals of a mini-batch."""
    counts = [int(t.loss_mask.sum()) for t in trajectories]
    return Totals(tokens=sum(counts), seqs=sum(count > 0 for count in counts))


def facts(**values: Any) -> Callable[[Callable], Callable]:
    """Set attributes of a loss or an estimator, for what other files ask of it; without one the default holds."""

    def set_on(function: Callable) -> Callable:
        for name, value in values.items():
            setattr(function, name, value)
        return function

    return set_on


def vanilla(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """PPO's clipped surrogate (arXiv:1707.06347) with separate clips (DAPO, arXiv:2503.14476) and the dual clip. Dual
    clip: arXiv:1912.09729."""
    return clipped_surrogate(log_ratio(logprobs, old_logprobs, mask).exp(), advantages, cfg, cfg.clip_ratio_c)


@facts(clips_much=True)  # its clip range is narrow
def gspo(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """The sequence's ratio, the geometric mean of its tokens', in place of each token's (Zheng et al. 2025).
    arXiv:2507.18071. The ratio's value is the sequence's, its gradient the token's."""
    log_ratios = seq_mean(log_ratio(logprobs, old_logprobs, mask), mask, seq_ids).detach()
    ratio = (log_ratios + logprobs - logprobs.detach()).clamp(max=10).exp()  # [T]
    return clipped_surrogate(ratio, advantages, cfg, None)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, cfg: LossConfig, dual_clip: float | None) -> PerToken:
    """max(-A r, -A clip(r)), for A < 0 at most -A * dual_clip when there is one."""
    low, high = cfg.clip_range
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    metrics = {"actor/pg_clipfrac": clipped > plain, "actor/ratio": ratio.detach()}
    if dual_clip is None:
        return loss, metrics
    dual = (advantages < 0) & (loss > -advantages * dual_clip)
    return torch.where(dual, -advantages * dual_clip, loss), metrics | {"actor/pg_clipfrac_lower": dual}


def cispo(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """REINFORCE weighted with the clipped ratio, which has no gradient: no token loses its own (MiniMax-M1 2025).
    arXiv:2506.13585."""
    low, high = cfg.clip_range
    ratio = log_ratio(logprobs, old_logprobs, mask).exp().detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -clipped * advantages * logprobs, {"actor/pg_clipfrac": clipped != ratio, "actor/ratio": ratio}


def gpg(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """Plain policy gradient (Chu et al. 2025, arXiv:2504.02546)."""
    return -advantages * logprobs, {}


def sapo(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """A smooth gate in place of the clip (Gao et al. 2025, arXiv:2511.20347)."""
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()
    tau = torch.where(advantages > 0, cfg.tau_pos, cfg.tau_neg)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, {"actor/ratio": ratio.detach()}


def geo_mean(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """GMPO: the sequence's geometric mean of its clipped ratios (Zhao et al. 2025, arXiv:2507.20673). They are clipped
    in logs, on the side to which the advantage pushes."""
    low, high = cfg.clip_range
    d = log_ratio(logprobs, old_logprobs, mask)
    clipped = torch.where(advantages > 0, d.clamp(max=high), d.clamp(min=-low))
    ratio = seq_mean(clipped, mask, seq_ids).exp()
    return -advantages * ratio, {"actor/pg_clipfrac": clipped != d, "actor/ratio": ratio.detach()}


def dppo_tv(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """REINFORCE with the truncated ratio, where the token's probability moved no further than the clip allows. Qi et
    al. 2026, arXiv:2602.04879."""
    low, high = cfg.clip_range
    moved = (logprobs.exp() - old_logprobs.exp()).detach()
    inside = torch.where(advantages > 0, moved <= high, moved >= -low)
    ratio = log_ratio(logprobs, old_logprobs, mask).exp().clamp(max=cfg.clip_ratio_c).detach()
    loss = torch.where(inside, -advantages * ratio * logprobs, 0.0)
    return loss, {"actor/pg_clipfrac": ~inside, "actor/ratio": ratio}


def seq_mean(values: Tensor, mask: Tensor, seq_ids: Tensor) -> Tensor:
    """[T]: each token's sequence's mean of values over the mask."""
    num_seqs = int(seq_ids[-1]) + 1
    sums = values.new_zeros(num_seqs).index_add(0, seq_ids, torch.where(mask, values, 0.0))  # [S]
    counts = values.new_zeros(num_seqs).index_add(0, seq_ids, mask.to(values.dtype))  # [S]
    return (sums / counts.clamp(min=1))[seq_ids]


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_old) [T], 0 at masked positions whatever they hold, clamped to +-20."""
    return (torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)).clamp(-20, 20)


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy, reference) from tokens that the policy sampled. Schulman, "Approximating KL
    divergence", 2020. With a "+" the value is the estimator's and the gradient is k2's, whose expectation is the true
    KL gradient."""
    d = (ref_logprobs - logprobs).clamp(-20, 20)
    base = kind.removesuffix("+")
    if base == "k1":
        value = -d
    elif base == "k2":
        value = d.square() / 2
    elif base in ("k3", "low_var_kl"):
        value = d.exp() - d - 1
    elif base == "abs":
        value = d.abs()
    else:
        raise unknown("KL estimator", kind, KL_ESTIMATORS)
    if kind.endswith("+"):
        with_gradient = d.square() / 2
        value = with_gradient + (value - with_gradient).detach()
    return value


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, seq_ids: Tensor, cfg: LossConfig
) -> Tensor:
    """exp(old - rollout) [T], a token's own or its sequence's product, truncated, without gradient. TIS: Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training"."""
    d = log_ratio(old_logprobs, rollout_logprobs, mask).detach()
    if cfg.rollout_is == "sequence":
        d = d.new_zeros(int(seq_ids[-1]) + 1).index_add(0, seq_ids, d)[seq_ids].clamp(-20, 20)
    return d.exp().clamp(max=cfg.rollout_is_threshold)


def reject_mismatched(trajectories: list[Trajectory], cfg: LossConfig) -> dict[str, float]:
    """Take the tokens, or sequences, whose pi_actor / pi_vLLM is out of bounds out of loss_mask; return metrics.
    IcePop for tokens; MIS (Liu et al. 2025) for sequences."""
    if cfg.rollout_rs == "none":
        return {}
    before = sum(int(t.loss_mask.sum()) for t in trajectories)
    rollout = flat([t.rollout_logprobs for t in trajectories], np.float32).split([len(t.tokens) for t in trajectories])
    for t, rollout_logprobs in zip(trajectories, rollout):
        gap = log_ratio(t.old_logprobs, rollout_logprobs, t.loss_mask)  # [L]
        if cfg.rollout_rs == "sequence" and t.loss_mask.any():
            gap = gap[t.loss_mask].mean()  # []
        ratio = gap.exp()
        t.loss_mask = t.loss_mask & (ratio >= cfg.rollout_rs_threshold_low) & (ratio <= cfg.rollout_rs_threshold_high)
    kept = sum(int(t.loss_mask.sum()) for t in trajectories)
    return {"correction/rejected_frac": 1 - kept / max(before, 1)}


def aggregation_weights(mask: Tensor, seq_ids: Tensor, num_seqs: int, totals: Totals, cfg: LossConfig) -> Tensor:
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


def policy_loss(
    batch: Batch, logprobs: Tensor, entropy: Tensor, cfg: LossConfig, totals: Totals
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """This micro-batch's share of the mini-batch's loss (a scalar with gradient), and `{metric: (sum, count)}`.
    logprobs and entropy [T] are the actor's now. Values at masked positions are never looked at. A batch without
    old_logprobs is on its only update: the old ones are the current ones, and the ratio is exactly 1."""
    mask = batch.loss_mask
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs

    def keep(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0)

    weights = aggregation_weights(mask, batch.seq_ids, batch.num_seqs, totals, cfg)
    loss, metrics = LOSSES[cfg.loss_mode](
        keep(logprobs), keep(old_logprobs), keep(batch.advantages), mask, batch.seq_ids, cfg
    )
    if cfg.rollout_is != "none":
        loss = loss * correction_weights(old_logprobs, batch.rollout_logprobs, mask, batch.seq_ids, cfg)
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
    shares["actor/loss"] = total.detach()
    count = mask.sum()
    portion = count / max(totals.tokens, 1)  # adds up to 1 over the mini-batch
    sums = {name: (keep(value.float()).sum(), count) for name, value in metrics.items()}
    sums |= {name: (share, portion) for name, share in shares.items()}
    return total, sums


def rollout_mismatch(trajectories: list[Trajectory]) -> dict[str, float]:
    """How far vLLM's log-probs are from the actor's on the tokens that count: always logged, correction on or off."""
    mask = torch.cat([t.loss_mask for t in trajectories])
    old = torch.cat([t.old_logprobs for t in trajectories])[mask].double()
    rollout = flat([t.rollout_logprobs for t in trajectories], np.float32)[mask].double()
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


LOSSES = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "dppo_tv": dppo_tv,
}
