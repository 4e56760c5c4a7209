"""The backward of packed attention in Triton: attention.flash_attention_backward's two calls and all that goes around them, in one.

A row of both kernels' tiles is a query of one head, and the heads that share a key and value head are neighbours: these are read once for all of them, and their gradients
are added up where they arise. Nothing is added atomically, so that the same numbers come out every time. Imported where there is a GPU; tests/test_attention_kernels.py
compares it, in Triton's interpreter, with what autograd makes of plain attention.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TILES = {  # of each head size: rows, keys, warps and stages of the two kernels, the fastest of six on an H200; with 128 registers two programs of eight warps have room on a multiprocessor
    128: {
        "queries": (128, 32, 8, 3, 128),
        "keys": (64, 128, 8, 3),
    },  # of size 64 FlashAttention 2 is faster, but for short sequences
}


def serves(q, k, num_seqs: int) -> bool:
    """Whether flash_backward takes these, on this GPU: its tiles are for the registers and the shared memory of Hopper."""
    group, tiles = q.size(1) // k.size(1), TILES.get(q.size(-1))
    known = (
        q.is_cuda
        and q.dtype == torch.bfloat16
        and tiles is not None
        and group <= 64
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )
    return known and all(
        q.size(0) // block + num_seqs < 2**16 for block in (tiles["queries"][0] // group, tiles["keys"][1])
    )  # programs of a grid


@triton.jit
def last_not_after(starts, num, x, block, spread):
    """The last i of num for which starts[i] // block + spread * i <= x."""
    n = tl.arange(0, 128)
    found = tl.zeros([128], tl.int32)
    for i in range(0, num, 128):
        at = tl.load(starts + i + n, mask=i + n < num, other=2147483647)
        found += ((i + n < num) & (at // block + spread * (i + n) <= x)).to(tl.int32)
    return tl.sum(found, 0) - 1


@triton.jit(do_not_specialize=["num_own", "num_prompts", "num_prompt_tokens"])
def table_kernel(
    table, cu_own, num_own, cu_responses, cu_prompts, num_prompts, num_prompt_tokens, block_of_queries, block_of_keys
):
    """Of program p: the first token of its block, the first of its sequence and the one behind, and the range of what the block sees, or is seen by, beyond its sequence.

    Sequence s has the programs from start // block + s on: at least as many as blocks, and all that can be known without a look at the boundaries before the launch.
    """
    p, of_keys = tl.program_id(0), tl.program_id(1)
    block = tl.where(of_keys == 1, block_of_keys, block_of_queries)
    s = last_not_after(cu_own, num_own, p, block, 1)
    own, end = tl.load(cu_own + s), tl.load(cu_own + s + 1)
    other, other_end = 0, 0
    if (s < num_prompts) & (of_keys == 1):
        other, other_end = (
            num_prompt_tokens + tl.load(cu_responses + s),
            num_prompt_tokens + tl.load(cu_responses + s + 1),
        )
    if (num_prompts > 0) & (s >= num_prompts) & (of_keys == 0):
        prompt = last_not_after(cu_responses, num_prompts, own - num_prompt_tokens, 1, 0)
        other, other_end = tl.load(cu_prompts + prompt), tl.load(cu_prompts + prompt + 1)
    row = table + (of_keys * tl.num_programs(0) + p) * 8
    tl.store(row, own + (p - own // block - s) * block)
    tl.store(row + 1, own)
    tl.store(row + 2, end)
    tl.store(row + 3, other)
    tl.store(row + 4, other_end)


@triton.jit
def rows_at(x, token, head, token_stride, head_stride, r, d, G: tl.constexpr):
    """Pointers [M, D]: rows r are queries from `token` on, the G heads of each in turn."""
    return (
        x
        + token.to(tl.int64) * token_stride
        + head.to(tl.int64) * G * head_stride
        + (r // G * token_stride + r % G * head_stride)[:, None]
        + d[None, :]
    )


@triton.jit
def add_keys(dq, q, grad, lse, delta, limit, k, v, k_stride, v_stride, start, end, scale, n, d):
    """dq [M, D] and what keys from `start` on, before `end`, add: for each row those up to its limit."""
    keys, k_at, v_at = (
        start + n,
        k + start.to(tl.int64) * k_stride + n[:, None] * k_stride + d[None, :],
        v + start.to(tl.int64) * v_stride + n[:, None] * v_stride + d[None, :],
    )
    k_tile, v_tile = (
        tl.load(k_at, mask=(keys < end)[:, None], other=0.0),
        tl.load(v_at, mask=(keys < end)[:, None], other=0.0),
    )
    p = tl.exp2(tl.dot(q, tl.trans(k_tile)) * scale - lse[:, None])  # [M, N]
    p = tl.where(keys[None, :] <= limit[:, None], p, 0.0)
    ds = p * (tl.dot(grad, tl.trans(v_tile)) - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq)


@triton.jit(do_not_specialize=["lse_stride", "num_tokens"])
def queries_kernel(
    dq,
    statistics,
    table,
    q,
    k,
    v,
    out,
    grad,
    lse,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    grad_token,
    grad_head,
    lse_stride,
    num_tokens,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """dq of a block of queries of a key and value head, and what the keys' kernel has to know of each: its log-sum-exp and the sum of out * grad."""
    head, row = (
        tl.program_id(0),
        table + (tl.num_programs(1) - 1 - tl.program_id(1)) * 8,
    )  # those that see most come last in their sequence: they begin first
    begin, own, end, other, other_end = (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
    )
    if begin >= end:
        return
    r, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    query = begin + r // G
    inside = (query < end) & (r < M // G * G)
    q_tile = tl.load(rows_at(q, begin, head, q_token, q_head, r, d, G), mask=inside[:, None], other=0.0)  # [M, D]
    grad_tile = tl.load(rows_at(grad, begin, head, grad_token, grad_head, r, d, G), mask=inside[:, None], other=0.0)
    delta = tl.sum(
        tl.load(rows_at(out, begin, head, out_token, out_head, r, d, G), mask=inside[:, None], other=0.0).to(tl.float32)
        * grad_tile.to(tl.float32),
        1,
    )
    lse_row = (
        tl.load(lse + (head * G + r % G) * lse_stride + query, mask=inside, other=float("inf")) * LOG2E
    )  # by which a row that is none has no weights
    to = statistics + (head.to(tl.int64) * num_tokens + begin) * G + r
    tl.store(to, lse_row, mask=inside)
    tl.store(to + tl.num_programs(0).to(tl.int64) * num_tokens * G, delta, mask=inside)
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    sum_q, last = tl.zeros([M, D], tl.float32), tl.minimum(begin + M // G, end)
    steps, other_steps = tl.cdiv(last - own, N), tl.cdiv(other_end - other, N)  # of own keys, and of the prompt's
    for i in range(steps + other_steps):
        start, stop = tl.where(i < steps, own + i * N, other + (i - steps) * N), tl.where(i < steps, last, other_end)
        limit = tl.where(i < steps, query, other_end - 1)
        sum_q = add_keys(
            sum_q, q_tile, grad_tile, lse_row, delta, limit, k, v, k_token, v_token, start, stop, scale * LOG2E, n, d
        )
    heads = tl.num_programs(0) * G
    tl.store(
        rows_at(dq, begin, head, heads * D, D, r, d, G), (sum_q * scale).to(dq.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def add_queries(
    dk,
    dv,
    k,
    v,
    keys,
    q,
    grad,
    lse,
    delta,
    q_token,
    q_head,
    grad_token,
    grad_head,
    start,
    end,
    head,
    above,
    scale,
    r,
    d,
    G: tl.constexpr,
    M: tl.constexpr,
):
    """dk and dv [N, D] and what queries from `start` on, before `end`, add. Each sees keys up to itself and `above` more."""
    query = start + r // G
    inside = (query < end) & (r < M // G * G)
    q_tile = tl.load(rows_at(q, start, head, q_token, q_head, r, d, G), mask=inside[:, None], other=0.0)  # [M, D]
    grad_tile = tl.load(rows_at(grad, start, head, grad_token, grad_head, r, d, G), mask=inside[:, None], other=0.0)
    lse_row = tl.load(lse + start.to(tl.int64) * G + r, mask=inside, other=float("inf"))
    p = tl.exp2(tl.dot(k, tl.trans(q_tile)) * scale - lse_row[None, :])  # [N, M]
    p = tl.where(keys[:, None] <= (query + above)[None, :], p, 0.0)
    dp = tl.dot(v, tl.trans(grad_tile))
    dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv)  # under way while ds is found
    ds = p * (dp - tl.load(delta + start.to(tl.int64) * G + r, mask=inside, other=0.0)[None, :])
    return tl.dot(ds.to(q_tile.dtype), q_tile, dk), dv


@triton.jit(do_not_specialize=["num_tokens"])
def keys_kernel(
    dk,
    dv,
    statistics,
    table,
    q,
    k,
    v,
    grad,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    grad_token,
    grad_head,
    num_tokens,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """dk and dv of a block of keys of a head. Prompts', which all of their responses see, come first and begin first."""
    head, row = tl.program_id(0), table + tl.program_id(1) * 8
    begin, end, other, other_end = tl.load(row), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    if begin >= end:
        return
    r, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    keys, step = begin + n, M // G
    k_tile = tl.load(
        k + begin.to(tl.int64) * k_token + head.to(tl.int64) * k_head + n[:, None] * k_token + d[None, :],
        mask=(keys < end)[:, None],
        other=0.0,
    )  # [N, D]
    v_tile = tl.load(
        v + begin.to(tl.int64) * v_token + head.to(tl.int64) * v_head + n[:, None] * v_token + d[None, :],
        mask=(keys < end)[:, None],
        other=0.0,
    )
    lse = statistics + head.to(tl.int64) * num_tokens * G
    delta = lse + tl.num_programs(0).to(tl.int64) * num_tokens * G
    own = tl.cdiv(end - begin, step)  # steps over queries of its own sequence
    num = own + tl.cdiv(other_end - other, step)
    sum_k, sum_v = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    for i in range(num):
        start, stop, above = (
            tl.where(i < own, begin + i * step, other + (i - own) * step),
            tl.where(i < own, end, other_end),
            tl.where(i < own, 0, num_tokens),
        )
        sum_k, sum_v = add_queries(
            sum_k,
            sum_v,
            k_tile,
            v_tile,
            keys,
            q,
            grad,
            lse,
            delta,
            q_token,
            q_head,
            grad_token,
            grad_head,
            start,
            stop,
            head,
            above,
            scale * LOG2E,
            r,
            d,
            G,
            M,
        )
    heads, inside = tl.num_programs(0), (keys < end)[:, None]
    at = ((begin.to(tl.int64) * heads + head) * D + n[:, None] * heads * D) + d[None, :]
    tl.store(dk + at, (sum_k * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, sum_v.to(dv.dtype.element_ty), mask=inside)


def flash_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    cu_own,
    cu_responses,
    cu_prompts,
    num_prompt_tokens: int,
    scale: float,
    tiles: dict | None = None,
):
    """(dq, dk, dv), as of attention.flash_attention_backward: every token sees its own sequence up to itself, and with prompts that are shared, which are the first
    num_prompt_tokens tokens, the other sequences see all of their prompt. lse [H, T] and out [T, H, D] are the whole attention's."""
    grad, q, k, v, out, lse = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, out, lse))
    (tokens, heads, size), kv_heads, num_own, num_prompts = (
        q.shape,
        k.size(1),
        len(cu_own) - 1,
        len(cu_prompts) - 1 if num_prompt_tokens else 0,
    )
    group, tiles = heads // kv_heads, tiles or TILES[size]
    (m, n, warps, stages, registers), of_keys = tiles["queries"], tiles["keys"]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    statistics = torch.empty(2, kv_heads, tokens, group, dtype=torch.float32, device=q.device)
    programs = [tokens // block + num_own for block in (m // group, of_keys[1])]
    table = torch.empty(2, max(programs), 8, dtype=torch.int32, device=q.device)
    table_kernel[(max(programs), 2)](
        table,
        cu_own,
        num_own,
        cu_responses,
        cu_prompts,
        num_prompts,
        num_prompt_tokens,
        m // group,
        of_keys[1],
        num_warps=1,
    )
    strides = {name: x.stride()[:2] for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("grad", grad))}
    queries_kernel[(kv_heads, programs[0])](
        dq,
        statistics,
        table[0],
        q,
        k,
        v,
        out,
        grad,
        lse,
        *strides["q"],
        *strides["k"],
        *strides["v"],
        *strides["out"],
        *strides["grad"],
        lse.stride(0),
        tokens,
        scale,
        G=group,
        D=size,
        M=m,
        N=n,
        num_warps=warps,
        num_stages=stages,
        maxnreg=registers,
    )
    m, n, warps, stages = of_keys
    keys_kernel[(kv_heads, programs[1])](
        dk,
        dv,
        statistics,
        table[1],
        q,
        k,
        v,
        grad,
        *strides["q"],
        *strides["k"],
        *strides["v"],
        *strides["grad"],
        tokens,
        scale,
        G=group,
        D=size,
        M=m,
        N=n,
        num_warps=warps,
        num_stages=stages,
    )
    return dq, dk, dv
