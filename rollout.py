"""Groups of sessions: a step's prompts sampled in one continuously batched loop, scored; and which groups are kept."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from advantage import ESTIMATORS
from agent import find_agent
from batch import Task, Trajectory, gather, group_kind, prompt_uid, rank_share
from engine import Engine
from host.console import traceback_text
from host.lookup import check_bounds, may_change, unknown
from host.rank import ToldToStop, told, told_to_stop
from policy import Policy, PromptTooLong, decode, session_seed
from reward import Scores, check_failures, too_many_failed

FAILED_GROUPS = ("drop", "survivors", "refill", "raise")
KINDS = ("informative", "solved", "failed", "lost")  # of groups, as they are counted


@dataclass(frozen=True)
class RolloutConfig:
    n: int = 8
    """Sessions a prompt: the group size."""
    temperature: float = 1.0
    """Sampling temperature; the actor's log-probs are of logits / temperature too."""
    top_p: float = 1.0
    """Nucleus sampling. Below 1 the actor does not reproduce the cut: keep 1 in training."""
    top_k: int = 0
    """Sample from the k likeliest tokens, 0 for all. The actor does not reproduce the cut: keep 0 in training."""
    ignore_eos: bool = False
    """Sample on past the end of turn, up to max_response_length (for benchmarks)."""
    session_timeout_s: float = may_change(1800.0)
    """Seconds that a session may take, from the start of the rollout; one that takes longer has failed."""
    group_timeout_s: float = may_change(3600.0)
    """Seconds that a prompt's sessions and their scores may take; what has not ended by then has failed."""
    failed_groups: Literal["drop", "survivors", "refill", "raise"] = "drop"
    """When a session of a group failed: drop the group, train on its survivors, refill with fresh prompts, or raise."""
    max_failed_fraction: float = may_change(0.5)
    """Stop when more than this share of a step's groups failed."""
    tensor_model_parallel_size: int = may_change(1)
    """Ranks that share one vLLM; each engine of so many GPUs samples its share of the prompts."""
    gpu_memory_utilization: float = may_change(0.5)
    """Share of the GPU that vLLM takes while it is awake: weights, activations and KV cache."""
    kv_cache_memory_bytes: int | None = may_change(None)
    """Size of the KV cache instead of what gpu_memory_utilization leaves for it. Needed on the CPU."""
    free_cache_engine: bool = may_change(True)
    """Sleep while the actor trains: vLLM's weights and KV cache leave the GPU. (On the CPU nothing is freed.)"""
    enforce_eager: bool = may_change(False)
    """No CUDA graphs and no compilation: starts a minute sooner, generates slower."""
    lean_engine: bool = may_change(True)
    """Start vLLM and put it to sleep without what no run needs: most CUDA graphs, some kernels, garbage collection."""
    lean_scheduler: bool = may_change(True)
    """Schedule with fast/scheduler.py, past vLLM's front end: less Python a token and a request, the same tokens."""
    lean_kernels: bool = may_change(True)
    """On a GPU with vLLM 0.26, decode by fast/decoding.py and sample by fast/sampling.py, not by vLLM's own: the same
    distribution by other random numbers."""
    max_num_seqs: int = may_change(512)
    """Most sequences that are generated at once."""
    max_num_batched_tokens: int | None = may_change(None)
    """Most tokens of one engine step; vLLM's default when not given."""

    def __post_init__(self):
        check_sampling(self, "rollout")
        check_bounds(
            "rollout",
            self,
            gpu_memory_utilization="(0, 1]",
            max_failed_fraction="[0, 1]",
            session_timeout_s="(0, inf)",
            group_timeout_s="(0, inf)",
            tensor_model_parallel_size="(0, inf)",
            kv_cache_memory_bytes="(0, inf)",
            max_num_seqs="(0, inf)",
            max_num_batched_tokens="(0, inf)",
        )
        if self.temperature == 0:
            raise ValueError(
                "rollout.temperature=0.0 must be above 0: a greedy policy has no log-probs to learn from "
                "(val.temperature may be 0)"
            )
        if self.failed_groups not in FAILED_GROUPS:
            raise unknown("rollout.failed_groups", self.failed_groups, FAILED_GROUPS)


@dataclass(frozen=True)
class ValConfig:
    may_change = True  # all of it, when a run is resumed

    n: int = 1
    """Sessions a validation prompt."""
    temperature: float = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling of validation."""
    top_k: int = 0
    """Sample validation from the k likeliest tokens, 0 for all."""

    def __post_init__(self):
        check_sampling(self, "val")


def check_sampling(cfg: RolloutConfig | ValConfig, group: str) -> None:
    """ValueError when vLLM can't sample so."""
    check_bounds(group, cfg, n="[1, inf)", temperature="[0, inf)", top_p="(0, 1]", top_k="[0, inf)")


@dataclass
class Group:
    """A prompt of a step and its sessions. pending -> running -> finished, or failure when any session raised or
    passed its deadline."""

    task: Task
    index: int  # place in the step
    status: str = "pending"
    trajectories: list[Trajectory] = field(
        default_factory=list
    )  # of sessions that ended well, in the order of their ids
    errors: list[str] = field(default_factory=list)  # of the others, as tracebacks
    uid: str = ""  # of the prompt in this step


@dataclass
class Rollout:
    """The sessions of one step, all of one kind: training's or validation's."""

    engine: Engine
    scorer: Scores
    step: int
    sampling: RolloutConfig | ValConfig
    stop: Callable[[], bool] = lambda: False  # asked while sampling: true gives all sessions up
    num_unscored: int = 0
    num_expected: int = 0  # trajectories on all ranks
    idle_s: float = 0.0  # that the engine had nothing to do but wait for tools and rewards

    def run(self, tasks: list[Task], place: int = 0) -> list[Group]:
        """sampling.n scored sessions of each task of this engine's share, together; groups in submission order.
        tasks[0] is prompt number `place` of the step: uids and seeds follow from it, whatever rank a prompt is on.
        ToldToStop once stop() is true."""
        first, share = rank_share(tasks, self.engine.ranks.world_size)
        groups = [Group(task, index) for index, task in enumerate(share, place + first)]
        self.num_expected += self.sampling.n * len(tasks)
        self.engine.drive([self.run_group(group) for group in groups], self.stop)
        self.idle_s += self.engine.idle_s
        return [] if self.engine.follows else groups

    async def run_group(self, group: Group) -> None:
        """All sessions of a prompt, under rollout.group_timeout_s; fills the group."""
        cfg = self.engine.cfg
        group.status = "running"
        encoded: dict = {}  # what the sessions of a prompt encode once
        split = "train" if self.sampling is cfg.rollout else "val"
        key = cfg.trainer.seed, split, self.step, group.index
        group.uid = prompt_uid(*key)
        jobs = [
            asyncio.ensure_future(self.run_session(group, session_id, key, encoded))
            for session_id in range(self.sampling.n)
        ]
        try:
            await asyncio.wait(jobs, timeout=cfg.rollout.group_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            late = [job for job in jobs if not job.done()]
            for job in late:
                job.cancel()
            ended = [job for job in jobs if job.done() and not job.cancelled()]
            raised = [job.exception() for job in ended if job.exception()]  # asked of all, else asyncio complains
        for error in raised:  # what a session does not take for its own failure is to stop the run
            raise error
        for session_id, job in enumerate(jobs):
            if job in late:
                limit = f"rollout.group_timeout_s={cfg.rollout.group_timeout_s}"
                group.errors.append(f"session {session_id} and its scores had not ended after {limit}\n")
                continue
            outcome = job.result()
            if isinstance(outcome, str):
                group.errors.append(outcome)
            else:
                group.trajectories += outcome
        group.status = "failure" if group.errors else "finished"

    async def run_session(self, group: Group, session_id: int, key: tuple, encoded: dict) -> list[Trajectory] | str:
        """One call of the task's agent, and its scores; a traceback when the agent raised or took too long."""
        cfg, task = self.engine.cfg, group.task
        policy = Policy(self.engine, task, self.sampling, session_seed(*key, session_id), encoded)
        agent = find_agent(task, cfg.agent)
        try:
            async with asyncio.timeout(cfg.rollout.session_timeout_s) as deadline:
                output = await agent(task, policy, cfg.agent)
                trajectories = check_output(output, agent.__name__, cfg.data, self.engine.num_tokens)
        except PromptTooLong:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise  # the rollout gives this session up; else it is the agent's own doing
            why = traceback_text()
            if isinstance(error, TimeoutError) and deadline.expired():
                limit = f"rollout.session_timeout_s={cfg.rollout.session_timeout_s}"
                why = f"session {session_id} had not ended after {limit}\n"
            if cfg.rollout.failed_groups == "raise":
                raise RuntimeError(f"a session failed, and rollout.failed_groups=raise:\n{why}") from None
            return why
        for index, t in enumerate(trajectories):
            t.uid = group.uid
            t.session_id = session_id
            t.index = index
            t.weight_version = self.engine.weight_version
            t.response = decode(t.tokens[t.prompt_length :], self.engine.tokenizer)
            t.answer = t.response if t.num_turns == 1 else decode(t.last_turn, self.engine.tokenizer)
        await self.score(trajectories)
        return trajectories

    async def score(self, trajectories: list[Trajectory]) -> None:
        """Score a session's outputs. RuntimeError as soon as too many of the step's could not be scored."""
        if len(trajectories) == 1:
            await self.scorer.score(trajectories[0])  # a task of its own for one would be most of its cost
        else:
            await asyncio.gather(*map(self.scorer.score, trajectories))
        errors = [t.error for t in trajectories if t.error]
        self.num_unscored += len(errors)
        self.num_expected += len(trajectories) - 1
        reward = self.engine.cfg.reward
        if too_many_failed(self.num_unscored, self.num_expected, reward):
            one_of_them = errors[0] if errors else ""
            raise RuntimeError(
                f"{self.num_unscored} of {self.num_expected} trajectories could not be scored, more than "
                f"reward.max_failed_fraction={reward.max_failed_fraction}; one of them:\n{one_of_them}"
            )


def check_output(output: Any, agent: str, cfg, num_tokens: int) -> list[Trajectory]:
    """What an agent returned, if an agent may return it; ValueError says what is wrong with it (cfg: DataConfig).
    Fills in a finish_reason that the agent left out."""
    trajectories = output if isinstance(output, list) else [output]
    if not trajectories or not all(isinstance(t, Trajectory) for t in trajectories):
        raise ValueError(f"the agent {agent} must return a Trajectory or a list of them, not {output!r:.200}")
    for t in trajectories:
        if wrong := fault(t, cfg, num_tokens):
            raise ValueError(f"the agent {agent} returned {wrong}")
        response = len(t.tokens) - t.prompt_length
        t.finish_reason = t.finish_reason or ("length" if response == cfg.max_response_length else "stop")
    return trajectories


def fault(t: Trajectory, cfg, num_tokens: int) -> str | None:
    """What is wrong with a trajectory that an agent filled."""
    if 1 not in t.response_mask:
        return "a trajectory without a sampled token"
    counts = len(t.tokens), len(t.response_mask), len(t.rollout_logprobs)
    if len(set(counts)) > 1 or not 0 <= min(t.tokens) <= max(t.tokens) < num_tokens:
        return (
            f"{counts[0]} tokens, {counts[1]} mask bits and {counts[2]} log-probs, "
            f"ids {min(t.tokens)} to {max(t.tokens)} of {num_tokens}: fill it by observe and act"
        )
    prompt = t.prompt_length
    response = len(t.tokens) - prompt
    if prompt == 0 or None in t.rollout_logprobs or not all(map(math.isfinite, t.rollout_logprobs)):
        return "a trajectory without a prompt, or with a log-prob that is no number: fill it by observe, then act"
    if not all(isinstance(value, (int, float)) for value in t.metrics.values()):
        return f"metrics that are no numbers: {t.metrics!r:.200}"
    if prompt > cfg.max_prompt_length or response > cfg.max_response_length:
        return (
            f"{prompt} + {response} tokens, more than data.max_prompt_length={cfg.max_prompt_length} + "
            f"data.max_response_length={cfg.max_response_length}"
        )
    return None


def check_groups(groups: list[Group], cfg: RolloutConfig) -> None:
    """RuntimeError with the first traceback when too many of a step's groups failed, or one that is to stop the run."""
    errors = [group.errors[0] for group in groups if group.errors]
    if errors and cfg.failed_groups == "raise":  # one that passed its deadline; others have raised already
        raise RuntimeError(f"a group failed, and rollout.failed_groups=raise:\n{errors[0]}")
    if len(errors) > cfg.max_failed_fraction * len(groups):
        raise RuntimeError(
            f"{len(errors)} of {len(groups)} groups failed, more than "
            f"rollout.max_failed_fraction={cfg.max_failed_fraction}; the first:\n{errors[0]}"
        )


def usable(groups: list[Group], cfg: RolloutConfig) -> list[Group]:
    """The groups to train on, as cfg.failed_groups says."""
    at_least = 2 if cfg.failed_groups == "survivors" else cfg.n  # a group of one has nothing to be compared with
    return [g for g in groups if g.status == "finished" or len({t.session_id for t in g.trajectories}) >= at_least]


def sample(run, step: int) -> list[Trajectory]:
    """A step's scored trajectories: train_batch_size groups of rollout.n sessions (run: train.Run).

    The same list on every rank, in submission order. Dynamic sampling (filter_groups) replaces groups whose scores are
    all equal, and rollout.failed_groups=refill those that failed, by fresh prompts, for a bounded number of batches.
    ToldToStop on every rank when any was told while it sampled. A collective."""
    cfg = run.cfg
    wanted = cfg.data.train_batch_size
    replaces = cfg.algorithm.filter_groups or cfg.rollout.failed_groups == "refill"
    most = cfg.algorithm.max_num_gen_batches if replaces else 1
    rollout = Rollout(run.engine, run.scorer, step, cfg.rollout, told)
    kept: list[list[Trajectory]] = []
    seen: list[Group] = []
    counts: Counter = Counter()
    seconds, place, batches = 0.0, 0, 0
    while len(kept) < wanted and batches < most:
        batches += 1
        tasks = run.stream.next_batch(wanted if cfg.algorithm.filter_groups else wanted - len(kept))  # [P]
        start = time.perf_counter()
        groups = sample_groups(run, rollout, tasks, place)
        seconds += time.perf_counter() - start
        groups = gather(groups)
        place += len(tasks)
        run.log.failures(f"{step:06d}", groups)
        seen += groups
        run.log.add(check_failures([t for group in seen for t in group.trajectories], cfg.reward))
        check_groups(seen, cfg.rollout)  # of the step: a refill of one prompt may fail
        alive = [group.trajectories for group in usable(groups, cfg.rollout)]
        counts["lost"] += len(groups) - len(alive)
        for group in alive:
            kind = group_kind(group)
            counts[kind] += 1
            if kind == "informative" or not cfg.algorithm.filter_groups:
                kept.append(group)
    if not kept or (replaces and len(kept) < wanted):
        raise too_few_groups(len(kept), wanted, counts, most if replaces else None)
    took = gather([seconds])  # of every rank: the others wait for the slowest
    run.log.add({f"rollout/groups_{kind}": counts[kind] for kind in KINDS} | {"rollout/gen_batches": batches})
    run.log.add({"timing_s/gen/max": max(took), "timing_s/gen/mean": sum(took) / len(took)})
    run.log.add({"timing_s/gen/min": min(took), "timing_s/idle": rollout.idle_s})
    return [t for group in kept[:wanted] for t in group]


def sample_groups(run, rollout: Rollout, tasks: list[Task], place: int) -> list[Group]:
    """This engine's groups of `tasks`, with greedy baselines where the estimator needs them. A collective."""
    groups = run_on_all(run, rollout, tasks, place)
    if getattr(ESTIMATORS[run.cfg.algorithm.adv_estimator], "needs_greedy", False):
        greedy = run_on_all(run, Rollout(run.engine, run.scorer, rollout.step, ValConfig(), told), tasks, place)
        set_baselines([group.trajectories for group in groups], [group.trajectories for group in greedy])
    return groups


def run_on_all(run, rollout: Rollout, tasks: list[Task], place: int) -> list[Group]:
    """rollout.run; ToldToStop on all ranks when any was told, so that none begins another without the others. A
    collective."""
    groups: list[Group] = []
    with suppress(ToldToStop):
        groups = rollout.run(tasks, place)
    if told_to_stop(run.actor.device):
        raise ToldToStop
    return groups


def too_few_groups(num_kept: int, wanted: int, counts: Counter, most: int | None) -> ValueError:
    """The error of a step without enough groups, after `most` batches of fresh prompts, if there could be several."""
    found = (
        f"{num_kept} groups to train on, {wanted} are needed: {counts['solved']} groups were solved, "
        f"{counts['failed']} failed, {counts['lost']} lost a session"
    )
    if most is None:
        return ValueError(f"a batch gave {found}: look into rollouts/*.failed.jsonl")
    return ValueError(f"algorithm.max_num_gen_batches={most} batches gave {found}: change the data, or raise it")


def set_baselines(groups: list[list[Trajectory]], greedy: list[list[Trajectory]]) -> None:
    """Give every prompt's trajectories the score of its greedy session (remax). Where that has no score, they have
    none either."""
    for group, of_prompt in zip(groups, greedy):
        for trajectory in group:
            trajectory.baseline = of_prompt[-1].score if of_prompt else math.nan
            if math.isnan(trajectory.baseline):
                trajectory.score = math.nan
                lost = "the greedy session of this prompt failed\n"
                trajectory.error = of_prompt[-1].error if of_prompt else lost
