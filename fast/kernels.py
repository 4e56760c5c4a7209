"""Triton kernels for what bounds a step on a GPU: decoding's attention and sampling, and softmaxes over the vocabulary.

Imported where there is a GPU. head.py, attention.py and decoding.py have the same in torch, which the CPU runs; tests/test_kernels.py compares the two, and plain
attention, in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from fast import decoding
from head import BLOCK, LOW

GOLDEN, MIX, MIX_AGAIN = (
    tl.constexpr(x % 2**64) for x in (decoding.GOLDEN, *decoding.MIX)
)  # unsigned: what their shifts bring in is 0
MEMBERS = 8  # sequences that may share a reading of the blocks that they begin with


@triton.jit
def statistics_kernel(
    out, logits, row_stride, temperatures, temperature_stride, rows, num_tokens, BLOCK: tl.constexpr, LOW: tl.constexpr
):
    block, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + (row if rows is None else tl.load(rows + row)) * temperature_stride)
    ids, scale = block * BLOCK + tl.arange(0, BLOCK), 1 / tl.where(temperature == 0, 1.0, temperature)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    x = tl.maximum(x * scale, LOW, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(x, 0)
    mass = tl.exp2((x - top) * 1.4426950408889634)  # 0 where x is LOW, unless all of the block is
    at = out + (row * tl.num_programs(0) + block) * 3
    tl.store(at, top)
    tl.store(at + 1, tl.sum(mass, 0))
    tl.store(at + 2, tl.sum(mass * x, 0))


def block_statistics(logits, temperature, num_tokens: int, rows=None):
    """Of each BLOCK tokens of the vocabulary, [3, K, B] float32: the largest x = logit / temperature, the sum of exp(x - largest), and that of x exp(x - largest).

    logits [K, V]; temperature is one number, or one of each row, in a tensor on the GPU; 0 counts as 1. With `rows` [K] it is a table, and they say where in it.
    """
    grid = triton.cdiv(num_tokens, BLOCK), len(logits)
    out = torch.empty(grid[1], grid[0], 3, dtype=torch.float32, device=logits.device)
    statistics_kernel[grid](
        out,
        logits,
        logits.stride(0),
        temperature,
        int(temperature.dim() > 0),
        rows,
        num_tokens,
        BLOCK=BLOCK,
        LOW=LOW,
        num_warps=4,
    )
    return out.unbind(-1)


@triton.jit
def uniform(seed, position):
    """decoding.uniform of one seed and position."""
    x = seed.to(tl.uint64) + (position.to(tl.uint64) + 1) * GOLDEN
    x = (x ^ (x >> 30)) * MIX
    x = (x ^ (x >> 27)) * MIX_AGAIN
    return ((x ^ (x >> 31)) >> 16).to(tl.float64) / 281474976710656.0  # 2^48


@triton.jit
def choose(weights, places, target, otherwise):
    """The first place at which the sum of the weights up to it is above target, of those with a weight. A scan in parallel rounds in its own way, by which sums may
    fall by a hair: where none is found, the last place with a weight; where all are 0 or no numbers, `otherwise`."""
    found = tl.min(tl.where((tl.cumsum(weights, 0) > target) & (weights > 0), places, 2147483647), 0)
    return tl.where(found < 2147483647, found, tl.max(tl.where(weights > 0, places, otherwise), 0))


@triton.jit
def choose_kernel(
    tokens,
    logprobs,
    logits,
    row_stride,
    tops,
    masses,
    tops_stride,
    block_stride,
    temperatures,
    seeds,
    positions,
    rows,
    at,
    num_tokens,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, b, n = tl.program_id(0), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    request, position = (
        row if rows is None else tl.load(rows + row),
        tl.load(positions + (row if at is None else tl.load(at + row))),
    )
    temperature, wanted = tl.load(temperatures + request), uniform(tl.load(seeds + request), position)
    inside = b < num_blocks
    top = tl.load(tops + row * tops_stride + b * block_stride, mask=inside, other=-float("inf"))
    highest = tl.max(top, 0)
    share = tl.exp(top - highest)
    mass = tl.load(masses + row * tops_stride + b * block_stride, mask=inside, other=0.0)
    total = tl.sum(mass * share, 0)
    logsumexp, mass = (
        highest + tl.log(total),
        (mass * (share / total)).to(tl.float64),
    )  # [BLOCKS], they add up to 1 but for rounding
    target, likeliest = wanted * tl.sum(mass, 0), tl.min(tl.where(inside & (top == highest), b, num_blocks - 1), 0)
    block = tl.where(temperature == 0, likeliest, choose(mass, b, target, likeliest))
    ids = block * BLOCK + n
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < num_tokens, other=-float("inf")).to(
        tl.float32
    ) * (1 / tl.where(temperature == 0, 1.0, temperature))
    p, likeliest = tl.exp(x - logsumexp).to(tl.float64), tl.min(tl.where(x == tl.max(x, 0), n, BLOCK - 1), 0)
    before = (target - tl.sum(tl.where(b < block, mass, 0.0), 0)) / tl.sum(
        tl.where(b == block, mass, 0.0), 0
    )  # share of the block's mass that comes before the token
    place = tl.where(temperature == 0, likeliest, choose(p, n, before * tl.sum(p, 0), likeliest))
    tl.store(tokens + row, tl.minimum(block * BLOCK + place, num_tokens - 1))  # of no numbers too
    tl.store(logprobs + row, tl.sum(tl.where(n == place, x, 0.0), 0) - logsumexp)


def choose_token(logits, tops, masses, temperature, seeds, positions, rows=None, at=None):
    """decoding.choose_token, in one launch."""
    num_rows, blocks = tops.shape
    tokens, logprobs = (
        torch.empty(num_rows, dtype=torch.int64, device=logits.device),
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
    )
    choose_kernel[(num_rows,)](
        tokens,
        logprobs,
        logits,
        logits.stride(0),
        tops,
        masses,
        tops.stride(0),
        tops.stride(1),
        temperature,
        seeds,
        positions,
        rows,
        at,
        logits.size(1),
        blocks,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=8,
    )
    return tokens, logprobs


@triton.jit
def gradient_kernel(
    logits,
    row_stride,
    targets,
    logsumexps,
    means,
    grad_logprobs,
    grad_entropies,
    temperature,
    num_tokens,
    vocab,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    at, scale = logits + row.to(tl.int64) * row_stride + ids, 1 / tl.load(temperature)
    x = tl.maximum(
        tl.load(at, mask=ids < num_tokens, other=0.0).to(tl.float32) * scale, LOW, propagate_nan=tl.PropagateNan.ALL
    )
    grad_logprob, grad_entropy = tl.load(grad_logprobs + row), tl.load(grad_entropies + row)
    p = tl.exp2((x - tl.load(logsumexps + row)) * 1.4426950408889634)
    grad = tl.where(ids == tl.load(targets + row), grad_logprob, 0.0) - p * (
        grad_logprob + grad_entropy * (x - tl.load(means + row))
    )
    tl.store(at, tl.where(ids < num_tokens, grad * scale, 0.0).to(logits.dtype.element_ty), mask=ids < vocab)


def logit_gradient(logits, targets, logsumexp, mean, grad_logprob, grad_entropy, temperature, num_tokens: int):
    """head.logit_gradient, written over `logits`."""
    rows, vocab = logits.shape
    per_row = [x.contiguous() for x in (targets, logsumexp, mean, grad_logprob, grad_entropy)]
    gradient_kernel[(triton.cdiv(vocab, BLOCK), rows)](
        logits, logits.stride(0), *per_row, temperature, num_tokens, vocab, BLOCK=BLOCK, LOW=LOW, num_warps=4
    )
    return logits


@triton.jit
def merge_kernel(
    out,
    lse,
    lse_stride,
    seen,
    seen_lse,
    seen_lse_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    H2: tl.constexpr,
    D2: tl.constexpr,
):
    token, h, d = tl.program_id(0).to(tl.int64), tl.arange(0, H2), tl.arange(0, D2)
    one = tl.load(lse + h * lse_stride + token, mask=h < H, other=0.0)
    other = tl.load(seen_lse + h * seen_lse_stride + token, mask=h < H, other=0.0)
    top = tl.maximum(one, other)
    whole = top + tl.log(tl.exp(one - top) + tl.exp(other - top))
    at, inside = token * H * D + h[:, None] * D + d[None, :], (h[:, None] < H) & (d[None, :] < D)
    merged = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(one - whole)[:, None]
    merged += tl.load(seen + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(other - whole)[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + h * lse_stride + token, whole, mask=h < H)


def merge(out, lse, seen, seen_lse) -> None:
    """attention.merge: out and seen [T, H, D], contiguous; lse and seen_lse [H, T] float32."""
    tokens, heads, size = out.shape
    seen = seen.contiguous()
    merge_kernel[(tokens,)](
        out,
        lse,
        lse.stride(0),
        seen,
        seen_lse,
        seen_lse.stride(0),
        H=heads,
        D=size,
        H2=triton.next_power_of_2(heads),
        D2=triton.next_power_of_2(size),
        num_warps=4,
    )


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
