"""What the doctor's diagnoses are given and share: a step beside those before it, and the decorators that list them.

Nothing but the standard library.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

# In records:
HEAD = 5  # a run's start
SPAN = 5  # "now"
USUAL = 20  # "usual"
TAIL = 500  # what else is kept of the past

TOP = 0.8  # between the lowest reward and the highest: a policy that is nearly always right may well be certain
NOISE = 3  # standard errors, or usual differences between steps, that are no chance
SPENT = 0.3  # share of all time: a third is worth a knob
MIN_RUN_S = 60.0  # of a younger run, shares of time are noise

Level = Literal["problem", "warning", "note"]


class Diagnosis(NamedTuple):
    name: str
    level: Level
    see: str  # the metric or knob to look at
    test: Callable[..., str | None]  # what is wrong, in words, when it is


DIAGNOSES: list[Diagnosis] = []
TRENDS: list[Diagnosis] = []


def diagnosis(level: Level, see: str) -> Callable:
    """Adds a function to DIAGNOSES, under its own name: (a Step, its number of the metric `see`) -> text or None."""
    return partial(add, DIAGNOSES, level, see)


def trend(level: Level, see: str) -> Callable:
    """Adds a function to TRENDS, under its own name: (all records of a run) -> text or None."""
    return partial(add, TRENDS, level, see)


def add(rows: list[Diagnosis], level: Level, see: str, test: Callable) -> Callable:
    rows.append(Diagnosis(test.__name__, level, see, test))
    return test


def number(record: dict, name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def column(records: list[dict], name: str) -> list[float]:
    """The numbers there are, oldest first."""
    values = [number(record, name) for record in records]
    return [value for value in values if math.isfinite(value)]


def center(values: list[float], least: int) -> float:
    """The median; NaN of fewer values than `least`."""
    return median(values) if len(values) >= least else math.nan


def jump(values: list[float]) -> float:
    """The usual difference between two steps."""
    return center([abs(b - a) for a, b in pairwise(values)], 1)


def quarters(records: list[dict], name: str) -> tuple[float, float]:
    """Mean of the first and of the last quarter; NaN below 20 numbers."""
    values = column(records, name)
    n = len(values) // 4
    if n < SPAN:
        return math.nan, math.nan
    return fmean(values[:n]), fmean(values[-n:])


def is_validation(name: str) -> bool:
    return bool(re.fullmatch(r"val/.+/mean@\d+", name))


def time_spent(records: list[dict], phase: str, text: str) -> str | None:
    """The text, with the phase's share of all time before it, when that share is large."""
    spent = sum(column(records, f"timing_s/{phase}"))
    total = sum(column(records, "timing_s/step"))
    if spent > SPENT * total > SPENT * MIN_RUN_S:
        return f"{spent / total:.0%} of {total:.0f} s {text}"
    return None


class Step:
    """A record beside those before it, as the diagnosis of one metric looks at it; s["reward/max"] is its number there.

    What is missing, null or not yet known is NaN: no comparison with it is true, so nothing is found.
    lately, recent, then, first and usual are of the metric that they name, else of the diagnosis' own. All but lately
    are medians.
    """

    def __init__(self, m: dict, before: list[dict], knobs: dict[str, dict], metric: str):
        self.m = m
        self.head = before[:HEAD]
        self.before = before[-TAIL:]
        self.knobs = knobs
        self.metric = metric

    def __getitem__(self, name: str) -> float:
        return number(self.m, name)

    def knob(self, name: str, default: Any = None) -> Any:
        group, leaf = name.split(".")
        value = (self.knobs.get(group) or {}).get(leaf)
        return default if value is None else value

    def lately(self, name: str | None = None, most: int = SPAN) -> list[float]:
        """The numbers of this step and of those before it, `most` in all.

        None of them when this step has no number or the run is younger.
        """
        name = name or self.metric
        values = column([*self.before[1 - most :], self.m], name)
        return values if len(values) == most and math.isfinite(self[name]) else []

    def recent(self, name: str | None = None) -> float:
        return center(self.lately(name), SPAN)

    def then(self, name: str | None = None) -> float:
        """What `recent` was 10 steps ago."""
        return center(self.lately(name, 10 + SPAN)[:SPAN], SPAN)

    def first(self, name: str | None = None) -> float:
        """Of the run's first steps."""
        return center(column(self.head, name or self.metric), HEAD)

    def usual(self, name: str | None = None) -> float:
        """Of the steps before this one."""
        return center(column(self.before[-USUAL:], name or self.metric), USUAL // 2)

    @property
    def stalled(self) -> bool:
        """The reward is no higher than 10 steps ago and not near its top: whatever else changed did not help."""
        rewards = self.lately("reward/mean", 10 + SPAN)
        if not rewards:
            return False
        low, high = self["reward/min"], self["reward/max"]
        no_higher = self.recent("reward/mean") <= self.then("reward/mean") + jump(rewards)
        return no_higher and self["reward/mean"] < low + TOP * (high - low)

    @property
    def groups(self) -> str:
        """How many groups the step had, for a text."""
        known = sum(self[f"rollout/groups_{kind}"] for kind in ("informative", "solved", "failed"))
        return f"{known:.0f}" if math.isfinite(known) else str(self.knob("data.train_batch_size", "the"))
