"""How a log-prob comes about: a causal LM on packed sequences, with a head that never holds all logits.

Three parts, from the outside in: `forward` runs the model on a `Batch`; `packed_attention` lets each packed sequence
attend to itself alone; the head gives the log-probs and entropies of sampled tokens a chunk of rows at a time, and
computes the chunk's logits again for the backward. fast/ has quicker twins of the last two: actor.speed_up.
"""

import sys
import types
from typing import NamedTuple

import torch
import torch.nn.functional as F

from batch import Batch

CHUNK_ELEMENTS = 2**28  # logits that exist at once: 0.5 GiB in bfloat16
MOST_ROWS = 65535  # of a chunk: a CUDA grid has no more
BLOCK = 2048  # tokens of the vocabulary that are reduced together
LOW = -1e30  # stands for -inf: exp gives 0, and 0 * LOW is 0, not NaN
UNSUPPORTED = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "quantization_config",
)


def meta_model(config) -> torch.nn.Module:
    """The model of a Hugging Face config without its weights: to count parameters, or to learn names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def load_model(path: str, dtype: torch.dtype, num_tokens: int, temperature: float) -> torch.nn.Module:
    """A causal LM with packed attention and the chunked head, in plain torch. num_tokens are the tokenizer's: ids from
    there on are padding of the vocabulary, with no share in the softmax. ValueError for a model whose forward this
    would get wrong."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    for knob in UNSUPPORTED:
        if getattr(config, knob, None) not in (None, 1.0):
            raise ValueError(
                f"actor.path={path}: its config has {knob}, which the packed log-prob forward does not compute; "
                "use a model without it"
            )
    AttentionInterface.register("packed", packed_attention)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="packed")
    head = model.get_output_embeddings()
    if num_tokens > head.weight.size(0):
        raise ValueError(
            f"actor.path={path}: the tokenizer has {num_tokens} tokens, the model only {head.weight.size(0)}"
        )
    replace_head(head, num_tokens, temperature)
    return model


def forward(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """`(logprobs [T], entropy [T])` of a packed batch, 0 at tokens that the policy did not sample. The one place that
    shifts: position t - 1 of the model predicts token t. The head sees only positions whose next token was sampled."""
    sampled = batch.sampled  # [K]
    assert len(sampled), "a micro-batch without a sampled token has nothing to compute"
    model.get_output_embeddings().targets = batch.tokens[sampled]
    tokens, position_ids, before = batch.tokens, batch.position_ids, sampled - 1
    if batch.shared:  # prompts that several sequences share are in the model's row once
        tokens = tokens[batch.shared.index]
        position_ids = position_ids[batch.shared.index]
        before = batch.shared.places[before]
    out = model(
        input_ids=tokens[None],
        position_ids=position_ids[None],
        attention_mask=None,
        use_cache=False,
        logits_to_keep=before,
        packing=batch,
    ).logits[0]  # [K, 2]
    zeros = out.new_zeros(len(batch.tokens))  # [T]
    return zeros.index_put((sampled,), out[:, 0]), zeros.index_put((sampled,), out[:, 1])


# Attention


def packed_attention(  # noqa: PLR0913 - as transformers calls it
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing: Batch | None = None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Causal attention of each packed sequence to itself. query [1, H, T, D] -> [1, T, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    return padded_attention(q, k, v, scaling, binding_window(sliding_window, packing), packing)[None], None


def binding_window(sliding_window: int | None, packing: Batch) -> int | None:
    """The sliding window, if any sequence is longer than it."""
    return sliding_window if sliding_window is not None and packing.max_seqlen > sliding_window else None


def padded_attention(q, k, v, scaling: float, window: int | None, packing: Batch) -> torch.Tensor:
    """torch's own attention on one padded row a sequence, for this layer's attention only. [T, H, D] -> [T, H, D]."""
    rows, columns = packing.seq_ids, packing.position_ids  # [T]
    longest = packing.max_seqlen

    def pad(x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(packing.num_seqs, longest, *x.shape[1:])  # [S, longest, H, D]
        return padded.index_put((rows, columns), x).transpose(1, 2)

    mask = None
    if window is not None:
        mask = torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    out = F.scaled_dot_product_attention(
        pad(q), pad(k), pad(v), attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)[rows, columns]


# The head


def replace_head(head, num_tokens: int, temperature: float) -> None:
    """Make head.forward give log-probs and entropies of head.targets under softmax(logits / temperature). `head.ops`
    is the module whose block_statistics and logit_gradient it uses: this one, or fast.kernels."""
    head.targets = None
    head.num_tokens = num_tokens
    head.temperature = temperature
    head.ops = sys.modules[__name__]
    head.forward = types.MethodType(head_forward, head)


def head_forward(head, hidden) -> torch.Tensor:
    """Log-prob and entropy of head.targets [K]: [1, K, hidden] -> [1, K, 2] float32."""
    hidden = hidden.reshape(-1, hidden.size(-1)).to(head.weight.dtype)  # [K, hidden]
    return LogProbs.apply(hidden, head.weight, head.bias, head)


def rows_at_once(vocab: int) -> int:
    """Rows of logits in a chunk."""
    return min(max(1, CHUNK_ELEMENTS // vocab), MOST_ROWS)


class Rows(NamedTuple):
    """What the gradient of a row of logits depends on, besides the row: each [K]."""

    targets: torch.Tensor
    logsumexp: torch.Tensor
    mean: torch.Tensor  # of x = logit / temperature under softmax(x)
    grad_logprob: torch.Tensor
    grad_entropy: torch.Tensor


class LogProbs(torch.autograd.Function):
    """[K, hidden] -> [1, K, 2]; gradients for hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head):
        temperature = torch.full((), head.temperature, dtype=torch.float32, device=hidden.device)

        def of_chunk(h: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = F.linear(h, weight, bias)
            chosen = logits.gather(-1, targets[:, None])[:, 0].float() / temperature
            return *head.ops.block_statistics(logits, temperature, head.num_tokens), chosen

        rows = rows_at_once(weight.size(0))
        chunks = [of_chunk(h, targets) for h, targets in zip(hidden.split(rows), head.targets.split(rows))]
        tops, masses, firsts, chosen = map(torch.cat, zip(*chunks))  # [K, B] each, and [K]
        logsumexp, share = total_mass(tops, masses)
        mean = (firsts * share).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, head.targets, temperature, logsumexp, mean)
        ctx.rows, ctx.num_tokens, ctx.ops = rows, head.num_tokens, head.ops
        return torch.stack([(chosen - logsumexp)[None], (logsumexp - mean)[None]], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, targets, temperature, logsumexp, mean = ctx.saved_tensors
        whole = Rows(targets, logsumexp, mean, *grad[0].unbind(-1))
        grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), None, None
        chunks = zip(hidden.split(ctx.rows), grad_hidden.split(ctx.rows), *(x.split(ctx.rows) for x in whole))
        for h, grad_h, *of_rows in chunks:
            logits = F.linear(h, weight, bias)
            logits = ctx.ops.logit_gradient(logits, Rows(*of_rows), temperature, ctx.num_tokens)  # now their gradient
            torch.mm(logits, weight, out=grad_h)
            grad_weight = torch.mm(logits.T, h) if grad_weight is None else grad_weight.addmm_(logits.T, h)
            if bias is not None:
                grad_bias = logits.sum(0) + (0 if grad_bias is None else grad_bias)
            del logits  # before the next chunk's are there
        return grad_hidden, grad_weight, grad_bias, None


def total_mass(tops, masses) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-sum-exp [K] of rows whose blocks have these statistics, and each block's exp(largest) / sum of all."""
    top = tops.amax(-1, keepdim=True)
    share = (tops - top).exp()
    total = (masses * share).sum(-1, keepdim=True)
    return (top + total.log())[:, 0], share / total


def block_statistics(logits, temperature, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each BLOCK tokens of the vocabulary, with x = logit / temperature: the largest x, the sum of exp(x -
    largest), and that of x exp(x - largest). logits [K, V] -> three [K, B] float32. temperature is one number or [K];
    0 counts as 1."""
    scale = torch.where(temperature == 0, 1.0, temperature).view(-1, 1)
    scaled = (logits[:, :num_tokens].float() / scale).clamp(min=LOW)
    block = min(BLOCK, num_tokens)
    blocks = F.pad(scaled, (0, -num_tokens % block), value=LOW).view(len(logits), -1, block)
    tops = blocks.amax(-1)
    masses = (blocks - tops[..., None]).exp()
    return tops, masses.sum(-1), (masses * blocks).sum(-1)


def logit_gradient(logits, rows: Rows, temperature, num_tokens: int) -> torch.Tensor:
    """The gradient of the logits [K, V], in their type. With x = logits / temperature and p = softmax(x): d logprob /
    dx = [target] - p, d entropy / dx = -p (x - mean)."""
    targets, logsumexp, mean, grad_logprob, grad_entropy = (row[:, None] for row in rows)
    scaled = (logits.float() / temperature).clamp(min=LOW)
    ids = torch.arange(logits.size(1), device=logits.device)
    p = (scaled - logsumexp).exp()
    of_target = torch.where(ids == targets, grad_logprob, 0.0)
    grad = of_target - p * (grad_logprob + grad_entropy * (scaled - mean))
    return torch.where(ids < num_tokens, grad / temperature, 0.0).to(logits.dtype)


def check_heads(path: str, tensor_parallel: int) -> None:
    """ValueError when the model's key-value heads can't be dealt out evenly. vLLM would copy some, and the sum of bits
    would not prove a sync."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % tensor_parallel:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tensor_parallel} does not divide the {heads} key-value heads of "
            f"actor.path={path}"
        )
