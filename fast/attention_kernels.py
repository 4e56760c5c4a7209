"""The backward of packed attention in Triton (actor.lean_kernels): both calls of attention.flash_attention_backward and
all that goes around them, in one.

Letters: T tokens, H heads, D numbers of a head, G heads that share a key and value head; tiles of M rows and N keys.
A row of both kernels' tiles is a query of one head. The G heads that share a key and value head are neighbours: keys
and values are read once for all of them, and their gradients are added up where they arise. Nothing is added
atomically, so that the same numbers come out every time.

Imported where there is a GPU; tests/test_attention_kernels.py compares it, in Triton's interpreter, with what autograd
makes of plain attention.
"""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INT32_MAX = tl.constexpr(2**31 - 1)
# By the size of a head: rows, keys, warps and stages of the two kernels, the fastest of six on an H200; and registers
# of the queries' kernel: with 128, two programs of eight warps have room on a multiprocessor. For size 64
# FlashAttention 2 is faster, but for short sequences.
TILES = {128: {"queries": (128, 32, 8, 3, 128), "keys": (64, 128, 8, 3)}}


def serves(q: torch.Tensor, k: torch.Tensor, num_seqs: int) -> bool:
    """Whether flash_backward takes these, on this GPU: its tiles are for the registers and shared memory of Hopper."""
    group = q.size(1) // k.size(1)
    tiles = TILES.get(q.size(-1))
    known = q.is_cuda and q.dtype == torch.bfloat16 and tiles is not None and group <= 64
    if not known or torch.cuda.get_device_capability(q.device)[0] != 9:
        return False
    blocks = tiles["queries"][0] // group, tiles["keys"][1]
    return all(q.size(0) // block + num_seqs < 2**16 for block in blocks)  # programs that a grid may have


@triton.jit
def last_not_after(starts, num, x, block, spread):
    """The last i < num for which starts[i] // block + spread * i <= x."""
    n = tl.arange(0, 128)
    found = tl.zeros([128], tl.int32)
    for i in range(0, num, 128):
        at = tl.load(starts + i + n, mask=i + n < num, other=INT32_MAX)
        found += ((i + n < num) & (at // block + spread * (i + n) <= x)).to(tl.int32)
    return tl.sum(found, 0) - 1


@triton.jit(do_not_specialize=["num_own", "num_prompts", "num_prompt_tokens"])
def table_kernel(
    table, cu_own, num_own, cu_responses, cu_prompts, num_prompts, num_prompt_tokens, block_of_queries, block_of_keys
):
    """What each program p of the two kernels works on.

    The first token of its block, the first of its sequence and the one behind that, and the range of what the block
    sees (queries) or is seen by (keys) beyond its sequence. Sequence s has the programs from start // block + s on: at
    least as many as blocks, and all that can be known without a look at the boundaries before the launch.
    """
    p = tl.program_id(0)
    of_keys = tl.program_id(1)
    block = tl.where(of_keys == 1, block_of_keys, block_of_queries)
    s = last_not_after(cu_own, num_own, p, block, 1)
    own = tl.load(cu_own + s)
    end = tl.load(cu_own + s + 1)
    other = 0
    other_end = 0
    if (s < num_prompts) & (of_keys == 1):  # keys of a prompt: all of its responses see them
        other = num_prompt_tokens + tl.load(cu_responses + s)
        other_end = num_prompt_tokens + tl.load(cu_responses + s + 1)
    if (num_prompts > 0) & (s >= num_prompts) & (of_keys == 0):  # queries of a response: they see its prompt
        prompt = last_not_after(cu_responses, num_prompts, own - num_prompt_tokens, 1, 0)
        other = tl.load(cu_prompts + prompt)
        other_end = tl.load(cu_prompts + prompt + 1)
    row = table + (of_keys * tl.num_programs(0) + p) * 8
    tl.store(row, own + (p - own // block - s) * block)
    tl.store(row + 1, own)
    tl.store(row + 2, end)
    tl.store(row + 3, other)
    tl.store(row + 4, other_end)


@triton.jit
def rows_at(x, token, head, token_stride, head_stride, r, d, G: tl.constexpr):
    """Pointers [M, D]: rows r are queries from `token` on, the G heads of each in turn."""
    of_row = r // G * token_stride + r % G * head_stride
    return x + token.to(tl.int64) * token_stride + head.to(tl.int64) * G * head_stride + of_row[:, None] + d[None, :]


@triton.jit
def add_keys(dq, q, grad, lse, delta, limit, k, v, k_stride, v_stride, start, end, scale, n, d):
    """dq [M, D] and what keys from `start` on, before `end`, add: for each row those up to its limit."""
    keys = start + n
    inside = (keys < end)[:, None]
    k_at = k + start.to(tl.int64) * k_stride + n[:, None] * k_stride + d[None, :]
    v_at = v + start.to(tl.int64) * v_stride + n[:, None] * v_stride + d[None, :]
    k_tile = tl.load(k_at, mask=inside, other=0.0)
    v_tile = tl.load(v_at, mask=inside, other=0.0)
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
    """dq of a block of queries of a key and value head; and what the keys' kernel has to know of each query.

    That is, in `statistics` [2, kv heads, T, G], its log-sum-exp in powers of 2 and the sum of out * grad.
    """
    head = tl.program_id(0)
    # Queries that see most come last in their sequence: they begin first.
    row = table + (tl.num_programs(1) - 1 - tl.program_id(1)) * 8
    begin = tl.load(row)
    own = tl.load(row + 1)
    end = tl.load(row + 2)
    other = tl.load(row + 3)
    other_end = tl.load(row + 4)
    if begin >= end:
        return
    r = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    query = begin + r // G
    inside = (query < end) & (r < M // G * G)
    used = inside[:, None]
    q_tile = tl.load(rows_at(q, begin, head, q_token, q_head, r, d, G), mask=used, other=0.0)  # [M, D]
    grad_tile = tl.load(rows_at(grad, begin, head, grad_token, grad_head, r, d, G), mask=used, other=0.0)
    out_tile = tl.load(rows_at(out, begin, head, out_token, out_head, r, d, G), mask=used, other=0.0)
    delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    # A row without a query gets inf, by which all its weights are 0.
    lse_row = tl.load(lse + (head * G + r % G) * lse_stride + query, mask=inside, other=float("inf")) * LOG2E
    to = statistics + (head.to(tl.int64) * num_tokens + begin) * G + r
    tl.store(to, lse_row, mask=inside)
    tl.store(to + tl.num_programs(0).to(tl.int64) * num_tokens * G, delta, mask=inside)
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    sum_q = tl.zeros([M, D], tl.float32)
    last = tl.minimum(begin + M // G, end)
    steps = tl.cdiv(last - own, N)  # over keys of the own sequence
    other_steps = tl.cdiv(other_end - other, N)  # over keys of the prompt
    for i in range(steps + other_steps):
        start = tl.where(i < steps, own + i * N, other + (i - steps) * N)
        stop = tl.where(i < steps, last, other_end)
        limit = tl.where(i < steps, query, other_end - 1)
        sum_q = add_keys(
            sum_q, q_tile, grad_tile, lse_row, delta, limit, k, v, k_token, v_token, start, stop, scale * LOG2E, n, d
        )
    heads = tl.num_programs(0) * G
    dq_at = rows_at(dq, begin, head, heads * D, D, r, d, G)
    tl.store(dq_at, (sum_q * scale).to(dq.dtype.element_ty), mask=used)


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
    """dk and dv [N, D] and what queries from `start` on, before `end`, add: each sees keys up to itself + `above`."""
    query = start + r // G
    inside = (query < end) & (r < M // G * G)
    used = inside[:, None]
    q_tile = tl.load(rows_at(q, start, head, q_token, q_head, r, d, G), mask=used, other=0.0)  # [M, D]
    grad_tile = tl.load(rows_at(grad, start, head, grad_token, grad_head, r, d, G), mask=used, other=0.0)
    at = start.to(tl.int64) * G + r
    lse_row = tl.load(lse + at, mask=inside, other=float("inf"))
    p = tl.exp2(tl.dot(k, tl.trans(q_tile)) * scale - lse_row[None, :])  # [N, M]
    p = tl.where(keys[:, None] <= (query + above)[None, :], p, 0.0)
    dp = tl.dot(v, tl.trans(grad_tile))
    dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv)  # goes on while ds is computed
    ds = p * (dp - tl.load(delta + at, mask=inside, other=0.0)[None, :])
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
    """dk and dv of a block of keys of a head. Prompts, which all of their responses see, come first and begin first."""
    head = tl.program_id(0)
    row = table + tl.program_id(1) * 8
    begin = tl.load(row)
    end = tl.load(row + 2)
    other = tl.load(row + 3)
    other_end = tl.load(row + 4)
    if begin >= end:
        return
    r = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    keys = begin + n
    inside = (keys < end)[:, None]
    k_at = k + begin.to(tl.int64) * k_token + head.to(tl.int64) * k_head + n[:, None] * k_token + d[None, :]
    v_at = v + begin.to(tl.int64) * v_token + head.to(tl.int64) * v_head + n[:, None] * v_token + d[None, :]
    k_tile = tl.load(k_at, mask=inside, other=0.0)  # [N, D]
    v_tile = tl.load(v_at, mask=inside, other=0.0)
    lse = statistics + head.to(tl.int64) * num_tokens * G
    delta = lse + tl.num_programs(0).to(tl.int64) * num_tokens * G
    step = M // G
    own = tl.cdiv(end - begin, step)  # steps over queries of the own sequence
    num = own + tl.cdiv(other_end - other, step)
    sum_k = tl.zeros([N, D], tl.float32)
    sum_v = tl.zeros([N, D], tl.float32)
    for i in range(num):
        start = tl.where(i < own, begin + i * step, other + (i - own) * step)
        stop = tl.where(i < own, end, other_end)
        above = tl.where(i < own, 0, num_tokens)
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
    heads = tl.num_programs(0)
    at = ((begin.to(tl.int64) * heads + head) * D + n[:, None] * heads * D) + d[None, :]
    tl.store(dk + at, (sum_k * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, sum_v.to(dv.dtype.element_ty), mask=inside)


def block_table(cu_own, cu_responses, cu_prompts, num_prompt_tokens: int, blocks: tuple[int, int], programs: int):
    """table_kernel's table [2, programs, 8] of the queries' kernel and the keys'. blocks: a block's tokens in each."""
    num_prompts = len(cu_prompts) - 1 if num_prompt_tokens else 0
    table = torch.empty(2, programs, 8, dtype=torch.int32, device=cu_own.device)
    prompts = cu_responses, cu_prompts, num_prompts, num_prompt_tokens
    table_kernel[(programs, 2)](table, cu_own, len(cu_own) - 1, *prompts, *blocks, num_warps=1)
    return table


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
    """(dq, dk, dv), as of attention.flash_attention_backward. lse [H, T] and out [T, H, D] are the whole attention's.

    Every token sees its own sequence up to itself. With prompts that are shared, which are the first num_prompt_tokens
    tokens, the other sequences see all of their prompt.
    """
    grad, q, k, v, out, lse = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, q, k, v, out, lse))
    num_tokens, heads, size = q.shape
    kv_heads = k.size(1)
    group = heads // kv_heads
    tiles = tiles or TILES[size]
    m, n, warps, stages, registers = tiles["queries"]
    m_of_keys, n_of_keys, warps_of_keys, stages_of_keys = tiles["keys"]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    statistics = torch.empty(2, kv_heads, num_tokens, group, dtype=torch.float32, device=q.device)
    blocks = m // group, n_of_keys
    programs = [num_tokens // block + len(cu_own) - 1 for block in blocks]
    table = block_table(cu_own, cu_responses, cu_prompts, num_prompt_tokens, blocks, max(programs))

    of_q, of_k, of_v, of_out, of_grad = (x.stride()[:2] for x in (q, k, v, out, grad))
    given = dq, statistics, table[0], q, k, v, out, grad, lse, *of_q, *of_k, *of_v, *of_out, *of_grad, lse.stride(0)
    shape = {"G": group, "D": size, "M": m, "N": n}
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    queries_kernel[(kv_heads, programs[0])](*given, num_tokens, scale, **shape, **options)

    given = dk, dv, statistics, table[1], q, k, v, grad, *of_q, *of_k, *of_v, *of_grad
    shape = {"G": group, "D": size, "M": m_of_keys, "N": n_of_keys}
    options = {"num_warps": warps_of_keys, "num_stages": stages_of_keys}
    keys_kernel[(kv_heads, programs[1])](*given, num_tokens, scale, **shape, **options)
    return dq, dk, dv
