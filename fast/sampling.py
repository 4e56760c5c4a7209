"""Sampling from one pass over the logits, in place of vLLM's (rollout.lean_kernels).

vLLM draws Gumbel noise for every token of the vocabulary, reads the logits again for the log-probs, and again for a rank that
nobody asks for. Here a block of the vocabulary is chosen by its share of the probability, then a token of the block: exact, by
one random number a token. In torch, with the same in Triton in kernels.py, which `lean_sampler` is handed on a GPU.
"""

import torch

from model import BLOCK, block_statistics, total_mass

# Of splitmix64 (Steele, Lea and Flood 2014), as signed numbers.
GOLDEN = -7046029254386353131
MIX = (-4658895280553007687, -7723592293110705685)


def uniform(seeds, positions):
    """A number in [0, 1) for each seed and position [S], float64: 48 bits of splitmix64."""
    shift = lambda x, bits: (x >> bits) & (2 ** (64 - bits) - 1)  # noqa: E731 - the bits that come in are 0, as of an unsigned number
    x = seeds + (positions + 1) * GOLDEN
    x = (x ^ shift(x, 30)) * MIX[0]
    x = (x ^ shift(x, 27)) * MIX[1]
    return shift(x ^ shift(x, 31), 16).double() / 2**48


def sample_tokens(logits, temperature, seeds, positions, rows=None, at=None, kernels=None):
    """(tokens [S], log-probs [S] float32) of softmax(logits / temperature), logits [S, V]; the likeliest token where the
    temperature is 0.

    A row's token follows from its logits, its seed and its position alone. With `rows` [S] temperature and seeds are tables,
    and rows say where in them; so does `at` [S] of positions.
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


def choose_token(logits, tops, masses, temperature, seeds, positions):
    """What `sample_tokens` returns, of the statistics of its blocks."""
    logsumexp, share = total_mass(tops, masses)
    masses = (masses * share).double()  # [S, B], they add up to 1 but for rounding
    greedy, wanted, ends = temperature[:, None] == 0, uniform(seeds, positions)[:, None], masses.cumsum(-1)
    block = torch.where(
        greedy, tops.argmax(-1, keepdim=True), (ends <= wanted * ends[:, -1:]).sum(-1, keepdim=True)
    )  # [S, 1]
    places = block * BLOCK + torch.arange(BLOCK, device=logits.device)  # [S, BLOCK]
    ids = places.clamp(max=logits.size(1) - 1)
    scaled = logits.gather(1, ids).float() / torch.where(greedy, 1.0, temperature[:, None])
    scaled = torch.where(places < logits.size(1), scaled, -torch.inf)
    mass, inner = masses.gather(1, block), (scaled - logsumexp[:, None]).exp().double().cumsum(-1)
    before = ((wanted * ends[:, -1:] - ends.gather(1, block) + mass) / mass).clamp(
        0, 1 - 2**-40
    )  # share of the block's mass that comes before the token
    place = torch.where(
        greedy, scaled.argmax(-1, keepdim=True), (inner <= before * inner[:, -1:]).sum(-1, keepdim=True)
    ).clamp(max=BLOCK - 1)  # of no numbers too
    return ids.gather(1, place)[:, 0], scaled.gather(1, place)[:, 0] - logsumexp


def lean_sampler(sampler, kernels=None) -> None:
    """vLLM's sampler with `sample_tokens` for batches that top_k, top_p and min_p leave whole, as a class of its own, in place. Penalties and the like, which
    engine.sampling_params does not ask for, are not looked at. The older of vLLM's two model runners has another sampler, which stays.

    The host bounds a turn, so what follows from a request alone is found out when it comes, not in every turn."""
    if not hasattr(sampler, "sampling_states"):
        return
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    states = sampler.sampling_states

    def is_cut(rows):
        """Whether requests are not whole, or have more to tell than the log-probs of their tokens."""
        return (
            (states.top_k.np[rows] != states.vocab_size)
            | (states.top_p.np[rows] != 1)
            | (states.min_p.np[rows] != 0)
            | (states.num_logprobs[rows] != 0)
        )

    class LeanSampler(type(sampler)):
        def add_request(self, row, *args, **kwargs):
            super().add_request(row, *args, **kwargs)
            self.cut[row], self.tables = is_cut(row), None

        def apply_staged_writes(self):
            if self.tables is None:  # vLLM copies all of its tables in every turn
                super().apply_staged_writes()
                self.tables = (
                    states.temperature.gpu.clone(),
                    states.seeds.gpu.clone(),
                )  # vLLM's are in the host's memory, and each block of each row reads them

        def __call__(self, logits, input_batch):
            rows, n = input_batch.idx_mapping_np, input_batch.num_reqs
            if len(rows) != len(logits) or self.cut[rows].any():
                return super().__call__(logits, input_batch)
            tokens, logprobs = sample_tokens(
                logits,
                *self.tables,
                input_batch.positions,
                input_batch.expanded_idx_mapping,
                input_batch.logits_indices,
                kernels,
            )
            num_sampled, num_rejected, tokens = self.ones[:n], self.zeros[:n], tokens[:, None]
            if input_batch.is_prefilling_np.any():  # a prompt may not be done yet, and gets no token
                num_sampled, num_rejected = get_num_sampled_and_rejected(
                    num_sampled.clone(),
                    input_batch.seq_lens,
                    input_batch.cu_num_logits,
                    input_batch.idx_mapping,
                    self.req_states.prefill_len.gpu,
                )
            return SamplerOutput(
                sampled_token_ids=tokens,
                logprobs_tensors=LogprobsTensors(tokens, logprobs[:, None], self.ranks[:n]),
                num_nans=None,
                num_sampled=num_sampled,
                num_rejected=num_rejected,
            )

    rows, device = states.max_num_reqs, states.seeds.gpu.device
    sampler.cut, sampler.tables = is_cut(slice(None)), None
    sampler.ones, sampler.zeros = (
        torch.ones(rows, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )
    sampler.ranks = torch.zeros(
        rows, dtype=torch.int64
    )  # nobody asks for them: on the host, where vLLM copies the others to
    sampler.__class__ = LeanSampler
