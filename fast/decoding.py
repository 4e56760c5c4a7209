"""Decoding's attention in Triton (rollout.lean_kernels): prompts that sequences of a batch share are read once for several of them.

Imported where there is a GPU; tests/test_kernels.py compares it with plain attention in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

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
    """The softmax so far of queries q [M, D], after tokens begin .. end of a sequence: its largest score, its mass and its sum of values."""
    d, n = tl.arange(0, D), tl.arange(0, TILE)
    for start in range(begin, end, TILE):
        t = start + n
        block = tl.load(table + t // SLOTS, mask=t < end, other=0).to(tl.int64)
        at = cache + block * block_stride + (t % SLOTS) * slot_stride  # [TILE], a key of D numbers and its value
        k = tl.load(at[None, :] + d[:, None], mask=(t < end)[None, :], other=0.0)
        scores = tl.where((t < end)[None, :], tl.dot(q, k) * scale, -1e30)  # [M, TILE], in powers of 2
        higher = tl.maximum(top, tl.max(scores, 1))
        p, keep = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        v = tl.load(at[:, None] + (D + d)[None, :], mask=(t < end)[:, None], other=0.0)
        total, sums, top = total * keep + tl.sum(p, 1), sums * keep[:, None] + tl.dot(p.to(v.dtype), v), higher
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
    seq = tl.program_id(0)
    place, i, first = seq % MEMBERS, tl.arange(0, MEMBERS), tl.load(table + seq.to(tl.int64) * table_stride)
    if place > 0:
        if (
            (tl.load(table + (seq - 1).to(tl.int64) * table_stride) == first)
            & (tl.load(lengths + seq - 1) > 0)
            & (tl.load(lengths + seq) > 0)
        ):
            tl.store(led + seq, 0)  # an earlier sequence leads
            return
    near = (i + place < MEMBERS) & (seq + i < num_seqs)
    rows = table + (seq + i).to(tl.int64) * table_stride  # [MEMBERS]
    length = tl.load(lengths + seq + i, mask=near, other=0)
    members = tl.min(tl.where((tl.load(rows, mask=near, other=-1) == first) & (length > 0), MEMBERS, i), 0)
    most = (
        (tl.min(tl.where(i < members, length, 2147483647), 0) - 1) // SLOTS * (members > 1)
    )  # blocks that all of them have filled
    common, b = 0, tl.arange(0, BLOCKS)
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
    head, seq = tl.program_id(0), tl.program_id(1)
    members = tl.load(led + seq)
    if members == 0:
        return
    r, d = tl.arange(0, M), tl.arange(0, D)
    at, used = (seq + r // G).to(tl.int64), r < members * G
    q = tl.load(
        query + (at * query_stride + (head * G + r % G) * D)[:, None] + d[None, :], mask=used[:, None], other=0.0
    )  # [M, D], G heads of each member
    top, total, sums = attend(
        tl.full([M], -1e30, tl.float32),
        tl.zeros([M], tl.float32),
        tl.zeros([M, D], tl.float32),
        q,
        0,
        tl.load(num_shared + seq),
        cache + head * head_stride,
        block_stride,
        slot_stride,
        table + seq.to(tl.int64) * table_stride,
        scale,
        D,
        SLOTS,
        TILE,
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
    head, seq = tl.program_id(0), tl.program_id(1)
    m, d, begin = tl.arange(0, M), tl.arange(0, D), tl.load(num_shared + seq)
    rows, seen = (head * G + m)[:, None] * D + d[None, :], m < tl.where(begin > 0, G, 0)
    q = tl.load(
        query + seq.to(tl.int64) * query_stride + rows, mask=(m < G)[:, None], other=0.0
    )  # [M, D], its G heads first
    at = (seq.to(tl.int64) * tl.num_programs(0) + head) * G + m
    top, total = tl.load(masses + at * 2, mask=seen, other=-1e30), tl.load(masses + at * 2 + 1, mask=seen, other=0.0)
    sums = tl.load(partial + at[:, None] * D + d[None, :], mask=seen[:, None], other=0.0)
    row = table + seq.to(tl.int64) * table_stride
    top, total, sums = attend(
        top,
        total,
        sums,
        q,
        begin,
        tl.load(lengths + seq),
        cache + head * head_stride,
        block_stride,
        slot_stride,
        row,
        scale,
        D,
        SLOTS,
        TILE,
    )
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]  # a place without a sequence has length 0
    tl.store(out + seq.to(tl.int64) * out_stride + rows, sums.to(out.dtype.element_ty), mask=(m < G)[:, None])


def find_shared(query, cache, table, lengths):
    """Blocks that neighbours begin with alike, as sessions of a prompt do, are read once for up to MEMBERS of them. Found once for all layers of a forward pass:
    of each sequence the number of tokens [N] so read, and how many sequences it leads [N] int32, 0 for those that lead none; with room for what a layer has read of them."""
    num_seqs, heads, size = query.shape
    empty = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=query.device)  # noqa: E731
    num_shared, led = empty(num_seqs, dtype=torch.int32), empty(num_seqs, dtype=torch.int32)
    find_kernel[(num_seqs,)](
        num_shared,
        led,
        table,
        table.stride(0),
        lengths,
        num_seqs,
        SLOTS=cache.size(2),
        MEMBERS=MEMBERS,
        BLOCKS=32,
        num_warps=1,
    )
    return num_shared, led, empty(num_seqs, heads, size), empty(num_seqs, heads, 2)


def decode_attention(out, query, cache, table, lengths, scale: float, shared) -> None:
    """Attention of one new token of each sequence to its paged cache, into `out`.

    out, query [N, H, D]; cache [blocks, kv heads, slots, 2 D], keys then values, as vLLM's flash attention backend keeps it; table [N, blocks] and lengths [N] int32;
    shared is find_shared of these.
    """
    num_seqs, heads, size = query.shape
    kv_heads, slots = cache.shape[1:3]
    group, (num_shared, led, partial, masses) = heads // kv_heads, shared
    tile, warps, stages = (
        (32, 1, 4) if size <= 128 and group <= 16 else (64, 2, 3) if size <= 128 else (32, 2, 3)
    )  # the fastest on an H200
    given = (
        partial,
        masses,
        query,
        query.stride(0),
        cache,
        cache.stride(0),
        cache.stride(2),
        cache.stride(1),
        table,
        table.stride(0),
        scale * 1.4426950408889634,
    )
    shapes, grid = {"G": group, "D": size, "SLOTS": slots}, (kv_heads, num_seqs)
    rows = max(16, triton.next_power_of_2(MEMBERS * group))
    shared_kernel[grid](
        num_shared, led, *given, **shapes, TILE=64 if size <= 128 else 32, M=rows, num_warps=4, num_stages=2
    )
    rows = max(16, triton.next_power_of_2(group))
    decode_kernel[grid](
        out, out.stride(0), lengths, num_shared, *given, **shapes, TILE=tile, M=rows, num_warps=warps, num_stages=stages
    )


def use_decode_kernel() -> None:
    """Large batches in which each sequence decodes a token get kernels.decode_attention, all others vLLM's flash attention. Comes before vLLM captures CUDA graphs."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    flash = FlashAttentionImpl.forward

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        m = attn_metadata
        known = (
            self.sliding_window,
            self.alibi_slopes,
            self.logits_soft_cap,
            self.sinks,
            self.kv_cache_dtype,
            self.attn_type.lower() == "decoder",
        )
        plain = (
            known == ((-1, -1), None, 0, None, "auto", True)
            and self.head_size in (64, 128, 256)
            and self.num_heads <= 16 * self.num_kv_heads
        )
        decodes = (
            m is not None
            and m.max_query_len == 1
            and not m.use_cascade
            and m.causal is True
            and len(m.seq_lens) >= m.num_actual_tokens
        )
        if not (
            plain and decodes and m.num_actual_tokens * self.num_kv_heads >= DECODE_PROGRAMS
        ):  # of fewer, flash attention cuts sequences into parts
            return flash(self, layer, query, key, value, kv_cache, m, output, *args, **kwargs)
        query = query[: m.num_actual_tokens]
        # vLLM makes a metadata object for each forward pass, and for each capture of a CUDA graph, of all layers of one shape. A graph finds anew in every replay.
        if (shared := getattr(m, "shared_prompts", None)) is None or shared[2].shape != query.shape:
            shared = m.shared_prompts = find_shared(query, kv_cache, m.block_table, m.seq_lens)
        decode_attention(output[: m.num_actual_tokens], query, kv_cache, m.block_table, m.seq_lens, self.scale, shared)
        return output

    if flash.__module__ != __name__:
        FlashAttentionImpl.forward = forward
