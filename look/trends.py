"""Diagnoses of a finished run as a whole: what only all its records show."""

import math

from look.step import NOISE, TOP, column, is_validation, jump, quarters, time_spent, trend

ROSE = 0.2  # share of responses cut that came on top


def rose(records: list[dict], name: str, by: float, text: str) -> str | None:
    """The text, and from where to where, when the last quarter is above the first by more than that."""
    first, last = quarters(records, name)
    if last > first + by:
        return f"{text}: {first:.3g} in the first quarter of the run, {last:.3g} in the last"
    return None


@trend("warning", "reward/mean")
def reward_flat(records: list[dict]) -> str | None:
    rewards = column(records, "reward/mean")
    if len(rewards) < 40:
        return None
    first, last = quarters(records, "reward/mean")
    low = min(column(records, "reward/min"), default=math.nan)
    high = max(column(records, "reward/max"), default=math.nan)
    no_higher = last - first < NOISE * jump(rewards) / math.sqrt(len(rewards) / 4)
    if no_higher and last < low + TOP * (high - low):
        return (
            f"the reward did not rise: {first:.3g} in the first quarter of the run, {last:.3g} in the last: "
            "actor.lr, groups without signal (reward/frac_zero_std), or the task"
        )
    return None


@trend("warning", "checkpoint.best_metric")
def validation_worse(records: list[dict]) -> str | None:
    for name in sorted({name for record in records for name in record if is_validation(name)}):
        values, errors = column(records, name), column(records, f"{name}/stderr")
        if values and errors and values[0] - values[-1] > NOISE * errors[-1]:
            return (
                f"{name} ended at {values[-1]:.3g}, below the {values[0]:.3g} that it began with: "
                "an earlier checkpoint is better"
            )
    return None


@trend("warning", "response_length/clip_ratio")
def truncation_rose(records: list[dict]) -> str | None:
    text = "more and more responses are cut at data.max_response_length"
    return rose(records, "response_length/clip_ratio", ROSE, text)


@trend("warning", "correction/k3")
def mismatch_rose(records: list[dict]) -> str | None:
    first, _ = quarters(records, "correction/k3")
    text = "sampler and actor drift apart: actor.dtype, loss.rollout_is"
    return rose(records, "correction/k3", 4 * first + 1e-4, text)


@trend("warning", "perf/max_memory_gb")
def memory_grew(records: list[dict]) -> str | None:
    first, _ = quarters(records, "perf/max_memory_gb")
    return rose(records, "perf/max_memory_gb", 0.3 * first, "memory grows, GiB")


@trend("warning", "timing_s/testing")
def testing_long(records: list[dict]) -> str | None:
    text = "went into validation: raise trainer.test_freq, or lower data.val_max_samples"
    return time_spent(records, "testing", text)


@trend("warning", "timing_s/sync")
def sync_long(records: list[dict]) -> str | None:
    text = "went into sync: raise sync.verify_every, or lower sync.probe_prompts"
    return time_spent(records, "sync", text)
