"""Triton kernels for what bounds a step on a GPU: decoding's attention, and softmaxes over the vocabulary.

Imported where there is a GPU. head.py and attention.py have the same in torch, which the CPU runs; tests/test_kernels.py compares the two, and plain
attention, in Triton's interpreter.
"""
import torch
import triton
import triton.language as tl

from head import BLOCK, LOW


@triton.jit
def statistics_kernel(out, logits, row_stride, temperatures, temperature_stride, num_tokens, BLOCK: tl.constexpr, LOW: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row * temperature_stride)
    ids, scale = block * BLOCK + tl.arange(0, BLOCK), 1 / tl.where(temperature == 0, 1.0, temperature)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < num_tokens, other=-float("inf")).to(tl.float32)
    x = tl.maximum(x * scale, LOW, propagate_nan=tl.PropagateNan.ALL)
    top = tl.max(x, 0)
    mass = tl.exp2((x - top) * 1.4426950408889634)  # 0 where x is LOW, unless all of the block is
    at = out + (row * tl.num_programs(0) + block) * 3
    tl.store(at, top)
    tl.store(at + 1, tl.sum(mass, 0))
    tl.store(at + 2, tl.sum(mass * x, 0))


def block_statistics(logits, temperature, num_tokens: int):
    """Of each BLOCK tokens of the vocabulary, [3, K, B] float32: the largest x = logit / temperature, the sum of exp(x - largest), and that of x exp(x - largest).

    logits [K, V]; temperature is one number, or one of each row, in a tensor on the GPU; 0 counts as 1.
    """
    rows, blocks = len(logits), triton.cdiv(num_tokens, BLOCK)
    out = torch.empty(rows, blocks, 3, dtype=torch.float32, device=logits.device)
    statistics_kernel[(blocks, rows)](out, logits, logits.stride(0), temperature, int(temperature.dim() > 0), num_tokens, BLOCK=BLOCK, LOW=LOW, num_warps=4)
    return out.unbind(-1)


@triton.jit
def gradient_kernel(logits, row_stride, targets, logsumexps, means, grad_logprobs, grad_entropies, temperature, num_tokens, vocab, BLOCK: tl.constexpr, LOW: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    at, scale = logits + row.to(tl.int64) * row_stride + ids, 1 / tl.load(temperature)
    x = tl.maximum(tl.load(at, mask=ids < num_tokens, other=0.0).to(tl.float32) * scale, LOW, propagate_nan=tl.PropagateNan.ALL)
    grad_logprob, grad_entropy = tl.load(grad_logprobs + row), tl.load(grad_entropies + row)
    p = tl.exp2((x - tl.load(logsumexps + row)) * 1.4426950408889634)
    grad = tl.where(ids == tl.load(targets + row), grad_logprob, 0.0) - p * (grad_logprob + grad_entropy * (x - tl.load(means + row)))
    tl.store(at, tl.where(ids < num_tokens, grad * scale, 0.0).to(logits.dtype.element_ty), mask=ids < vocab)


def logit_gradient(logits, targets, logsumexp, mean, grad_logprob, grad_entropy, temperature, num_tokens: int):
    """head.logit_gradient, written over `logits`."""
    rows, vocab = logits.shape
    per_row = [x.contiguous() for x in (targets, logsumexp, mean, grad_logprob, grad_entropy)]
    gradient_kernel[(triton.cdiv(vocab, BLOCK), rows)](logits, logits.stride(0), *per_row, temperature, num_tokens, vocab, BLOCK=BLOCK, LOW=LOW, num_warps=4)
    return logits


@triton.jit
def merge_kernel(out, lse, lse_stride, seen, seen_lse, seen_lse_stride, H: tl.constexpr, D: tl.constexpr, H2: tl.constexpr, D2: tl.constexpr):
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
        out, lse, lse.stride(0), seen, seen_lse, seen_lse.stride(0), H=heads, D=size, H2=triton.next_power_of_2(heads), D2=triton.next_power_of_2(size), num_warps=4
    )


@triton.jit
def decode_kernel(
    out, out_stride, query, query_stride, cache, block_stride, slot_stride, head_stride, table, table_stride, lengths, scale,
    G: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0), tl.program_id(1)  # programs of the same tokens run together, and share a prompt's cache blocks in L2
    length, m, d, n = tl.load(lengths + seq), tl.arange(0, M), tl.arange(0, D), tl.arange(0, TILE)
    rows = (head * G + m)[:, None] * D + d[None, :]
    q = tl.load(query + seq.to(tl.int64) * query_stride + rows, mask=(m < G)[:, None], other=0.0)  # [M, D], its G heads first
    top, total, sums = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    for start in range(0, length, TILE):
        t = start + n
        block = tl.load(table + seq.to(tl.int64) * table_stride + t // SLOTS, mask=t < length, other=0).to(tl.int64)
        at = cache + block * block_stride + (t % SLOTS) * slot_stride + head * head_stride  # [TILE], a key of D numbers and its value
        k = tl.load(at[None, :] + d[:, None], mask=(t < length)[None, :], other=0.0)
        scores = tl.where((t < length)[None, :], tl.dot(q, k) * scale, -1e30)  # [M, TILE], in powers of 2
        higher = tl.maximum(top, tl.max(scores, 1))
        p, keep = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        v = tl.load(at[:, None] + (D + d)[None, :], mask=(t < length)[:, None], other=0.0)
        total, sums, top = total * keep + tl.sum(p, 1), sums * keep[:, None] + tl.dot(p.to(v.dtype), v), higher
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]  # a place without a sequence has length 0
    tl.store(out + seq.to(tl.int64) * out_stride + rows, sums.to(out.dtype.element_ty), mask=(m < G)[:, None])


def decode_attention(out, query, cache, table, lengths, scale: float) -> None:
    """Attention of one new token of each sequence to its paged cache, into `out`.

    out, query [N, H, D]; cache [blocks, kv heads, slots, 2 D], keys then values, as vLLM's flash attention backend keeps it; table [N, blocks] and lengths [N] int32.
    """
    heads, size = query.shape[1:]
    kv_heads, slots = cache.shape[1:3]
    decode_kernel[(kv_heads, len(query))](
        out, out.stride(0), query, query.stride(0), cache, cache.stride(0), cache.stride(2), cache.stride(1), table, table.stride(0), lengths, scale * 1.4426950408889634,
        G=heads // kv_heads, D=size, SLOTS=slots, TILE=64 if size <= 128 else 32, M=max(16, triton.next_power_of_2(heads // kv_heads)), num_warps=2, num_stages=3,
    )  # fmt: skip
