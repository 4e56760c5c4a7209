"""Advantage estimators, KL in the reward, and what they say about a step. Pure functions, no collectives.

An estimator maps token-level rewards to advantages, `(scores [P, G, T], mask [P, G, T], cfg) -> [P, G, T]`, in float64.
The group is a dimension. A session whose mask is empty was not scored: it takes part in no statistic. To add one, write
the function and put it into ESTIMATORS.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from batch import Trajectory, flat, group_by_prompt
from loss import KL_ESTIMATORS, kl_divergence


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """Advantage estimator, a key of ESTIMATORS: grpo, rloo, opo, gpg, grpo_passk, remax, reinforce_plus_plus, reinforce_plus_plus_baseline."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO); off for Dr. GRPO."""
    gamma: float = 1.0
    """Discount of reinforce_plus_plus."""
    filter_groups: bool = False
    """Dynamic sampling (DAPO): replace groups whose scores are all equal with fresh prompts."""
    max_num_gen_batches: int = 10
    """Batches of prompts that filter_groups samples for one step before it gives up."""
    mask_truncated: bool = False
    """Leave responses that hit max_response_length out of the loss and of their group's baseline."""
    overlong_buffer_len: int = 0
    """Soft overlong punishment (DAPO): the last so many tokens before max_response_length cost up to overlong_penalty_factor."""
    overlong_penalty_factor: float = 1.0
    """The reward's loss at max_response_length."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL(old, ref) from each token's reward. Needs the reference model."""
    kl_penalty: str = "k1"
    """Estimator of the KL in the reward: k1, k2, k3 (= low_var_kl), abs."""
    kl_coef: float = 0.001
    """Weight of the KL in the reward (the initial one when kl_ctrl_type is adaptive)."""
    kl_ctrl_type: str = "fixed"
    """fixed, or adaptive: steer kl_coef so that the KL stays near target_kl (Ziegler et al. 2019, arXiv:1909.08593)."""
    target_kl: float = 0.1
    """KL that the adaptive controller steers to, in nats a token."""
    horizon: int = 10_000
    """Trajectories over which the adaptive controller acts: larger is slower."""

    def __post_init__(self):
        if self.kl_penalty.removesuffix("+") not in KL_ESTIMATORS:
            raise ValueError(f"algorithm.kl_penalty={self.kl_penalty} is not known; known: {', '.join(KL_ESTIMATORS)}")
        if self.kl_ctrl_type not in ("fixed", "adaptive"):
            raise ValueError(f"algorithm.kl_ctrl_type={self.kl_ctrl_type} is not known; known: fixed, adaptive")
        if self.max_num_gen_batches < 1 or self.overlong_buffer_len < 0 or not 0 <= self.gamma <= 1:
            raise ValueError(
                f"algorithm.max_num_gen_batches={self.max_num_gen_batches} must be at least 1, algorithm.overlong_buffer_len={self.overlong_buffer_len} not negative, algorithm.gamma={self.gamma} in 0..1"
            )
        if self.horizon < 1 or self.target_kl <= 0:
            raise ValueError(
                f"algorithm.horizon={self.horizon} and algorithm.target_kl={self.target_kl} must be positive"
            )


def grpo(scores, mask, cfg):
    """(s - mean) / (std + 1e-6) in the group, std unbiased (Shao et al. 2024, arXiv:2402.03300); Dr. GRPO without the division (arXiv:2503.20783)."""
    s, valid, n = session_scores(scores, mask)
    centred = s - group_mean(s, n)  # [P, G]
    return spread(centred / (group_std(s, valid, n) + 1e-6) if cfg.norm_adv_by_std_in_grpo else centred, mask)


def rloo(scores, mask, cfg):
    """s minus the mean of the others in the group (Ahmadian et al. 2024, arXiv:2402.14740)."""
    s, valid, n = session_scores(scores, mask)
    others = (s.sum(1, keepdim=True) - s) / (n - 1).clamp(min=1)  # [P, G]
    return spread(s - others, mask)


def opo(scores, mask, cfg):
    """s minus the group's mean weighted by response length, the variance-optimal baseline (Hao et al. 2025, arXiv:2505.23585)."""
    s, valid, n = session_scores(scores, mask)
    length = mask.sum(-1)  # [P, G]
    baseline = (s * length).sum(1, keepdim=True) / length.sum(1, keepdim=True).clamp(min=1)  # [P, 1]
    return spread(torch.where(n > 1, s - baseline, s), mask)


def gpg(scores, mask, cfg):
    """alpha * (s - mean), alpha = rows / rows with a nonzero score over the batch (Chu et al. 2025, arXiv:2504.02546)."""
    s, valid, n = session_scores(scores, mask)
    alpha = valid.sum() / ((s != 0) & valid).sum().clamp(min=1)
    return spread(torch.where(n > 1, alpha * (s - group_mean(s, n)), s), mask)


def reinforce_plus_plus(scores, mask, cfg):
    """Discounted return-to-go on sampled tokens, whitened over the batch (Hu 2025, arXiv:2501.03262)."""
    return whiten(returns_to_go(scores, mask, cfg.gamma), mask)


def returns_to_go(scores, mask, gamma):
    """[..., T]: what follows each sampled token, itself included; observations neither earn nor discount."""
    returns, discount = torch.where(mask, scores, 0.0), torch.ones_like(scores).masked_fill(mask, gamma)
    for t in reversed(range(scores.shape[-1] - 1)):
        returns[..., t] += discount[..., t] * returns[..., t + 1]
    return returns


def reinforce_plus_plus_baseline(scores, mask, cfg):
    """s minus the group's mean, whitened over the batch's sampled tokens (arXiv:2501.03262)."""
    s, valid, n = session_scores(scores, mask)
    return whiten(spread(s - group_mean(s, n), mask), mask)


def grpo_passk(scores, mask, cfg):
    """Only the group's best session, by how much it beats the second (Chen et al. 2025, arXiv:2503.19595)."""
    s, valid, n = session_scores(scores, mask)
    ranked = torch.where(valid, s, -torch.inf)  # [P, G]
    top = ranked.topk(min(2, s.shape[1]), 1)
    second = torch.where(n > 1, top.values[:, -1:], 0.0)
    gap = torch.where(n > 0, top.values[:, :1] - second, 0.0)  # [P, 1]
    if cfg.norm_adv_by_std_in_grpo:
        gap = gap / (group_std(s, valid, n) + 1e-6)
    return spread(torch.zeros_like(s).scatter(1, top.indices[:, :1], gap), mask)


def remax(scores, mask, cfg):
    """s minus the reward of a greedy session of the same prompt, which `Trajectory.baseline` holds and the rewards have lost already (Li et al. 2023, arXiv:2310.10505)."""
    return spread(session_scores(scores, mask)[0], mask)


def group_mean(s, n):
    """[P, 1]: mean of the group's scored sessions; 0 for a group of one."""
    return torch.where(n > 1, s.sum(1, keepdim=True) / n.clamp(min=1), 0.0)


def group_std(s, valid, n):
    """[P, 1]: their unbiased standard deviation; 1 for a group of one."""
    squares = torch.where(valid, (s - group_mean(s, n)).square(), 0.0).sum(1, keepdim=True)
    return torch.where(n > 1, (squares / (n - 1).clamp(min=1)).sqrt(), 1.0)


def whiten(values, mask):
    """Zero mean and unit variance (unbiased) over the batch's sampled tokens."""
    chosen = values[mask]
    if chosen.numel() < 2:
        return torch.where(mask, values, 0.0)
    return torch.where(mask, (values - chosen.mean()) * (chosen.var() + 1e-8).rsqrt(), 0.0)


def session_scores(scores, mask):
    """`(s [P, G], valid [P, G], n [P, 1])`: each session's summed reward (0 where unscored), which are scored, how many a group."""
    valid = mask.any(-1)
    return torch.where(mask, scores, 0.0).sum(-1), valid, valid.sum(1, keepdim=True)


def spread(values, mask):
    """A value a session [P, G] onto its sampled tokens [P, G, T]."""
    return torch.where(mask, values.unsqueeze(-1), 0.0)


def set_loss_mask(trajectories: list[Trajectory], cfg: AlgorithmConfig = AlgorithmConfig()) -> None:
    """The one effective mask: sampled tokens, of trajectories that have a score. What leaves it leaves loss, denominators and baselines alike."""
    masks = flat([t.response_mask for t in trajectories], np.bool_).split([len(t.tokens) for t in trajectories])
    for trajectory, mask in zip(trajectories, masks):
        counts = trajectory.score == trajectory.score and not (
            cfg.mask_truncated and trajectory.finish_reason == "length"
        )
        trajectory.loss_mask = mask if counts else torch.zeros_like(mask)  # [L]


def punish_overlong(trajectories: list[Trajectory], cfg: AlgorithmConfig, max_response_length: int) -> dict[str, float]:
    """Take up to overlong_penalty_factor off the scores of responses that end within overlong_buffer_len of the limit (DAPO, arXiv:2503.14476)."""
    if not cfg.overlong_buffer_len:
        return {}
    penalties = []
    for t in trajectories:
        excess = len(t.tokens) - t.prompt_length - (max_response_length - cfg.overlong_buffer_len)
        penalties.append(min(max(excess, 0) / cfg.overlong_buffer_len, 1.0) * cfg.overlong_penalty_factor)
        t.score -= penalties[-1]
    return {"reward/overlong_penalty": sum(penalties) / len(penalties)}


def set_token_level_rewards(trajectories: list[Trajectory], cfg: AlgorithmConfig, kl_coef: float) -> dict[str, float]:
    """The score on each trajectory's last sampled token, less kl_coef * KL(old, ref) on every sampled token when asked for."""
    kl_means, lengths, mask = (
        [],
        [len(t.tokens) for t in trajectories],
        torch.cat([t.loss_mask for t in trajectories]).numpy(),
    )
    last = np.maximum.reduceat(
        np.where(mask, np.arange(len(mask)), -1), np.cumsum([0, *lengths[:-1]])
    )  # [S] of all tokens end to end; -1: none counts
    rewards = torch.zeros(len(mask), dtype=torch.float64)
    rewards[last[last >= 0]] = torch.tensor([t.score - t.baseline for t in trajectories], dtype=torch.float64)[
        last >= 0
    ]
    for t, t.token_level_rewards in zip(trajectories, rewards.split(lengths)):
        if cfg.use_kl_in_reward and t.loss_mask.any():
            kl = kl_divergence(t.old_logprobs, t.ref_logprobs, cfg.kl_penalty)  # [L]
            t.token_level_rewards -= kl_coef * torch.where(t.loss_mask, kl, 0.0)
            kl_means.append(float(kl[t.loss_mask].mean()))
    return (
        {"reward/kl": sum(kl_means) / max(len(kl_means), 1), "reward/kl_coef": kl_coef} if cfg.use_kl_in_reward else {}
    )


def update_kl_coef(kl_coef: float, kl: float, num_trajectories: int, cfg: AlgorithmConfig) -> float:
    """The next step's kl_coef: one step of the adaptive controller, or the same."""
    if cfg.kl_ctrl_type == "fixed":
        return kl_coef
    error = min(max(kl / cfg.target_kl - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_trajectories / cfg.horizon)


def compute_advantages(trajectories: list[Trajectory], cfg: AlgorithmConfig) -> dict[str, float]:
    """Fill `advantages` [L] of every trajectory; return the step's advantage metrics.

    Of several outputs of a session, the one with the largest index stands for the session in its group, and its
    advantage goes to all of them, each on its own mask. A group whose scores are all equal gets exactly 0.
    """
    groups = group_by_prompt(trajectories)
    finals = [list({t.session_id: t for t in sorted(g, key=lambda t: t.index)}.values()) for g in groups]  # [P][<= G]
    places = torch.tensor([(p, g) for p, group in enumerate(finals) for g in range(len(group))]).T  # [2, P * G]
    rewards, masks = (
        pad_sequence([getattr(t, name)[t.prompt_length :] for g in finals for t in g], batch_first=True)
        for name in ("token_level_rewards", "loss_mask")
    )
    shape = (
        len(finals),
        max(len(g) for g in finals),
        max(rewards.shape[1], 1),
    )  # P, G, T: columns from the first sampled token on
    scores, mask = (
        x.new_zeros(shape).index_put_(tuple(places), F.pad(x, (0, shape[2] - x.shape[1]))) for x in (rewards, masks)
    )
    advantages = ESTIMATORS[cfg.adv_estimator](scores, mask, cfg)  # [P, G, T]
    equal = equal_groups(
        scores, mask
    )  # [P]; rounding must not invent a signal: fifteen rewards of 0.9 have a mean that is not quite 0.9
    if cfg.adv_estimator in GROUP_ESTIMATORS:
        advantages[equal] = 0.0
    for group, final_ones, rows in zip(groups, finals, advantages.float().unbind()):
        of_session = {t.session_id: (t, row) for t, row in zip(final_ones, rows.unbind())}
        for t in group:
            final, row = of_session[t.session_id]  # row [T]
            if t is final:
                t.advantages = F.pad(row[: len(t.tokens) - t.prompt_length], (t.prompt_length, 0))  # [L]
                continue
            t.advantages = torch.zeros(len(t.tokens))  # [L]
            if final.loss_mask.any():
                whole = row[
                    int(final.loss_mask.nonzero()[0]) - final.prompt_length
                ]  # the session's: return from its start
                t.advantages[t.loss_mask] = float(whole)
            else:
                t.loss_mask = torch.zeros_like(t.loss_mask)  # its session does not count: neither does it
    return advantage_metrics(advantages, scores, mask, equal)


def equal_groups(scores, mask):
    """[P] bool: two or more scored sessions, all with the same score: nothing to learn from."""
    s, valid, n = session_scores(scores, mask)
    largest, smallest = torch.where(valid, s, -torch.inf).amax(1), torch.where(valid, s, torch.inf).amin(1)  # [P]
    return (n.squeeze(1) > 1) & (largest == smallest)


def advantage_metrics(advantages, scores, mask, equal) -> dict[str, float]:
    """Over sampled tokens, in verl's names; and the share of groups that taught nothing."""
    values = advantages[mask]
    solved = (session_scores(scores, mask)[0].sum(1) > 0) & equal
    metrics = {"reward/frac_zero_std": equal.double().mean(), "reward/frac_zero_std_positive": solved.double().mean()}
    if values.numel():
        metrics |= {
            "critic/advantages/mean": values.mean(),
            "critic/advantages/max": values.max(),
            "critic/advantages/min": values.min(),
        }
    return {name: float(value) for name, value in metrics.items()}


ESTIMATORS = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
GROUP_ESTIMATORS = ESTIMATORS.keys() - {
    "reinforce_plus_plus",
    "remax",
}  # those with a baseline from the group: they need n > 1
