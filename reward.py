"""Scores: which rule judges a trajectory, the workers that run it under a deadline, and what happens when it fails.

The rules that ship, and the contract of one, are in rules.py. A rule that raises or passes its deadline could not tell: the score is
NaN, not 0. To add a rule, put it into rules.REWARDS, and the data_source of the rows that it is for into rules.DATA_SOURCES.
"""

import asyncio
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batch import Task, Trajectory
from host.lookup import load_function, nearest, unknown
from host.workers import WorkerDied, WorkerError, WorkerPool, WorkerTimeout
from tasks.rules import DATA_SOURCES, REWARDS, reasoning_gym, reasoning_gym_scorer

Rule = Callable[[Task, Trajectory], float | dict]
TIMEOUT = "TimeoutError"  # how the error of a score that passed its deadline starts


@dataclass(frozen=True)
class RewardConfig:
    name: str | None = None
    """gsm8k, math, math_dapo, countdown, exact or exact_int for every row; not set: by each row's data_source."""
    custom_path: str | None = None
    """`file.py` or `file.py:function` for every row: compute_score(data_source, solution_str, ground_truth, extra_info) as in
    verl, sync or async, returning a number or a dict with `score`."""
    num_workers: int = min(4, len(os.sched_getaffinity(0)))
    """Processes a rank that run the rule; more than the cores only for a rule that waits, as for a service. By default 4, or the cores if fewer."""
    timeout_s: float = 10.0
    """Seconds that one score may take; then its worker is killed and replaced, and the score is NaN."""
    max_failed_fraction: float = 0.1
    """Stop when more than this share of a step's trajectories could not be scored."""

    def __post_init__(self):
        if self.name and self.custom_path:
            raise ValueError(
                f"reward.name={self.name!r} and reward.custom_path={self.custom_path!r} are both set: leave one out"
            )
        if self.num_workers < 1:
            raise ValueError(f"reward.num_workers={self.num_workers} must be at least 1")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"reward.timeout_s={self.timeout_s} must be a positive number of seconds")
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"reward.max_failed_fraction={self.max_failed_fraction} must be between 0 and 1")


class Scorer:
    """Scores trajectories one by one, as they end, in worker processes."""

    def __init__(self, cfg: RewardConfig, data_sources: Iterable[str] = ()):
        """ValueError for what load_reward refuses. The workers are started, and not waited for."""
        self.cfg, data_sources = cfg, sorted(set(data_sources))
        load_reward(cfg, data_sources)
        libraries = ["math_verify"] + ["reasoning_gym"] * any(
            name.startswith("reasoning_gym/") for name in data_sources
        )
        preload = [] if cfg.custom_path else libraries  # once, not in every worker
        self.pool = WorkerPool(functools.partial(load_judge, cfg, data_sources), cfg.num_workers, preload)

    async def score(self, trajectory: Trajectory) -> None:
        """Fill score, score_parts and error from the texts response and answer; where the rule fails, score is NaN and error says why."""
        trajectory.score, trajectory.score_parts, trajectory.error = math.nan, {}, None
        fields = {
            **vars(trajectory),
            "task": vars(trajectory.task),
            "rollout_logprobs": [],
        }  # these would be most of the pickle, and are no rule's business
        try:
            trajectory.score, trajectory.score_parts = await self.pool.call(fields, timeout_s=self.cfg.timeout_s)
        except WorkerDied as e:
            trajectory.error = f"WorkerDied: {e}"
        except WorkerTimeout:
            trajectory.error = f"{TIMEOUT}: the reward of row {trajectory.task.index} took more than reward.timeout_s={self.cfg.timeout_s:g}"
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


def score_and_parts(result) -> tuple[float, dict[str, float]]:
    """What a rule returned, as numbers. Parts that are no numbers (verl's rules return texts beside the score) are left out."""
    parts = {k: as_number(v) for k, v in (result if isinstance(result, dict) else {"score": result}).items()}
    value = parts.pop("score", None)
    if value is None or not math.isfinite(value):
        raise TypeError(f"a reward must return a finite number, or a dict with one as 'score', not {result!r}")
    return value, {k: v for k, v in parts.items() if v is not None}


def as_number(value) -> float | None:
    """bool, int, float, and scalars of numpy and torch; None for anything else."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float)) else None


def too_many_failed(num_failed: int, num_expected: int, cfg: RewardConfig) -> bool:
    """Whether num_failed of a step's num_expected scores are more than max_failed_fraction; true early, before all are there, stays true."""
    return num_failed > 0 and num_failed / num_expected > cfg.max_failed_fraction


def check_failures(trajectories: list[Trajectory], cfg: RewardConfig) -> dict[str, float]:
    """Metrics of a whole step's failed scores, of all ranks; RuntimeError with the first traceback when there are too many."""
    errors = [t.error for t in trajectories if t.error]
    if too_many_failed(len(errors), len(trajectories), cfg):
        failed = f"{len(errors)} of {len(trajectories)} trajectories could not be scored"
        raise RuntimeError(
            f"{failed}, more than reward.max_failed_fraction={cfg.max_failed_fraction}; the first:\n{errors[0]}"
        )
    num_late = sum(error.startswith(TIMEOUT) for error in errors)
    return {"reward/error": float(len(errors) - num_late), "reward/timeout": float(num_late)}


def load_reward(cfg: RewardConfig, data_sources: Iterable[str] = ()) -> Rule:
    """The rule that cfg asks for. ValueError when it is not there, or when one of the rows' data_sources has no rule."""
    if cfg.custom_path:
        return load_custom(cfg.custom_path)
    if cfg.name:
        if cfg.name not in REWARDS:
            raise unknown("reward.name", cfg.name, REWARDS)
        return REWARDS[cfg.name]
    rules = {data_source: rule_for(data_source) for data_source in sorted(set(data_sources))}
    return lambda task, trajectory: rules[task.data_source](task, trajectory)


def rule_for(data_source: str) -> Rule:
    if data_source.startswith("reasoning_gym/"):
        reasoning_gym_scorer(data_source)  # ValueError when there is none
        return reasoning_gym
    name = (
        "math_dapo" if data_source.startswith("aime") else DATA_SOURCES.get(data_source, data_source)
    )  # aime24, aime2025, aime_2024, ...
    if name not in REWARDS:
        hint, names = (
            "set reward.name or reward.custom_path, or data.default_data_source for rows without a data_source",
            [*REWARDS, *DATA_SOURCES],
        )
        raise ValueError(
            f"no reward is known for data_source {data_source!r}: {hint}{nearest(data_source, names)}; known: {', '.join(names)}"
        )
    return REWARDS[name]


@functools.lru_cache(maxsize=1)
def load_custom(custom_path: str) -> Rule:
    """compute_score of a user's file, called as verl calls it."""
    path, _, function = custom_path.rpartition(":") if re.search(r"\.py:\w+$", custom_path) else (custom_path, "", "")
    function, blame = function or "compute_score", f"reward.custom_path={custom_path!r}"
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
        row = dict(data_source=task.data_source, ground_truth=task.ground_truth, extra_info=task.extra_info)
        result = compute_score(solution_str=trajectory.response, **row)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return custom
