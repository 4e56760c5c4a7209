"""Attention of packed sequences, each to itself: torch's varlen flash attention on GPUs, padded rows elsewhere; and to prompts that sequences share.

Registered with transformers as "packed" by actor.load_model. `packing` is the batch that the model runs on.
"""
import inspect

import torch
import torch.nn.functional as F

from batch import Batch

VARLEN_OPTIONS: dict[str, bool] = {}  # what this torch's varlen_attn needs to be told


def learn_varlen() -> None:
    from torch.nn.attention.varlen import varlen_attn

    VARLEN_OPTIONS.update({"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {})  # older ones see it by themselves


def packed_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing: Batch | None = None, **kwargs):
    """Causal attention of each packed sequence to itself. query [1, H, T, D] -> [1, T, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    shared, flash = packing.shared, query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    window = sliding_window if sliding_window is not None and packing.max_seqlen > sliding_window else None
    if shared is not None and flash and window is None:
        sizes = shared.num_prompt_tokens, shared.longest_own, shared.longest_responses, shared.longest_prompt
        return shared_attention(q, k, v, shared.cu_own, shared.cu_responses, shared.cu_prompts, *sizes, scaling)[0][None], None
    if shared is not None:  # every sequence gets a copy of its prompt, for this layer's attention only
        q, k, v = (x[shared.places] for x in (q, k, v))
    if flash:
        from torch.nn.attention.varlen import varlen_attn

        cu, longest = packing.cu_seqlens, packing.max_seqlen
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=(-1 if window is None else window - 1, 0), **VARLEN_OPTIONS)
    else:
        out = padded_attention(q, k, v, scaling, window, packing)
    return (out if shared is None else out[shared.index])[None], None


def padded_attention(q, k, v, scaling: float, window: int | None, packing: Batch):
    """For float32 and the CPU, which have no varlen kernel: one padded row a sequence, for this layer's attention only. [T, H, D] -> [T, H, D]."""
    rows, columns = packing.seq_ids, packing.position_ids  # [T]

    def pad(x):
        padded = x.new_zeros(packing.num_seqs, packing.max_seqlen, *x.shape[1:])  # [S, longest, H, D]
        return padded.index_put((rows, columns), x).transpose(1, 2)

    mask = None
    if window is not None:
        mask = torch.ones(packing.max_seqlen, packing.max_seqlen, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    out = F.scaled_dot_product_attention(pad(q), pad(k), pad(v), attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)[rows, columns]


def flash_forward(q, k, v, cu_q, cu_k, longest_q: int, longest_k: int, causal: bool, scale: float):
    """torch's varlen flash attention: out [T, H, D] and log-sum-exp [H, T] float32."""
    return torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, longest_q, longest_k, 0.0, causal, False, scale=scale)[:2]


def flash_backward(grad, q, k, v, out, lse, cu_q, cu_k, longest_q: int, longest_k: int, causal: bool, scale: float):
    """Gradients of q, k, v. Of a part of the keys they are those of the whole attention when `out` and `lse` are the whole's."""
    rng_state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # there is no dropout
    return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, 0.0, causal, rng_state, unused, scale=scale)


@torch.library.custom_op("lockstep::shared_attention", mutates_args=())
def shared_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_own: torch.Tensor, cu_responses: torch.Tensor, cu_prompts: torch.Tensor,
    num_prompt_tokens: int, longest_own: int, longest_responses: int, longest_prompt: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [T', H, D], log-sum-exp [H, T']). Two attentions of a response, to itself and to its prompt, are merged by their log-sum-exps."""
    n = num_prompt_tokens
    out, lse = flash_forward(q, k, v, cu_own, cu_own, longest_own, longest_own, True, scale)
    seen, seen_lse = flash_forward(q[n:], k[:n], v[:n], cu_responses, cu_prompts, longest_responses, longest_prompt, False, scale)
    whole = torch.logaddexp(lse[:, n:], seen_lse)
    weigh = lambda part, part_lse: part.float() * (part_lse - whole).exp().T[:, :, None]  # noqa: E731
    out, lse = out.contiguous(), lse.contiguous()
    out[n:], lse[:, n:] = (weigh(out[n:], lse[:, n:]) + weigh(seen, seen_lse)).to(out.dtype), whole
    return out, lse


@torch.library.custom_op("lockstep::shared_attention_backward", mutates_args=())
def shared_attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, cu_own: torch.Tensor, cu_responses: torch.Tensor, cu_prompts: torch.Tensor,
    num_prompt_tokens: int, longest_own: int, longest_responses: int, longest_prompt: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    n, grad = num_prompt_tokens, grad.contiguous()
    dq, dk, dv = flash_backward(grad, q, k, v, out, lse, cu_own, cu_own, longest_own, longest_own, True, scale)
    more = flash_backward(grad[n:], q[n:], k[:n], v[:n], out[n:], lse[:, n:].contiguous(), cu_responses, cu_prompts, longest_responses, longest_prompt, False, scale)
    dq[n:] += more[0]
    dk[:n] += more[1]
    dv[:n] += more[2]
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@shared_attention.register_fake
def _(q, k, v, *rest):
    return q.new_empty(q.shape), q.new_empty(q.size(1), q.size(0), dtype=torch.float32)


@shared_attention_backward.register_fake
def _(grad, q, k, v, *rest):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.sizes = inputs[6:]


def backward(ctx, grad, _):
    return *shared_attention_backward(grad, *ctx.saved_tensors, *ctx.sizes), *[None] * 8


shared_attention.register_autograd(backward, setup_context=keep_for_backward)
