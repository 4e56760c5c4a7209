"""Triton kernels for softmaxes over the vocabulary, of the LM head and of sampling, and for two attentions that become one.

Imported where there is a GPU. model.py, sampling.py and attention.py have the same in torch, which the CPU runs;
tests/test_kernels.py compares the two in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from fast.sampling import GOLDEN as SIGNED_GOLDEN
from fast.sampling import MIX as SIGNED_MIX
from model import BLOCK, LOW, Rows

GOLDEN, MIX, MIX_AGAIN = (
    tl.constexpr(x % 2**64) for x in (SIGNED_GOLDEN, *SIGNED_MIX)
)  # unsigned: what their shifts bring in is 0


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
    """sampling.uniform of one seed and position."""
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
    """sampling.choose_token, in one launch."""
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


def logit_gradient(logits, rows: Rows, temperature, num_tokens: int):
    """model.logit_gradient, written over `logits`."""
    num_rows, vocab = logits.shape
    per_row = [x.contiguous() for x in rows]
    gradient_kernel[(triton.cdiv(vocab, BLOCK), num_rows)](
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
