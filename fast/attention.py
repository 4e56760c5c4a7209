"""Attention of packed sequences by flash attention (actor.flash_attention), and with prompts that sequences share computed once.

model.packed_attention is the plain twin. transformers calls the functions that `use_fast_attention` registers; `packing` is the
batch that the model runs on. The custom operations keep a compiled layer in one graph.
"""

import functools
import types

import torch

from batch import Batch
from model import binding_window, padded_attention

KERNELS: types.ModuleType | None = (
    None  # fast.kernels, when merging and the backward may use Triton (actor.lean_kernels)
)


def use_fast_attention(model, flash: bool, kernels: bool) -> None:
    """Let a model attend by flash attention in bfloat16, or, without `flash`, by torch's own with shared prompts."""
    from transformers import AttentionInterface

    global KERNELS
    if kernels:
        from fast import kernels as triton_kernels

        KERNELS = triton_kernels
    else:
        KERNELS = None
    AttentionInterface.register("packed_flash", flash_packed_attention)
    AttentionInterface.register("packed_shared", shared_packed_attention)
    model.set_attn_implementation("packed_flash" if flash else "packed_shared")


def shared_packed_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing: Batch | None = None, **kwargs
) -> tuple[torch.Tensor, None]:
    """model.packed_attention where prompts may be in the row once: every sequence gets a copy of its prompt, for this
    layer's attention only. query [1, H, T', D] -> [1, T', H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T', H, D]
    window = binding_window(sliding_window, packing)
    shared = packing.shared
    if shared is None:
        return padded_attention(q, k, v, scaling, window, packing)[None], None
    q, k, v = (x[shared.places] for x in (q, k, v))  # [T, H, D]
    return padded_attention(q, k, v, scaling, window, packing)[shared.index][None], None


def flash_packed_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing: Batch | None = None, **kwargs
) -> tuple[torch.Tensor, None]:
    """The same by flash attention; float32, which has none, goes the other way."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        return shared_packed_attention(
            module, query, key, value, attention_mask, scaling, sliding_window, packing, **kwargs
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T', H, D]
    window = binding_window(sliding_window, packing)
    shared = packing.shared
    if shared is not None and window is None:
        starts = shared.cu_own, shared.cu_responses, shared.cu_prompts
        sizes = shared.num_prompt_tokens, shared.longest_own, shared.longest_responses, shared.longest_prompt
        return flash_attention(q, k, v, *starts, *sizes, scaling, -1)[0][None], None
    if shared is not None:
        q, k, v = (x[shared.places] for x in (q, k, v))  # [T, H, D]
    starts = packing.cu_seqlens, packing.cu_seqlens, packing.cu_seqlens
    left = -1 if window is None else window - 1
    out = flash_attention(q, k, v, *starts, 0, packing.max_seqlen, 0, 0, scaling, left)[0]
    return (out if shared is None else out[shared.index])[None], None


@functools.cache
def flash_3():
    """FlashAttention 3's forward, which vLLM brings for Hopper GPUs; None elsewhere."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    return flash_attn_varlen_func if is_fa_version_supported(3) else None


def flash_forward(q, k, v, cu_q, cu_k, longest_q: int, longest_k: int, causal: bool, scale: float, left: int = -1):
    """out [T, H, D] and log-sum-exp [H, T] float32; a token sees `left` tokens before it, all when -1."""
    if flash_3():
        window = (left, 0 if left >= 0 else -1)
        return flash_3()(
            q,
            k,
            v,
            longest_q,
            cu_q,
            longest_k,
            cu_k,
            softmax_scale=scale,
            causal=causal,
            window_size=window,
            return_softmax_lse=True,
            num_splits=1,
            fa_version=3,
        )
    window = {"window_size_left": left, "window_size_right": 0} if left >= 0 else {}
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, longest_q, longest_k, 0.0, causal, False, scale=scale, **window
    )[:2]


def flash_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, longest_q: int, longest_k: int, causal: bool, scale: float, left: int = -1
):
    """Gradients of q, k, v, by torch's kernel. Of a part of the keys they are those of the whole attention when `out` and `lse` are the whole's."""
    rng_state, unused = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )  # there is no dropout
    window = {"window_size_left": left, "window_size_right": 0} if left >= 0 else {}
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, 0.0, causal, rng_state, unused, scale=scale, **window
    )


def merge(out, lse, seen, seen_lse) -> None:
    """Two attentions of the same queries to different keys become one, in place: out [T, H, D], lse [H, T]."""
    if KERNELS:
        KERNELS.merge(out, lse, seen, seen_lse)
        return
    whole = torch.logaddexp(lse, seen_lse)
    weigh = lambda part, part_lse: part.float() * (part_lse - whole).exp().T[:, :, None]  # noqa: E731
    out.copy_(weigh(out, lse) + weigh(seen, seen_lse))
    lse.copy_(whole)


@torch.library.custom_op("lockstep::flash_attention", mutates_args=())
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_own: torch.Tensor,
    cu_responses: torch.Tensor,
    cu_prompts: torch.Tensor,
    num_prompt_tokens: int,
    longest_own: int,
    longest_responses: int,
    longest_prompt: int,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, D], log-sum-exp [H, T]) of packed sequences. Where prompts are shared, those are the first num_prompt_tokens tokens, and a
    response's two attentions, to itself and to its prompt, are merged by their log-sum-exps."""
    n = num_prompt_tokens
    out, lse = flash_forward(q, k, v, cu_own, cu_own, longest_own, longest_own, True, scale, left)
    out, lse = out.contiguous(), lse.contiguous()
    if n:
        seen, seen_lse = flash_forward(
            q[n:], k[:n], v[:n], cu_responses, cu_prompts, longest_responses, longest_prompt, False, scale
        )
        merge(out[n:], lse[:, n:], seen, seen_lse)
    return out, lse


@torch.library.custom_op("lockstep::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_own: torch.Tensor,
    cu_responses: torch.Tensor,
    cu_prompts: torch.Tensor,
    num_prompt_tokens: int,
    longest_own: int,
    longest_responses: int,
    longest_prompt: int,
    scale: float,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if left < 0 and KERNELS:
        from fast import attention_kernels

        if attention_kernels.serves(q, k, len(cu_own) - 1):
            return attention_kernels.flash_backward(
                grad, q, k, v, out, lse, cu_own, cu_responses, cu_prompts, num_prompt_tokens, scale
            )
    n, grad = num_prompt_tokens, grad.contiguous()
    dq, dk, dv = flash_backward(grad, q, k, v, out, lse, cu_own, cu_own, longest_own, longest_own, True, scale, left)
    if n:
        more = flash_backward(
            grad[n:],
            q[n:],
            k[:n],
            v[:n],
            out[n:],
            lse[:, n:].contiguous(),
            cu_responses,
            cu_prompts,
            longest_responses,
            longest_prompt,
            False,
            scale,
        )
        dq[n:] += more[0]
        dk[:n] += more[1]
        dv[:n] += more[2]
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@flash_attention.register_fake
def _(q, k, v, *rest):
    return q.new_empty(q.shape), q.new_empty(q.size(1), q.size(0), dtype=torch.float32)


@flash_attention_backward.register_fake
def _(grad, q, k, v, *rest):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.sizes = inputs[6:]


def backward(ctx, grad, _):
    return *flash_attention_backward(grad, *ctx.saved_tensors, *ctx.sizes), *[None] * 9


flash_attention.register_autograd(backward, setup_context=keep_for_backward)
