"""Groups of sessions: each prompt of a step, its sessions in one continuously batched loop, their deadlines, failures and scores."""

import asyncio
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from agent import find_agent
from batch import Task, Trajectory, gather, group_kind, prompt_uid, rank_share
from host.console import traceback_text
from policy import Policy, PromptTooLong, decode, session_seed
from reward import check_failures, too_many_failed


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
    session_timeout_s: float = 1800.0
    """Seconds that a session may take, from the start of the rollout; one that takes longer has failed."""
    group_timeout_s: float = 3600.0
    """Seconds that a prompt's sessions and their scores may take; what has not ended by then has failed."""
    failed_groups: Literal["drop", "survivors", "refill", "raise"] = "drop"
    """When a session of a group failed: drop the group, train on its survivors, refill with fresh prompts, or raise."""
    max_failed_fraction: float = 0.5
    """Stop when more than this share of a step's groups failed."""
    tensor_model_parallel_size: int = 1
    """Ranks that share one vLLM; each engine of so many GPUs samples its share of the prompts."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU that vLLM takes while it is awake: weights, activations and KV cache."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache instead of what gpu_memory_utilization leaves for it. Needed on the CPU."""
    free_cache_engine: bool = True
    """Sleep while the actor trains: vLLM's weights and KV cache leave the GPU. (On the CPU vLLM cannot, and nothing is freed.)"""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts a minute sooner, generates slower."""
    lean_scheduler: bool = True
    """Schedule with scheduler.py, which requests reach without vLLM's front end: less Python a token and a request than vLLM's own, for the same tokens and log-probs."""
    lean_kernels: bool = True
    """On a GPU with vLLM 0.26, decode with kernels.py's attention and sample with decoding.py, not vLLM's own: same distribution, other random numbers."""
    max_num_seqs: int = 512
    """Most sequences that are generated at once."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one engine step; vLLM's default when not given."""

    def __post_init__(self):
        check_sampling(self, "rollout")
        if not 0 < self.gpu_memory_utilization <= 1 or not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(
                f"rollout.gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1, rollout.max_failed_fraction={self.max_failed_fraction} in 0..1"
            )
        if self.temperature == 0:
            raise ValueError(
                "rollout.temperature=0.0 must be above 0: a greedy policy has no log-probs to learn from (val.temperature may be 0)"
            )
        for knob in (
            "session_timeout_s",
            "group_timeout_s",
            "tensor_model_parallel_size",
            "kv_cache_memory_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
        ):
            value = getattr(self, knob)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"rollout.{knob}={value} must be above 0")
        if self.failed_groups not in ("drop", "survivors", "refill", "raise"):
            raise ValueError(f"rollout.failed_groups={self.failed_groups!r} must be drop, survivors, refill or raise")


@dataclass(frozen=True)
class ValConfig:
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
    if cfg.n < 1 or not 0 <= cfg.temperature < math.inf:
        raise ValueError(
            f"{group}.n={cfg.n} must be at least 1, {group}.temperature={cfg.temperature} a number that is not negative"
        )
    if not 0 < cfg.top_p <= 1 or cfg.top_k < 0:
        raise ValueError(
            f"{group}.top_p={cfg.top_p} must be above 0 and at most 1, {group}.top_k={cfg.top_k} not negative"
        )


@dataclass
class Group:
    """A prompt of a step and its sessions. pending -> running -> finished, or failure when any session raised or passed its deadline."""

    task: Task
    index: int  # place in the step
    status: str = "pending"
    trajectories: list[Trajectory] = field(
        default_factory=list
    )  # of the sessions that ended well, in the order of their ids
    errors: list[str] = field(default_factory=list)  # of the others, as tracebacks


@dataclass
class Rollout:
    """The sessions of one step, all of one kind: training's or validation's."""

    engine: Any  # engine.Engine
    scorer: Any  # reward.Scorer
    step: int
    sampling: RolloutConfig | ValConfig
    num_unscored: int = 0
    num_expected: int = 0  # trajectories on all ranks
    idle_s: float = 0.0  # that the engine had nothing to do but wait for tools and rewards

    def run(self, tasks: list[Task], place: int = 0) -> list[Group]:
        """sampling.n scored sessions of each task of this engine's share, together; groups in submission order.

        tasks[0] is prompt number `place` of the step: uids and seeds follow from it, whatever rank a prompt is on.
        """
        first, share = rank_share(tasks, self.engine.ranks.world_size)
        groups = [Group(task, index) for index, task in enumerate(share, place + first)]
        self.num_expected += self.sampling.n * len(tasks)
        self.engine.drive([self.run_group(group) for group in groups])
        self.idle_s += self.engine.idle_s
        return [] if self.engine.follows else groups

    async def run_group(self, group: Group) -> None:
        cfg = self.engine.cfg
        group.status, prompts = "running", {}  # what the sessions of a prompt encode once
        key = cfg.trainer.seed, "train" if self.sampling is cfg.rollout else "val", self.step, group.index
        uid = prompt_uid(*key)
        jobs = [
            asyncio.ensure_future(self.run_session(group, session_id, key, uid, prompts))
            for session_id in range(self.sampling.n)
        ]
        try:
            await asyncio.wait(jobs, timeout=cfg.rollout.group_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            late = [job for job in jobs if not job.done() and job.cancel()]
            raised = [job.exception() for job in jobs if job.done() and not job.cancelled() and job.exception()]
        for error in raised:  # what a session does not take for its own failure is to stop the run
            raise error
        for session_id, job in enumerate(jobs):
            if job in late:
                group.errors.append(
                    f"session {session_id} and its scores had not ended after rollout.group_timeout_s={cfg.rollout.group_timeout_s}\n"
                )
            elif isinstance(job.result(), str):
                group.errors.append(job.result())
            else:
                group.trajectories += job.result()
        group.status = "failure" if group.errors else "finished"

    async def run_session(
        self, group: Group, session_id: int, key: tuple, uid: str, prompts: dict
    ) -> list[Trajectory] | str:
        """One call of the task's agent, and the scores of what it returned; a traceback when it raised or took too long."""
        cfg, task = self.engine.cfg, group.task
        policy = Policy(self.engine, task, self.sampling, session_seed(*key, session_id), prompts)
        agent = find_agent(task, cfg.agent)
        try:
            async with asyncio.timeout(cfg.rollout.session_timeout_s) as deadline:
                trajectories = check_output(
                    await agent(task, policy, cfg.agent), agent.__name__, cfg.data, self.engine.num_tokens
                )
        except PromptTooLong:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise  # the rollout gives this session up; else it is the agent's own doing
            late = isinstance(error, TimeoutError) and deadline.expired()
            why = (
                f"session {session_id} had not ended after rollout.session_timeout_s={cfg.rollout.session_timeout_s}\n"
                if late
                else traceback_text()
            )
            if cfg.rollout.failed_groups == "raise":
                raise RuntimeError(f"a session failed, and rollout.failed_groups=raise:\n{why}") from None
            return why
        for index, t in enumerate(trajectories):
            t.uid, t.session_id, t.index, t.weight_version = uid, session_id, index, self.engine.weight_version
            t.response = decode(t.tokens[t.prompt_length :], self.engine.tokenizer)
            t.answer = t.response if t.num_turns == 1 else decode(t.last_turn, self.engine.tokenizer)
        scores = [self.scorer.score(t) for t in trajectories]
        await (
            asyncio.gather(*scores) if len(scores) > 1 else scores[0]
        )  # a task of its own for one would be most of its cost
        errors = [t.error for t in trajectories if t.error]
        self.num_unscored, self.num_expected = (
            self.num_unscored + len(errors),
            self.num_expected + len(trajectories) - 1,
        )
        if too_many_failed(self.num_unscored, self.num_expected, cfg.reward):
            raise RuntimeError(
                f"{self.num_unscored} of {self.num_expected} trajectories could not be scored, more than reward.max_failed_fraction={cfg.reward.max_failed_fraction}; one of them:\n{(errors or [''])[0]}"
            )
        return trajectories


def check_output(output, agent: str, cfg, num_tokens: int) -> list[Trajectory]:
    """What an agent returned, if it is what an agent may return. ValueError says what is wrong with it. Fills in a finish_reason that it left out."""
    trajectories = output if isinstance(output, list) else [output]
    if not trajectories or not all(isinstance(t, Trajectory) for t in trajectories):
        raise ValueError(f"the agent {agent} must return a Trajectory or a list of them, not {output!r:.200}")
    for t in trajectories:
        if 1 not in t.response_mask:
            raise ValueError(f"the agent {agent} returned a trajectory without a sampled token")
        if (
            not len(t.tokens) == len(t.response_mask) == len(t.rollout_logprobs)
            or not 0 <= min(t.tokens) <= max(t.tokens) < num_tokens
        ):
            raise ValueError(
                f"the agent {agent} returned {len(t.tokens)} tokens, {len(t.response_mask)} mask bits and {len(t.rollout_logprobs)} log-probs, ids {min(t.tokens)} to {max(t.tokens)} of {num_tokens}: fill it by observe and act"
            )
        prompt = t.response_mask.index(1)
        if prompt == 0 or None in t.rollout_logprobs or not all(map(math.isfinite, t.rollout_logprobs)):
            raise ValueError(
                f"the agent {agent} returned a trajectory without a prompt, or with a log-prob that is no number: fill it by observe, then act"
            )
        if not all(isinstance(value, (int, float)) for value in t.metrics.values()):
            raise ValueError(f"the agent {agent} returned metrics that are no numbers: {t.metrics!r:.200}")
        response = len(t.tokens) - prompt
        t.finish_reason = t.finish_reason or ("length" if response == cfg.max_response_length else "stop")
        if prompt > cfg.max_prompt_length or response > cfg.max_response_length:
            raise ValueError(
                f"the agent {agent} returned {prompt} + {response} tokens, more than data.max_prompt_length={cfg.max_prompt_length} + data.max_response_length={cfg.max_response_length}"
            )
    return trajectories


def check_groups(groups: list[Group], cfg: RolloutConfig) -> None:
    """RuntimeError with the first traceback when more than cfg.max_failed_fraction of a step's groups failed, or one that is to stop the run."""
    errors = [group.errors[0] for group in groups if group.errors]
    if errors and cfg.failed_groups == "raise":  # one that passed its deadline; others have raised already
        raise RuntimeError(f"a group failed, and rollout.failed_groups=raise:\n{errors[0]}")
    if len(errors) > cfg.max_failed_fraction * len(groups):
        raise RuntimeError(
            f"{len(errors)} of {len(groups)} groups failed, more than rollout.max_failed_fraction={cfg.max_failed_fraction}; the first:\n{errors[0]}"
        )


def usable(groups: list[Group], cfg: RolloutConfig) -> list[Group]:
    """The groups to train on, as cfg.failed_groups says."""
    at_least = 2 if cfg.failed_groups == "survivors" else cfg.n  # a group of one has nothing to be compared with
    return [
        group
        for group in groups
        if group.status == "finished" or len({t.session_id for t in group.trajectories}) >= at_least
    ]


def sample(cfg, engine, scorer, stream, step: int, log) -> list[Trajectory]:
    """A step's scored trajectories, train_batch_size groups of rollout.n sessions: the same list on every rank, in submission order.

    Dynamic sampling (filter_groups) replaces groups whose scores are all equal, and rollout.failed_groups=refill those that failed,
    by fresh prompts, for a bounded number of batches.
    """
    kept, seen, counts, place, seconds = [], [], Counter(), 0, 0.0
    again = cfg.algorithm.filter_groups or cfg.rollout.failed_groups == "refill"
    wanted, most = cfg.data.train_batch_size, cfg.algorithm.max_num_gen_batches if again else 1
    rollout = Rollout(engine, scorer, step, cfg.rollout)
    for batch in range(1, most + 1):
        tasks = stream.next_batch(wanted if cfg.algorithm.filter_groups else wanted - len(kept))  # [P]
        with log.timer("gen"):  # sessions are scored while others still generate
            start = time.perf_counter()
            groups = rollout.run(tasks, place)  # this engine's prompts, G sessions each
            if cfg.algorithm.adv_estimator == "remax":
                greedy = Rollout(engine, scorer, step, ValConfig()).run(tasks, place)
                set_baselines([g.trajectories for g in groups], [g.trajectories for g in greedy])
            seconds += time.perf_counter() - start
            groups, place = gather(groups), place + len(tasks)
        log.failures(f"{step:06d}", groups)
        seen += groups
        log.add(check_failures([t for g in seen for t in g.trajectories], cfg.reward))
        check_groups(seen, cfg.rollout)  # of the step: a refill of one prompt may fail
        alive = [g.trajectories for g in usable(groups, cfg.rollout)]
        kinds = [group_kind(group) for group in alive]
        counts += Counter(kinds) + Counter(lost=len(groups) - len(alive))
        kept += [g for g, kind in zip(alive, kinds) if kind == "informative" or not cfg.algorithm.filter_groups]
        if len(kept) >= wanted:
            break
    if not kept or (again and len(kept) < wanted):
        found = f"{len(kept)} groups to train on, {wanted} are needed: {counts['solved']} groups were solved, {counts['failed']} failed, {counts['lost']} lost a session"
        raise ValueError(
            f"algorithm.max_num_gen_batches={most} batches gave {found}: change the data, or raise it"
            if again
            else f"a batch gave {found}: look into rollouts/*.failed.jsonl"
        )
    took = gather([seconds])  # of every rank: the others wait for the slowest
    log.add(
        {
            "timing_s/gen/max": max(took),
            "timing_s/gen/mean": sum(took) / len(took),
            "timing_s/gen/min": min(took),
            "timing_s/idle": rollout.idle_s,
        }
    )
    log.add(
        {f"rollout/groups_{kind}": counts[kind] for kind in ("informative", "solved", "failed", "lost")}
        | {"rollout/gen_batches": batch}
    )
    return [t for group in kept[:wanted] for t in group]


def set_baselines(groups: list[list[Trajectory]], greedy: list[list[Trajectory]]) -> None:
    """Give every prompt's trajectories the score of its greedy session (remax); without one that has a score they have none either."""
    for group, of_prompt in zip(groups, greedy):
        for trajectory in group:
            trajectory.baseline = of_prompt[-1].score if of_prompt else float("nan")
            if trajectory.baseline != trajectory.baseline:
                trajectory.score, trajectory.error = (
                    float("nan"),
                    of_prompt[-1].error if of_prompt else "the greedy session of this prompt failed\n",
                )
