"""Triton kernels for softmaxes over the vocabulary, of the LM head (actor.lean_kernels) and of sampling
(rollout.lean_kernels), and for two attentions that become one (actor.lean_kernels).

Imported where there is a GPU. model.py, sampling.py and attention.py have the same in torch, which the CPU runs;
tests/test_kernels.py compares the two in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from fast.sampling import GOLDEN as SIGNED_GOLDEN
from fast.sampling import MIX as SIGNED_MIX
from model import BLOCK, LOW, Rows

LOG2E = tl.constexpr(1.4426950408889634)
INT32_MAX = tl.constexpr(2**31 - 1)
# As unsigned numbers: what their shifts bring in is 0.
GOLDEN = tl.constexpr(SIGNED_GOLDEN % 2**64)
MIX = tl.constexpr(SIGNED_MIX[0] % 2**64)
MIX_AGAIN = tl.constexpr(SIGNED_MIX[1] % 2**64)


@triton.jit
def statistics_kernel(
    out, logits, row_stride, temperatures, temperature_stride, rows, num_tokens, BLOCK: tl.constexpr, LOW: tl.constexpr
):
    """block_statistics of a block of a row."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperatures + (row if rows is None else tl.load(rows + row)) * temperature_stride)
    scale = 1 / tl.where(temperature == 0, 1.0, temperature)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits_at = logits + row.to(tl.int64) * row_stride + ids
    x = tl.load(logits_at, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    x = tl.maximum(x * scale, LOW, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(x, 0)
    mass = tl.exp2((x - top) * LOG2E)  # 0 where x is LOW, unless all of the block is
    at = out + (row * tl.num_programs(0) + block) * 3
    tl.store(at, top)
    tl.store(at + 1, tl.sum(mass, 0))
    tl.store(at + 2, tl.sum(mass * x, 0))


def block_statistics(
    logits: torch.Tensor, temperature: torch.Tensor, num_tokens: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """model.block_statistics, in one launch: three [K, B] float32.

    logits [K, V]; temperature is one number, or one of each row, in a tensor on the GPU; 0 counts as 1. With `rows` [K]
    it is a table, and they say where in it.
    """
    grid = triton.cdiv(num_tokens, BLOCK), len(logits)
    out = torch.empty(grid[1], grid[0], 3, dtype=torch.float32, device=logits.device)
    given = logits, logits.stride(0), temperature, int(temperature.dim() > 0), rows, num_tokens
    statistics_kernel[grid](out, *given, BLOCK=BLOCK, LOW=LOW, num_warps=4)
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
    """The first place with a weight at which the sum of the weights up to it is above target.

    A parallel scan rounds in its own way, by which sums may fall by a hair: where no such place is found, the last one
    with a weight. Where all weights are 0 or NaN, `otherwise`.
    """
    found = tl.min(tl.where((tl.cumsum(weights, 0) > target) & (weights > 0), places, INT32_MAX), 0)
    return tl.where(found < INT32_MAX, found, tl.max(tl.where(weights > 0, places, otherwise), 0))


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
    """sampling.choose_token of a row."""
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    n = tl.arange(0, BLOCK)
    request = row if rows is None else tl.load(rows + row)
    position = tl.load(positions + (row if at is None else tl.load(at + row)))
    temperature = tl.load(temperatures + request)
    wanted = uniform(tl.load(seeds + request), position)

    # The block.
    inside = b < num_blocks
    top = tl.load(tops + row * tops_stride + b * block_stride, mask=inside, other=-float("inf"))
    highest = tl.max(top, 0)
    share = tl.exp(top - highest)
    mass = tl.load(masses + row * tops_stride + b * block_stride, mask=inside, other=0.0)
    total = tl.sum(mass * share, 0)
    logsumexp = highest + tl.log(total)
    mass = (mass * (share / total)).to(tl.float64)  # [BLOCKS], they add up to 1 but for rounding
    target = wanted * tl.sum(mass, 0)
    likeliest = tl.min(tl.where(inside & (top == highest), b, num_blocks - 1), 0)
    block = tl.where(temperature == 0, likeliest, choose(mass, b, target, likeliest))

    # The token of the block.
    ids = block * BLOCK + n
    logits_at = logits + row.to(tl.int64) * row_stride + ids
    x = tl.load(logits_at, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    x = x * (1 / tl.where(temperature == 0, 1.0, temperature))
    p = tl.exp(x - logsumexp).to(tl.float64)
    likeliest = tl.min(tl.where(x == tl.max(x, 0), n, BLOCK - 1), 0)
    mass_before = tl.sum(tl.where(b < block, mass, 0.0), 0)
    own_mass = tl.sum(tl.where(b == block, mass, 0.0), 0)
    before = (target - mass_before) / own_mass  # share of the block's mass that comes before the token
    place = tl.where(temperature == 0, likeliest, choose(p, n, before * tl.sum(p, 0), likeliest))
    tl.store(tokens + row, tl.minimum(block * BLOCK + place, num_tokens - 1))  # in range, of NaNs too
    tl.store(logprobs + row, tl.sum(tl.where(n == place, x, 0.0), 0) - logsumexp)


def choose_token(
    logits, tops, masses, temperature, seeds, positions, rows=None, at=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """sampling.choose_token, in one launch. rows and at are sampling.sample_tokens'."""
    num_rows, blocks = tops.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    statistics = tops, masses, tops.stride(0), tops.stride(1)
    tables = temperature, seeds, positions, rows, at
    given = logits, logits.stride(0), *statistics, *tables, logits.size(1), blocks
    sizes = {"BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks)}
    choose_kernel[(num_rows,)](tokens, logprobs, *given, **sizes, num_warps=8)
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
    """logit_gradient of a block of a row."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    at = logits + row.to(tl.int64) * row_stride + ids
    scale = 1 / tl.load(temperature)
    x = tl.load(at, mask=ids < num_tokens, other=0.0).to(tl.float32)
    x = tl.maximum(x * scale, LOW, propagate_nan=tl.PropagateNan.ALL)
    grad_logprob = tl.load(grad_logprobs + row)
    grad_entropy = tl.load(grad_entropies + row)
    p = tl.exp2((x - tl.load(logsumexps + row)) * LOG2E)
    of_target = tl.where(ids == tl.load(targets + row), grad_logprob, 0.0)
    grad = of_target - p * (grad_logprob + grad_entropy * (x - tl.load(means + row)))
    tl.store(at, tl.where(ids < num_tokens, grad * scale, 0.0).to(logits.dtype.element_ty), mask=ids < vocab)


def logit_gradient(logits: torch.Tensor, rows: Rows, temperature: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """model.logit_gradient, written over `logits`."""
    num_rows, vocab = logits.shape
    grid = triton.cdiv(vocab, BLOCK), num_rows
    per_row = [x.contiguous() for x in rows]
    given = logits, logits.stride(0), *per_row, temperature, num_tokens, vocab
    gradient_kernel[grid](*given, BLOCK=BLOCK, LOW=LOW, num_warps=4)
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
    """merge of a token. H2 and D2 are H heads and D numbers of a head, up to a power of 2."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, H2)
    d = tl.arange(0, D2)
    one = tl.load(lse + h * lse_stride + token, mask=h < H, other=0.0)
    other = tl.load(seen_lse + h * seen_lse_stride + token, mask=h < H, other=0.0)
    top = tl.maximum(one, other)
    whole = top + tl.log(tl.exp(one - top) + tl.exp(other - top))
    at = token * H * D + h[:, None] * D + d[None, :]
    inside = (h[:, None] < H) & (d[None, :] < D)
    merged = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(one - whole)[:, None]
    merged += tl.load(seen + at, mask=inside, other=0.0).to(tl.float32) * tl.exp(other - whole)[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + h * lse_stride + token, whole, mask=h < H)


def merge(out: torch.Tensor, lse: torch.Tensor, seen: torch.Tensor, seen_lse: torch.Tensor) -> None:
    """attention.merge: out and seen [T, H, D], out contiguous; lse and seen_lse [H, T] float32."""
    tokens, heads, size = out.shape
    given = out, lse, lse.stride(0), seen.contiguous(), seen_lse, seen_lse.stride(0)
    sizes = {"H": heads, "D": size, "H2": triton.next_power_of_2(heads), "D2": triton.next_power_of_2(size)}
    merge_kernel[(tokens,)](*given, **sizes, num_warps=4)
