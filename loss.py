"""Policy losses, KL, rollout correction and aggregation, for one packed micro-batch.

A loss returns per-token values, never a mean: `(logprobs [T], old_logprobs [T], advantages [T], mask [T], seq_ids [T],
cfg) -> (loss [T], {metric: [T]})`. Clipping, KL, correction and aggregation stay orthogonal. To add one, write the
function and put it into LOSSES. Denominators are those of the whole mini-batch over all ranks, so the gradient does not
depend on how the mini-batch is cut.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from batch import Batch, Trajectory, flat

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


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
    """k1 | k2 | k3 (= low_var_kl) | abs; with a + (k1+, k3+, ...) the value is the estimator's and the gradient k2's."""
    bypass_mode: bool = False
    """Take vLLM's log-probs as the old ones instead of scoring the batch with the actor before the first update."""
    tau_pos: float = 1.0
    """sapo's temperature for positive advantages."""
    tau_neg: float = 1.05
    """sapo's temperature for the others."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Correct for the difference between vLLM and the actor: weight the loss with exp(old - rollout), a token's own or its sequence's."""
    rollout_is_threshold: float = 2.0
    """Truncate the correction's weights here (TIS)."""
    rollout_rs: Literal["none", "token", "sequence"] = "none"
    """Leave out tokens (IcePop) or whole sequences (MIS) whose exp(old - rollout), for a sequence of the mean, is out of bounds."""
    rollout_rs_threshold_low: float = 0.5
    """Smallest pi_actor / pi_vLLM that rollout_rs keeps."""
    rollout_rs_threshold_high: float = 2.0
    """Largest pi_actor / pi_vLLM that rollout_rs keeps."""

    def __post_init__(self):
        if self.kl_loss_type.removesuffix("+") not in KL_ESTIMATORS:
            raise ValueError(
                f"loss.kl_loss_type={self.kl_loss_type} is not known; known: {', '.join(KL_ESTIMATORS)}, each also with a +"
            )
        if self.loss_agg_mode not in AGGREGATIONS:
            raise ValueError(f"loss.loss_agg_mode={self.loss_agg_mode} is not known; known: {', '.join(AGGREGATIONS)}")
        if self.clip_ratio_c <= 1:
            raise ValueError(f"loss.clip_ratio_c={self.clip_ratio_c} must be above 1")
        if self.rollout_is_threshold <= 0:
            raise ValueError(f"loss.rollout_is_threshold={self.rollout_is_threshold} must be positive")
        if not 0 <= self.rollout_rs_threshold_low < self.rollout_rs_threshold_high:
            raise ValueError(
                f"loss.rollout_rs_threshold_low={self.rollout_rs_threshold_low} must be below loss.rollout_rs_threshold_high={self.rollout_rs_threshold_high} and not negative"
            )
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError(f"loss.tau_pos={self.tau_pos} and loss.tau_neg={self.tau_neg} must be positive")
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
    return clipped_surrogate(log_ratio(logprobs, old_logprobs, mask).exp(), advantages, cfg, cfg.clip_ratio_c)


def gspo(logprobs, old_logprobs, advantages, mask, seq_ids, cfg):
    """The sequence's ratio, the geometric mean of its tokens', in place of each token's (Zheng et al. 2025, arXiv:2507.18071)."""
    log_ratios = seq_mean(log_ratio(logprobs, old_logprobs, mask), mask, seq_ids).detach()
    ratio = (
        (log_ratios + logprobs - logprobs.detach()).clamp(max=10).exp()
    )  # [T] its value is the sequence's, its gradient the token's
    return clipped_surrogate(ratio, advantages, cfg, None)


def clipped_surrogate(ratio, advantages, cfg, dual_clip):
    """max(-A r, -A clip(r)), for A < 0 at most -A * dual_clip when there is one."""
    low, high = cfg.clip_range
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    metrics = {"actor/pg_clipfrac": clipped > plain, "actor/ratio": ratio.detach()}
    if dual_clip is None:
        return loss, metrics
    dual = (advantages < 0) & (loss > -advantages * dual_clip)
    return torch.where(dual, -advantages * dual_clip, loss), metrics | {"actor/pg_clipfrac_lower": dual}


def cispo(logprobs, old_logprobs, advantages, mask, seq_ids, cfg):
    """REINFORCE weighted with the clipped ratio, which has no gradient: no token loses its own (MiniMax-M1 2025, arXiv:2506.13585)."""
    low, high = cfg.clip_range
    ratio = log_ratio(logprobs, old_logprobs, mask).exp().detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -clipped * advantages * logprobs, {"actor/pg_clipfrac": clipped != ratio, "actor/ratio": ratio}


def gpg(logprobs, old_logprobs, advantages, mask, seq_ids, cfg):
    """Plain policy gradient (Chu et al. 2025, arXiv:2504.02546)."""
    return -advantages * logprobs, {}


def sapo(logprobs, old_logprobs, advantages, mask, seq_ids, cfg):
    """A smooth gate in place of the clip (Gao et al. 2025, arXiv:2511.20347)."""
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()
    tau = torch.where(advantages > 0, cfg.tau_pos, cfg.tau_neg)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, {"actor/ratio": ratio.detach()}


def geo_mean(logprobs, old_logprobs, advantages, mask, seq_ids, cfg):
    """GMPO: the sequence's geometric mean of ratios that are clipped, in logs, on the side that the advantage would push (Zhao et al. 2025, arXiv:2507.20673)."""
    low, high = cfg.clip_range
    d = log_ratio(logprobs, old_logprobs, mask)
    clipped = torch.where(advantages > 0, d.clamp(max=high), d.clamp(min=-low))
    ratio = seq_mean(clipped, mask, seq_ids).exp()
    return -advantages * ratio, {"actor/pg_clipfrac": clipped != d, "actor/ratio": ratio.detach()}


def dppo_tv(logprobs, old_logprobs, advantages, mask, seq_ids, cfg):
    """REINFORCE with the truncated ratio, where the token's probability moved no further than the clip allows (Qi et al. 2026, arXiv:2602.04879)."""
    low, high = cfg.clip_range
    moved = (logprobs.exp() - old_logprobs.exp()).detach()
    inside = torch.where(advantages > 0, moved <= high, moved >= -low)
    ratio = log_ratio(logprobs, old_logprobs, mask).exp().clamp(max=cfg.clip_ratio_c).detach()
    return torch.where(inside, -advantages * ratio * logprobs, 0.0), {
        "actor/pg_clipfrac": ~inside,
        "actor/ratio": ratio,
    }


def seq_mean(values, mask, seq_ids):
    """[T]: each token's sequence's mean of values over the mask."""
    num_seqs = int(seq_ids[-1]) + 1
    sums = values.new_zeros(num_seqs).index_add(0, seq_ids, torch.where(mask, values, 0.0))  # [S]
    counts = values.new_zeros(num_seqs).index_add(0, seq_ids, mask.to(values.dtype))  # [S]
    return (sums / counts.clamp(min=1))[seq_ids]


def log_ratio(logprobs, old_logprobs, mask):
    """log(pi / pi_old) [T], 0 at masked positions whatever they hold, clamped to +-20."""
    return (torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)).clamp(-20, 20)


def kl_divergence(logprobs, ref_logprobs, kind: str):
    """Per-token estimate of KL(policy, reference) from tokens that the policy sampled (Schulman, "Approximating KL divergence", 2020).

    With a "+" the value is the estimator's and the gradient is k2's, whose expectation is the true KL gradient.
    """
    d = (ref_logprobs - logprobs).clamp(-20, 20)
    base = kind.removesuffix("+")
    value = {"k1": lambda: -d, "k2": lambda: d.square() / 2, "k3": lambda: d.exp() - d - 1, "abs": lambda: d.abs()}[
        "k3" if base == "low_var_kl" else base
    ]()
    if kind.endswith("+"):
        with_gradient = d.square() / 2
        value = with_gradient + (value - with_gradient).detach()
    return value


def correction_weights(old_logprobs, rollout_logprobs, mask, seq_ids, cfg: LossConfig):
    """exp(old - rollout) [T], a token's own or its sequence's product, truncated, without gradient.

    TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    d = log_ratio(old_logprobs, rollout_logprobs, mask).detach()
    if cfg.rollout_is == "sequence":
        d = d.new_zeros(int(seq_ids[-1]) + 1).index_add(0, seq_ids, d)[seq_ids].clamp(-20, 20)
    return d.exp().clamp(max=cfg.rollout_is_threshold)


def reject_mismatched(trajectories: list[Trajectory], cfg: LossConfig) -> dict[str, float]:
    """Take out of loss_mask the tokens, or sequences, whose pi_actor / pi_vLLM is out of bounds (IcePop; MIS, Liu et al. 2025). Returns metrics."""
    if cfg.rollout_rs == "none":
        return {}
    before = sum(int(t.loss_mask.sum()) for t in trajectories)
    rollout = flat([t.rollout_logprobs for t in trajectories], np.float32).split([len(t.tokens) for t in trajectories])
    for t, rollout_logprobs in zip(trajectories, rollout):
        ratio = log_ratio(t.old_logprobs, rollout_logprobs, t.loss_mask)  # [L] in logs
        if cfg.rollout_rs == "sequence" and t.loss_mask.any():
            ratio = ratio[t.loss_mask].mean()
        ratio = ratio.exp()
        t.loss_mask = t.loss_mask & (ratio >= cfg.rollout_rs_threshold_low) & (ratio <= cfg.rollout_rs_threshold_high)
    kept = sum(int(t.loss_mask.sum()) for t in trajectories)
    return {"correction/rejected_frac": 1 - kept / max(before, 1)}


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
    count = mask.sum()
    sums = {name: (keep(value.float()).sum(), count) for name, value in metrics.items()}
    portion = count / max(totals.tokens, 1)  # adds up to 1 over the mini-batch
    sums |= {name: (value, portion) for name, value in (shares | {"actor/loss": total.detach()}).items()}
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
