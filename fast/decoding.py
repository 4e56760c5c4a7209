"""Decoding's attention in Triton (rollout.lean_kernels): prompts that sequences of a batch share are read once for
several of them.

Letters: N sequences, H heads, D numbers of a head, G heads that share a key and value head; tiles of M queries and TILE
keys; SLOTS tokens of a block of the paged KV cache. Scores are in powers of 2, so that exp2 is their exp.

Imported where there is a GPU; tests/test_kernels.py compares it with plain attention in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
INT32_MAX = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-1e30)  # the score of a key that is not looked at
DECODE_PROGRAMS = 1024  # sequences x key-value heads from which a GPU is busy with a program for each
MEMBERS = 8  # sequences that may share a reading of the blocks that they begin with


@triton.jit
def attend(
    top,
    total,
    sums,
    q,
    begin,
    end,
    cache,
    block_stride,
    slot_stride,
    table,
    scale,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take queries q [M, D] over tokens begin .. end of a sequence.

    Their softmax so far, before and after: largest score `top` and mass `total` [M], sum of values `sums` [M, D].
    """
    d = tl.arange(0, D)
    n = tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        t = start + n
        block = tl.load(table + t // SLOTS, mask=t < end, other=0).to(tl.int64)
        at = cache + block * block_stride + (t % SLOTS) * slot_stride  # [TILE], a key of D numbers and its value
        k = tl.load(at[None, :] + d[:, None], mask=(t < end)[None, :], other=0.0)
        scores = tl.where((t < end)[None, :], tl.dot(q, k) * scale, LOWEST)  # [M, TILE]
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        keep = tl.exp2(top - higher)
        v = tl.load(at[:, None] + (D + d)[None, :], mask=(t < end)[:, None], other=0.0)
        total = total * keep + tl.sum(p, 1)
        sums = sums * keep[:, None] + tl.dot(p.to(v.dtype), v)
        top = higher
    return top, total, sums


@triton.jit
def find_kernel(
    num_shared,
    led,
    table,
    table_stride,
    lengths,
    num_seqs,
    SLOTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """find_shared of a sequence: whether it leads others, those behind it up to the next multiple of MEMBERS."""
    seq = tl.program_id(0)
    place = seq % MEMBERS
    i = tl.arange(0, MEMBERS)
    first = tl.load(table + seq.to(tl.int64) * table_stride)
    if place > 0:
        before = tl.load(table + (seq - 1).to(tl.int64) * table_stride)
        if (before == first) & (tl.load(lengths + seq - 1) > 0) & (tl.load(lengths + seq) > 0):
            tl.store(led + seq, 0)  # an earlier sequence leads
            return
    # Members: the sequences from this one on that begin with the same block.
    near = (i + place < MEMBERS) & (seq + i < num_seqs)
    rows = table + (seq + i).to(tl.int64) * table_stride  # [MEMBERS]
    length = tl.load(lengths + seq + i, mask=near, other=0)
    members = tl.min(tl.where((tl.load(rows, mask=near, other=-1) == first) & (length > 0), MEMBERS, i), 0)
    # Blocks that all of them have filled, and of those the ones that all have in common.
    shortest = tl.min(tl.where(i < members, length, INT32_MAX), 0)
    most = (shortest - 1) // SLOTS * (members > 1)
    common = 0
    b = tl.arange(0, BLOCKS)
    for start in range(0, most, BLOCKS):
        if common == start:
            inside = start + b < most
            lead = tl.load(table + seq.to(tl.int64) * table_stride + start + b, mask=inside, other=-1)
            ids = tl.load(rows[:, None] + (start + b)[None, :], mask=(i < members)[:, None] & inside[None, :], other=-2)
            same = tl.min(tl.where((ids == lead[None, :]) | (i >= members)[:, None], 1, 0), 0) * inside
            common += tl.min(tl.where(same > 0, BLOCKS, b), 0)
    tl.store(num_shared + seq + i, common * SLOTS, mask=i < tl.maximum(members, 1))
    tl.store(led + seq, tl.where(common > 0, members, 0))


@triton.jit
def shared_kernel(
    num_shared,
    led,
    partial,
    masses,
    query,
    query_stride,
    cache,
    block_stride,
    slot_stride,
    head_stride,
    table,
    table_stride,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
):
    """What the members of a sequence that leads read together: their softmax so far, into partial and masses."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    members = tl.load(led + seq)
    if members == 0:
        return
    r = tl.arange(0, M)  # G heads of each member
    d = tl.arange(0, D)
    at = (seq + r // G).to(tl.int64)
    used = r < members * G
    query_at = query + (at * query_stride + (head * G + r % G) * D)[:, None] + d[None, :]
    q = tl.load(query_at, mask=used[:, None], other=0.0)  # [M, D]
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    end = tl.load(num_shared + seq)
    of_head = cache + head * head_stride
    row = table + seq.to(tl.int64) * table_stride
    top, total, sums = attend(
        top, total, sums, q, 0, end, of_head, block_stride, slot_stride, row, scale, D, SLOTS, TILE
    )
    to = (at * tl.num_programs(0) + head) * G + r % G
    tl.store(partial + to[:, None] * D + d[None, :], sums, mask=used[:, None])
    tl.store(masses + to * 2, top, mask=used)
    tl.store(masses + to * 2 + 1, total, mask=used)


@triton.jit
def decode_kernel(
    out,
    out_stride,
    lengths,
    num_shared,
    partial,
    masses,
    query,
    query_stride,
    cache,
    block_stride,
    slot_stride,
    head_stride,
    table,
    table_stride,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
):
    """The rest of a sequence, and its output."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    begin = tl.load(num_shared + seq)
    rows = (head * G + m)[:, None] * D + d[None, :]
    used = (m < G)[:, None]
    q = tl.load(query + seq.to(tl.int64) * query_stride + rows, mask=used, other=0.0)  # [M, D], its G heads first
    seen = m < tl.where(begin > 0, G, 0)
    at = (seq.to(tl.int64) * tl.num_programs(0) + head) * G + m
    top = tl.load(masses + at * 2, mask=seen, other=LOWEST)
    total = tl.load(masses + at * 2 + 1, mask=seen, other=0.0)
    sums = tl.load(partial + at[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
    end = tl.load(lengths + seq)
    of_head = cache + head * head_stride
    row = table + seq.to(tl.int64) * table_stride
    top, total, sums = attend(
        top, total, sums, q, begin, end, of_head, block_stride, slot_stride, row, scale, D, SLOTS, TILE
    )
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]  # a place without a sequence has length 0
    tl.store(out + seq.to(tl.int64) * out_stride + rows, sums.to(out.dtype.element_ty), mask=used)


Shared = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def find_shared(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> Shared:
    """Blocks that neighbours begin with alike, as sessions of a prompt do, are read once for up to MEMBERS of them.

    Found once for all layers of a forward pass: the number of tokens of each sequence [N] that are read so, and how
    many sequences it leads [N] int32, 0 for those that lead none; with room for what a layer has read of them.
    """
    num_seqs, heads, size = query.shape
    device = query.device
    num_shared = torch.empty(num_seqs, dtype=torch.int32, device=device)
    led = torch.empty(num_seqs, dtype=torch.int32, device=device)
    partial = torch.empty(num_seqs, heads, size, dtype=torch.float32, device=device)
    masses = torch.empty(num_seqs, heads, 2, dtype=torch.float32, device=device)
    given = num_shared, led, table, table.stride(0), lengths, num_seqs
    find_kernel[(num_seqs,)](*given, SLOTS=cache.size(2), MEMBERS=MEMBERS, BLOCKS=32, num_warps=1)
    return num_shared, led, partial, masses


def decode_attention(out, query, cache, table, lengths, scale: float, shared: Shared) -> None:
    """Attention of one new token of each sequence to its paged cache, into `out`.

    out, query [N, H, D]; cache [blocks, kv heads, slots, 2 D], keys then values, as vLLM's flash attention backend
    keeps it; table [N, blocks] and lengths [N] int32; shared is find_shared of these.
    """
    num_seqs, heads, size = query.shape
    kv_heads, slots = cache.shape[1:3]
    group = heads // kv_heads
    num_shared, led, partial, masses = shared
    strides = cache.stride(0), cache.stride(2), cache.stride(1)
    given = partial, masses, query, query.stride(0), cache, *strides, table, table.stride(0), scale * LOG2E
    shapes = {"G": group, "D": size, "SLOTS": slots}
    grid = kv_heads, num_seqs

    options = {"TILE": 64 if size <= 128 else 32, "num_warps": 4, "num_stages": 2}
    rows = max(16, triton.next_power_of_2(MEMBERS * group))
    shared_kernel[grid](num_shared, led, *given, **shapes, **options, M=rows)

    # The fastest on an H200.
    if size <= 128 and group <= 16:
        options = {"TILE": 32, "num_warps": 1, "num_stages": 4}
    elif size <= 128:
        options = {"TILE": 64, "num_warps": 2, "num_stages": 3}
    else:
        options = {"TILE": 32, "num_warps": 2, "num_stages": 3}
    rows = max(16, triton.next_power_of_2(group))
    decode_kernel[grid](out, out.stride(0), lengths, num_shared, *given, **shapes, **options, M=rows)


def serves(layer) -> bool:
    """Whether the kernels compute what this layer (vLLM's FlashAttentionImpl) does."""
    plain = (
        layer.sliding_window == (-1, -1)
        and layer.alibi_slopes is None
        and layer.logits_soft_cap == 0
        and layer.sinks is None
        and layer.kv_cache_dtype == "auto"
        and layer.attn_type.lower() == "decoder"
    )
    return plain and layer.head_size in (64, 128, 256) and layer.num_heads <= 16 * layer.num_kv_heads


def decodes(metadata) -> bool:
    """Whether each sequence of vLLM's batch decodes one token."""
    return (
        metadata is not None
        and metadata.max_query_len == 1
        and not metadata.use_cascade
        and metadata.causal is True
        and len(metadata.seq_lens) >= metadata.num_actual_tokens
    )


def use_decode_kernel() -> None:
    """Large batches in which each sequence decodes a token get decode_attention, all others vLLM's flash attention.

    To be called before vLLM captures CUDA graphs.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    flash = FlashAttentionImpl.forward

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        m = attn_metadata
        # Of few sequences, flash attention cuts each into parts.
        if not (serves(self) and decodes(m) and m.num_actual_tokens * self.num_kv_heads >= DECODE_PROGRAMS):
            return flash(self, layer, query, key, value, kv_cache, m, output, *args, **kwargs)
        query = query[: m.num_actual_tokens]
        # vLLM makes a metadata object for each forward pass, and for each capture of a CUDA graph, of all layers of one
        # shape. A graph finds anew in every replay.
        shared = getattr(m, "shared_prompts", None)
        if shared is None or shared[2].shape != query.shape:
            shared = m.shared_prompts = find_shared(query, kv_cache, m.block_table, m.seq_lens)
        decode_attention(output[: m.num_actual_tokens], query, kv_cache, m.block_table, m.seq_lens, self.scale, shared)
        return output

    if flash.__module__ != __name__:  # a second engine of the process finds it done
        FlashAttentionImpl.forward = forward
