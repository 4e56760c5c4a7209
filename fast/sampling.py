"""Sampling from one pass over the logits, in place of vLLM's (rollout.lean_kernels).

vLLM draws Gumbel noise for every token of the vocabulary, reads the logits again for the log-probs, and again for a
rank that nobody asks for. Here a block of the vocabulary is chosen by its share of the probability, then a token of the
block: exact, by one random number a token. In torch, with the same in Triton in kernels.py, which `lean_sampler` is
handed on a GPU.
"""

import types
from typing import Any

import numpy as np
import torch

from model import BLOCK, block_statistics, total_mass

# Of splitmix64 (Steele, Lea and Flood 2014), as signed numbers.
GOLDEN = -7046029254386353131
MIX = (-4658895280553007687, -7723592293110705685)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each seed and position [S], float64: 48 bits of splitmix64."""
    x = seeds + (positions + 1) * GOLDEN
    x = (x ^ shift(x, 30)) * MIX[0]
    x = (x ^ shift(x, 27)) * MIX[1]
    return shift(x ^ shift(x, 31), 16).double() / 2**48


def shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits as of an unsigned number: the bits that come in are 0."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def sample_tokens(  # noqa: PLR0913 - tables, and where in them
    logits, temperature, seeds, positions, rows=None, at=None, kernels: types.ModuleType | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [S], log-probs [S] float32) of softmax(logits / temperature), logits [S, V].

    The likeliest token where the temperature is 0. A row's token follows from its logits, its seed and its position
    alone. With `rows` [S] temperature and seeds are tables, and rows say where in them; so does `at` [S] of positions.
    """
    if kernels:
        tops, masses, _ = kernels.block_statistics(logits, temperature, logits.size(1), rows)  # [S, B]
        return kernels.choose_token(logits, tops, masses, temperature, seeds, positions, rows, at)
    if rows is not None:
        temperature, seeds = temperature[rows], seeds[rows]
    if at is not None:
        positions = positions[at]
    tops, masses, _ = block_statistics(logits, temperature, logits.size(1))  # [S, B]
    return choose_token(logits, tops, masses, temperature, seeds, positions)


def choose_token(logits, tops, masses, temperature, seeds, positions) -> tuple[torch.Tensor, torch.Tensor]:
    """What `sample_tokens` returns, from the statistics of its blocks."""
    vocab = logits.size(1)
    logsumexp, share = total_mass(tops, masses)
    masses = (masses * share).double()  # [S, B], they add up to 1 but for rounding
    greedy = temperature[:, None] == 0
    wanted = uniform(seeds, positions)[:, None]

    # The block: the first whose masses up to it are above the wanted share of all.
    ends = masses.cumsum(-1)
    target = wanted * ends[:, -1:]
    block = torch.where(greedy, tops.argmax(-1, keepdim=True), (ends <= target).sum(-1, keepdim=True))  # [S, 1]

    # The token of the block, in the same way.
    places = block * BLOCK + torch.arange(BLOCK, device=logits.device)  # [S, BLOCK]
    ids = places.clamp(max=vocab - 1)
    scaled = logits.gather(1, ids).float() / torch.where(greedy, 1.0, temperature[:, None])
    scaled = torch.where(places < vocab, scaled, -torch.inf)
    inner = (scaled - logsumexp[:, None]).exp().double().cumsum(-1)
    mass = masses.gather(1, block)
    before = (target - ends.gather(1, block) + mass) / mass  # share of the block's mass that comes before the token
    before = before.clamp(0, 1 - 2**-40)
    sampled = (inner <= before * inner[:, -1:]).sum(-1, keepdim=True)
    place = torch.where(greedy, scaled.argmax(-1, keepdim=True), sampled)
    place = place.clamp(max=BLOCK - 1)  # in range, of NaNs too
    return ids.gather(1, place)[:, 0], scaled.gather(1, place)[:, 0] - logsumexp


def lean_sampler(sampler: Any, kernels: types.ModuleType | None = None) -> None:
    """Let vLLM's sampler use `sample_tokens` for batches that top_k, top_p and min_p leave whole: its class is changed.

    Penalties and the like, which engine.sampling_params does not ask for, are not looked at. The older of vLLM's two
    model runners has another sampler, which stays. The host bounds a turn, so what follows from a request alone is
    found out when it comes, not in every turn.
    """
    if not hasattr(sampler, "sampling_states"):
        return
    rows = sampler.sampling_states.max_num_reqs
    device = sampler.sampling_states.seeds.gpu.device
    sampler.__class__ = type("LeanSampler", (LeanSampler, type(sampler)), {})
    sampler.kernels = kernels
    sampler.cut = sampler.is_cut(slice(None))
    sampler.tables = None
    sampler.ones = torch.ones(rows, dtype=torch.int32, device=device)
    sampler.zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    sampler.ranks = torch.zeros(
        rows, dtype=torch.int64
    )  # on the host, where vLLM copies the others to: nobody asks for them


class LeanSampler:
    """What lean_sampler puts before the class of vLLM's sampler, which super() is."""

    def is_cut(self, rows) -> np.ndarray:
        """Whether top_k, top_p or min_p cut requests, or they have more to tell than the log-probs of their tokens."""
        states = self.sampling_states
        return (
            (states.top_k.np[rows] != states.vocab_size)
            | (states.top_p.np[rows] != 1)
            | (states.min_p.np[rows] != 0)
            | (states.num_logprobs[rows] != 0)
        )

    def add_request(self, row: int, *args, **kwargs) -> None:
        """A request comes, into this row of vLLM's tables."""
        super().add_request(row, *args, **kwargs)
        self.cut[row] = self.is_cut(row)
        self.tables = None

    def apply_staged_writes(self) -> None:
        """Bring the tables up to date; vLLM copies all of them in every turn."""
        if self.tables is None:
            super().apply_staged_writes()
            # Copies: vLLM's are in the host's memory, and each block of each row reads them.
            states = self.sampling_states
            self.tables = states.temperature.gpu.clone(), states.seeds.gpu.clone()

    def __call__(self, logits: torch.Tensor, input_batch) -> Any:
        """vLLM's SamplerOutput for a batch."""
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        rows = input_batch.idx_mapping_np
        if len(rows) != len(logits) or self.cut[rows].any():
            return super().__call__(logits, input_batch)
        places = input_batch.expanded_idx_mapping, input_batch.logits_indices
        tokens, logprobs = sample_tokens(logits, *self.tables, input_batch.positions, *places, self.kernels)
        tokens = tokens[:, None]
        num_sampled, num_rejected = self.count(input_batch)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=LogprobsTensors(tokens, logprobs[:, None], self.ranks[: input_batch.num_reqs]),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def count(self, input_batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that each request gets, and that are taken back: 1 and 0, but for prompts that are not done yet."""
        ones = self.ones[: input_batch.num_reqs]
        if not input_batch.is_prefilling_np.any():
            return ones, self.zeros[: input_batch.num_reqs]
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

        lengths = self.req_states.prefill_len.gpu
        batch = input_batch
        return get_num_sampled_and_rejected(
            ones.clone(), batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, lengths
        )
