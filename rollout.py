"""The in-process vLLM engine: it drives agents, sleeps while the actor trains, and wakes to new weights.

Every private name of vLLM that Lockstep touches is in the shim at the top.
"""
import asyncio
import contextlib
import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from agent import AGENTS, Policy, Reply, session_seed, stop_token_ids
from batch import Task, Trajectory, prompt_uid, rank_share

VLLM_VERSIONS = ((0, 26), (0, 33))  # from, below: what the shim was run with


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
    gpu_memory_utilization: float = 0.5
    """Share of the GPU that vLLM takes while it is awake: weights, activations and KV cache."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache instead of what gpu_memory_utilization leaves for it. Needed on the CPU."""
    free_cache_engine: bool = True
    """Sleep while the actor trains: vLLM's weights and KV cache leave the GPU. (On the CPU vLLM cannot, and nothing is freed.)"""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts a minute sooner, generates slower."""
    max_num_seqs: int = 512
    """Most sequences that are generated at once."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one engine step; vLLM's default when not given."""

    def __post_init__(self):
        if self.n < 1:
            raise ValueError(f"rollout.n={self.n} must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"rollout.gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1")
        if self.temperature <= 0:
            raise ValueError(f"rollout.temperature={self.temperature} must be above 0: a greedy policy has no log-probs to learn from (val.temperature may be 0)")
        check_cuts(self, "rollout")


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
        if self.n < 1 or self.temperature < 0:
            raise ValueError(f"val.n={self.n} must be at least 1 and val.temperature={self.temperature} not negative")
        check_cuts(self, "val")


def check_cuts(cfg, group: str) -> None:
    if not 0 < cfg.top_p <= 1 or cfg.top_k < 0:
        raise ValueError(f"{group}.top_p={cfg.top_p} must be above 0 and at most 1, {group}.top_k={cfg.top_k} not negative")


# The shim: vLLM's private names, and what its CPU build needs.


def import_vllm():
    """vLLM in this process, of a version that the shim knows. ValueError otherwise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        torch._dynamo.config.disable = True  # it would compile the sampler with g++ for half a minute
    import vllm

    version = tuple(int(x) for x in vllm.__version__.split("+")[0].split(".")[:2])
    if not VLLM_VERSIONS[0] <= version < VLLM_VERSIONS[1]:
        low, high = (".".join(map(str, v)) for v in VLLM_VERSIONS)
        raise ValueError(f"vLLM {vllm.__version__} is installed; Lockstep knows {low} up to, not including, {high} (see requirements.txt)")
    if not torch.cuda.is_available():
        import vllm.model_executor.layers.utils as layers

        def keep_weights(layer, remove_weight):  # vLLM would pack them into handles that no new weights reach
            layer.cpu_linear = torch.nn.functional.linear

        layers.dispatch_cpu_unquantized_gemm = keep_weights
    return vllm


def vllm_model(llm):
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def forbid_tokens_from(model, num_tokens: int) -> None:
    """Ids at or past num_tokens (the padding of the embedding) can't be sampled and have no share in the log-probs."""
    compute_logits = model.compute_logits

    def bounded(*args, **kwargs):
        logits = compute_logits(*args, **kwargs)
        if logits is not None:
            logits[..., num_tokens:] = -torch.inf
        return logits

    model.compute_logits = bounded


def finish_loading(llm) -> None:
    """What vLLM does to weights once they are loaded."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(vllm_model(llm), llm.llm_engine.model_config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class Engine:
    """vLLM in this process. States: awake -> sleep() -> asleep -> wake_weights() -> loading -> wake_cache() -> awake; any other order raises.

    `sync_weights` does the waking. Starts asleep and without weights.
    """

    def __init__(self, cfg, tokenizer):
        vllm = import_vllm()
        self.cfg, self.tokenizer, self.num_tokens = cfg, tokenizer, len(tokenizer)
        self.stop_token_ids = [] if cfg.rollout.ignore_eos else stop_token_ids(cfg.actor.path, tokenizer)
        self.sleeps = torch.cuda.is_available() and cfg.rollout.free_cache_engine
        check_gpu_memory(cfg.rollout)
        self.llm = vllm.LLM(
            model=cfg.actor.path,
            dtype=cfg.actor.dtype,
            load_format="dummy",  # the weights come from the actor, always
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the model's own: the knobs are what is used
            logprobs_mode="processed_logprobs",
            distributed_executor_backend="external_launcher",
            seed=cfg.trainer.seed,
            disable_log_stats=True,
            max_model_len=cfg.data.max_prompt_length + cfg.data.max_response_length,
            enable_sleep_mode=self.sleeps,
            gpu_memory_utilization=cfg.rollout.gpu_memory_utilization,
            kv_cache_memory_bytes=cfg.rollout.kv_cache_memory_bytes,
            enforce_eager=cfg.rollout.enforce_eager or not torch.cuda.is_available(),
            max_num_seqs=cfg.rollout.max_num_seqs,
            max_num_batched_tokens=cfg.rollout.max_num_batched_tokens,
        )
        self.model = vllm_model(self.llm)
        forbid_tokens_from(self.model, self.num_tokens)
        self.dtype = getattr(torch, cfg.actor.dtype)
        self.weight_version = None  # training steps behind the weights it holds
        self.waiting: dict[str, asyncio.Future] = {}
        self.num_requests = 0
        self.state = "awake"
        self.sleep()

    def _move(self, expected: str, new: str) -> None:
        if self.state != expected:
            raise RuntimeError(f"vLLM is {self.state}, where {expected} is needed to become {new}: the order is sleep, wake weights, load every tensor, wake the cache, generate")
        self.state = new

    def sleep(self) -> None:
        """Free weights and KV cache on the GPU. Nothing of a step outlives it: the next one can't generate before a sync."""
        self._move("awake", "asleep")
        if self.sleeps:
            self.llm.sleep(level=2)
        else:
            self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End vLLM, then the process group that it shares with the actor."""
        self.llm.llm_engine.engine_core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()

    def wake_weights(self) -> None:
        self._move("asleep", "loading")
        if self.sleeps:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])

    def load_weights(self, weights) -> set[str]:
        """Write a stream of (Hugging Face name, tensor) into vLLM; returns vLLM's names of what was written."""
        if self.state != "loading":
            raise RuntimeError(f"vLLM is {self.state}: weights are loaded between waking them and waking the cache")
        loaded = self.model.load_weights(weights)
        finish_loading(self.llm)
        return loaded

    def wake_cache(self, weight_version: int) -> None:
        """Memory for the KV cache, and leave to generate. Nothing of older weights is in it: going to sleep cleared the prefix cache."""
        self._move("loading", "awake")
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.weight_version = weight_version

    async def generate(self, tokens: list[int], sampling, max_tokens: int, seed: int) -> Reply:
        """Queue one request and wait until it is done; `drive` turns the engine."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=max_tokens, seed=seed,
            stop_token_ids=self.stop_token_ids, ignore_eos=self.cfg.rollout.ignore_eos,
            logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self.num_requests += 1
        name = str(self.num_requests)
        self.waiting[name] = asyncio.get_running_loop().create_future()
        self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), params)
        output = await self.waiting[name]
        reply = Reply(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason)
        assert len(reply.tokens) == len(reply.logprobs), f"vLLM gave {len(reply.tokens)} tokens and {len(reply.logprobs)} log-probs"
        return reply

    def run(self, tasks: list[Task], step: int, sampling: RolloutConfig | ValConfig, place: int = 0) -> list[Trajectory]:
        """sampling.n sessions of each task of this rank's share, in one continuously batched loop; trajectories in submission order.

        tasks[0] is prompt number `place` of the step: uids and seeds follow from it.
        """
        if self.state != "awake":
            raise RuntimeError(f"vLLM is {self.state}: it generates between a sync of the weights and the next sleep")
        first, share = rank_share(tasks)
        sessions = []
        for index, task in enumerate(share, place + first):
            prompts: dict = {}  # what the sessions of a prompt encode once
            sessions += [self._session(task, prompts, index, session_id, step, sampling) for session_id in range(sampling.n)]
        return [trajectory for output in self.drive(sessions) for trajectory in output]

    def drive(self, sessions: list) -> list:
        """Run coroutines that generate, together, until all have ended; their results in order. The first that raises ends the others."""
        with no_garbage_collection():
            return asyncio.run(self._drive(sessions))

    async def _session(self, task: Task, prompts: dict, index: int, session_id: int, step: int, sampling) -> list[Trajectory]:
        """One call of the task's agent. uid and seed follow from the prompt's place in the whole step, whatever rank it is on."""
        kind = "train" if sampling is self.cfg.rollout else "val"
        seed = self.cfg.trainer.seed
        policy = Policy(self, task, sampling, session_seed(seed, kind, step, index, session_id), prompts)
        agent = AGENTS[task.agent_name or self.cfg.agent.default_agent_loop]
        output = await agent(task, policy, self.cfg.agent)
        trajectories = output if isinstance(output, list) else [output]
        for i, trajectory in enumerate(trajectories):
            assert trajectory.response_length, f"the agent {agent.__name__} returned a trajectory without a sampled token"
            trajectory.uid = prompt_uid(seed, kind, step, index)
            trajectory.session_id, trajectory.index, trajectory.weight_version = session_id, i, self.weight_version
        return trajectories

    async def _drive(self, sessions: list) -> list:
        """Turn the engine whenever it has work; sessions go on as their replies come."""
        engine, jobs, failed = self.llm.llm_engine, [asyncio.ensure_future(session) for session in sessions], []
        pending = set(jobs)

        def ended(job):
            pending.discard(job)
            if not job.cancelled() and job.exception():
                failed.append(job.exception())

        for job in jobs:
            job.add_done_callback(ended)
        try:
            while pending and not failed:
                await asyncio.sleep(0)  # sessions queue their first turn, or the next one
                if engine.has_unfinished_requests():
                    for output in engine.step():
                        if output.finished:
                            self.waiting.pop(output.request_id).set_result(output.outputs[0])
                elif pending:  # only tools and the like are at work, or results on their way to their session
                    await asyncio.wait(pending, timeout=0.001, return_when=asyncio.FIRST_COMPLETED)
            if failed:
                raise failed[0]
            return [job.result() for job in jobs]
        finally:
            for job in pending:
                job.cancel()
            if self.waiting:
                engine.abort_request(list(self.waiting))
                self.waiting.clear()


@contextlib.contextmanager
def no_garbage_collection():
    """vLLM makes objects for every token and request; looking for cycles among them while generating costs more than it frees."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_gpu_memory(cfg: RolloutConfig) -> None:
    """ValueError when the GPU has less free than vLLM is to take."""
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    if free < cfg.gpu_memory_utilization * total:
        raise ValueError(
            f"rollout.gpu_memory_utilization={cfg.gpu_memory_utilization} asks for {cfg.gpu_memory_utilization * total / 2**30:.1f} GiB, but only {free / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are free: lower it below {free / total:.2f}, or free the GPU"
        )
