"""Diagnoses of what is sampled and what it costs: responses, rewards, sessions, validation, time.

The thresholds lie beyond what runs that learned have shown (docs/runs, the quickstart): a false alarm costs the next
true one its reader.
"""

import math
import re
from statistics import fmean

from look.step import (
    NOISE,
    SPAN,
    USUAL,
    Step,
    center,
    column,
    diagnosis,
    is_validation,
    jump,
    number,
    time_spent,
)

TRUNCATED = 0.3  # share of responses: long reasoning often starts with 0.1 to 0.2 and recovers
SMALL = 32  # tokens: a limit so low is meant to be, as for an answer that is a sum
LENGTH = 3  # times the length at the start
IDLE = 0.3  # share of generation
LATE = 1.5  # times the mean engine
UNEVEN = 0.3  # share above the mean rank
MIN_GEN_S = 1.0  # below these seconds nobody waits


def cut_on_purpose(s: Step, x: float) -> bool:
    """Groups still teach, and no reward is seen to be lost.

    That is: all responses are as long, or the limit is small, or those cut earn no less than all do, but for chance.
    """
    chance = NOISE * s["reward/std"] * ((1 - x) / x / max(s["rollout/num_trajectories"], 1)) ** 0.5
    return s["reward/frac_zero_std"] < 1 and (
        x > 0.99
        or s.knob("data.max_response_length", math.inf) <= SMALL
        or s["reward/mean"] - s["reward/truncated"] <= chance
    )


@diagnosis("warning", "response_length/clip_ratio")
def truncated(s: Step, x: float) -> str | None:
    if x > TRUNCATED and not cut_on_purpose(s, x):
        limit = s.knob("data.max_response_length")
        return (
            f"{x:.0%} of responses hit data.max_response_length={limit}: raise it, or see algorithm.overlong_buffer_len"
        )
    return None


@diagnosis("note", "response_length/clip_ratio")
def truncated_on_purpose(s: Step, x: float) -> str | None:
    if x > TRUNCATED and cut_on_purpose(s, x):
        limit = s.knob("data.max_response_length")
        return (
            f"{x:.0%} of responses hit data.max_response_length={limit} and rewards still differ: normal if "
            "they are meant to be as long, if the answer comes early or with rollout.ignore_eos, else raise it"
        )
    return None


@diagnosis("warning", "response_length/mean")
def length_collapsed(s: Step, x: float) -> str | None:
    if s.recent() < s.first() / LENGTH and s.stalled:
        return (
            f"responses shrank from {s.first():.0f} tokens to {s.recent():.0f} and the reward does not rise: "
            "read rollouts/: a reward that favours short ones; loss.loss_agg_mode"
        )
    return None


@diagnosis("warning", "response_length/mean")
def length_ran_away(s: Step, x: float) -> str | None:
    if s.recent() > s.first() * LENGTH and s.stalled:
        return (
            f"responses grew from {s.first():.0f} tokens to {s.recent():.0f} and the reward does not rise: "
            "read rollouts/ for repetition; algorithm.overlong_buffer_len, loss.loss_agg_mode"
        )
    return None


@diagnosis("warning", "reward/mean")
def reward_fell(s: Step, x: float) -> str | None:
    """Means of 10 steps against the best of them, since a single step's is noise."""
    rewards = column([*s.before[-99:], s.m], "reward/mean")
    if len(rewards) < 40 or not math.isfinite(x):
        return None
    means = [fmean(rewards[i : i + 10]) for i in range(len(rewards) - 9)]
    best, now = max(means), means[-1]
    if best - now > max(NOISE * jump(rewards), 0.1 * abs(best), 0.5 * (best - means[0])):
        return (
            f"the reward fell from {best:.3g} to {now:.3g} (means of 10 steps): lower actor.lr, "
            "add loss.use_kl_loss, go back to an earlier checkpoint; or the data became harder"
        )
    return None


@diagnosis("warning", "reward/max")
def reward_outlier(s: Step, x: float) -> str | None:
    lowest, usual_lowest, usual = s["reward/min"], s.usual("reward/min"), s.usual()
    if max(abs(x), abs(lowest)) > 10 * (1 + abs(usual) + abs(usual_lowest)):
        return (
            f"rewards from {lowest:.4g} to {x:.4g}, usual are {usual_lowest:.3g} to {usual:.3g}: "
            "one outlier outweighs its group: bound the reward"
        )
    return None


@diagnosis("warning", "reward/error")
def rewards_failed(s: Step, x: float) -> str | None:
    if x > 0:
        return f"{x:.0f} of the rewards raised and were left out: `error` in rollouts/ has the tracebacks"
    return None


@diagnosis("warning", "reward/timeout")
def rewards_late(s: Step, x: float) -> str | None:
    if x > 0:
        return (
            f"{x:.0f} of the rewards took over reward.timeout_s={s.knob('reward.timeout_s')} and were left out: "
            "raise it, or a faster rule"
        )
    return None


@diagnosis("warning", "rollout/groups_lost")
def groups_lost(s: Step, x: float) -> str | None:
    if x > 0:
        return (
            f"{x:.0f} of the groups lost a session: rollouts/*.failed.jsonl has the tracebacks; "
            f"rollout.failed_groups={s.knob('rollout.failed_groups')}"
        )
    return None


@diagnosis("warning", "agent/tool_errors/mean")
def tools_fail(s: Step, x: float) -> str | None:
    calls = s["agent/tool_calls/mean"]
    if x > 0.5 * calls > 0:
        return (
            f"{x / calls:.0%} of the tool calls failed: read rollouts/: "
            "the policy's format is not agent.format, or the tool is not in agent.tools"
        )
    return None


@diagnosis("warning", "rollout/gen_batches")
def many_batches(s: Step, x: float) -> str | None:
    if x > 1 and x >= 0.8 * s.knob("algorithm.max_num_gen_batches", 10):
        most = s.knob("algorithm.max_num_gen_batches")
        return (
            f"a step took {x:.0f} batches, and after algorithm.max_num_gen_batches={most} the run stops: "
            "raise it, or drop prompts always or never solved"
        )
    return None


@diagnosis("note", "data.val_files")
def no_validation(s: Step, x: float) -> str | None:
    is_first_step = not s.before
    if is_first_step and "data" in s.knobs and not s.knob("data.val_files", ()):
        return "no validation is configured: how good the policy is on what it has not seen stays unknown"
    return None


@diagnosis("warning", "val/error")
def validation_failed(s: Step, x: float) -> str | None:
    failures = [
        name for name in s.m if name in ("val/error", "val/timeout") or re.fullmatch("val/.+/failed_sessions", name)
    ]
    if any(s[name] > 0 for name in failures):
        return (
            "sessions of the validation failed or could not be scored, and count as wrong: "
            "see rollouts/val-*.failed.jsonl, and `error` in rollouts/val-*"
        )
    return None


@diagnosis("warning", "checkpoint.best_metric")
def validation_fell(s: Step, x: float) -> str | None:
    """Any validation score, twice in a row below an earlier one by more than its standard errors.

    And the training reward is above that of then.
    """
    for name in filter(is_validation, s.m):
        numbers = [number(record, name) for record in s.before]
        earlier = [(value, place) for place, value in enumerate(numbers) if math.isfinite(value)]
        if not earlier:
            continue
        best, place = max(earlier)
        last, _ = earlier[-1]
        now = s[name]
        fell = best - max(now, last) > NOISE * s[f"{name}/stderr"]
        rewards = column(s.before[-USUAL:], "reward/mean")
        then = center(column(s.before[max(place - 2, 0) : place + 3], "reward/mean"), 1)
        later = center(rewards[-SPAN:], SPAN)
        if fell and later > then + 2 * jump(rewards):
            return (
                f"{name} fell from {best:.3g} (step {s.before[place].get('step')}) to {now:.3g} "
                f"while the training reward rose from {then:.3g} to {later:.3g}: "
                "overfitting, or a reward that can be gamed: read rollouts/, take an earlier checkpoint"
            )
    return None


@diagnosis("warning", "timing_s/idle")
def engine_idle(s: Step, x: float) -> str | None:
    gen = s.recent("timing_s/gen")
    if s.recent() > IDLE * gen > IDLE * MIN_GEN_S:
        return (
            f"the engine waits for tools and rewards for {s.recent() / gen:.0%} of the generation: "
            "reward.num_workers, agent.tool_workers, a faster rule"
        )
    return None


@diagnosis("warning", "timing_s/gen/max")
def engine_late(s: Step, x: float) -> str | None:
    mean = s.recent("timing_s/gen/mean")
    if s.recent() > LATE * mean > LATE * MIN_GEN_S:
        return (
            f"the slowest engine takes {s.recent():.1f} s, the mean {mean:.1f} s, and all wait: "
            "long responses or slow tools: data.max_response_length, rollout.session_timeout_s"
        )
    return None


@diagnosis("warning", "perf/token_imbalance")
def ranks_uneven(s: Step, x: float) -> str | None:
    if s.recent() > UNEVEN:
        return (
            f"the fullest rank trains on {s.recent():.0%} more tokens than the mean: a larger actor.ppo_mini_batch_size"
        )
    return None


@diagnosis("warning", "perf/gen_tokens_per_s")
def slowed(s: Step, x: float) -> str | None:
    """Both kinds of throughput, since one alone falls with the responses' length."""
    gen = center(s.lately("perf/gen_tokens_per_s", 3), 3)
    train = center(s.lately("perf/train_tokens_per_s", 3), 3)
    was_gen = s.usual("perf/gen_tokens_per_s")
    was_train = s.usual("perf/train_tokens_per_s")
    if gen < was_gen / 2 and train < was_train / 2 and s["timing_s/step"] > MIN_GEN_S:
        return (
            f"{gen:.0f} tokens/s are generated and {train:.0f} trained on, usual were {was_gen:.0f} and "
            f"{was_train:.0f}: something else uses the machine, or it throttles"
        )
    return None


@diagnosis("warning", "timing_s/save_checkpoint")
def saving(s: Step, x: float) -> str | None:
    records = [*s.before[1 - USUAL :], s.m]
    text = "went into saving: raise checkpoint.save_freq, or use a faster disk"
    return time_spent(records, "save_checkpoint", text)
