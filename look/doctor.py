"""What is wrong with a run, or looks wrong and is normal, in words, from its metrics. Numbers in, words out, nothing but the standard library.

Live, Doctor says a finding when it begins; of a finished run, diagnose says each kind once. To add a diagnosis, put a row into DIAGNOSES,
for what a step and those before it show, or into TRENDS, for what only the whole run shows.
"""

import math
import re
from collections import deque
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Literal, NamedTuple

LEVELS = "problem", "warning", "note"
AGAIN, GONE = (
    20,
    5,
)  # records until a finding that lasts is said again; without it until it has ended: what comes and goes would flood the console
HEAD, SPAN, USUAL, TAIL = 5, 5, 20, 500  # records: a run's start, "now", "usual", and what else is kept of the past

# Beyond what runs that learned have shown (docs/runs, the quickstart): a false alarm costs the next true one its reader.
TRUNCATED, SMALL = (
    0.3,
    32,
)  # share of responses: long reasoning often starts with 0.1 to 0.2 and recovers; tokens: so few are meant to be few, as for a sum
MOSTLY = 0.95  # share of groups without signal, for 10 steps: at 0.6 a run still learns well, at 0.9 the quickstart has solved its task
MISMATCH = {
    "bfloat16": 0.02,
    "float32": 1e-3,
}  # k3: seen were 0.003 in bfloat16, 1e-13 in float32 on a CPU, and TF32 kernels differ more
REJECTED, LOW_ESS = (
    0.5,
    0.7,
)  # shares of the tokens: from here on the correction, not the reward, decides; usual are 0 and 0.99
SPIKE, FAR = (
    10,
    10,
)  # times the usual gradient norm; times actor.grad_clip: at 2 or 3 times, as of small models, clipping only does its work
COLLAPSED, NO_ENTROPY, MORE_ENTROPY = (
    0.1,
    0.01,
    1.0,
)  # share of the first entropy; nats a token, a surprise in some hundred tokens; nats that came on top
TOP = 0.8  # between the lowest reward and the highest: a policy that is nearly always right may well be certain
LARGE_STEP_KL, LARGE_REF_KL, CLIPPED = (
    0.1,
    1.0,
    0.3,
)  # nats a token within a step, where PPO stops at 0.01 to 0.05, and from the reference; share of tokens
LENGTH, ROSE = 3, 0.2  # times the length at the start; share of responses cut that came on top
NOISE = 3  # standard errors, or usual differences between steps, that are no chance
IDLE, LATE, UNEVEN, SPENT = (
    0.3,
    1.5,
    0.3,
    0.3,
)  # shares of generation, times the mean engine, share above the mean rank, share of all time: a third is worth a knob
MIN_GEN_S, MIN_RUN_S = 1.0, 60.0  # below these seconds nobody waits, and shares of time are noise


class Finding(NamedTuple):
    name: str
    level: Literal["problem", "warning", "note"]
    text: str
    see: str  # the metric or knob to look at

    def __str__(self) -> str:
        return f"{self.text} ({self.see})"


def number(record: dict, name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def column(records, name: str) -> list[float]:
    """The numbers there are, oldest first."""
    return [value for value in (number(record, name) for record in records) if math.isfinite(value)]


def center(values: list[float], least: int) -> float:
    return median(values) if len(values) >= least else math.nan


def jump(values: list[float]) -> float:
    """The usual difference between two steps."""
    return center([abs(b - a) for a, b in pairwise(values)], 1)


def is_validation(name: str) -> bool:
    return bool(re.fullmatch(r"val/.+/mean@\d+", name))


class Step:
    """A record beside those before it. What is missing, null or not yet known is NaN: no comparison with it is true, so nothing is found.

    recent, then, first and usual are medians: of the metric that they name, else of the one that the row in DIAGNOSES names.
    """

    def __init__(self, m: dict, before: list[dict], knobs: dict[str, dict]):
        self.m, self.knobs, self.see, self.head, self.before = m, knobs, "", before[:HEAD], before[-TAIL:]

    def __getitem__(self, name: str) -> float:
        return number(self.m, name)

    def knob(self, name: str, default=None):
        group, leaf = name.split(".")
        value = (self.knobs.get(group) or {}).get(leaf)
        return default if value is None else value

    def lately(self, name: str | None = None, most: int = SPAN) -> list[float]:
        """This step's number and those of the steps before it, `most` in all; none when this one has none or the run is younger."""
        values = column([*self.before[1 - most :], self.m], name or self.see)
        return values if len(values) == most and math.isfinite(self[name or self.see]) else []

    def recent(self, name: str | None = None) -> float:
        return center(self.lately(name), SPAN)

    def then(self, name: str | None = None) -> float:
        """What `recent` was 10 steps ago."""
        return center(self.lately(name, 10 + SPAN)[:SPAN], SPAN)

    def first(self, name: str | None = None) -> float:
        return center(column(self.head, name or self.see), HEAD)

    def usual(self, name: str | None = None) -> float:
        """Of the steps before this one."""
        return center(column(self.before[-USUAL:], name or self.see), USUAL // 2)

    @property
    def stalled(self) -> bool:
        """The reward is no higher than 10 steps ago and not near its top: whatever else changed did not help."""
        rewards, low, high = self.lately("reward/mean", 10 + SPAN), self["reward/min"], self["reward/max"]
        return (
            bool(rewards)
            and self.recent("reward/mean") <= self.then("reward/mean") + jump(rewards)
            and self["reward/mean"] < low + TOP * (high - low)
        )

    @property
    def groups(self) -> str:
        known = sum(self[f"rollout/groups_{kind}"] for kind in ("informative", "solved", "failed"))
        return f"{known:.0f}" if math.isfinite(known) else str(self.knob("data.train_batch_size", "the"))


def reward_fell(s: Step, x: float):
    """Means of 10 steps against the best of them, since a single step's is noise."""
    rewards = column([*s.before[-99:], s.m], "reward/mean")
    if len(rewards) < 40 or not math.isfinite(x):
        return None
    means = [fmean(rewards[i : i + 10]) for i in range(len(rewards) - 9)]
    best, now = max(means), means[-1]
    fell = best - now > max(NOISE * jump(rewards), 0.1 * abs(best), 0.5 * (best - means[0]))
    return (
        fell
        and f"the reward fell from {best:.3g} to {now:.3g} (means of 10 steps): lower actor.lr, add loss.use_kl_loss, go back to an earlier checkpoint; or the data became harder"
    )


def validation_fell(s: Step, x: float):
    """Twice in a row below an earlier one by more than its standard errors, while the training reward is above that of then."""
    for name in filter(is_validation, s.m):
        earlier = [
            (number(record, name), place)
            for place, record in enumerate(s.before)
            if math.isfinite(number(record, name))
        ]
        if not earlier:
            continue
        (best, place), now, rewards = max(earlier), s[name], column(s.before[-USUAL:], "reward/mean")
        then, later = (
            center(column(s.before[max(place - 2, 0) : place + 3], "reward/mean"), 1),
            center(rewards[-SPAN:], SPAN),
        )
        if best - max(now, earlier[-1][0]) > NOISE * s[f"{name}/stderr"] and later > then + 2 * jump(rewards):
            fell = f"{name} fell from {best:.3g} (step {s.before[place].get('step')}) to {now:.3g} while the training reward rose from {then:.3g} to {later:.3g}"
            return f"{fell}: overfitting, or a reward that can be gamed: read rollouts/, take an earlier checkpoint"
    return None


def mismatch(s: Step, k3: float):
    top_p, top_k = s.knob("rollout.top_p", 1.0), s.knob("rollout.top_k", 0)
    cut = (
        f"rollout.top_p={top_p}, top_k={top_k} cut what the actor does not: set 1 and 0"
        if top_p < 1 or top_k
        else "check temperature/top_p/dtype or set sync.verify_every=1; loss.rollout_is"
    )
    return (
        k3 > MISMATCH.get(s.knob("actor.dtype"), 0.02)
        and f"the sampler and the actor disagree (k3 {k3:.2g}, probabilities by {s['correction/prob_diff_mean']:.2g} on average): {cut}"
    )


def cut_on_purpose(s: Step, x: float) -> bool:
    """Groups still teach, and no reward is seen to be lost: all are as long, or the limit is small, or those cut earn no less than all do, but for chance."""
    chance = NOISE * s["reward/std"] * ((1 - x) / x / max(s["rollout/num_trajectories"], 1)) ** 0.5
    return s["reward/frac_zero_std"] < 1 and (
        x > 0.99
        or s.knob("data.max_response_length", math.inf) <= SMALL
        or s["reward/mean"] - s["reward/truncated"] <= chance
    )


def slowed(s: Step, x: float):
    """Both kinds of throughput, since one alone falls with the responses' length."""
    (gen, was_gen), (train, was_train) = (
        (center(s.lately(name, 3), 3), s.usual(name)) for name in ("perf/gen_tokens_per_s", "perf/train_tokens_per_s")
    )
    slow = gen < was_gen / 2 and train < was_train / 2 and s["timing_s/step"] > MIN_GEN_S
    return (
        slow
        and f"{gen:.0f} tokens/s are generated and {train:.0f} trained on, usual were {was_gen:.0f} and {was_train:.0f}: something else uses the machine, or it throttles"
    )


def time_spent(records, phase: str, text: str):
    spent, total = (sum(column(records, f"timing_s/{name}")) for name in (phase, "step"))
    return spent > SPENT * total > SPENT * MIN_RUN_S and f"{spent / total:.0%} of {total:.0f} s {text}"


DIAGNOSES = [  # name, level, the metric or knob to see, and the text when it is so
    (
        "rewards_all_low",
        "problem",
        "reward/mean",
        lambda s, x: (
            s["reward/min"] == s["reward/max"] <= 0
            and f"all {s.groups} groups had equal rewards, each {x:.4g}: nothing was learned this step: the task is too hard, or answers are not recognised: read rollouts/; easier data, a reward with parts"
        ),
    ),
    (
        "rewards_all_high",
        "problem",
        "reward/mean",
        lambda s, x: (
            s["reward/min"] == s["reward/max"] > 0
            and f"all {s.groups} groups had equal rewards, each {x:.4g}: nothing was learned this step: the task is too easy, or the reward never differs: other data or algorithm.filter_groups"
        ),
    ),
    (
        "groups_all_equal",
        "problem",
        "reward/frac_zero_std",
        lambda s, x: (
            x == 1
            and s["reward/max"] > s["reward/min"]
            and s.knob("algorithm.adv_estimator", "grpo") not in ("reinforce_plus_plus", "remax")
            and f"all {s.groups} groups had equal rewards: nothing was learned this step: a larger rollout.n, algorithm.filter_groups, data of medium difficulty"
        ),
    ),
    (
        "groups_mostly_equal",
        "warning",
        "reward/frac_zero_std",
        lambda s, x: (
            1 > x
            and min(s.lately(most=10), default=0) > MOSTLY
            and f"{x:.0%} of the groups had equal rewards ({s['reward/frac_zero_std_positive']:.0%} solved), and so for 10 steps: most sampling teaches nothing: algorithm.filter_groups, other data"
        ),
    ),
    (
        "gradient_zero",
        "problem",
        "actor/grad_norm",
        lambda s, x: (
            x == 0
            and s["reward/frac_zero_std"] < 1
            and s["reward/max"] > s["reward/min"]
            and s.knob("algorithm.adv_estimator", "grpo") != "grpo_passk"
            and "the gradient is exactly 0 although rewards differ: every token is masked, rejected or clipped: see algorithm.mask_truncated, loss.rollout_rs, loss.clip_ratio"
        ),
    ),
    (
        "gradient_not_finite",
        "problem",
        "actor/skipped_steps",
        lambda s, x: (
            x > 0
            and f"{x:.0f} {'updates were' if x > 1 else 'update was'} skipped, the gradient was not finite: `python -m look.replay RUN/replays/STEP` shows it; lower actor.lr, or actor.dtype=float32"
        ),
    ),
    (
        "gradient_clipped",
        "warning",
        "actor/grad_norm",
        lambda s, x: (
            min(s.lately(most=USUAL), default=0) > FAR * s.knob("actor.grad_clip", 1.0)
            and f"the gradient's norm ({x:.3g}) was over {FAR} times actor.grad_clip={s.knob('actor.grad_clip')} for {USUAL} steps, and cut down to it: another loss.loss_agg_mode, a larger grad_clip"
        ),
    ),
    (
        "gradient_spike",
        "warning",
        "actor/grad_norm",
        lambda s, x: (
            x > max(SPIKE * s.usual(), s.knob("actor.grad_clip", 1.0))
            and f"the gradient's norm is {x:.3g}, usual is {s.usual():.2g}: read this step's rollouts; actor.grad_clip={s.knob('actor.grad_clip')} bounded it"
        ),
    ),
    (
        "loss_zero",
        "note",
        "actor/grad_norm",
        lambda s, x: (
            s["actor/num_updates"] == 1
            and abs(s["actor/pg_loss"]) < 1e-3
            and x > 0
            and f"the loss is 0 because the ratio is 1 on a step's only update and the advantages add up to 0: normal, the gradient is not 0 but {x:.2g}"
        ),
    ),
    (
        "lr_zero",
        "note",
        "actor/lr",
        lambda s, x: (
            x == 0
            and s["step"] < s.knob("actor.lr_warmup_steps", 0)
            and "the learning rate is 0 in the first step of the warm-up: normal, from the next step on it is not"
        ),
    ),
    (
        "lr_stays_zero",
        "warning",
        "actor/lr",
        lambda s, x: (
            x == 0
            and s["step"] >= s.knob("actor.lr_warmup_steps", 0)
            and "the learning rate is 0, so nothing changes: actor.lr, actor.min_lr_ratio"
        ),
    ),
    (
        "entropy_collapsed",
        "warning",
        "actor/entropy",
        lambda s, x: (
            (s.recent() < NO_ENTROPY or s.recent() < min(COLLAPSED * s.first(), 0.9 * s.then()))
            and s.stalled
            and f"entropy fell from {s.first():.2g} to {s.recent():.2g} and the reward does not rise: nothing new is tried: loss.clip_ratio_high above clip_ratio_low, loss.entropy_coeff, actor.lr"
        ),
    ),
    (
        "entropy_exploded",
        "warning",
        "actor/entropy",
        lambda s, x: (
            s.recent() > max(2 * s.first(), s.first() + MORE_ENTROPY)
            and f"entropy rose from {s.first():.2g} to {s.recent():.2g}: the policy becomes random: a smaller actor.lr, loss.entropy_coeff or loss.clip_ratio_high"
        ),
    ),
    (
        "step_kl",
        "warning",
        "actor/ppo_kl",
        lambda s, x: (
            x > LARGE_STEP_KL
            and f"the policy moved {x:.2g} nats a token within one step: a smaller actor.lr, a larger actor.ppo_mini_batch_size"
        ),
    ),
    (
        "kl_in_loss",
        "warning",
        "actor/kl_loss",
        lambda s, x: (
            x > LARGE_REF_KL
            and "sum" not in s.knob("loss.loss_agg_mode", "token-mean")  # else not by token
            and f"the policy is {x:.2g} nats a token from the reference: raise loss.kl_loss_coef={s.knob('loss.kl_loss_coef')}, or lower actor.lr"
        ),
    ),
    (
        "kl_in_reward",
        "warning",
        "reward/kl",
        lambda s, x: (
            x > LARGE_REF_KL
            and f"the policy is {x:.2g} nats a token from the reference: raise algorithm.kl_coef={s.knob('algorithm.kl_coef')}, lower actor.lr"
        ),
    ),
    (
        "clipped",
        "warning",
        "actor/pg_clipfrac",
        lambda s, x: (
            x > CLIPPED
            and s.knob("loss.loss_mode", "vanilla") != "gspo"  # whose range is narrow on purpose
            and f"{x:.0%} of the tokens were clipped: the step's later updates do little: a smaller actor.lr, fewer updates a step"
        ),
    ),
    ("mismatch", "problem", "correction/k3", mismatch),
    (
        "low_ess",
        "warning",
        "correction/ess",
        lambda s, x: (
            x < LOW_ESS
            and f"the correction's effective sample size is {x:.0%} of the tokens, a few outweigh the others: see correction/k3"
        ),
    ),
    (
        "rejected",
        "warning",
        "correction/rejected_frac",
        lambda s, x: (
            x > REJECTED
            and f"loss.rollout_rs left out {x:.0%} of the tokens: see correction/k3, or widen its thresholds"
        ),
    ),
    (
        "truncated",
        "warning",
        "response_length/clip_ratio",
        lambda s, x: (
            x > TRUNCATED
            and not cut_on_purpose(s, x)
            and f"{x:.0%} of responses hit data.max_response_length={s.knob('data.max_response_length')}: raise it, or see algorithm.overlong_buffer_len"
        ),
    ),
    (
        "truncated_on_purpose",
        "note",
        "response_length/clip_ratio",
        lambda s, x: (
            x > TRUNCATED
            and cut_on_purpose(s, x)
            and f"{x:.0%} of responses hit data.max_response_length={s.knob('data.max_response_length')} and rewards still differ: normal if they are meant to be as long, if the answer comes early or with rollout.ignore_eos, else raise it"
        ),
    ),
    (
        "length_collapsed",
        "warning",
        "response_length/mean",
        lambda s, x: (
            s.recent() < s.first() / LENGTH
            and s.stalled
            and f"responses shrank from {s.first():.0f} tokens to {s.recent():.0f} and the reward does not rise: read rollouts/: a reward that favours short ones; loss.loss_agg_mode"
        ),
    ),
    (
        "length_ran_away",
        "warning",
        "response_length/mean",
        lambda s, x: (
            s.recent() > s.first() * LENGTH
            and s.stalled
            and f"responses grew from {s.first():.0f} tokens to {s.recent():.0f} and the reward does not rise: read rollouts/ for repetition; algorithm.overlong_buffer_len, loss.loss_agg_mode"
        ),
    ),
    ("reward_fell", "warning", "reward/mean", reward_fell),
    (
        "reward_outlier",
        "warning",
        "reward/max",
        lambda s, x: (
            max(abs(x), abs(s["reward/min"])) > 10 * (1 + abs(s.usual()) + abs(s.usual("reward/min")))
            and f"rewards from {s['reward/min']:.4g} to {x:.4g}, usual are {s.usual('reward/min'):.3g} to {s.usual():.3g}: one outlier outweighs its group: bound the reward"
        ),
    ),
    (
        "rewards_failed",
        "warning",
        "reward/error",
        lambda s, x: (
            x > 0 and f"{x:.0f} of the rewards raised and were left out: `error` in rollouts/ has the tracebacks"
        ),
    ),
    (
        "rewards_late",
        "warning",
        "reward/timeout",
        lambda s, x: (
            x > 0
            and f"{x:.0f} of the rewards took over reward.timeout_s={s.knob('reward.timeout_s')} and were left out: raise it, or a faster rule"
        ),
    ),
    (
        "groups_lost",
        "warning",
        "rollout/groups_lost",
        lambda s, x: (
            x > 0
            and f"{x:.0f} of the groups lost a session: rollouts/*.failed.jsonl has the tracebacks; rollout.failed_groups={s.knob('rollout.failed_groups')}"
        ),
    ),
    (
        "tools_fail",
        "warning",
        "agent/tool_errors/mean",
        lambda s, x: (
            x > 0.5 * s["agent/tool_calls/mean"] > 0
            and f"{x / s['agent/tool_calls/mean']:.0%} of the tool calls failed: read rollouts/: the policy's format is not agent.format, or the tool is not in agent.tools"
        ),
    ),
    (
        "many_batches",
        "warning",
        "rollout/gen_batches",
        lambda s, x: (
            x > 1
            and x >= 0.8 * s.knob("algorithm.max_num_gen_batches", 10)
            and f"a step took {x:.0f} batches, and after algorithm.max_num_gen_batches={s.knob('algorithm.max_num_gen_batches')} the run stops: raise it, or drop prompts always or never solved"
        ),
    ),
    (
        "no_validation",
        "note",
        "data.val_files",
        lambda s, x: (
            not s.before
            and "data" in s.knobs
            and not s.knob("data.val_files", ())
            and "no validation is configured: how good the policy is on what it has not seen stays unknown"
        ),
    ),
    (
        "validation_failed",
        "warning",
        "val/error",
        lambda s, x: (
            any(
                s[name] > 0
                for name in s.m
                if name in ("val/error", "val/timeout") or re.fullmatch("val/.+/failed_sessions", name)
            )
            and "sessions of the validation failed or could not be scored, and count as wrong: see rollouts/val-*.failed.jsonl, and `error` in rollouts/val-*"
        ),
    ),
    ("validation_fell", "warning", "checkpoint.best_metric", validation_fell),
    (
        "engine_idle",
        "warning",
        "timing_s/idle",
        lambda s, x: (
            s.recent() > IDLE * s.recent("timing_s/gen") > IDLE * MIN_GEN_S
            and f"the engine waits for tools and rewards for {s.recent() / s.recent('timing_s/gen'):.0%} of the generation: reward.num_workers, agent.tool_workers, a faster rule"
        ),
    ),
    (
        "engine_late",
        "warning",
        "timing_s/gen/max",
        lambda s, x: (
            s.recent() > LATE * s.recent("timing_s/gen/mean") > LATE * MIN_GEN_S
            and f"the slowest engine takes {s.recent():.1f} s, the mean {s.recent('timing_s/gen/mean'):.1f} s, and all wait: long responses or slow tools: data.max_response_length, rollout.session_timeout_s"
        ),
    ),
    (
        "ranks_uneven",
        "warning",
        "perf/token_imbalance",
        lambda s, x: (
            s.recent() > UNEVEN
            and f"the fullest rank trains on {s.recent():.0%} more tokens than the mean: a larger actor.ppo_mini_batch_size"
        ),
    ),
    ("slowed", "warning", "perf/gen_tokens_per_s", slowed),
    (
        "saving",
        "warning",
        "timing_s/save_checkpoint",
        lambda s, x: time_spent(
            [*s.before[1 - USUAL :], s.m],
            "save_checkpoint",
            "went into saving: raise checkpoint.save_freq, or use a faster disk",
        ),
    ),
]


def quarters(records: list[dict], name: str) -> tuple[float, float]:
    """Mean of the first and of the last quarter; NaN below 20 numbers."""
    values = column(records, name)
    n = len(values) // 4
    return (fmean(values[:n]), fmean(values[-n:])) if n >= SPAN else (math.nan, math.nan)


def rose(records, name: str, by: float, text: str):
    first, last = quarters(records, name)
    return last > first + by and f"{text}: {first:.3g} in the first quarter of the run, {last:.3g} in the last"


def reward_flat(records):
    rewards, (first, last) = column(records, "reward/mean"), quarters(records, "reward/mean")
    low, high = (
        min(column(records, "reward/min"), default=math.nan),
        max(column(records, "reward/max"), default=math.nan),
    )
    flat = (
        len(rewards) >= 40
        and last - first < NOISE * jump(rewards) / math.sqrt(len(rewards) / 4)
        and last < low + TOP * (high - low)
    )
    return (
        flat
        and f"the reward did not rise: {first:.3g} in the first quarter of the run, {last:.3g} in the last: actor.lr, groups without signal (reward/frac_zero_std), or the task"
    )


def validation_worse(records):
    for name in sorted({name for record in records for name in record if is_validation(name)}):
        values, errors = column(records, name), column(records, f"{name}/stderr")
        if errors and values[0] - values[-1] > NOISE * errors[-1]:
            return f"{name} ended at {values[-1]:.3g}, below the {values[0]:.3g} that it began with: an earlier checkpoint is better"
    return None


TRENDS = [  # as DIAGNOSES, of all records
    ("reward_flat", "warning", "reward/mean", reward_flat),
    ("validation_worse", "warning", "checkpoint.best_metric", validation_worse),
    (
        "truncation_rose",
        "warning",
        "response_length/clip_ratio",
        lambda r: rose(
            r, "response_length/clip_ratio", ROSE, "more and more responses are cut at data.max_response_length"
        ),
    ),
    (
        "mismatch_rose",
        "warning",
        "correction/k3",
        lambda r: rose(
            r,
            "correction/k3",
            4 * quarters(r, "correction/k3")[0] + 1e-4,
            "sampler and actor drift apart: actor.dtype, loss.rollout_is",
        ),
    ),
    (
        "memory_grew",
        "warning",
        "perf/max_memory_gb",
        lambda r: rose(r, "perf/max_memory_gb", 0.3 * quarters(r, "perf/max_memory_gb")[0], "memory grows, GiB"),
    ),
    (
        "testing_long",
        "warning",
        "timing_s/testing",
        lambda r: time_spent(
            r, "testing", "went into validation: raise trainer.test_freq, or lower data.val_max_samples"
        ),
    ),
    (
        "sync_long",
        "warning",
        "timing_s/sync",
        lambda r: time_spent(r, "sync", "went into sync: raise sync.verify_every, or lower sync.probe_prompts"),
    ),
]


def examine_step(m: dict, before: list[dict], knobs: dict[str, dict]) -> list[Finding]:
    """What a step's record shows beside those before it; knobs is the resolved configuration."""
    step = Step(m, before, knobs)
    return [
        Finding(name, level, text, step.see)
        for name, level, step.see, test in DIAGNOSES
        if (text := test(step, step[step.see]))
    ]


class Doctor:
    """Looks at every step of a run in turn, and keeps of the past what the diagnoses need. Of a run that goes on, show it the earlier records first."""

    def __init__(self, knobs: dict[str, dict]):
        self.knobs, self.count, self.seen, self.said = knobs, 0, {}, {}
        self.head, self.tail = [], deque(maxlen=TAIL)

    def examine(self, m: dict) -> list[Finding]:
        findings = examine_step(m, [*self.head, *self.tail], self.knobs)
        (self.head if len(self.head) < HEAD else self.tail).append(m)
        return findings

    def lines(self, m: dict) -> list[str]:
        """For the console: a finding when it begins and every 20th step that it lasts, a note once."""
        lines, self.count = [], self.count + 1
        for f in self.examine(m):
            begins = self.count - self.seen.get(f.name, -GONE) > GONE
            if f.name not in self.said or (f.level != "note" and (begins or self.count - self.said[f.name] >= AGAIN)):
                lines.append(f"{f.level}: {f}")
                self.said[f.name] = self.count
            self.seen[f.name] = self.count
        return lines


def diagnose(records: list[dict], knobs: dict[str, dict]) -> list[str]:
    """A finished run: each kind of finding once, with its steps, problems first; or that nothing is wrong, and what was looked at."""
    doctor, hits = Doctor(knobs), {}  # name -> {step: finding}
    for place, record in enumerate(records):
        step = number(record, "step")
        for f in doctor.examine(record):
            hits.setdefault(f.name, {})[int(step) if math.isfinite(step) else place] = f
    found, total = [], sum(any(name in r for name in ("reward/mean", "timing_s/gen")) for r in records)
    for of_step in hits.values():
        longest, steps = longest_range(list(of_step))
        f = of_step[longest[-1]]
        found.append((f.level, str(f) if f.level == "note" else f"{steps}, {len(of_step)} of {total}: {f}"))
    found += [(level, f"{text} ({see})") for _, level, see, test in TRENDS if (text := test(records))]
    lines = [f"{level}: {text}" for level, text in sorted(found, key=lambda pair: LEVELS.index(pair[0]))]
    if all(level == "note" for level, _ in found):
        known, rows = {name for record in records for name in record}, DIAGNOSES + TRENDS
        without = [name for name, _, see, _ in rows if "/" in see and see not in known]
        looked = f"looked for {', '.join(name for name, *_ in rows if name not in without)}"
        lines.insert(
            0,
            f"nothing found that is wrong in {total} steps: {looked}"
            + (f"; the records have no numbers for {', '.join(without)}" if without else ""),
        )
    return lines


def longest_range(steps: list[int]) -> tuple[list[int], str]:
    """The longest run of consecutive steps, and all in words: "steps 3-17 and 5 others"."""
    ranges = [[step for _, step in group] for _, group in groupby(enumerate(steps), lambda pair: pair[1] - pair[0])]
    longest = max(ranges, key=len)
    words, others = (
        f"steps {longest[0]}-{longest[-1]}" if len(longest) > 1 else f"step {longest[0]}",
        len(steps) - len(longest),
    )
    return longest, words + (f" and {others} other{'s' * (others > 1)}" if others else "")
