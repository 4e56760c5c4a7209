"""What replaces parts of vLLM's decoding on a GPU (rollout.lean_kernels): attention by kernels.py, and sampling from one pass over the logits.

vLLM's sampling draws Gumbel noise for every token of the vocabulary, reads the logits again for the log-probs, and again for a rank that nobody asks
for. Here a block of the vocabulary is chosen by its share of the probability, then a token of the block: exact, by one random number a token.
"""
import torch

from head import BLOCK, kernels_for, total_mass

DECODE_PROGRAMS = 1024  # sequences x key-value heads from which a GPU is busy with a program for each
GOLDEN, MIX = -7046029254386353131, (-4658895280553007687, -7723592293110705685)  # of splitmix64 (Steele, Lea and Flood 2014), as signed numbers


def uniform(seeds, positions):
    """A number in [0, 1) for each seed and position [S], float64: 48 bits of splitmix64."""
    shift = lambda x, bits: (x >> bits) & (2 ** (64 - bits) - 1)  # noqa: E731 - the bits that come in are 0, as of an unsigned number
    x = seeds + (positions + 1) * GOLDEN
    x = (x ^ shift(x, 30)) * MIX[0]
    x = (x ^ shift(x, 27)) * MIX[1]
    return shift(x ^ shift(x, 31), 16).double() / 2**48


def sample_tokens(logits, temperature, seeds, positions, choose=None):
    """(tokens [S], log-probs [S] float32) of softmax(logits / temperature), logits [S, V]; the likeliest token where the temperature is 0.

    A row's token follows from its logits, its seed and its position alone. `choose` may be compiled.
    """
    tops, masses, _ = kernels_for(logits).block_statistics(logits, temperature, logits.size(1))  # [S, B]
    return (choose or choose_token)(logits, tops, masses, temperature, seeds, positions)


def choose_token(logits, tops, masses, temperature, seeds, positions):
    """What `sample_tokens` returns, of the statistics of its blocks."""
    logsumexp, share = total_mass(tops, masses)
    masses = (masses * share).double()  # [S, B], they add up to 1 but for rounding
    greedy, wanted, ends = temperature[:, None] == 0, uniform(seeds, positions)[:, None], masses.cumsum(-1)
    block = torch.where(greedy, tops.argmax(-1, keepdim=True), (ends <= wanted * ends[:, -1:]).sum(-1, keepdim=True))  # [S, 1]
    places = block * BLOCK + torch.arange(BLOCK, device=logits.device)  # [S, BLOCK]
    ids = places.clamp(max=logits.size(1) - 1)
    scaled = logits.gather(1, ids).float() / torch.where(greedy, 1.0, temperature[:, None])
    scaled = torch.where(places < logits.size(1), scaled, -torch.inf)
    mass, inner = masses.gather(1, block), (scaled - logsumexp[:, None]).exp().double().cumsum(-1)
    before = ((wanted * ends[:, -1:] - ends.gather(1, block) + mass) / mass).clamp(0, 1 - 2**-40)  # share of the block's mass that comes before the token
    place = torch.where(greedy, scaled.argmax(-1, keepdim=True), (inner <= before * inner[:, -1:]).sum(-1, keepdim=True)).clamp(max=BLOCK - 1)  # of no numbers too
    return ids.gather(1, place)[:, 0], scaled.gather(1, place)[:, 0] - logsumexp


def lean_sampler(sampler, tensor_parallel: int = 1) -> None:
    """vLLM's sampler with `sample_tokens` for batches that top_k, top_p and min_p leave whole, as a class of its own, in place. Penalties and the like, which
    engine.sampling_params does not ask for, are not looked at. The older of vLLM's two model runners has another sampler, which stays."""
    if not hasattr(sampler, "sampling_states"):
        return
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    # Ranks that share an engine must sample alike, and compilation may tune each of them differently.
    choose = torch.compile(choose_token, dynamic=True) if tensor_parallel == 1 else choose_token

    class LeanSampler(type(sampler)):
        def __call__(self, logits, input_batch):
            rows, states = input_batch.idx_mapping_np, self.sampling_states
            cut = (states.top_k.np[rows] != states.vocab_size).any() or (states.top_p.np[rows] != 1).any() or (states.min_p.np[rows] != 0).any()
            if cut or (states.num_logprobs[rows] != 0).any() or len(rows) != len(logits):
                return super().__call__(logits, input_batch)
            requests = input_batch.expanded_idx_mapping
            positions = input_batch.positions[input_batch.logits_indices]
            tokens, logprobs = sample_tokens(logits, states.temperature.gpu[requests], states.seeds.gpu[requests], positions, choose)
            one = input_batch.seq_lens.new_ones(input_batch.num_reqs)  # token a request; none where a prompt is not done yet
            num_sampled, num_rejected = get_num_sampled_and_rejected(one, input_batch.seq_lens, input_batch.cu_num_logits, input_batch.idx_mapping, self.req_states.prefill_len.gpu)
            return SamplerOutput(
                sampled_token_ids=tokens[:, None], logprobs_tensors=LogprobsTensors(tokens[:, None], logprobs[:, None], torch.zeros_like(tokens)),
                num_nans=None, num_sampled=num_sampled, num_rejected=num_rejected,
            )  # fmt: skip

    sampler.__class__ = LeanSampler


def use_decode_kernel() -> None:
    """Large batches in which each sequence decodes a token get kernels.decode_attention, all others vLLM's flash attention. Comes before vLLM captures CUDA graphs."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from kernels import decode_attention

    flash = FlashAttentionImpl.forward

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        m = attn_metadata
        known = self.sliding_window, self.alibi_slopes, self.logits_soft_cap, self.sinks, self.kv_cache_dtype, self.attn_type.lower() == "decoder"
        plain = known == ((-1, -1), None, 0, None, "auto", True) and self.head_size in (64, 128, 256)
        decodes = m is not None and m.max_query_len == 1 and not m.use_cascade and m.causal is True and len(m.seq_lens) >= m.num_actual_tokens
        if not (plain and decodes and m.num_actual_tokens * self.num_kv_heads >= DECODE_PROGRAMS):  # of fewer, flash attention cuts sequences into parts
            return flash(self, layer, query, key, value, kv_cache, m, output, *args, **kwargs)
        decode_attention(output[: m.num_actual_tokens], query[: m.num_actual_tokens], kv_cache, m.block_table, m.seq_lens, self.scale)
        return output

    if flash.__module__ != __name__:
        FlashAttentionImpl.forward = forward


def capture_sizes(most: int) -> list[int]:
    """Batch sizes to capture CUDA graphs of, up to `most` sequences, from 64 on an eighth to a quarter apart: vLLM's own 51 take longer to start, and end at 512."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + 2 ** (sizes[-1].bit_length() - 3))
    return [size for size in sizes if size < most] + [most]
