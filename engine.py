"""The in-process vLLM: it drives coroutines that generate, sleeps while the actor trains, wakes to new weights.

One plain way through vLLM, whose private names that it needs are in the shim below. fast/engine.py has a subclass
that overrides how requests enter, steps are taken, weights are loaded and sleep is done.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from host.rank import ToldToStop
from model import own_classes
from policy import Reply, stop_token_ids

VLLM_VERSIONS = ((0, 26), (0, 33))  # from, below: what the shim was run with


def import_vllm() -> Any:
    """vLLM in this process, of a version that the shim knows. ValueError otherwise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        torch._dynamo.config.disable = True  # it would compile the sampler with g++ for half a minute
    import vllm

    if not VLLM_VERSIONS[0] <= version_of(vllm) < VLLM_VERSIONS[1]:
        low, high = (".".join(map(str, v)) for v in VLLM_VERSIONS)
        raise ValueError(
            f"vLLM {vllm.__version__} is installed; Lockstep knows {low} up to, not including, {high} "
            "(see requirements.txt)"
        )
    if not torch.cuda.is_available():
        mend_cpu_build()
    return vllm


def version_of(vllm) -> tuple[int, ...]:
    """(0, 26) of 0.26.0."""
    return tuple(int(x) for x in vllm.__version__.split("+")[0].split(".")[:2])


@functools.cache
def mend_cpu_build() -> None:
    """On the CPU vLLM packs weights so that no new ones reach them, and names shared memory alike in all runs."""
    import vllm.model_executor.layers.utils as layers
    from vllm.distributed.device_communicators import cpu_communicator

    def keep_weights(layer, remove_weight) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = keep_weights
    shared: Any = cpu_communicator._CPUSHMDistributed
    named = shared.make_group_name
    # Else two runs on a machine would share memory, and one that was killed would block the next.
    shared.make_group_name = staticmethod(lambda group: f"{named(group)}-{os.environ['MASTER_PORT']}")


def vllm_model(llm) -> Any:
    """The model that vLLM runs on this rank."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def forbid_tokens_from(model, num_tokens: int) -> None:
    """Ids at or past num_tokens (the padding of the embedding) can't be sampled and have no share in the log-probs."""
    compute_logits = model.compute_logits

    def bounded(*args, **kwargs) -> torch.Tensor | None:
        logits = compute_logits(*args, **kwargs)
        if logits is not None:
            logits[..., num_tokens:] = -torch.inf
        return logits

    model.compute_logits = bounded


def finish_loading(llm) -> None:
    """What vLLM does to weights once they are loaded."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    process_weights_after_loading(vllm_model(llm), llm.llm_engine.model_config, device)


class Engine:
    """vLLM in this process: awake -> sleep() -> asleep -> wake_weights() -> loading -> wake_cache() -> awake, or it
    raises.

    `sync_weights` does the waking. Starts asleep and without weights. With tensor parallelism the first rank of an
    engine leads: it runs the sessions, and before every turn tells the others which requests to add and to abort, so
    that all turn alike."""

    def __init__(self, cfg, tokenizer, tools=None):
        vllm = import_vllm()
        from vllm.distributed import get_tp_group

        self.cfg = cfg
        self.tokenizer = tokenizer
        self.tools = tools
        self.num_tokens = len(tokenizer)
        self.stop_token_ids = [] if cfg.rollout.ignore_eos else stop_token_ids(cfg.actor.path, tokenizer)
        self.sleeps = torch.cuda.is_available() and cfg.rollout.free_cache_engine
        check_gpu_memory(cfg.rollout)
        with own_classes(cfg.actor.path) as given_to:
            self.llm = vllm.LLM(**self.options())
            self.model = vllm_model(self.llm)
            given_to.append(self.model)
        forbid_tokens_from(self.model, self.num_tokens)
        self.ranks = get_tp_group()  # those of this engine: rank_in_group, world_size, broadcast_object from the first
        self.follows = self.ranks.rank_in_group > 0
        self.dtype = getattr(torch, cfg.actor.dtype)
        self.weight_version: int | None = None  # training steps behind the weights it holds; None before the first sync
        self.numbers = itertools.count(1)  # names of requests to come, none of which vLLM ever had
        self.waiting: dict[str, asyncio.Future] = {}  # sessions by their request
        self.to_add: list[tuple] = []  # (name, tokens, params) of requests that the next turn adds
        self.to_abort: list[str] = []
        self.unfinished: set[str] = set()  # requests that vLLM has
        self.news = asyncio.Event()  # a session queued a request, or ended
        self.idle_s = 0.0  # seconds of the last drive in which vLLM had no work
        self.healthy = True  # vLLM did not fail in a turn
        self.state = "awake"
        self.sleep()

    def options(self) -> dict[str, Any]:
        """What vllm.LLM is made with."""
        cfg = self.cfg
        on_gpu = torch.cuda.is_available()
        return {
            "model": cfg.actor.path,
            "dtype": cfg.actor.dtype,
            "load_format": "dummy",  # the weights come from the actor, always
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # not the model's own: the knobs are what is used
            "logprobs_mode": "processed_logprobs",
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": cfg.rollout.tensor_model_parallel_size,
            "seed": cfg.trainer.seed,
            "disable_log_stats": True,
            "max_model_len": cfg.data.max_prompt_length + cfg.data.max_response_length,
            "enable_sleep_mode": self.sleeps,
            "gpu_memory_utilization": cfg.rollout.gpu_memory_utilization,
            "kv_cache_memory_bytes": cfg.rollout.kv_cache_memory_bytes,
            "enforce_eager": cfg.rollout.enforce_eager or not on_gpu,
            "enable_chunked_prefill": on_gpu,  # on the CPU it fails for a seeded prompt that it cuts in two
            "max_num_seqs": cfg.rollout.max_num_seqs,
            "max_num_batched_tokens": cfg.rollout.max_num_batched_tokens,
        }

    def _move(self, expected: str, new: str) -> None:
        if self.state != expected:
            raise RuntimeError(
                f"vLLM is {self.state}, where {expected} is needed to become {new}: the order is sleep, wake weights, "
                "load every tensor, wake the cache, generate"
            )
        self.state = new

    def sleep(self) -> None:
        """Free weights and KV cache on the GPU. Nothing outlives it: no generating before the next sync."""
        self._move("awake", "asleep")
        if self.sleeps:
            self.llm.sleep(level=2)
        else:
            self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End the tools and vLLM, then the process group that it shares with the actor."""
        if self.tools:
            self.tools.close()
        self.llm.llm_engine.engine_core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()

    def wake_weights(self) -> None:
        """Memory for the weights, which `load_weights` then writes."""
        self._move("asleep", "loading")
        if self.sleeps:
            self._make_room()
            self.llm.wake_up(tags=["weights"])

    def _make_room(self) -> None:
        torch.cuda.empty_cache()  # vLLM takes only what torch has given back

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Write a stream of (Hugging Face name, tensor) into vLLM; returns vLLM's names of what was written."""
        if self.state != "loading":
            raise RuntimeError(f"vLLM is {self.state}: weights are loaded between waking them and waking the cache")
        return self._load(weights)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = self.model.load_weights(weights)
        finish_loading(self.llm)
        return loaded

    def wake_cache(self, weight_version: int) -> None:
        """Memory for the KV cache, and leave to generate: sleep cleared the prefix cache of older weights."""
        self._move("loading", "awake")
        if self.sleeps:
            self._make_room()
            self.llm.wake_up(tags=["kv_cache"])
        self.weight_version = weight_version

    async def generate(self, tokens: list[int], sampling, max_tokens: int, seed: int) -> Reply:
        """Queue one request and wait until it is done; `drive` turns the engine. Cancelled, it leaves vLLM too.
        ValueError when vLLM can't take it."""
        self.check_request(tokens, max_tokens)
        name = str(next(self.numbers))
        self.waiting[name] = asyncio.get_running_loop().create_future()
        self.to_add.append((name, tokens, self.sampling_params(sampling, max_tokens, seed)))
        self.news.set()
        try:
            reply = Reply(*await self.waiting[name])
        except asyncio.CancelledError:
            self.waiting.pop(name, None)
            self.to_abort.append(name)
            raise
        assert len(reply.tokens) == len(reply.logprobs), "vLLM gave another number of log-probs than of tokens"
        return reply

    def check_request(self, tokens: list[int], max_tokens: int) -> None:
        """ValueError when vLLM can't continue these tokens."""
        longest = self.llm.llm_engine.model_config.max_model_len - 1
        if not 0 < len(tokens) <= longest or max_tokens < 1 or not 0 <= min(tokens) <= max(tokens) < self.num_tokens:
            ids = f"ids {min(tokens)} to {max(tokens)}" if tokens else "none"
            raise ValueError(
                f"can't continue {len(tokens)} tokens, {ids}, by {max_tokens}: vLLM takes 1 to {longest} tokens of "
                f"ids 0 to {self.num_tokens - 1}, and samples at least 1"
            )

    def sampling_params(self, sampling, max_tokens: int, seed: int) -> Any:
        """vLLM's parameters of a request: the sampled tokens and their log-probs, once they are all there."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            ignore_eos=self.cfg.rollout.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            max_tokens=max_tokens,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # it is of this request alone
        )

    def drive(self, sessions: list[Coroutine], stop: Callable[[], bool] = lambda: False) -> list:
        """Run coroutines that generate, together, until all have ended; their results in order. The first that raises
        ends the others. Once stop() is true all are given up, and ToldToStop is raised. The ranks that follow run
        none: they turn the engine with their leader, and get nothing."""
        if self.follows or self.state != "awake":
            for session in sessions:
                session.close()
        if self.state != "awake":
            raise RuntimeError(f"vLLM is {self.state}: it generates between a sync of the weights and the next sleep")
        self.idle_s = 0.0
        with no_garbage_collection():
            if self.follows:
                while (orders := self.ranks.broadcast_object(None)) is not None:
                    self._turn(*orders)
                return []
            loop = asyncio.new_event_loop()  # asyncio.run would wait for threads and tasks that hang
            try:
                return loop.run_until_complete(self._drive(sessions, stop))
            finally:
                loop.close()

    async def _drive(self, sessions: list[Coroutine], stop: Callable[[], bool]) -> list:
        """Turn the engine whenever it has work; sessions go on as their replies come."""
        self.news = asyncio.Event()
        self.healthy = True
        jobs = [asyncio.ensure_future(session) for session in sessions]
        pending = set(jobs)
        failed: list[BaseException] = []

        def ended(job: asyncio.Future) -> None:
            pending.discard(job)
            self.news.set()
            if not job.cancelled() and (error := job.exception()):
                failed.append(error)

        for job in jobs:
            job.add_done_callback(ended)
        try:
            while pending and not failed:
                if stop():
                    raise ToldToStop
                if await self._has_work():
                    self._lead()
                elif pending and not failed:  # only tools and rewards are at work
                    await self._wait_for_news()
            if failed:
                raise failed[0]
            return [job.result() for job in jobs]
        finally:
            await cancel_other_tasks()
            self.to_abort.extend(self.waiting)
            self.waiting.clear()
            if self.healthy:
                self._lead()
                self.ranks.broadcast_object(None)

    async def _has_work(self) -> bool:
        """Whether vLLM has something to do once sessions that can go on have started, or queued their next turn."""
        for _ in range(4):  # passes of the event loop
            await asyncio.sleep(0)
            if self.to_add or self.to_abort or self.unfinished:
                return True
        return False

    async def _wait_for_news(self) -> None:
        start = time.perf_counter()
        self.news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), 1.0)  # then stop() is asked again
        self.idle_s += time.perf_counter() - start
        self._lead()  # so that a follower's wait never reaches its group's time-out

    def _lead(self) -> None:
        """Tell the ranks of this engine what to do, and do it."""
        orders = self.to_add, self.to_abort
        self.to_add, self.to_abort = [], []
        self.healthy = False
        self.ranks.broadcast_object(orders)
        ended = self._turn(*orders)
        self.healthy = True
        for name, *outcome in ended:
            future = self.waiting.pop(name, None)
            if future and not future.done():
                future.set_result(outcome)

    def _turn(self, requests: list[tuple], aborted: list[str]) -> list[tuple]:
        """One step of vLLM, after adding and aborting what the leader says; what `take_step` says of its end."""
        self.give_orders(requests, aborted)
        self.unfinished.update(name for name, *_ in requests)
        self.unfinished.difference_update(aborted)
        ended = self.take_step() if self.unfinished else []
        self.unfinished.difference_update(name for name, *_ in ended)
        return ended

    def give_orders(self, requests: list[tuple], aborted: list[str]) -> None:
        """Add requests, (name, tokens, params) each, then abort some."""
        for name, tokens, params in requests:
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
        self.llm.llm_engine.abort_request(aborted)

    def take_step(self) -> list[tuple]:
        """A step of vLLM: (name, tokens, log-probs, finish reason) of every request that ended."""
        ended = []
        for request in self.llm.llm_engine.step():
            if request.finished:
                [out] = request.outputs
                tokens, logprobs = list(out.token_ids), list(out.logprobs.logprobs)
                ended.append((request.request_id, tokens, logprobs, out.finish_reason))
        return ended


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """vLLM makes objects for every token and request; looking for cycles among them costs more than it frees."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def cancel_other_tasks() -> None:
    """Cancel every other task of the loop, and give them some time to end; one that holds on is left behind."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=5)


def check_gpu_memory(cfg) -> None:
    """ValueError when the GPU has less free than vLLM is to take (cfg: RolloutConfig)."""
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    asked = cfg.gpu_memory_utilization * total
    if free < asked:
        raise ValueError(
            f"rollout.gpu_memory_utilization={cfg.gpu_memory_utilization} asks for {asked / 2**30:.1f} GiB, but only "
            f"{free / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are free: "
            f"lower it below {free / total:.2f}, or free the GPU"
        )
