"""What is wrong with a run, or looks wrong and is normal, in words, from its metrics.

Live, Doctor says a finding when it begins; of a finished run, diagnose says each kind once. How they say it is here;
what they look for stands in diagnoses_learning.py and diagnoses_sampling.py, for what a step and those before it show,
and in trends.py, for what only the whole run shows. To add a diagnosis, write one function with one decorator there:

    @diagnosis("warning", "response_length/mean")  # level, and the metric or knob to see
    def too_short(s: Step, x: float) -> str | None:  # its name; x is the metric's number in this step, or NaN
        if x < 2:
            return f"responses have {x:.1f} tokens: raise data.max_response_length"
        return None
"""

import math
from collections import deque
from itertools import groupby
from typing import NamedTuple

# In the order in which a step's findings are said. Importing a file lists its diagnoses.
from look import diagnoses_learning, diagnoses_sampling, trends  # noqa: F401
from look.step import DIAGNOSES, HEAD, TAIL, TRENDS, Level, Step, number

LEVELS = "problem", "warning", "note"
# In records; what comes and goes would flood the console.
AGAIN = 20  # until a finding that lasts is said again
GONE = 5  # without a finding until it has ended


class Finding(NamedTuple):
    name: str
    level: Level
    text: str
    see: str  # the metric or knob to look at

    def __str__(self) -> str:
        return f"{self.text} ({self.see})"


def examine_step(m: dict, before: list[dict], knobs: dict[str, dict]) -> list[Finding]:
    """What a step's record shows beside those before it; knobs is the resolved configuration."""
    findings = []
    for name, level, see, test in DIAGNOSES:
        step = Step(m, before, knobs, see)
        text = test(step, step[see])
        if text:
            findings.append(Finding(name, level, text, see))
    return findings


class Doctor:
    """Looks at every step of a run in turn, and keeps of the past what the diagnoses need.

    Of a run that goes on, show it the earlier records first.
    """

    def __init__(self, knobs: dict[str, dict]):
        self.knobs = knobs
        self.head: list[dict] = []
        self.tail: deque[dict] = deque(maxlen=TAIL)
        self.count = 0  # records that `lines` was shown
        self.seen: dict[str, int] = {}  # a finding's name -> the count when it was last found
        self.said: dict[str, int] = {}  # and when it was last said

    def examine(self, m: dict) -> list[Finding]:
        findings = examine_step(m, [*self.head, *self.tail], self.knobs)
        if len(self.head) < HEAD:
            self.head.append(m)
        else:
            self.tail.append(m)
        return findings

    def lines(self, m: dict) -> list[str]:
        """For the console: a finding when it begins and every 20th step that it lasts, a note once."""
        lines = []
        self.count += 1
        for f in self.examine(m):
            begins = self.count - self.seen.get(f.name, -GONE) > GONE
            is_due = f.level != "note" and (begins or self.count - self.said[f.name] >= AGAIN)
            if f.name not in self.said or is_due:
                lines.append(f"{f.level}: {f}")
                self.said[f.name] = self.count
            self.seen[f.name] = self.count
        return lines


def diagnose(records: list[dict], knobs: dict[str, dict]) -> list[str]:
    """A finished run: each kind of finding once, problems first; or that nothing is wrong, and what was looked for."""
    total = sum("reward/mean" in record or "timing_s/gen" in record for record in records)
    found = [*found_in_steps(records, knobs, total), *found_in_the_whole(records)]
    found.sort(key=lambda pair: LEVELS.index(pair[0]))
    lines = [f"{level}: {text}" for level, text in found]
    if all(level == "note" for level, _ in found):
        lines.insert(0, nothing_found(records, total))
    return lines


def found_in_steps(records: list[dict], knobs: dict[str, dict], total: int) -> list[tuple[Level, str]]:
    """Level and text of each kind of finding, with its steps: the text is the last one's of its longest range."""
    doctor = Doctor(knobs)
    hits: dict[str, dict[int, Finding]] = {}  # name -> {step: finding}
    for place, record in enumerate(records):
        step = number(record, "step")
        for f in doctor.examine(record):
            hits.setdefault(f.name, {})[int(step) if math.isfinite(step) else place] = f
    found = []
    for of_step in hits.values():
        longest, steps = longest_range(list(of_step))
        f = of_step[longest[-1]]
        text = str(f) if f.level == "note" else f"{steps}, {len(of_step)} of {total}: {f}"
        found.append((f.level, text))
    return found


def found_in_the_whole(records: list[dict]) -> list[tuple[Level, str]]:
    found = []
    for _, level, see, test in TRENDS:
        text = test(records)
        if text:
            found.append((level, f"{text} ({see})"))
    return found


def nothing_found(records: list[dict], total: int) -> str:
    """That nothing is wrong, what was looked for, and what the records have no numbers for."""
    known = {name for record in records for name in record}
    looked: list[str] = []
    without: list[str] = []
    for name, _, see, _ in DIAGNOSES + TRENDS:
        is_metric = "/" in see
        if is_metric and see not in known:
            without.append(name)
        else:
            looked.append(name)
    text = f"nothing found that is wrong in {total} steps: looked for {', '.join(looked)}"
    if without:
        text += f"; the records have no numbers for {', '.join(without)}"
    return text


def longest_range(steps: list[int]) -> tuple[list[int], str]:
    """The longest run of consecutive steps, and all in words: "steps 3-17 and 5 others"."""
    by_range = groupby(enumerate(steps), lambda pair: pair[1] - pair[0])  # equal while both count up by one
    ranges = [[step for _, step in group] for _, group in by_range]
    longest = max(ranges, key=len)
    words = f"steps {longest[0]}-{longest[-1]}" if len(longest) > 1 else f"step {longest[0]}"
    others = len(steps) - len(longest)
    if others == 1:
        words += " and 1 other"
    elif others:
        words += f" and {others} others"
    return longest, words
