"""The LM head: log-probs and entropies of sampled tokens. [K, V] logits exist a chunk at a time, and are computed again for the backward.

What the softmax needs is found in one pass over the logits, block by block of the vocabulary, and their gradient is written over them in
another: on a GPU by kernels.py, which has the two functions at the end of this file as Triton.
"""

import sys
import types

import torch
import torch.nn.functional as F

CHUNK_ELEMENTS = 2**28  # logits that exist at once: 0.5 GiB in bfloat16
BLOCK = 2048  # tokens of the vocabulary that are reduced together
LOW = -1e30  # a logit of no probability that may be multiplied by 0


def replace_head(head, num_tokens: int, temperature: float) -> None:
    """Make head.forward give log-probs and entropies of head.targets under softmax(logits / temperature) of the tokenizer's num_tokens tokens."""
    head.targets, head.num_tokens, head.temperature = None, num_tokens, temperature
    head.forward = types.MethodType(head_forward, head)


def head_forward(head, hidden):
    """log-prob and entropy of head.targets [K], [1, K, hidden] -> [1, K, 2] float32."""
    hidden = hidden.reshape(-1, hidden.size(-1)).to(head.weight.dtype)  # [K, hidden]
    return LogProbs.apply(
        hidden,
        head.weight,
        head.bias,
        head.targets,
        torch.full((), head.temperature, dtype=torch.float32, device=hidden.device),
        head.num_tokens,
    )


def rows_at_once(vocab: int) -> int:
    """Rows of logits in a chunk: a kernel's grid has no more."""
    return min(max(1, CHUNK_ELEMENTS // vocab), 65535)


def kernels_for(tensor):
    """Where block_statistics and logit_gradient come from."""
    if tensor.is_cuda:
        from fast import kernels

        return kernels
    return sys.modules[__name__]


class LogProbs(torch.autograd.Function):
    """[K, hidden] -> [1, K, 2]; gradients for hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, num_tokens):
        def of_chunk(h, t):
            logits = F.linear(h, weight, bias)
            return *kernels_for(h).block_statistics(logits, temperature, num_tokens), logits.gather(-1, t[:, None])[
                :, 0
            ].float() / temperature

        rows = rows_at_once(weight.size(0))
        tops, masses, firsts, chosen = map(
            torch.cat, zip(*map(of_chunk, hidden.split(rows), targets.split(rows)))
        )  # [K, B], and [K]
        logsumexp, share = total_mass(tops, masses)
        mean = (firsts * share).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, logsumexp, mean)
        ctx.rows, ctx.num_tokens = rows, num_tokens
        return torch.stack([(chosen - logsumexp)[None], (logsumexp - mean)[None]], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, targets, temperature, logsumexp, mean = ctx.saved_tensors
        grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), None, None
        for chunk, h, *of_rows in zip(
            grad_hidden.split(ctx.rows),
            *(x.split(ctx.rows) for x in (hidden, targets, logsumexp, mean, *grad[0].unbind(-1))),
        ):
            logits = kernels_for(h).logit_gradient(
                F.linear(h, weight, bias), *of_rows, temperature, ctx.num_tokens
            )  # their gradient
            torch.mm(logits, weight, out=chunk)
            grad_weight = torch.mm(logits.T, h) if grad_weight is None else grad_weight.addmm_(logits.T, h)
            if bias is not None:
                grad_bias = logits.sum(0) + (0 if grad_bias is None else grad_bias)
            del logits
        return grad_hidden, grad_weight, grad_bias, None, None, None


def total_mass(tops, masses):
    """The log-sum-exp [K] of rows whose blocks have these, and what each block's sums count for [K, B]: its exp(largest) / sum of all."""
    top = tops.amax(-1, keepdim=True)
    share = (tops - top).exp()
    total = (masses * share).sum(-1, keepdim=True)
    return (top + total.log())[:, 0], share / total


def block_statistics(logits, temperature, num_tokens: int):
    """Of each BLOCK tokens of the vocabulary, three [K, B] float32: the largest x = logit / temperature, the sum of exp(x - largest), and that of
    x exp(x - largest). logits [K, V]; temperature one number or [K], where 0 counts as 1."""
    scale = torch.where(temperature == 0, 1.0, temperature).view(-1, 1)
    scaled, block = (logits[:, :num_tokens].float() / scale).clamp(min=LOW), min(BLOCK, num_tokens)
    blocks = F.pad(scaled, (0, -num_tokens % block), value=LOW).view(len(logits), -1, block)
    tops = blocks.amax(-1)
    masses = (blocks - tops[..., None]).exp()
    return tops, masses.sum(-1), (masses * blocks).sum(-1)


def logit_gradient(logits, targets, logsumexp, mean, grad_logprob, grad_entropy, temperature, num_tokens: int):
    """The gradient of the logits, in their type. d logprob / dx = [target] - p, d entropy / dx = -p (x - mean), of x = logits / temperature and p = softmax(x)."""
    scaled, ids = (logits.float() / temperature).clamp(min=LOW), torch.arange(logits.size(1), device=logits.device)
    p = (scaled - logsumexp[:, None]).exp()
    grad = torch.where(ids == targets[:, None], grad_logprob[:, None], 0.0) - p * (
        grad_logprob[:, None] + grad_entropy[:, None] * (scaled - mean[:, None])
    )
    return torch.where(ids < num_tokens, grad / temperature, 0.0).to(logits.dtype)
