"""The engine with less Python a request, a token and a sync, and a shorter start. What is sampled stays the same.

Everything here that replaces something of vLLM, with its knob. Run with vLLM 0.26 (CUDA) and 0.32 (CPU);
engine.VLLM_VERSIONS is checked at the start, KERNEL_VERSIONS for what replaces kernels.

    what                                       why                                                knob
    Scheduler (scheduler_cls)                  Python for every token of a request: scheduler.py  rollout.lean_scheduler
    LLMEngine: add_request, abort, step        70 us of Python a request in the front end         rollout.lean_scheduler
    FlashAttentionImpl.forward                 decoding, with shared prompts: decoding.py         rollout.lean_kernels
    the sampler's class                        reads the logits three times: sampling.py          rollout.lean_kernels
    the model's load_weights, from 2nd sync    0.1 ms of Python a tensor: copies.py               sync.replay_copies
    registry._run_in_subprocess                imports vLLM again to look at a model, 15 s        rollout.lean_engine
    SamplingParams.for_sampler_warmup          compiles kernels of penalties and the like         rollout.lean_engine
    cudagraph_capture_sizes                    51 captures, which end at 512 sequences            rollout.lean_engine
    inductor imported after vLLM               vLLM has it compile kernels one at a time          rollout.lean_engine
    gc.collect in sleep                        0.1 s with a step's objects about                  rollout.lean_engine
    torch.cuda.empty_cache in sleep            the actor soon needs what torch keeps              rollout.lean_engine
    torch.accelerator.get_memory_info in sleep ends a run when others take memory meanwhile       rollout.lean_engine
    torch.cuda.empty_cache before a wake       not needed where the GPU has room for both         rollout.lean_engine

What the plain way needs of vLLM (weights that stay unpacked on the CPU, names of shared memory, ids that can't be
sampled) is in engine.py.
"""

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any

import torch

from engine import Engine, finish_loading, import_vllm, version_of

KERNEL_VERSIONS = ((0, 26), (0, 27))  # from, below: what replaces kernels of vLLM was run with these
SPARE = 2 * 2**30  # bytes of the GPU that stay free when vLLM wakes beside what torch keeps for the next update


class LeanEngine(Engine):
    """An Engine that takes the short ways which its knobs allow."""

    def __init__(self, cfg, tokenizer, tools=None):
        on_gpu = torch.cuda.is_available()
        self.lean = cfg.rollout.lean_engine
        self.past_front_end = cfg.rollout.lean_scheduler
        self.params: dict[tuple, Any] = {}  # what requests ask for, by their kind
        self.copies = None
        if cfg.sync.replay_copies:
            from fast.copies import Copies

            self.copies = Copies()
        if self.lean:
            hasten_start()
        kernels = cfg.rollout.lean_kernels and on_gpu and kernels_fit(import_vllm())
        if kernels:
            from fast.decoding import use_decode_kernel

            use_decode_kernel()  # before vLLM captures CUDA graphs
        super().__init__(cfg, tokenizer, tools)
        if kernels:
            from fast import kernels as triton_kernels
            from fast.sampling import lean_sampler

            lean_sampler(self.llm.llm_engine.model_executor.driver_worker.model_runner.sampler, triton_kernels)

    def options(self) -> dict[str, Any]:
        """What vllm.LLM is made with."""
        options = super().options()
        on_gpu = torch.cuda.is_available()
        if self.lean and on_gpu:
            sizes = capture_sizes(self.cfg.rollout.max_num_seqs)
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if self.past_front_end:
            from fast.scheduler import lean_scheduler

            options["scheduler_cls"] = lean_scheduler(asynchronous=on_gpu)
        return options

    def sampling_params(self, sampling, max_tokens: int, seed: int) -> Any:
        """vLLM's parameters of a request, as its front end checks and completes them: once for each kind of request."""
        if not self.past_front_end:
            return super().sampling_params(sampling, max_tokens, seed)
        ignores = self.cfg.rollout.ignore_eos
        kind = sampling.temperature, sampling.top_p, sampling.top_k, ignores, *self.stop_token_ids
        if kind not in self.params:
            asked = super().sampling_params(sampling, max_tokens=1, seed=0)
            engine = self.llm.llm_engine
            request = engine.input_processor.process_inputs(
                "0", {"prompt_token_ids": [0]}, asked, engine.get_supported_tasks()
            )
            self.params[kind] = request.sampling_params
        params = copy.copy(self.params[kind])  # takes a sixteenth of making it anew
        params.max_tokens, params.seed = max_tokens, seed
        return params

    def give_orders(self, requests: list[tuple], aborted: list[str]) -> None:
        """Past vLLM's front end: what it checks of a request, `check_request` did."""
        if not self.past_front_end:
            super().give_orders(requests, aborted)
            return
        from vllm.v1.request import Request

        core = self.llm.llm_engine.engine_core.engine_core
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
        self.llm.llm_engine.engine_core.abort_requests(aborted)

    def take_step(self) -> list[tuple]:
        """A step of the lean scheduler, whose requests end whole."""
        if not self.past_front_end:
            return super().take_step()
        from fast.scheduler import OUTCOME

        ended = self.llm.llm_engine.engine_core.get_output().outputs
        return [(o.request_id, o.new_token_ids, o.kv_transfer_params[OUTCOME], str(o.finish_reason)) for o in ended]

    def _load(self, weights) -> set[str]:
        if self.copies is None:
            return super()._load(weights)
        return self.copies.load(self.model, weights, lambda: finish_loading(self.llm))

    def sleep(self) -> None:
        """Free weights and KV cache on the GPU."""
        with only_sleep() if self.lean and self.sleeps else contextlib.nullcontext():
            super().sleep()

    def _make_room(self) -> None:
        """Have torch give back what it keeps for the next update, unless the GPU has room for that and for vLLM."""
        if not self.lean or torch.cuda.mem_get_info()[0] < asleep_bytes() + SPARE:
            super()._make_room()


def hasten_start() -> None:
    """Import vLLM, and leave out what it does at its start that no run needs."""
    if torch.cuda.is_available():
        from torch._inductor import config  # noqa: F401 - before vLLM, which would have it compile one at a time
    vllm = import_vllm()
    from vllm.model_executor.models import registry

    # vLLM looks at a model that it has not seen in a process of its own, so as not to touch the GPU before it forks.
    registry._run_in_subprocess = lambda inspect: inspect()  # nothing forks here
    if torch.cuda.is_available():
        vllm.SamplingParams.for_sampler_warmup = staticmethod(lambda: vllm.SamplingParams(logprobs=0))


def kernels_fit(vllm) -> bool:
    """Whether the kernels were run with this vLLM."""
    return KERNEL_VERSIONS[0] <= version_of(vllm) < KERNEL_VERSIONS[1]


@contextlib.contextmanager
def only_sleep() -> Iterator[None]:
    """vLLM's sleep without what it does besides."""
    collect = gc.collect
    empty_cache = torch.cuda.empty_cache
    get_memory_info = torch.accelerator.get_memory_info
    gc.collect = lambda *_, **__: 0  # Python's own collections find a step's garbage soon enough
    torch.cuda.empty_cache = lambda: None  # the actor is about to need what torch keeps
    # vLLM stops the run when the GPU has less free than before, as when another process took some meanwhile.
    torch.accelerator.get_memory_info = lambda *_: (0, 0)
    try:
        yield
    finally:
        gc.collect = collect
        torch.cuda.empty_cache = empty_cache
        torch.accelerator.get_memory_info = get_memory_info


def asleep_bytes() -> int:
    """What waking all that sleeps takes."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocated = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocated if data.is_asleep)


def capture_sizes(most: int) -> list[int]:
    """Batch sizes to capture CUDA graphs of, up to `most` sequences: from 64 on an eighth to a quarter apart.

    vLLM's own 51 take longer to start, and end at 512.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + 2 ** (sizes[-1].bit_length() - 3))
    return [size for size in sizes if size < most] + [most]
