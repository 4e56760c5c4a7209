"""Attention of packed sequences by flash attention (actor.flash_attention), and of prompts that several sequences share
(actor.share_prompts).

model.packed_attention is the plain twin. transformers calls the functions that `use_fast_attention` registers;
`packing` is the batch that the model runs on. The custom operations keep a compiled layer in one graph.
"""

import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor

from batch import Batch
from model import Scores, attending, binding_window, check_arguments, padded_attention

# fast.kernels, when merging and the backward may use Triton (actor.lean_kernels).
KERNELS: types.ModuleType | None = None


def use_fast_attention(model, flash: bool, kernels: bool) -> None:
    """Let a model attend by flash attention in bfloat16, or, without `flash`, by torch's own with shared prompts."""
    from transformers import AttentionInterface

    global KERNELS
    KERNELS = None
    if kernels:
        from fast import kernels as triton_kernels

        KERNELS = triton_kernels
    AttentionInterface.register("packed_fast", flash_packed_attention)
    AttentionInterface.register("packed_shared", shared_packed_attention)
    model.set_attn_implementation("packed_fast" if flash else "packed_shared")


def shared_packed_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing: Batch | None = None, **kwargs
) -> tuple[Tensor, None]:
    """model.packed_attention where prompts may be in the row once. query [1, H, T', D] -> [1, T', H, D].

    Every sequence gets a copy of its prompt, for this layer's attention only.
    """
    softcap = check_arguments(module, attention_mask, **kwargs)
    packing = packing or attending.packing
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T', H, D]
    scores = Scores(scaling, binding_window(sliding_window, packing), softcap)
    shared = packing.shared
    if shared is None:
        return padded_attention(q, k, v, scores, packing)[None], None
    q, k, v = (x[shared.places] for x in (q, k, v))  # [T, H, D]
    return padded_attention(q, k, v, scores, packing)[shared.index][None], None


def flash_packed_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing: Batch | None = None, **kwargs
) -> tuple[Tensor, None]:
    """The same by flash attention; float32, which has none, and capped scores go the other way."""
    softcap = check_arguments(module, attention_mask, **kwargs)
    if query.dtype not in (torch.bfloat16, torch.float16) or softcap is not None:
        return shared_packed_attention(
            module, query, key, value, attention_mask, scaling, sliding_window, packing, **kwargs
        )
    packing = packing or attending.packing
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T', H, D]
    window = binding_window(sliding_window, packing)
    shared = packing.shared
    if shared is not None and window is None:
        starts = shared.cu_own, shared.cu_responses, shared.cu_prompts
        sizes = shared.num_prompt_tokens, shared.longest_own, shared.longest_responses, shared.longest_prompt
        out, _ = flash_attention(q, k, v, *starts, *sizes, scaling, -1)
        return out[None], None
    if shared is not None:  # a window is counted over a sequence with its prompt: each gets a copy
        q, k, v = (x[shared.places] for x in (q, k, v))  # [T, H, D]
    starts = packing.cu_seqlens, packing.cu_seqlens, packing.cu_seqlens
    left = -1 if window is None else window - 1
    out, _ = flash_attention(q, k, v, *starts, 0, packing.max_seqlen, 0, 0, scaling, left)
    if shared is not None:
        out = out[shared.index]
    return out[None], None


@functools.cache
def flash_3() -> Callable | None:
    """FlashAttention 3's forward, which vLLM brings for Hopper GPUs; None elsewhere."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    return flash_attn_varlen_func if is_fa_version_supported(3) else None


def flash_forward(
    q, k, v, cu_q, cu_k, longest_q: int, longest_k: int, causal: bool, scale: float, left: int = -1
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and log-sum-exp [H, T] float32; a token sees `left` tokens before it, all when -1."""
    if flash_3():
        return flash_3()(
            *(q, k, v, longest_q, cu_q, longest_k, cu_k),
            softmax_scale=scale,
            causal=causal,
            window_size=(left, 0 if left >= 0 else -1),
            return_softmax_lse=True,
            num_splits=1,
            fa_version=3,
        )
    options = {"scale": scale} | torch_window(left)
    dropout, return_mask = 0.0, False
    given = q, k, v, cu_q, cu_k, longest_q, longest_k, dropout, causal, return_mask
    return torch.ops.aten._flash_attention_forward(*given, **options)[:2]


def flash_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, longest_q: int, longest_k: int, causal: bool, scale: float, left: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, by torch's kernel.

    Given only a part of the keys, with `out` and `lse` of the attention to all of them, it gives that part's share of
    the whole attention's gradients.
    """
    dropout = 0.0
    no_rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    options = {"scale": scale} | torch_window(left)
    given = grad, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, dropout, causal, no_rng_state, unused
    return torch.ops.aten._flash_attention_backward(*given, **options)


def torch_window(left: int) -> dict[str, int]:
    """What torch's kernels are told of a sliding window."""
    return {"window_size_left": left, "window_size_right": 0} if left >= 0 else {}


def merge(out: Tensor, lse: Tensor, seen: Tensor, seen_lse: Tensor) -> None:
    """Two attentions of the same queries to different keys become one, in place: out [T, H, D], lse [H, T]."""
    if KERNELS:
        KERNELS.merge(out, lse, seen, seen_lse)
        return
    whole = torch.logaddexp(lse, seen_lse)  # [H, T]

    def weigh(part: Tensor, part_lse: Tensor) -> Tensor:
        return part.float() * (part_lse - whole).exp().T[:, :, None]

    out.copy_(weigh(out, lse) + weigh(seen, seen_lse))
    lse.copy_(whole)


@torch.library.custom_op("lockstep::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_own: Tensor,
    cu_responses: Tensor,
    cu_prompts: Tensor,
    num_prompt_tokens: int,
    longest_own: int,
    longest_responses: int,
    longest_prompt: int,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], log-sum-exp [H, T]) of packed sequences.

    Where prompts are shared, they are the first num_prompt_tokens tokens, and a response's two attentions, to itself
    and to its prompt, are merged by their log-sum-exps.
    """
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
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_own: Tensor,
    cu_responses: Tensor,
    cu_prompts: Tensor,
    num_prompt_tokens: int,
    longest_own: int,
    longest_responses: int,
    longest_prompt: int,
    scale: float,
    left: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. out and lse are flash_attention's."""
    if left < 0 and KERNELS:
        from fast import attention_kernels

        if attention_kernels.serves(q, k, len(cu_own) - 1):
            starts = cu_own, cu_responses, cu_prompts
            return attention_kernels.flash_backward(grad, q, k, v, out, lse, *starts, num_prompt_tokens, scale)
    n = num_prompt_tokens
    grad = grad.contiguous()
    dq, dk, dv = flash_backward(grad, q, k, v, out, lse, cu_own, cu_own, longest_own, longest_own, True, scale, left)
    if n:  # and of the responses' attention to their prompts
        tensors = grad[n:], q[n:], k[:n], v[:n], out[n:], lse[:, n:].contiguous()
        sequences = cu_responses, cu_prompts, longest_responses, longest_prompt
        more_dq, more_dk, more_dv = flash_backward(*tensors, *sequences, False, scale)
        dq[n:] += more_dq
        dk[:n] += more_dk
        dv[:n] += more_dv
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@flash_attention.register_fake
def flash_attention_shapes(q, k, v, *rest) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.size(1), q.size(0), dtype=torch.float32)


@flash_attention_backward.register_fake
def flash_attention_backward_shapes(grad, q, k, v, *rest) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def keep_for_backward(ctx, inputs: tuple, output: tuple) -> None:
    """What flash_attention_backward is given besides the gradient, from flash_attention's inputs and output."""
    q_k_v, starts, sizes = inputs[:3], inputs[3:6], inputs[6:]
    ctx.save_for_backward(*q_k_v, *output, *starts)
    ctx.sizes = sizes


def backward(ctx, grad: Tensor, _grad_lse: Tensor | None) -> tuple:
    """Gradients for q, k and v, and none for the nine other inputs."""
    gradients = flash_attention_backward(grad, *ctx.saved_tensors, *ctx.sizes)
    return *gradients, *[None] * 9


flash_attention.register_autograd(backward, setup_context=keep_for_backward)
