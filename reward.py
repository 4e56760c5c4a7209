"""Scores: which rule judges a trajectory, the workers that run it under a deadline, and what happens when it fails.

The rules that ship, and the contract of one, are in tasks/rules.py. A rule that raises or passes its deadline could not
tell: the score is NaN, not 0. To add a rule, put it into rules.REWARDS, and the data_source of the rows that it is for
into rules.DATA_SOURCES.
"""

import asyncio
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from batch import Task, Trajectory
from host.lookup import check_bounds, load_function, may_change, nearest, unknown
from host.workers import WorkerDied, WorkerError, WorkerPool, WorkerTimeout
from tasks.rules import DATA_SOURCES, REWARDS, reasoning_gym, reasoning_gym_scorer

Rule = Callable[[Task, Trajectory], float | dict]
TIMEOUT = "TimeoutError"  # how the error of a score that passed its deadline starts


@dataclass(frozen=True)
class RewardConfig:
    name: str | None = None
    """gsm8k, math, math_dapo, countdown, exact or exact_int for every row; not set: by each row's data_source."""
    custom_path: str | None = None
    """`file.py` or `file.py:function` for every row: compute_score(data_source, solution_str, ground_truth, extra_info)
    as in verl, sync or async, returning a number or a dict with `score`."""
    num_workers: int = may_change(min(4, len(os.sched_getaffinity(0))))
    """Processes a rank that run the rule; more than the cores only for a rule that waits, as for a service. By default
    4, or the cores if fewer."""
    timeout_s: float = may_change(10.0)
    """Seconds that one score may take; then its worker is killed and replaced, and the score is NaN."""
    max_failed_fraction: float = may_change(0.1)
    """Stop when more than this share of a step's trajectories could not be scored."""

    def __post_init__(self) -> None:
        if self.name and self.custom_path:
            raise ValueError(
                f"reward.name={self.name!r} and reward.custom_path={self.custom_path!r} are both set: leave one out"
            )
        check_bounds("reward", self, num_workers="[1, inf)", timeout_s="(0, inf)", max_failed_fraction="[0, 1]")


class Scores(Protocol):
    """What a rollout needs of a scorer: Scorer, or one that runs in the process of a test."""

    async def score(self, trajectory: Trajectory) -> None:
        """Fill the trajectory's score, score_parts and error."""


class Scorer:
    """Scores trajectories one by one, as they end, in worker processes."""

    def __init__(self, cfg: RewardConfig, data_sources: Iterable[str] = ()):
        """ValueError for what load_reward refuses. The workers are started, and not waited for."""
        data_sources = sorted(set(data_sources))
        load_reward(cfg, data_sources)
        preload = []  # modules that are imported once, not in every worker
        if not cfg.custom_path:
            preload.append("math_verify")
            if any(name.startswith("reasoning_gym/") for name in data_sources):
                preload.append("reasoning_gym")
        self.cfg = cfg
        self.pool = WorkerPool(functools.partial(load_judge, cfg, data_sources), cfg.num_workers, preload)

    async def score(self, trajectory: Trajectory) -> None:
        """Fill score, score_parts and error from the texts response and answer. Where the rule fails, score is NaN and
        error says why."""
        trajectory.score = math.nan
        trajectory.score_parts = {}
        trajectory.error = None
        fields = dict(vars(trajectory))
        fields["task"] = vars(trajectory.task)
        fields["rollout_logprobs"] = []  # no rule looks at them, and they would be most of the pickle
        try:
            trajectory.score, trajectory.score_parts = await self.pool.call(fields, timeout_s=self.cfg.timeout_s)
        except WorkerDied as e:
            trajectory.error = f"WorkerDied: {e}"
        except WorkerTimeout:
            row = trajectory.task.index
            trajectory.error = (
                f"{TIMEOUT}: the reward of row {row} took more than reward.timeout_s={self.cfg.timeout_s:g}"
            )
        except WorkerError as e:
            trajectory.error = str(e)

    def close(self) -> None:
        self.pool.close()


def load_judge(cfg: RewardConfig, data_sources: list[str]) -> Callable[[dict], tuple[float, dict[str, float]]]:
    """What a worker runs. It loads the rule itself: a user's file can't be pickled."""
    rule = load_reward(cfg, data_sources)

    def judge(fields: dict) -> tuple[float, dict[str, float]]:
        trajectory = Trajectory(Task("", "", None))
        vars(trajectory.task).update(fields.pop("task"))
        vars(trajectory).update(fields)
        return score_and_parts(rule(trajectory.task, trajectory))

    return judge


def score_and_parts(result: Any) -> tuple[float, dict[str, float]]:
    """The score and the other numbers of what a rule returned. TypeError when its score is no finite number. Parts
    that are no numbers (verl's rules return texts beside the score) are left out."""
    named = result if isinstance(result, dict) else {"score": result}
    parts = {name: as_number(value) for name, value in named.items()}
    score = parts.pop("score", None)
    if score is None or not math.isfinite(score):
        raise TypeError(f"a reward must return a finite number, or a dict with one as 'score', not {result!r}")
    return score, {name: number for name, number in parts.items() if number is not None}


def as_number(value: Any) -> float | None:
    """bool, int, float, and scalars of numpy and torch; None for anything else."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float)) else None


def too_many_failed(num_failed: int, num_expected: int, cfg: RewardConfig) -> bool:
    """Whether num_failed of a step's num_expected scores are more than max_failed_fraction. May be asked before all
    scores are there: once it is true it stays true."""
    return num_failed > 0 and num_failed / num_expected > cfg.max_failed_fraction


def check_failures(trajectories: list[Trajectory], cfg: RewardConfig) -> dict[str, float]:
    """Metrics of the failed scores in a whole step, of all ranks. RuntimeError with the first traceback when there are
    more than cfg.max_failed_fraction."""
    errors = [t.error for t in trajectories if t.error]
    if too_many_failed(len(errors), len(trajectories), cfg):
        failed = f"{len(errors)} of {len(trajectories)} trajectories could not be scored"
        raise RuntimeError(
            f"{failed}, more than reward.max_failed_fraction={cfg.max_failed_fraction}; the first:\n{errors[0]}"
        )
    num_late = sum(error.startswith(TIMEOUT) for error in errors)
    return {"reward/error": float(len(errors) - num_late), "reward/timeout": float(num_late)}


def load_reward(cfg: RewardConfig, data_sources: Iterable[str] = ()) -> Rule:
    """The rule that cfg asks for. ValueError when it is not there, or one of the rows' data_sources has no rule."""
    if cfg.custom_path:
        return load_custom(cfg.custom_path)
    if cfg.name:
        if cfg.name not in REWARDS:
            raise unknown("reward.name", cfg.name, REWARDS)
        return REWARDS[cfg.name]
    rules = {data_source: rule_for(data_source) for data_source in sorted(set(data_sources))}

    def by_data_source(task: Task, trajectory: Trajectory) -> float | dict:
        return rules[task.data_source](task, trajectory)

    return by_data_source


def rule_for(data_source: str) -> Rule:
    """The rule that ships for rows of this data_source. ValueError when there is none."""
    if data_source.startswith("reasoning_gym/"):
        reasoning_gym_scorer(data_source)  # ValueError when there is none
        return reasoning_gym
    name = DATA_SOURCES.get(data_source, data_source)
    if data_source.startswith("aime"):  # aime24, aime2025, aime_2024, ...
        name = "math_dapo"
    if name not in REWARDS:
        names = [*REWARDS, *DATA_SOURCES]
        raise ValueError(
            f"no reward is known for data_source {data_source!r}: set reward.name or reward.custom_path, or "
            "data.default_data_source for rows without a data_source"
            f"{nearest(data_source, names)}; known: {', '.join(names)}"
        )
    return REWARDS[name]


@functools.lru_cache(maxsize=1)
def load_custom(custom_path: str) -> Rule:
    """compute_score of a user's file, called as verl calls it. ValueError says what is wrong with the file."""
    path = custom_path
    function = "compute_score"
    if re.search(r"\.py:\w+$", custom_path):
        path, _, function = custom_path.rpartition(":")
    blame = f"reward.custom_path={custom_path!r}"
    compute_score = load_function(path, function, blame)
    if not compute_score:
        raise ValueError(f"{blame}: {path!r} has no function {function!r}")
    try:
        inspect.signature(compute_score).bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except TypeError as e:
        raise ValueError(
            f"{blame}: {function} must take data_source, solution_str, ground_truth and extra_info as keywords: {e}"
        ) from e

    def custom(task: Task, trajectory: Trajectory) -> float | dict:
        result = compute_score(
            data_source=task.data_source,
            solution_str=trajectory.response,
            ground_truth=task.ground_truth,
            extra_info=task.extra_info,
        )
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return custom
