"""Diagnoses of what an update learns from and does: rewards within the groups, gradient, entropy, KL, mismatch.

The thresholds lie beyond what runs that learned have shown (docs/runs, the quickstart): a false alarm costs the next
true one its reader.
"""

from collections.abc import Callable

from look.step import USUAL, Step, diagnosis

# Share of groups without signal, for 10 steps: at 0.6 a run learns well, at 0.9 the quickstart has solved its task.
MOSTLY = 0.95
SPIKE = 10  # times the usual gradient norm
FAR = 10  # times actor.grad_clip: at 2 or 3 times, as of small models, clipping only does its work
COLLAPSED = 0.1  # share of the first entropy
NO_ENTROPY = 0.01  # nats a token, a surprise in some hundred tokens
MORE_ENTROPY = 1.0  # nats a token on top of the first entropy
LARGE_STEP_KL = 0.1  # nats a token within a step, where PPO stops at 0.01 to 0.05
LARGE_REF_KL = 1.0  # nats a token from the reference
CLIPPED = 0.3  # share of the tokens
# k3: seen were 0.003 in bfloat16, 1e-13 in float32 on a CPU, and TF32 kernels differ more.
MISMATCH = {"bfloat16": 0.02, "float32": 1e-3}
# Shares of the tokens: from here on the correction, not the reward, decides; usual are 0 and 0.99.
REJECTED = 0.5
LOW_ESS = 0.7


def estimator(s: Step) -> Callable | None:
    """The run's advantage estimator, whose attributes say what is normal with it; None for a name that is not known."""
    from advantage import ESTIMATORS  # here, since torch comes with it: seconds that a look at most runs need not wait

    return ESTIMATORS.get(s.knob("algorithm.adv_estimator", "grpo"))


def loss_function(s: Step) -> Callable | None:
    """As `estimator`, of the loss."""
    from loss import LOSSES  # here, as above

    return LOSSES.get(s.knob("loss.loss_mode", "vanilla"))


@diagnosis("problem", "reward/mean")
def rewards_all_low(s: Step, x: float) -> str | None:
    if s["reward/min"] == s["reward/max"] <= 0:
        return (
            f"all {s.groups} groups had equal rewards, each {x:.4g}: nothing was learned this step: "
            "the task is too hard, or answers are not recognised: read rollouts/; easier data, a reward with parts"
        )
    return None


@diagnosis("problem", "reward/mean")
def rewards_all_high(s: Step, x: float) -> str | None:
    if s["reward/min"] == s["reward/max"] > 0:
        return (
            f"all {s.groups} groups had equal rewards, each {x:.4g}: nothing was learned this step: "
            "the task is too easy, or the reward never differs: other data or algorithm.filter_groups"
        )
    return None


@diagnosis("problem", "reward/frac_zero_std")
def groups_all_equal(s: Step, x: float) -> str | None:
    """Not with an estimator that compares beyond the group: it learns from equal rewards as well."""
    if x == 1 and s["reward/max"] > s["reward/min"] and getattr(estimator(s), "by_group", True):
        return (
            f"all {s.groups} groups had equal rewards: nothing was learned this step: "
            "a larger rollout.n, algorithm.filter_groups, data of medium difficulty"
        )
    return None


@diagnosis("warning", "reward/frac_zero_std")
def groups_mostly_equal(s: Step, x: float) -> str | None:
    if x < 1 and min(s.lately(most=10), default=0) > MOSTLY:
        return (
            f"{x:.0%} of the groups had equal rewards ({s['reward/frac_zero_std_positive']:.0%} solved), "
            "and so for 10 steps: most sampling teaches nothing: algorithm.filter_groups, other data"
        )
    return None


@diagnosis("problem", "actor/grad_norm")
def gradient_zero(s: Step, x: float) -> str | None:
    """Not with an estimator whose advantages may all be 0 although rewards differ."""
    rewards_differ = s["reward/frac_zero_std"] < 1 and s["reward/max"] > s["reward/min"]
    if x == 0 and rewards_differ and not getattr(estimator(s), "may_be_zero", False):
        return (
            "the gradient is exactly 0 although rewards differ: every token is masked, rejected or clipped: "
            "see algorithm.mask_truncated, loss.rollout_rs, loss.clip_ratio"
        )
    return None


@diagnosis("problem", "actor/skipped_steps")
def gradient_not_finite(s: Step, x: float) -> str | None:
    if x > 0:
        return (
            f"{x:.0f} {'updates were' if x > 1 else 'update was'} skipped, the gradient was not finite: "
            "`python -m look.replay RUN/replays/STEP` shows it; lower actor.lr, or actor.dtype=float32"
        )
    return None


@diagnosis("warning", "actor/grad_norm")
def gradient_clipped(s: Step, x: float) -> str | None:
    if min(s.lately(most=USUAL), default=0) > FAR * s.knob("actor.grad_clip", 1.0):
        return (
            f"the gradient's norm ({x:.3g}) was over {FAR} times actor.grad_clip={s.knob('actor.grad_clip')} "
            f"for {USUAL} steps, and cut down to it: another loss.loss_agg_mode, a larger grad_clip"
        )
    return None


@diagnosis("warning", "actor/grad_norm")
def gradient_spike(s: Step, x: float) -> str | None:
    if x > max(SPIKE * s.usual(), s.knob("actor.grad_clip", 1.0)):
        return (
            f"the gradient's norm is {x:.3g}, usual is {s.usual():.2g}: "
            f"read this step's rollouts; actor.grad_clip={s.knob('actor.grad_clip')} bounded it"
        )
    return None


@diagnosis("note", "actor/grad_norm")
def loss_zero(s: Step, x: float) -> str | None:
    if s["actor/num_updates"] == 1 and abs(s["actor/pg_loss"]) < 1e-3 and x > 0:
        return (
            "the loss is 0 because the ratio is 1 on a step's only update and the advantages add up to 0: "
            f"normal, the gradient is not 0 but {x:.2g}"
        )
    return None


@diagnosis("note", "actor/lr")
def lr_zero(s: Step, x: float) -> str | None:
    if x == 0 and s["step"] < s.knob("actor.lr_warmup_steps", 0):
        return "the learning rate is 0 in the first step of the warm-up: normal, from the next step on it is not"
    return None


@diagnosis("warning", "actor/lr")
def lr_stays_zero(s: Step, x: float) -> str | None:
    if x == 0 and s["step"] >= s.knob("actor.lr_warmup_steps", 0):
        return "the learning rate is 0, so nothing changes: actor.lr, actor.min_lr_ratio"
    return None


@diagnosis("warning", "actor/entropy")
def entropy_collapsed(s: Step, x: float) -> str | None:
    low = s.recent() < NO_ENTROPY
    fell = s.recent() < min(COLLAPSED * s.first(), 0.9 * s.then())
    if (low or fell) and s.stalled:
        return (
            f"entropy fell from {s.first():.2g} to {s.recent():.2g} and the reward does not rise: "
            "nothing new is tried: loss.clip_ratio_high above clip_ratio_low, loss.entropy_coeff, actor.lr"
        )
    return None


@diagnosis("warning", "actor/entropy")
def entropy_exploded(s: Step, x: float) -> str | None:
    if s.recent() > max(2 * s.first(), s.first() + MORE_ENTROPY):
        return (
            f"entropy rose from {s.first():.2g} to {s.recent():.2g}: the policy becomes random: "
            "a smaller actor.lr, loss.entropy_coeff or loss.clip_ratio_high"
        )
    return None


@diagnosis("warning", "actor/ppo_kl")
def step_kl(s: Step, x: float) -> str | None:
    if x > LARGE_STEP_KL:
        return (
            f"the policy moved {x:.2g} nats a token within one step: "
            "a smaller actor.lr, a larger actor.ppo_mini_batch_size"
        )
    return None


@diagnosis("warning", "actor/kl_loss")
def kl_in_loss(s: Step, x: float) -> str | None:
    """Not where the loss sums over a sequence's tokens: then the KL is not by token."""
    if x > LARGE_REF_KL and "sum" not in s.knob("loss.loss_agg_mode", "token-mean"):
        return (
            f"the policy is {x:.2g} nats a token from the reference: "
            f"raise loss.kl_loss_coef={s.knob('loss.kl_loss_coef')}, or lower actor.lr"
        )
    return None


@diagnosis("warning", "reward/kl")
def kl_in_reward(s: Step, x: float) -> str | None:
    if x > LARGE_REF_KL:
        return (
            f"the policy is {x:.2g} nats a token from the reference: "
            f"raise algorithm.kl_coef={s.knob('algorithm.kl_coef')}, lower actor.lr"
        )
    return None


@diagnosis("warning", "actor/pg_clipfrac")
def clipped(s: Step, x: float) -> str | None:
    """Not with a loss whose range is narrow on purpose."""
    if x > CLIPPED and not getattr(loss_function(s), "clips_much", False):
        return (
            f"{x:.0%} of the tokens were clipped: the step's later updates do little: "
            "a smaller actor.lr, fewer updates a step"
        )
    return None


@diagnosis("problem", "correction/k3")
def mismatch(s: Step, k3: float) -> str | None:
    if k3 > MISMATCH.get(s.knob("actor.dtype"), 0.02):
        top_p = s.knob("rollout.top_p", 1.0)
        top_k = s.knob("rollout.top_k", 0)
        if top_p < 1 or top_k:
            advice = f"rollout.top_p={top_p}, top_k={top_k} cut what the actor does not: set 1 and 0"
        else:
            advice = "check temperature/top_p/dtype or set sync.verify_every=1; loss.rollout_is"
        return (
            f"the sampler and the actor disagree (k3 {k3:.2g}, "
            f"probabilities by {s['correction/prob_diff_mean']:.2g} on average): {advice}"
        )
    return None


@diagnosis("warning", "correction/ess")
def low_ess(s: Step, x: float) -> str | None:
    if x < LOW_ESS:
        return (
            f"the correction's effective sample size is {x:.0%} of the tokens, a few outweigh the others: "
            "see correction/k3"
        )
    return None


@diagnosis("warning", "correction/rejected_frac")
def rejected(s: Step, x: float) -> str | None:
    if x > REJECTED:
        return f"loss.rollout_rs left out {x:.0%} of the tokens: see correction/k3, or widen its thresholds"
    return None
