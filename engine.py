"""The in-process vLLM engine: it drives coroutines that generate, sleeps while the actor trains, and wakes to new weights.

Every private name of vLLM that Lockstep touches is in the shim at the top.
"""

import asyncio
import contextlib
import copy
import gc
import itertools
import os
import time

import torch
import torch.distributed as dist

from fast.copies import Copies
from fast.decoding import capture_sizes, lean_sampler, use_decode_kernel
from fast.scheduler import OUTCOME, lean_scheduler
from policy import Reply, stop_token_ids

VLLM_VERSIONS = ((0, 26), (0, 33))  # from, below: what the shim was run with
KERNEL_VERSIONS = ((0, 26), (0, 27))  # the same for what replaces kernels of vLLM, which are on GPUs only
SPARE = 2 * 2**30  # bytes of the GPU that are to stay free when vLLM wakes beside what torch keeps for the next update

# The shim: vLLM's private names, and what its CPU build needs.


def import_vllm():
    """vLLM in this process, of a version that the shim knows. ValueError otherwise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        torch._dynamo.config.disable = True  # it would compile the sampler with g++ for half a minute
    else:
        from torch._inductor import config  # noqa: F401 - before vLLM, which would have it compile kernels one at a time, the actor's too
    import vllm

    if not VLLM_VERSIONS[0] <= version_of(vllm) < VLLM_VERSIONS[1]:
        low, high = (".".join(map(str, v)) for v in VLLM_VERSIONS)
        raise ValueError(
            f"vLLM {vllm.__version__} is installed; Lockstep knows {low} up to, not including, {high} (see requirements.txt)"
        )
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = (
        lambda inspect: inspect()
    )  # of a model it has not seen it would import vLLM once more (15 s on a CPU), so as not to touch the GPU: nothing forks here
    if torch.cuda.is_available():
        vllm.SamplingParams.for_sampler_warmup = staticmethod(
            lambda: vllm.SamplingParams(logprobs=0)
        )  # else kernels of penalties and the like are compiled too
    else:
        import vllm.model_executor.layers.utils as layers

        def keep_weights(layer, remove_weight):  # vLLM would pack them into handles that no new weights reach
            layer.cpu_linear = torch.nn.functional.linear

        layers.dispatch_cpu_unquantized_gemm = keep_weights
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as shared

        named = (
            shared.make_group_name
        )  # the same in every run on a machine: two would share memory, and one that was killed would block the next
        shared.make_group_name = staticmethod(lambda communicator: f"{named(communicator)}-{os.environ['MASTER_PORT']}")
    return vllm


def version_of(vllm) -> tuple[int, ...]:
    return tuple(int(x) for x in vllm.__version__.split("+")[0].split(".")[:2])


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


def tensor_parallel_ranks():
    """The ranks of this process's engine: `rank_in_group`, `world_size`, and `broadcast_object` from the first of them."""
    from vllm.distributed import get_tp_group

    return get_tp_group()


def sampling_params(llm, temperature: float, top_p: float, top_k: int, ignore_eos: bool, *stop_token_ids: int):
    """What requests of a kind ask for, as vLLM's front end checks and completes it: the sampled tokens and their log-probs, once they are all there."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "ignore_eos": ignore_eos,
        "stop_token_ids": list(stop_token_ids),
        "max_tokens": 1,
        "seed": 0,
    }
    params = SamplingParams(
        **kind,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
    return llm.llm_engine.input_processor.process_inputs(
        "0", {"prompt_token_ids": [0]}, params, llm.llm_engine.get_supported_tasks()
    ).sampling_params


def past_front_end(llm) -> bool:
    """With a scheduler of scheduler.py's, whose requests end whole, vLLM's front end would only take 70 us of Python a request."""
    return type(llm.llm_engine.engine_core.engine_core.scheduler).__module__ == lean_scheduler.__module__


def give_orders(llm, requests: list[tuple], aborted: list[str]) -> None:
    """Add requests, (name, tokens, params) each, then abort some. What vLLM's front end checks of them, `Engine.generate` did."""
    if not past_front_end(llm):
        for name, tokens, params in requests:
            llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return llm.llm_engine.abort_request(aborted)
    from vllm.v1.request import Request

    core = llm.llm_engine.engine_core.engine_core
    for name, tokens, params in requests:
        core.add_request(
            Request(
                request_id=name,
                prompt_token_ids=tokens,
                sampling_params=params,
                pooling_params=None,
                block_hasher=core.request_block_hasher,
            )
        )
    llm.llm_engine.engine_core.abort_requests(aborted)


def take_step(llm) -> list[tuple]:
    """A step of vLLM; name, tokens, log-probs and finish reason of every request that ended."""
    if past_front_end(llm):
        return [
            (o.request_id, o.new_token_ids, o.kv_transfer_params[OUTCOME], str(o.finish_reason))
            for o in llm.llm_engine.engine_core.get_output().outputs
        ]
    return [
        (out.request_id, list(o.token_ids), list(o.logprobs.logprobs), o.finish_reason)
        for out in llm.llm_engine.step()
        if out.finished
        for o in out.outputs
    ]


def asleep_bytes() -> int:
    """What waking all that sleeps takes."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return sum(data.handle[1] for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.is_asleep)


def finish_loading(llm) -> None:
    """What vLLM does to weights once they are loaded."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(
        vllm_model(llm), llm.llm_engine.model_config, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )


class Engine:
    """vLLM in this process. States: awake -> sleep() -> asleep -> wake_weights() -> loading -> wake_cache() -> awake; any other order raises.

    `sync_weights` does the waking. Starts asleep and without weights. With tensor parallelism the first rank of an engine leads: it
    runs the sessions, and before every turn tells the others which requests to add and to abort, so that all turn alike.
    """

    def __init__(self, cfg, tokenizer, tools=None):
        vllm = import_vllm()
        self.cfg, self.tokenizer, self.num_tokens, self.tools = cfg, tokenizer, len(tokenizer), tools
        self.stop_token_ids = [] if cfg.rollout.ignore_eos else stop_token_ids(cfg.actor.path, tokenizer)
        self.sleeps = torch.cuda.is_available() and cfg.rollout.free_cache_engine
        check_gpu_memory(cfg.rollout)
        check_heads(cfg.actor.path, cfg.rollout.tensor_model_parallel_size)
        kernels = (
            torch.cuda.is_available()
            and cfg.rollout.lean_kernels
            and KERNEL_VERSIONS[0] <= version_of(vllm) < KERNEL_VERSIONS[1]
        )
        if kernels:
            use_decode_kernel()
        self.llm = vllm.LLM(
            model=cfg.actor.path,
            dtype=cfg.actor.dtype,
            load_format="dummy",  # the weights come from the actor, always
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the model's own: the knobs are what is used
            logprobs_mode="processed_logprobs",
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=cfg.rollout.tensor_model_parallel_size,
            seed=cfg.trainer.seed,
            disable_log_stats=True,
            max_model_len=cfg.data.max_prompt_length + cfg.data.max_response_length,
            enable_sleep_mode=self.sleeps,
            gpu_memory_utilization=cfg.rollout.gpu_memory_utilization,
            kv_cache_memory_bytes=cfg.rollout.kv_cache_memory_bytes,
            enforce_eager=cfg.rollout.enforce_eager or not torch.cuda.is_available(),
            enable_chunked_prefill=torch.cuda.is_available(),  # on the CPU it fails for a seeded prompt that it cuts in two
            compilation_config={"cudagraph_capture_sizes": capture_sizes(cfg.rollout.max_num_seqs)}
            if torch.cuda.is_available()
            else None,
            max_num_seqs=cfg.rollout.max_num_seqs,
            max_num_batched_tokens=cfg.rollout.max_num_batched_tokens,
            scheduler_cls=lean_scheduler(asynchronous=torch.cuda.is_available())
            if cfg.rollout.lean_scheduler
            else None,
        )
        if kernels:
            lean_sampler(self.llm.llm_engine.model_executor.driver_worker.model_runner.sampler)
        self.model = vllm_model(self.llm)
        forbid_tokens_from(self.model, self.num_tokens)
        self.ranks = tensor_parallel_ranks()
        self.follows = self.ranks.rank_in_group > 0
        self.dtype = getattr(torch, cfg.actor.dtype)
        self.weight_version = None  # training steps behind the weights it holds
        self.copies, self.params = Copies(), {}  # ways of the weights into vLLM; what requests ask for, by their kind
        self.waiting: dict[str, asyncio.Future] = {}
        self.orders: tuple[list, list] = ([], [])  # requests to add and names to abort at the next turn
        self.news = None  # set when a session queued a request or ended
        self.unfinished, self.numbers, self.idle_s = (
            set(),
            itertools.count(1),
            0.0,
        )  # names of the requests that vLLM has; of those to come, none of which it ever had; seconds
        self.state = "awake"
        self.sleep()

    def _move(self, expected: str, new: str) -> None:
        if self.state != expected:
            raise RuntimeError(
                f"vLLM is {self.state}, where {expected} is needed to become {new}: the order is sleep, wake weights, load every tensor, wake the cache, generate"
            )
        self.state = new

    def sleep(self) -> None:
        """Free weights and KV cache on the GPU. Nothing of a step outlives it: the next one can't generate before a sync."""
        self._move("awake", "asleep")
        if self.sleeps:
            with plain_sleep():
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
        self._move("asleep", "loading")
        if self.sleeps:
            make_room()
            self.llm.wake_up(tags=["weights"])

    def load_weights(self, weights) -> set[str]:
        """Write a stream of (Hugging Face name, tensor) into vLLM; returns vLLM's names of what was written."""
        if self.state != "loading":
            raise RuntimeError(f"vLLM is {self.state}: weights are loaded between waking them and waking the cache")
        return self.copies.load(self.model, weights, lambda: finish_loading(self.llm))

    def wake_cache(self, weight_version: int) -> None:
        """Memory for the KV cache, and leave to generate. Nothing of older weights is in it: going to sleep cleared the prefix cache."""
        self._move("loading", "awake")
        if self.sleeps:
            make_room()
            self.llm.wake_up(tags=["kv_cache"])
        self.weight_version = weight_version

    async def generate(self, tokens: list[int], sampling, max_tokens: int, seed: int) -> Reply:
        """Queue one request and wait until it is done; `drive` turns the engine. Cancelled, it leaves vLLM too. ValueError when vLLM can't take it."""
        longest = self.llm.llm_engine.model_config.max_model_len - 1
        if not 0 < len(tokens) <= longest or not 0 <= min(tokens) <= max(tokens) < self.num_tokens or max_tokens < 1:
            ids = f"ids {min(tokens)} to {max(tokens)}" if tokens else "none"
            raise ValueError(
                f"can't continue {len(tokens)} tokens, {ids}, by {max_tokens}: vLLM takes 1 to {longest} tokens of ids 0 to {self.num_tokens - 1}, and samples at least 1"
            )
        kind = sampling.temperature, sampling.top_p, sampling.top_k, self.cfg.rollout.ignore_eos, *self.stop_token_ids
        if kind not in self.params:
            self.params[kind] = sampling_params(self.llm, *kind)
        params = copy.copy(self.params[kind])  # takes a sixteenth of making it anew
        params.max_tokens, params.seed = max_tokens, seed
        name = str(next(self.numbers))
        self.waiting[name] = asyncio.get_running_loop().create_future()
        self.orders[0].append((name, tokens, params))
        self.news.set()
        try:
            reply = Reply(*await self.waiting[name])
        except asyncio.CancelledError:
            self.waiting.pop(name, None)
            self.orders[1].append(name)
            raise
        assert len(reply.tokens) == len(reply.logprobs), (
            f"vLLM gave {len(reply.tokens)} tokens and {len(reply.logprobs)} log-probs"
        )
        return reply

    def drive(self, sessions: list) -> list:
        """Run coroutines that generate, together, until all have ended; their results in order. The first that raises ends the others.

        The ranks that follow run none: they turn the engine with their leader, and get nothing.
        """
        if self.follows or self.state != "awake":
            for session in sessions:
                session.close()
        if self.state != "awake":
            raise RuntimeError(f"vLLM is {self.state}: it generates between a sync of the weights and the next sleep")
        self.idle_s = 0.0
        with no_garbage_collection():
            if not self.follows:
                loop = asyncio.new_event_loop()  # asyncio.run would wait for threads and tasks that hang
                try:
                    return loop.run_until_complete(self._drive(sessions))
                finally:
                    loop.close()
            while (orders := self.ranks.broadcast_object(None)) is not None:
                self._turn(*orders)
            return []

    async def _drive(self, sessions: list) -> list:
        """Turn the engine whenever it has work; sessions go on as their replies come."""
        self.news = asyncio.Event()
        jobs = [asyncio.ensure_future(session) for session in sessions]
        pending, failed, healthy = set(jobs), [], False

        def ended(job):
            pending.discard(job)
            self.news.set()
            if not job.cancelled() and job.exception():
                failed.append(job.exception())

        for job in jobs:
            job.add_done_callback(ended)
        try:
            while pending and not failed:
                for _ in range(
                    4
                ):  # passes of the event loop, in which sessions start, and queue their first turn or the next one
                    await asyncio.sleep(0)
                    if work := bool(any(self.orders) or self.unfinished):
                        break
                if work:
                    self._lead()
                elif pending and not failed:  # only tools and rewards are at work
                    start = time.perf_counter()
                    self.news.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.news.wait(), 60)
                    self.idle_s += time.perf_counter() - start
                    self._lead()  # so that a follower's wait never reaches its group's time-out
            healthy = True
            if failed:
                raise failed[0]
            return [job.result() for job in jobs]
        finally:
            if left := [
                task for task in asyncio.all_tasks() if task is not asyncio.current_task() and (task.cancel() or True)
            ]:
                await asyncio.wait(left, timeout=5)  # one that holds on is left behind
            self.orders[1].extend(self.waiting)
            self.waiting.clear()
            if healthy:  # vLLM itself did not fail
                self._lead()
                self.ranks.broadcast_object(None)

    def _lead(self) -> None:
        """Tell the ranks of this engine what to do, and do it."""
        orders, self.orders = self.orders, ([], [])
        self.ranks.broadcast_object(orders)
        for name, *outcome in self._turn(*orders):
            if (future := self.waiting.pop(name, None)) and not future.done():
                future.set_result(outcome)

    def _turn(self, requests: list, aborted: list[str]) -> list:
        """One step of vLLM, after adding and aborting what the leader says; what `take_step` says of the requests that it finished."""
        give_orders(self.llm, requests, aborted)
        self.unfinished = self.unfinished.union(name for name, *_ in requests).difference(aborted)
        ended = take_step(self.llm) if self.unfinished else []
        self.unfinished.difference_update(name for name, *_ in ended)
        return ended


@contextlib.contextmanager
def no_garbage_collection():
    """vLLM makes objects for every token and request; looking for cycles among them while generating costs more than it frees."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def plain_sleep():
    """vLLM's sleep without what it does besides: it collects all garbage, some 0.1 s with a step's objects about, which Python's own collections find
    soon enough; it empties torch's cache, which the actor is about to need; and it stops the run when the GPU has less free than before, since
    another process took some meanwhile."""
    collect, empty, memory = gc.collect, torch.cuda.empty_cache, torch.accelerator.get_memory_info
    gc.collect, torch.cuda.empty_cache, torch.accelerator.get_memory_info = (
        lambda *_, **__: 0,
        lambda: None,
        lambda *_: (0, 0),
    )
    try:
        yield
    finally:
        gc.collect, torch.cuda.empty_cache, torch.accelerator.get_memory_info = collect, empty, memory


def make_room() -> None:
    """Have torch give back what it keeps for the next update, unless the GPU has room for that and for what of vLLM is asleep."""
    if torch.cuda.mem_get_info()[0] < asleep_bytes() + SPARE:
        torch.cuda.empty_cache()


def check_gpu_memory(cfg) -> None:
    """ValueError when the GPU has less free than vLLM is to take."""
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    if free < cfg.gpu_memory_utilization * total:
        raise ValueError(
            f"rollout.gpu_memory_utilization={cfg.gpu_memory_utilization} asks for {cfg.gpu_memory_utilization * total / 2**30:.1f} GiB, but only {free / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are free: lower it below {free / total:.2f}, or free the GPU"
        )


def check_heads(path: str, tensor_parallel: int) -> None:
    """ValueError when the model's key-value heads can't be dealt out evenly: vLLM would copy some, and the sum of bits would not prove a sync."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % tensor_parallel:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tensor_parallel} does not divide the {heads} key-value heads of actor.path={path}"
        )
