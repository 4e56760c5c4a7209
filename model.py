"""How a log-prob comes about: a causal LM on packed sequences, with a head that never holds all logits.

Three parts, from the outside in: `forward` runs the model on a `Batch`; `packed_attention` lets each packed sequence
attend to itself alone; the head gives the log-probs and entropies of sampled tokens a chunk of rows at a time, and
computes the chunk's logits again for the backward. fast/ has quicker twins of the last two: actor.speed_up.
"""

import contextlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from batch import Batch

CHUNK_ELEMENTS = 2**28  # logits that exist at once: 0.5 GiB in bfloat16
MOST_ROWS = 65535  # of a chunk: a CUDA grid has no more
BLOCK = 2048  # tokens of the vocabulary that are reduced together
LOW = -1e30  # stands for -inf: exp gives 0, and 0 * LOW is 0, not NaN
# What a model type does with its head's logits: the config's knob, and the factor that it stands for; None where it is
# a cap, cap * tanh(logits / cap).
LOGIT_TRANSFORMS: dict[str, tuple[str, Callable[[float], float] | None]] = {
    "granite": ("logits_scaling", lambda value: 1 / value),
    "hyperclovax": ("logits_scaling", lambda value: value),
    "cohere": ("logit_scale", lambda value: value),
    "cohere2": ("logit_scale", lambda value: value),
    "gemma2": ("final_logit_softcapping", None),
    "gemma3_text": ("final_logit_softcapping", None),
    "vaultgemma": ("final_logit_softcapping", None),
    "nanochat": ("final_logit_softcapping", None),
}
# Arguments of an attention function that say nothing of what it computes.
HARMLESS = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_hidden_states"}


def meta_model(config) -> torch.nn.Module:
    """The model of a Hugging Face config without its weights: to count parameters, or to learn names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_model(knob: str, path: str, num_tokens: int, longest: int) -> None:
    """ValueError, in one line, for a model that would be trained wrong or not run at all, from its config alone. `knob`
    names it, num_tokens are the tokenizer's, `longest` is the most tokens of a sequence."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"{knob}={path}: its config can't be read: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from error
    lacks = [what for what, is_so in unsupported(config, longest).items() if is_so]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        lacks.insert(0, "no causal language model that transformers has itself")
    else:
        code = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])
        lacks += ["its attention has sinks"] if "s_aux=" in code else []
        lacks += [] if "ALL_ATTENTION_FUNCTIONS" in code else ["its attention can't be replaced"]
    if lacks:
        raise ValueError(
            f"{knob}={path}: {config.model_type} is not supported: {'; '.join(lacks)}. "
            "Supported are dense, unquantised text models with softmax attention (docs/limits.md)"
        )
    if num_tokens > config.vocab_size:
        raise ValueError(f"{knob}={path}: the tokenizer has {num_tokens} tokens, the model only {config.vocab_size}")


def check_heads(path: str, tensor_parallel: int) -> None:
    """ValueError when the model's key-value heads can't be dealt out evenly. vLLM would copy some, and the sum of bits
    would not prove a sync."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % tensor_parallel:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={tensor_parallel} does not divide the {heads} key-value heads of "
            f"actor.path={path}"
        )


def unsupported(config, longest: int) -> dict[str, bool]:
    """What a packed forward or vLLM would get wrong, and whether a config has it."""

    def most(*knobs: str) -> int:
        values = [getattr(config, knob, None) for knob in knobs]
        return max((value for value in values if isinstance(value, int)), default=0)

    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = ropes.values() if all(isinstance(rope, dict) for rope in ropes.values()) and ropes else [ropes]
    kinds = {rope.get("rope_type"): rope.get("original_max_position_embeddings", 0) for rope in ropes}
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    recurrent = [knob for knob in vars(config) if knob.startswith(("mamba_", "ssm_", "conv_L", "rwkv_", "lru_"))]
    known, _ = LOGIT_TRANSFORMS.get(config.model_type, (None, None))
    changes = {"logits_scaling", "logit_scale", "final_logit_softcapping"} - {known}
    changes = {knob for knob in changes if getattr(config, knob, None) not in (None, 1.0)}
    return {
        f"{', '.join(changes)} of its config is not computed": bool(changes),
        "it has images or sound beside text": any(hasattr(config, f"{kind}_config") for kind in ("vision", "audio")),
        "it is an encoder with a decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "its weights are quantised": getattr(config, "quantization_config", None) is not None,
        "it is a mixture of experts": most("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        > 1,
        f"it has layers of {', '.join(sorted(map(str, layers)))}": bool(layers),
        f"it has recurrent layers ({', '.join(recurrent[:2])})": bool(recurrent),
        "it has no num_attention_heads": not hasattr(config, "num_attention_heads"),
        "its dynamic rope depends on what else is in a packed row": "dynamic" in kinds,
        f"its longrope changes within {longest} tokens": "longrope" in kinds and longest > (kinds["longrope"] or 0),
    }


def load_model(path: str, dtype: torch.dtype, num_tokens: int, temperature: float) -> torch.nn.Module:
    """A causal LM with packed attention and the chunked head, in plain torch. num_tokens are the tokenizer's: ids from
    there on are padding of the vocabulary, with no share in the softmax. Whose forward this would get wrong,
    check_model refuses."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("packed", packed_attention)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="packed")
    scale, softcap = take_logit_transform(model)
    head = model.get_output_embeddings()
    replace_head(head, num_tokens, temperature / scale, softcap and softcap / scale)
    return model


def take_logit_transform(model) -> tuple[float, float | None]:
    """(scale, softcap) of a model's logits, which the head takes over: the model, which would do the same to log-probs,
    is told that it has none. `model.published` keeps what its config said, for who exports it."""
    knob, scale_of = LOGIT_TRANSFORMS.get(model.config.model_type, (None, None))
    value = getattr(model.config, knob, None) if knob else None
    model.published = {knob: value} if value is not None else {}
    if value is None:
        return 1.0, None
    if scale_of is None:
        setattr(model.config, knob, None)
        return 1.0, float(value)
    setattr(model.config, knob, 1.0)
    if hasattr(model, knob):  # Cohere's
        setattr(model, knob, 1.0)
    return scale_of(value), None


@contextlib.contextmanager
def own_classes(path: str) -> Iterator[list[torch.nn.Module]]:
    """Leave transformers' class of the model as it is. Where vLLM has none of its own it runs transformers', marked for
    its compiler in the class itself, which the actor, made of the same class, could not be built of afterwards. vLLM's
    models, which the caller puts into the list, get a class of their own."""
    from transformers import AutoConfig, AutoModel

    cls: Any = AutoModel._model_mapping.get(type(AutoConfig.from_pretrained(path)), object)
    bases, known = cls.__bases__, dict(vars(cls))
    models: list[torch.nn.Module] = []
    try:
        yield models
    finally:
        take_marks(cls, bases, known, models)


def take_marks(cls: Any, bases: tuple[type, ...], known: dict[str, Any], models: list[torch.nn.Module]) -> None:
    """A class as it was, with these bases and attributes; `models` get one of their own, with what was added."""
    marks = {name: value for name, value in vars(cls).items() if known.get(name) is not value}
    added = [base for base in cls.__bases__ if base not in bases]
    if not added:
        return
    cls.__bases__ = bases
    for name in marks:
        if name in known:
            setattr(cls, name, known[name])
        else:
            delattr(cls, name)
    own = type(cls.__name__, (cls, *added), marks)
    for module in (module for model in models for module in model.modules() if type(module) is cls):
        module.__class__ = own


def forward(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """`(logprobs [T], entropy [T])` of a packed batch, 0 at tokens that the policy did not sample. The one place that
    shifts: position t - 1 of the model predicts token t. The head sees only positions whose next token was sampled."""
    sampled = batch.sampled  # [K]
    assert len(sampled), "a micro-batch without a sampled token has nothing to compute"
    model.get_output_embeddings().targets = batch.tokens[sampled]
    attending.packing = batch
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


# The batch of the forward that goes on, for model types that drop `packing` on the way to their attention.
attending = types.SimpleNamespace(packing=None)


def packed_attention(  # noqa: PLR0913 - as transformers calls it
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing: Batch | None = None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Causal attention of each packed sequence to itself. query [1, H, T, D] -> [1, T, H, D]."""
    softcap = check_arguments(module, attention_mask, **kwargs)
    packing = packing or attending.packing
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    scores = Scores(scaling, binding_window(sliding_window, packing), softcap)
    return padded_attention(q, k, v, scores, packing)[None], None


def check_arguments(
    module, attention_mask, dropout: float = 0.0, softcap: float | None = None, **kwargs
) -> float | None:
    """The softcap of a call's attention scores. ValueError for whatever else a model asks of it that is not computed
    here, such as attention sinks (s_aux)."""
    asked = {name for name, value in kwargs.items() if value is not None and name not in HARMLESS}
    asked |= {"attention_mask"} if attention_mask is not None else set()
    asked |= {"dropout"} if dropout else set()  # the actor is in eval mode
    if asked:
        raise ValueError(
            f"{type(module).__name__} asks its attention for {', '.join(sorted(asked))}, which is not supported: "
            "what is packed would be computed without it"
        )
    return softcap


def binding_window(sliding_window: int | None, packing: Batch) -> int | None:
    """The sliding window, if any sequence is longer than it."""
    return sliding_window if sliding_window is not None and packing.max_seqlen > sliding_window else None


class Scores(NamedTuple):
    """What becomes of q . k before the softmax."""

    scaling: float
    window: int | None  # tokens that a token sees, itself among them, where that is not all before it
    softcap: float | None


def padded_attention(q, k, v, scores: Scores, packing: Batch) -> torch.Tensor:
    """torch's own attention on one padded row a sequence, for this layer's attention only. [T, H, D] -> [T, H, D]."""
    rows, columns = packing.seq_ids, packing.position_ids  # [T]
    longest = packing.max_seqlen

    def pad(x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(packing.num_seqs, longest, *x.shape[1:])  # [S, longest, H, D]
        return padded.index_put((rows, columns), x).transpose(1, 2)

    mask = None
    if scores.window is not None or scores.softcap is not None:
        window = scores.window or longest
        mask = torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    if scores.softcap is not None:
        out = softcapped_attention(pad(q), pad(k), pad(v), mask, scores)
    else:
        out = F.scaled_dot_product_attention(
            pad(q), pad(k), pad(v), attn_mask=mask, is_causal=mask is None, scale=scores.scaling, enable_gqa=True
        )
    return out.transpose(1, 2)[rows, columns]


def softcapped_attention(q, k, v, mask: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Attention whose scores s become softcap * tanh(s / softcap), as Gemma 2's. [S, H, L, D] -> [S, H, L, D]."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    capped_scores = scores.softcap * torch.tanh(q @ k.transpose(2, 3) * scores.scaling / scores.softcap)  # [S, H, L, L]
    weights = capped_scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


# The head


def replace_head(head, num_tokens: int, temperature: float, softcap: float | None = None) -> None:
    """Make head.forward give log-probs and entropies of head.targets under softmax(logits / temperature), of capped
    logits when there is a softcap. `head.ops` is the module whose block_statistics and logit_gradient it uses: this
    one, or fast.kernels."""
    head.targets = None
    head.softcap = softcap
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
            logits = capped(F.linear(h, weight, bias), head.softcap)
            chosen = logits.gather(-1, targets[:, None])[:, 0].float() / temperature
            return *head.ops.block_statistics(logits, temperature, head.num_tokens), chosen

        rows = rows_at_once(weight.size(0))
        chunks = [of_chunk(h, targets) for h, targets in zip(hidden.split(rows), head.targets.split(rows))]
        tops, masses, firsts, chosen = map(torch.cat, zip(*chunks))  # [K, B] each, and [K]
        logsumexp, share = total_mass(tops, masses)
        mean = (firsts * share).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, head.targets, temperature, logsumexp, mean)
        ctx.rows, ctx.num_tokens, ctx.ops, ctx.softcap = rows, head.num_tokens, head.ops, head.softcap
        return torch.stack([(chosen - logsumexp)[None], (logsumexp - mean)[None]], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, targets, temperature, logsumexp, mean = ctx.saved_tensors
        whole = Rows(targets, logsumexp, mean, *grad[0].unbind(-1))
        grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden), None, None
        chunks = zip(hidden.split(ctx.rows), grad_hidden.split(ctx.rows), *(x.split(ctx.rows) for x in whole))
        for h, grad_h, *of_rows in chunks:
            logits = capped(F.linear(h, weight, bias), ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (logits.float() / ctx.softcap).square()
            logits = ctx.ops.logit_gradient(logits, Rows(*of_rows), temperature, ctx.num_tokens)  # now their gradient
            if slope is not None:
                logits = (logits * slope).to(h.dtype)
            torch.mm(logits, weight, out=grad_h)
            grad_weight = torch.mm(logits.T, h) if grad_weight is None else grad_weight.addmm_(logits.T, h)
            if bias is not None:
                grad_bias = logits.sum(0) + (0 if grad_bias is None else grad_bias)
            del logits  # before the next chunk's are there
        return grad_hidden, grad_weight, grad_bias, None


def capped(logits, softcap: float | None) -> torch.Tensor:
    """softcap * tanh(logits / softcap), as Gemma 2 caps its logits (arXiv:2408.00118), in their type."""
    return logits if softcap is None else (softcap * torch.tanh(logits.float() / softcap)).to(logits.dtype)


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
