"""Advantage estimators, KL in the reward, and what they say about a step. Pure functions, no collectives.

An estimator maps token-level rewards to advantages, `(scores [P, G, T], mask [P, G, T], cfg) -> [P, G, T]`, in float64.
The group is a dimension. A session whose mask is empty was not scored: it takes part in no statistic. To add one, write
the function and put it into ESTIMATORS.

What other files ask of an estimator are attributes of the function, set by `@facts(...)`:

    by_group      compares within a prompt's group: needs n > 1, and gives equal scores exactly 0. True when not set
    needs_greedy  a greedy session of each prompt is sampled, whose score is `Trajectory.baseline`. False when not set
    may_be_zero   a gradient of exactly 0 is no alarm. False when not set
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from batch import Trajectory, final_outputs, flat, group_by_prompt, teaches
from host.lookup import check_bounds, unknown
from loss import KL_ESTIMATORS, facts, kl_divergence


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = "grpo"
    """Estimator: grpo, rloo, opo, gpg, grpo_passk, remax, reinforce_plus_plus, reinforce_plus_plus_baseline."""
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
    """Overlong punishment (DAPO): the last so many tokens to max_response_length cost up to overlong_penalty_factor."""
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

    def __post_init__(self) -> None:
        if self.kl_penalty.removesuffix("+") not in KL_ESTIMATORS:
            raise unknown("algorithm.kl_penalty", self.kl_penalty, KL_ESTIMATORS)
        if self.kl_ctrl_type not in ("fixed", "adaptive"):
            raise unknown("algorithm.kl_ctrl_type", self.kl_ctrl_type, ("fixed", "adaptive"))
        check_bounds(
            "algorithm",
            self,
            gamma="[0, 1]",
            max_num_gen_batches="[1, inf)",
            overlong_buffer_len="[0, inf)",
            target_kl="(0, inf)",
            horizon="[1, inf)",
        )


def grpo(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """(s - mean) / (std + 1e-6) in the group, std unbiased (Shao et al. 2024, arXiv:2402.03300). Dr. GRPO without the
    division (arXiv:2503.20783)."""
    s, valid, n = session_scores(scores, mask)
    advantages = s - group_mean(s, n)  # [P, G]
    if cfg.norm_adv_by_std_in_grpo:
        advantages = advantages / (group_std(s, valid, n) + 1e-6)
    return spread(advantages, mask)


def rloo(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """s minus the mean of the others in the group (Ahmadian et al. 2024, arXiv:2402.14740)."""
    s, _, n = session_scores(scores, mask)
    others = (s.sum(1, keepdim=True) - s) / (n - 1).clamp(min=1)  # [P, G]
    return spread(s - others, mask)


def opo(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """s minus the group's mean weighted by response length, the variance-optimal baseline. Hao et al. 2025,
    arXiv:2505.23585."""
    s, _, n = session_scores(scores, mask)
    length = mask.sum(-1)  # [P, G]
    baseline = (s * length).sum(1, keepdim=True) / length.sum(1, keepdim=True).clamp(min=1)  # [P, 1]
    return spread(torch.where(n > 1, s - baseline, s), mask)


def gpg(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """alpha * (s - mean), alpha = sessions / sessions with a nonzero score, over the batch (Chu et al. 2025).
    arXiv:2504.02546."""
    s, valid, n = session_scores(scores, mask)
    alpha = valid.sum() / ((s != 0) & valid).sum().clamp(min=1)
    return spread(torch.where(n > 1, alpha * (s - group_mean(s, n)), s), mask)


@facts(by_group=False)
def reinforce_plus_plus(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Discounted return-to-go on sampled tokens, whitened over the batch (Hu 2025, arXiv:2501.03262)."""
    return whiten(returns_to_go(scores, mask, cfg.gamma), mask)


def returns_to_go(scores: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[..., T]: the discounted sum from each token on, itself included; observations neither earn nor discount."""
    returns = torch.where(mask, scores, 0.0)
    discount = torch.ones_like(scores).masked_fill(mask, gamma)
    for t in reversed(range(scores.shape[-1] - 1)):
        returns[..., t] += discount[..., t] * returns[..., t + 1]
    return returns


def reinforce_plus_plus_baseline(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """s minus the group's mean, whitened over the batch's sampled tokens (arXiv:2501.03262)."""
    s, _, n = session_scores(scores, mask)
    return whiten(spread(s - group_mean(s, n), mask), mask)


@facts(may_be_zero=True)
def grpo_passk(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Only the group's best session, by how much it beats the second (Chen et al. 2025, arXiv:2503.19595)."""
    s, valid, n = session_scores(scores, mask)
    ranked = torch.where(valid, s, -torch.inf)  # [P, G]
    top = ranked.topk(min(2, s.shape[1]), 1)
    second = torch.where(n > 1, top.values[:, -1:], 0.0)
    gap = torch.where(n > 0, top.values[:, :1] - second, 0.0)  # [P, 1]
    if cfg.norm_adv_by_std_in_grpo:
        gap = gap / (group_std(s, valid, n) + 1e-6)
    return spread(torch.zeros_like(s).scatter(1, top.indices[:, :1], gap), mask)


@facts(by_group=False, needs_greedy=True)
def remax(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """s minus the reward of a greedy session of the same prompt (Li et al. 2023, arXiv:2310.10505).
    `Trajectory.baseline` holds that reward, and set_token_level_rewards has subtracted it already."""
    s, _, _ = session_scores(scores, mask)
    return spread(s, mask)


def group_mean(s: Tensor, n: Tensor) -> Tensor:
    """[P, 1]: mean of the group's scored sessions; 0 for a group of one."""
    return torch.where(n > 1, s.sum(1, keepdim=True) / n.clamp(min=1), 0.0)


def group_std(s: Tensor, valid: Tensor, n: Tensor) -> Tensor:
    """[P, 1]: their unbiased standard deviation; 1 for a group of one."""
    squares = torch.where(valid, (s - group_mean(s, n)).square(), 0.0).sum(1, keepdim=True)
    return torch.where(n > 1, (squares / (n - 1).clamp(min=1)).sqrt(), 1.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit variance (unbiased) over the batch's sampled tokens."""
    chosen = values[mask]
    if chosen.numel() < 2:
        return torch.where(mask, values, 0.0)
    return torch.where(mask, (values - chosen.mean()) * (chosen.var() + 1e-8).rsqrt(), 0.0)


def session_scores(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(s [P, G], valid [P, G], n [P, 1])`. Each session's summed reward (0 where unscored), which sessions are
    scored, and how many of a group are."""
    valid = mask.any(-1)
    return torch.where(mask, scores, 0.0).sum(-1), valid, valid.sum(1, keepdim=True)


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """A value a session [P, G] onto its sampled tokens [P, G, T]."""
    return torch.where(mask, values.unsqueeze(-1), 0.0)


def mask_and_punish(trajectories: list[Trajectory], cfg: Any) -> dict[str, float]:
    """What comes first after sampling: lower the scores of overlong responses, and set loss_mask; return metrics. cfg
    is the whole config.Config."""
    metrics = punish_overlong(trajectories, cfg.algorithm, cfg.data.max_response_length)
    set_loss_mask(trajectories, cfg.algorithm)
    return metrics


def punish_overlong(trajectories: list[Trajectory], cfg: AlgorithmConfig, max_response_length: int) -> dict[str, float]:
    """Lower the scores of responses that end within overlong_buffer_len of the limit (DAPO, arXiv:2503.14476). By up
    to overlong_penalty_factor, at the limit."""
    if not cfg.overlong_buffer_len:
        return {}
    punished_from = max_response_length - cfg.overlong_buffer_len
    penalties = []
    for t in trajectories:
        excess = len(t.tokens) - t.prompt_length - punished_from
        penalty = min(max(excess, 0) / cfg.overlong_buffer_len, 1.0) * cfg.overlong_penalty_factor
        t.score -= penalty
        penalties.append(penalty)
    return {"reward/overlong_penalty": sum(penalties) / len(penalties)}


def set_loss_mask(trajectories: list[Trajectory], cfg: AlgorithmConfig = AlgorithmConfig()) -> None:
    """The one effective mask: sampled tokens, of trajectories that have a score. What leaves it leaves loss,
    denominators and baselines alike."""
    masks = flat([t.response_mask for t in trajectories], np.bool_).split([len(t.tokens) for t in trajectories])
    for trajectory, mask in zip(trajectories, masks):
        left_out = cfg.mask_truncated and trajectory.finish_reason == "length"
        counts = trajectory.scored and not left_out
        trajectory.loss_mask = mask if counts else torch.zeros_like(mask)  # [L]


def set_token_level_rewards(
    trajectories: list[Trajectory], cfg: AlgorithmConfig, kl_coef: float
) -> tuple[float, dict[str, float]]:
    """The score on each trajectory's last sampled token, less kl_coef * KL(old, ref) on every sampled token when
    asked. Returns the step's mean KL, 0 when it is not in the reward, and metrics."""
    put_scores(trajectories)
    if not cfg.use_kl_in_reward:
        return 0.0, {}
    means = []
    for trajectory in trajectories:
        if trajectory.loss_mask.any():
            means.append(subtract_kl(trajectory, cfg.kl_penalty, kl_coef))
    kl = sum(means) / max(len(means), 1)
    return kl, {"reward/kl": kl, "reward/kl_coef": kl_coef}


def put_scores(trajectories: list[Trajectory]) -> None:
    """Set token_level_rewards [L], float64: the score less the baseline on the last token that counts, 0 elsewhere."""
    lengths = [len(t.tokens) for t in trajectories]
    mask = torch.cat([t.loss_mask for t in trajectories]).numpy()  # of all tokens end to end, as are rewards
    places = np.where(mask, np.arange(len(mask)), -1)
    last = np.maximum.reduceat(places, np.cumsum([0, *lengths[:-1]]))  # [S], -1 where none counts
    counts = last >= 0
    scores = torch.tensor([t.score - t.baseline for t in trajectories], dtype=torch.float64)  # [S]
    rewards = torch.zeros(len(mask), dtype=torch.float64)
    rewards[last[counts]] = scores[counts]
    for trajectory, its_rewards in zip(trajectories, rewards.split(lengths)):
        trajectory.token_level_rewards = its_rewards


def subtract_kl(t: Trajectory, kind: str, kl_coef: float) -> float:
    """Take kl_coef * KL(old, ref) off the reward of each token that counts; return the mean KL of these."""
    kl = kl_divergence(t.old_logprobs, t.ref_logprobs, kind)  # [L]
    t.token_level_rewards -= kl_coef * torch.where(t.loss_mask, kl, 0.0)
    return float(kl[t.loss_mask].mean())


def update_kl_coef(kl_coef: float, kl: float, num_trajectories: int, cfg: AlgorithmConfig) -> float:
    """The next step's kl_coef: one step of the adaptive controller, or the same."""
    if cfg.kl_ctrl_type == "fixed":
        return kl_coef
    error = min(max(kl / cfg.target_kl - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_trajectories / cfg.horizon)


def compute_advantages(trajectories: list[Trajectory], cfg: AlgorithmConfig) -> dict[str, float]:
    """Fill `advantages` [L] of every trajectory; return the step's advantage metrics. Of several outputs of a session,
    the one with the largest index stands for the session in its group, and its advantage goes to all of them, each on
    its own mask. A group whose scores are all equal gets exactly 0."""
    groups = group_by_prompt(trajectories)
    finals = [final_outputs(group) for group in groups]  # [P][<= G]
    # Columns count from each session's first sampled token.
    scores = on_grid([[t.token_level_rewards[t.prompt_length :] for t in group] for group in finals])  # [P, G, T]
    mask = on_grid([[t.loss_mask[t.prompt_length :] for t in group] for group in finals])  # [P, G, T]
    estimator = ESTIMATORS[cfg.adv_estimator]
    advantages = estimator(scores, mask, cfg)  # [P, G, T]
    equal = equal_groups(scores, mask)  # [P]
    if getattr(estimator, "by_group", True):
        # Rounding must not invent a signal: fifteen rewards of 0.9 have a mean that is not quite 0.9.
        advantages[equal] = 0.0
    for group, of_sessions, rows in zip(groups, finals, advantages.float().unbind()):
        of_session = {final.session_id: (final, row) for final, row in zip(of_sessions, rows.unbind())}
        for trajectory in group:
            set_advantages(trajectory, *of_session[trajectory.session_id])
    return advantage_metrics(advantages, scores, mask, equal)


def on_grid(rows: list[list[Tensor]]) -> Tensor:
    """[P, G, T] of a row [<= T] a session, `rows[prompt][session]`, with zeros elsewhere; T is at least 1."""
    padded = pad_sequence([row for group in rows for row in group], batch_first=True)  # [sessions, <= T]
    if padded.shape[1] == 0:
        padded = F.pad(padded, (0, 1))
    places = [(p, g) for p, group in enumerate(rows) for g in range(len(group))]
    prompts, sessions = torch.tensor(places).T
    grid = padded.new_zeros(len(rows), max(len(group) for group in rows), padded.shape[1])
    grid[prompts, sessions] = padded
    return grid


def set_advantages(trajectory: Trajectory, final: Trajectory, row: Tensor) -> None:
    """Set one output's advantages [L], of the output that stands for its session and the advantages [T] of that."""
    prompt_length, length = trajectory.prompt_length, len(trajectory.tokens)
    if trajectory is final:
        trajectory.advantages = F.pad(row[: length - prompt_length], (prompt_length, 0))
        return
    trajectory.advantages = torch.zeros(length)
    if final.loss_mask.any():
        first = int(final.loss_mask.nonzero()[0]) - final.prompt_length
        trajectory.advantages[trajectory.loss_mask] = float(row[first])  # the session's: the return from its start
    else:
        trajectory.loss_mask = torch.zeros_like(trajectory.loss_mask)  # its session does not count: neither does it


def equal_groups(scores: Tensor, mask: Tensor) -> Tensor:
    """[P] bool: two or more scored sessions, all with the same score: nothing to learn from."""
    s, valid, _ = session_scores(scores, mask)
    equal = []
    for of_group, is_scored in zip(s.tolist(), valid.tolist()):
        known = [score for score, is_known in zip(of_group, is_scored) if is_known]
        equal.append(len(known) > 1 and not teaches(known))
    return torch.tensor(equal)


def advantage_metrics(advantages: Tensor, scores: Tensor, mask: Tensor, equal: Tensor) -> dict[str, float]:
    """Over sampled tokens, in verl's names; and the share of groups that taught nothing."""
    values = advantages[mask]
    s, _, _ = session_scores(scores, mask)
    solved = (s.sum(1) > 0) & equal
    metrics = {"reward/frac_zero_std": equal.double().mean(), "reward/frac_zero_std_positive": solved.double().mean()}
    if values.numel():
        metrics |= {
            "critic/advantages/mean": values.mean(),
            "critic/advantages/max": values.max(),
            "critic/advantages/min": values.min(),
        }
    return {name: float(value) for name, value in metrics.items()}


Estimator = Callable[[Tensor, Tensor, AlgorithmConfig], Tensor]
ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
