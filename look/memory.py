"""Does it fit? The GPU memory that each phase of a step needs, worked out from the configuration before anything is loaded.

`check_memory` refuses a run that can't fit and says which knob would make it fit; `report` is the table. Bytes are those of one GPU. The
formulas count what this code keeps: tests/test_memory.py holds them against what autograd saves. Sequences are taken to be as long as
the data section allows, micro-batches to be full, and a session to give one trajectory.
"""

import functools
import math
import os
from collections import Counter
from dataclasses import dataclass, replace

import torch

import model as lm_head
from fsdp import one_group, reshards
from sync_weights import SUMMED_AT_ONCE

GIB = 2**30
BATCH = 150  # bytes a token of the packed batch and some twenty [T] floats of the loss
# Fitted to H200s: what was left on the card beside the sleeping SmolLM2-135M, 1.24 GiB, is the first two.
CONTEXT = 0.55 * GIB  # CUDA's context and loaded kernels
VLLM_ASLEEP = 0.7 * GIB  # what sleep leaves of vLLM: CUDA graphs, buffers
FRAGMENTATION = 0.08  # what torch's allocator takes beyond what is asked of it for all that is not LASTING; 0.06 of 27 GiB and 0.2 of 10 GiB were seen
NCCL = 0.5 * GIB  # its buffers when there are several GPUs; a guess, not measured
LASTING = ("fp32 weights", "Adam moments", "reference", "vLLM awake", "vLLM asleep")
KNOBS = dict.fromkeys(("activations", "layer at work"), "actor.ppo_max_token_len_per_gpu") | dict.fromkeys(
    ("fp32 weights", "Adam moments", "gradients"), "actor.fsdp_size"
)
KNOBS |= {
    "gathered weights": "actor.reshard_after_forward",
    "reference": "ref.param_offload",
    "vLLM awake": "rollout.gpu_memory_utilization",
}
# What the advice tries: switches, and numbers with the step by which it lowers them.
SWITCHES = dict.fromkeys(
    (
        "actor.enable_gradient_checkpointing",
        "actor.reshard_after_forward",
        "ref.param_offload",
        "rollout.free_cache_engine",
        "actor.optimizer_offload",
    ),
    True,
) | {"actor.fsdp_size": -1}
NUMBERS = {
    "actor.ppo_max_token_len_per_gpu": 256,
    "actor.log_prob_max_token_len_per_gpu": 256,
    "actor.ppo_micro_batch_size_per_gpu": 1,
}
NUMBERS |= {"rollout.gpu_memory_utilization": 0.01, "rollout.kv_cache_memory_bytes": 2**28}


@dataclass(frozen=True)
class Shape:
    """A model in the numbers that its memory depends on."""

    params: int  # tied ones once
    layer: int  # parameters of a transformer layer
    largest: int  # elements of the largest parameter
    vocab: int  # rows of the head, padding too
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    size: int  # of a head
    mlp: int  # of all experts that a token uses
    norms: int  # of the hidden state, in a layer
    qk_norm: bool  # whether queries and keys are normed too

    @classmethod
    def of(cls, model_config) -> "Shape":
        """Counted on the real model without its weights (meta device), so that parameters are exact for any architecture."""
        from transformers import AutoModelForCausalLM

        c = model_config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)
        layer = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])][-1]
        sizes, norms = (
            [p.numel() for p in model.parameters()],
            [name for name, m in layer.named_modules() if type(m).__name__.endswith("Norm")],
        )
        heads, qk_norm = c.num_attention_heads, sum(name.endswith(("q_norm", "k_norm")) for name in norms)
        mlp = getattr(c, "moe_intermediate_size", None) or getattr(c, "intermediate_size", None) or 4 * c.hidden_size
        mlp, vocab = mlp * (getattr(c, "num_experts_per_tok", None) or 1), model.get_output_embeddings().weight.size(0)
        kv_heads, size = (
            getattr(c, "num_key_value_heads", None) or heads,
            getattr(c, "head_dim", None) or c.hidden_size // heads,
        )
        own = sum(p.numel() for p in layer.parameters())
        return cls(
            sum(sizes),
            own,
            max(sizes),
            vocab,
            c.hidden_size,
            c.num_hidden_layers,
            heads,
            kv_heads,
            size,
            mlp,
            len(norms) - qk_norm,
            qk_norm > 0,
        )

    def saved(self, e: int, compiled: bool) -> int:
        """Bytes a token that a layer keeps for its backward, in a type of e bytes: q, k, v, the attention's output and float32 log-sum-exp; gate, its
        activation, up and their product; of each norm the input in float32, 1 / rms, the normed and the scaled one. Compiled, it computes the
        activation and the norms' float32 again, and keeps their inputs."""
        q, kv = self.heads * self.size, self.kv_heads * self.size
        if compiled:
            return e * (2 * self.norms * self.hidden + (2 + self.qk_norm) * (q + kv) + 3 * self.mlp) + 4 * self.heads
        normed = self.norms * ((4 + 2 * e) * self.hidden + 4) + self.qk_norm * (
            (4 + e) * (q + kv) + 4 * (self.heads + self.kv_heads)
        )
        return normed + 2 * e * (q + kv) + 4 * self.heads + 4 * e * self.mlp

    def ends(self, e: int) -> int:
        """The same for what is outside of the layers: rotary angles, ids, the final norm."""
        return 2 * e * self.size + 12 + (4 + e) * self.hidden


def estimate(
    cfg, model_config, num_tokens: int, world_size: int, gpu_bytes: int, ref_config=None
) -> dict[str, dict[str, int]]:
    """{phase: {part: bytes}} of one GPU, for the phases that a step has, named as in timing_s/*. The reference is taken to be like the actor unless its config is given."""
    return Estimate(
        cfg, Shape.of(model_config), num_tokens, world_size, gpu_bytes, ref_config and Shape.of(ref_config)
    ).phases()


class Estimate:
    """What one GPU of world_size needs; `num_tokens` are the tokenizer's, `gpu_bytes` all that the GPU has."""

    def __init__(self, cfg, shape: Shape, num_tokens: int, world_size: int, gpu_bytes: int, ref: Shape | None = None):
        self.cfg, self.shape, self.num_tokens, self.world_size, self.gpu_bytes, self.ref = (
            cfg,
            shape,
            num_tokens,
            world_size,
            gpu_bytes,
            ref or shape,
        )
        self.shards = world_size if cfg.actor.fsdp_size == -1 else cfg.actor.fsdp_size
        self.e = getattr(torch, cfg.actor.dtype).itemsize  # bytes of a number in the compute type
        self.longest = cfg.data.max_prompt_length + cfg.data.max_response_length

    def of(self, cfg, world_size: int | None = None) -> "Estimate":
        """The same model and GPU with another configuration."""
        return Estimate(cfg, self.shape, self.num_tokens, world_size or self.world_size, self.gpu_bytes, self.ref)

    def phases(self) -> dict[str, dict[str, int]]:
        cfg, shape, ref, e = self.cfg, self.shape, self.ref, self.e
        kept = {"fp32 weights": 4 * shape.params / self.shards, "Adam moments": 8 * shape.params / self.shards}
        kept |= (
            {"reference": 0 if cfg.ref.param_offload else e * ref.params / self.shards} if cfg.needs_reference else {}
        )
        gathered = {"gathered weights": self.gathered(shape)}
        cache = cfg.rollout.kv_cache_memory_bytes
        awake = {
            "vLLM awake": cfg.rollout.gpu_memory_utilization * self.gpu_bytes
            if cache is None
            else cache + self.vllm_needs()
        }
        # A tensor is sent in the compute type and its bits are summed in int64; a probe gathers weights. What a sync took stays cached until vLLM sleeps.
        table = dict.fromkeys(
            ("sync", "gen"),
            kept | gathered | awake | {"tensor on its way": e * shape.largest + 8 * min(shape.largest, SUMMED_AT_ONCE)},
        )
        kept |= {"vLLM asleep": VLLM_ASLEEP} if cfg.rollout.free_cache_engine else awake
        if cfg.old_logprobs_from == "actor":
            table["old_log_prob"] = kept | gathered | self.scoring(shape)
        if cfg.needs_reference:
            table["ref"] = kept | {"gathered weights": self.gathered(ref)} | self.scoring(ref)
        table["update_actor"] = kept | gathered | max(self.updating(), key=lambda parts: sum(parts.values()))
        for phase, parts in table.items():
            if cfg.actor.optimizer_offload and phase != "update_actor":
                parts = table[phase] = parts | {"Adam moments": 0}
            passing = sum(size for part, size in parts.items() if part not in LASTING)
            parts = parts | {
                "CUDA context": CONTEXT + NCCL * (self.world_size > 1),
                "fragmentation": FRAGMENTATION * passing,
            }
            table[phase] = {part: round(size) for part, size in parts.items()}
        return table

    def gathered(self, shape: Shape) -> int:
        """What FSDP2 holds whole: the layer at work, the one fetched ahead, and the head; without resharding everything."""
        return self.e * (
            min(2 * shape.layer + shape.vocab * shape.hidden, shape.params)
            if reshards(self.cfg.actor, self.shards)
            else shape.params
        )

    def micro_batch(self, budget: int, prompts: int, vocab: int) -> tuple[int, int, int, bool]:
        """Most tokens of a micro-batch, most sampled ones in it, how many of those have logits at once, and whether there may be several micro-batches."""
        data, n = self.cfg.data, self.cfg.rollout.n
        seqs = -(-prompts * n // self.world_size)
        whole = (
            -(-prompts // self.world_size) * (data.max_prompt_length + n * data.max_response_length)
            if self.cfg.actor.share_prompts
            else seqs * self.longest
        )
        most = budget if self.cfg.actor.use_dynamic_bsz else self.cfg.actor.ppo_micro_batch_size_per_gpu * self.longest
        tokens = min(most, whole)
        sampled = min(tokens, seqs * data.max_response_length)
        return tokens, sampled, min(sampled, lm_head.rows_at_once(vocab)), whole > most

    def scoring(self, shape: Shape) -> dict[str, int]:
        """A forward without gradient: a layer's intermediate values, then the head's logits and what is kept of them."""
        a, e, h = self.cfg.actor, self.e, shape.hidden
        tokens, sampled, rows, _ = self.micro_batch(
            a.log_prob_max_token_len_per_gpu or a.ppo_max_token_len_per_gpu, self.cfg.data.train_batch_size, shape.vocab
        )
        layer = tokens * (2 * e * shape.size + 12 + e * max(8 * h, 4 * h + 3 * shape.mlp))
        statistics = (
            24 * sampled * -(-self.num_tokens // lm_head.BLOCK)
        )  # three float32 of each block, of the chunks and of all of them
        head = e * h * (tokens + sampled) + e * rows * shape.vocab + statistics
        return {"batch": BATCH * tokens} | ({"LM head": head} if head > layer else {"layer at work": layer})

    def updating(self) -> list[dict[str, int]]:
        """The moments that can be a backward's fullest: in the head, with logits that become their gradient; in the last layer; at the end, with all gradients.

        Gradients are float32 shards. A layer's are whole, in the compute type and in float32, until they are scattered, of
        one group all, in float32, and once more to be scattered; the head's from its first chunk on.
        """
        a, shape, e, h = self.cfg.actor, self.shape, self.e, self.shape.hidden
        tokens, sampled, rows, several = self.micro_batch(
            a.ppo_max_token_len_per_gpu, a.ppo_mini_batch_size, shape.vocab
        )
        head, saved, down = shape.vocab * h, shape.saved(e, a.use_torch_compile), e * (h + 2 * shape.mlp)
        # Scattered gradients come from a stream with memory of its own, where the head's new ones stand beside the sum of earlier micro-batches.
        scattered = 4 * (shape.params + head) / self.shards
        earlier, batch = scattered * several, {"batch": BATCH * tokens}
        kept = batch | {
            "activations": tokens
            * (shape.layers * (e * h if a.enable_gradient_checkpointing else saved) + shape.ends(e))
        }
        again = saved if a.enable_gradient_checkpointing else 0
        layer = max(
            9 * e * h, again + max(5 * e * h, down) - (4 + e) * h
        )  # in the final norm, or in the last layer, without what that norm kept
        return [
            kept
            | {
                "gradients": earlier + e * head * (rows < sampled),
                "LM head": e * rows * shape.vocab + 2 * e * h * sampled,
            },
            kept | {"gradients": earlier + e * head + (e + 4) * shape.layer, "layer at work": tokens * layer},
            batch
            | {
                "gradients": 12 * shape.params
                if one_group(a, self.world_size, lambda: shape.params)
                else scattered + (2 * e + 4) * head
            },
        ]

    def vllm_needs(self) -> float:
        """What vLLM takes beside its KV cache: weights, what stays when it sleeps, four float32 [sequences, V] to sample from."""
        r = self.cfg.rollout
        return (
            self.e * self.shape.params / r.tensor_model_parallel_size
            + VLLM_ASLEEP
            + 16 * r.max_num_seqs * self.shape.vocab
        )

    def vllm_shortage(self) -> str | None:
        """What is wrong when vLLM's share can't hold its weights and the KV cache of one sequence."""
        r, s, needs = self.cfg.rollout, self.shape, self.vllm_needs()
        sequence = 2 * self.e * s.layers * s.kv_heads * s.size * self.longest / r.tensor_model_parallel_size
        if r.kv_cache_memory_bytes is not None:
            few = f"rollout.kv_cache_memory_bytes={r.kv_cache_memory_bytes} holds less than one sequence of {self.longest} tokens: raise it to {round(sequence)} at least"
            return few if r.kv_cache_memory_bytes < sequence else None
        share, least = r.gpu_memory_utilization * self.gpu_bytes, (needs + sequence) / self.gpu_bytes
        few = f"rollout.gpu_memory_utilization={r.gpu_memory_utilization} gives vLLM {share / GIB:.1f} GiB; it needs {needs / GIB:.1f} beside its KV cache"
        few += f", and {sequence / GIB:.1f} for one sequence of {self.longest} tokens: raise it above {least:.2f}, or raise rollout.tensor_model_parallel_size, or lower rollout.max_num_seqs"
        return few if share < needs + sequence else None


def peak(table: dict[str, dict[str, int]]) -> tuple[str, int]:
    """The phase that needs most, and how much."""
    return max(((phase, sum(parts.values())) for phase, parts in table.items()), key=lambda found: found[1])


def report(table: dict[str, dict[str, int]], total: int) -> str:
    """A line a part and a column a phase, in GiB."""
    rows = [
        (part, [parts.get(part, 0) for parts in table.values()])
        for part in dict.fromkeys(part for parts in table.values() for part in parts)
    ]
    rows.append((f"of {total / GIB:.1f}", [sum(parts.values()) for parts in table.values()]))
    return "\n".join(
        [f"{'GiB on a GPU':<18}" + "".join(f"{p:>14}" for p in table)]
        + [
            f"{name:<18}" + "".join(f"{size / GIB:>14.2f}" if size else " " * 14 for size in sizes)
            for name, sizes in rows
        ]
    )


def preflight(cfg, num_tokens: int, world_size: int) -> None:
    """On a GPU, print what each phase will need, and refuse what can't fit. ValueError, from check_memory."""
    if torch.cuda.is_available():
        from transformers import AutoConfig

        check_memory(
            cfg,
            AutoConfig.from_pretrained(cfg.actor.path),
            num_tokens,
            world_size,
            say=int(os.environ.get("RANK", 0)) == 0,
        )


def check_memory(
    cfg, model_config, num_tokens: int, world_size: int, gpu_bytes: int | None = None, say: bool = False
) -> None:
    """ValueError when a phase needs more than the GPU has free, or vLLM more than its share, with what would make it fit. Of a CPU no limit is known."""
    if gpu_bytes is None and not torch.cuda.is_available():
        return
    free, total = (gpu_bytes, gpu_bytes) if gpu_bytes else torch.cuda.mem_get_info()
    free += 0 if gpu_bytes else CONTEXT  # to ask is to have made this process's context, which the table counts
    ref = None
    if cfg.needs_reference and cfg.ref.path:
        from transformers import AutoConfig

        ref = Shape.of(AutoConfig.from_pretrained(cfg.ref.path))
    now = Estimate(cfg, Shape.of(model_config), num_tokens, world_size, total, ref)
    if say:
        print(
            f"memory by arithmetic (memory.py); {free / GIB:.1f} GiB are free\n{report(now.phases(), total)}",
            flush=True,
        )
    if wrong := now.vllm_shortage():
        raise ValueError(wrong)
    phase, need = peak(table := now.phases())
    if need > free:
        parts = [(part, size) for part, size in Counter(table[phase]).most_common(4) if part != "fragmentation"][:3]
        parts = ", ".join(f"{part} {size / GIB:.1f}{knob_of(cfg, part, phase)}" for part, size in parts)
        raise ValueError(
            f"{phase} would need {need / GIB:.1f} GiB of the {free / GIB:.1f} free: the largest parts are {parts}; {advice(now, free)}"
        )


def knob_of(cfg, part: str, phase: str) -> str:
    """The knob that a part grows with, and its value."""
    name = KNOBS.get(part, "")
    if name == "actor.ppo_max_token_len_per_gpu" and not cfg.actor.use_dynamic_bsz:
        name = "actor.ppo_micro_batch_size_per_gpu"
    elif (
        name == "actor.ppo_max_token_len_per_gpu"
        and phase != "update_actor"
        and cfg.actor.log_prob_max_token_len_per_gpu
    ):
        name = "actor.log_prob_max_token_len_per_gpu"
    elif part == "vLLM awake" and cfg.rollout.kv_cache_memory_bytes is not None:
        name = "rollout.kv_cache_memory_bytes"
    return f" ({name}={value_of(cfg, name)})" if name else ""


def value_of(cfg, name: str):
    return functools.reduce(getattr, name.split("."), cfg)


def change(cfg, name: str, value):
    group, knob = name.split(".")
    return replace(cfg, **{group: replace(getattr(cfg, group), **{knob: value})})


def advice(now: Estimate, free: float) -> str:
    """Each change that is enough alone, as the arithmetic says; when none is, all switches together, and a number lowered."""

    def fits(cfg, world_size=now.world_size):
        tried, a = now.of(cfg, world_size), cfg.actor
        short = (
            a.use_dynamic_bsz
            and min(a.ppo_max_token_len_per_gpu, a.log_prob_max_token_len_per_gpu or math.inf) < now.longest
        )
        return not short and not tried.vllm_shortage() and peak(tried.phases())[1] <= free

    changed = {name: change(now.cfg, name, value) for name, value in SWITCHES.items()}
    full = {phase: need for phase, parts in now.phases().items() if (need := sum(parts.values())) > free}
    changed = {
        name: cfg
        for name, cfg in changed.items()
        if any(sum(now.of(cfg).phases()[phase].values()) < need for phase, need in full.items())
    }
    told = {name: f"turn on {name}" if SWITCHES[name] is True else f"set {name}={SWITCHES[name]}" for name in changed}
    alone = [told[name] for name, cfg in changed.items() if fits(cfg)] + lowered(now.cfg, fits)
    more = [
        n
        for n in (now.world_size * k for k in (1, 2, 4, 8))
        if n <= now.cfg.data.train_batch_size and fits(change(now.cfg, "actor.fsdp_size", -1), n)
    ]
    alone += [
        f"use {n} GPUs (--num_processes {n})" + " with actor.fsdp_size=-1" * (now.cfg.actor.fsdp_size != -1)
        for n in more[:1]
        if n > now.world_size
    ]
    if alone:
        return ", or ".join(alone)
    cfg = functools.reduce(lambda cfg, name: change(cfg, name, SWITCHES[name]), changed, now.cfg)
    together, rest = " and ".join(told.values()), lowered(cfg, fits)
    if fits(cfg):
        return together
    return (
        f"{together}, and {', or '.join(rest)}"
        if together and rest
        else "no knob alone is enough: use larger GPUs or a smaller model"
    )


def lowered(cfg, fits) -> list[str]:
    """Of each number the largest smaller value at which everything fits, where there is one."""
    found = []
    for name, step in NUMBERS.items():
        values = (round(i * step, 2) for i in range(math.ceil((value_of(cfg, name) or 0) / step) - 1, 0, -1))
        value = next((v for v in values if fits(change(cfg, name, v))), None)
        found += [] if value is None else [f"lower {name} to {value}"]
    return found
