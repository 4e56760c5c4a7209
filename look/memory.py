"""Does it fit? The GPU memory that each phase of a step needs, by arithmetic, before anything is loaded.

`check_memory` refuses a run that can't fit and says which knob would make it fit (look/advice.py); `report` is the
table. Bytes are those of one GPU. The formulas count what this code keeps: tests/test_memory.py holds them against what
autograd saves. Sequences are taken to be as long as the data section allows, micro-batches to be full, and a session to
give one trajectory. `cfg` is config.Config everywhere.
"""

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

from batch import ceil_div
from fsdp import one_group, reshards
from look.advice import advice, knob_of
from model import BLOCK, meta_model, rows_at_once
from sync_weights import SUMMED_AT_ONCE

GIB = 2**30
BATCH = 150  # bytes a token of the packed batch and some twenty [T] floats of the loss
# Fitted to H200s: what was left on the card beside the sleeping SmolLM2-135M, 1.24 GiB, is the first two.
CONTEXT = 0.55 * GIB  # CUDA's context and loaded kernels
VLLM_ASLEEP = 0.7 * GIB  # what sleep leaves of vLLM: CUDA graphs, buffers
# What torch's allocator takes beyond what is asked of it for all that is not LASTING. 0.06 of 27 GiB and 0.2 of 10 GiB
# were seen.
FRAGMENTATION = 0.08
NCCL = 0.5 * GIB  # its buffers when there are several GPUs; a guess, not measured
LASTING = ("fp32 weights", "Adam moments", "reference", "vLLM awake", "vLLM asleep")

Parts = dict[str, float]  # {part: bytes}


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
        """Counted on the real model without its weights, so that parameters are exact for any architecture."""
        model = meta_model(model_config)
        layer = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])][-1]
        sizes = [p.numel() for p in model.parameters()]
        norms = [name for name, m in layer.named_modules() if type(m).__name__.endswith("Norm")]
        qk_norms = [name for name in norms if name.endswith(("q_norm", "k_norm"))]
        c = model_config.get_text_config()
        heads = c.num_attention_heads
        mlp = getattr(c, "moe_intermediate_size", None) or getattr(c, "intermediate_size", None) or 4 * c.hidden_size
        experts = getattr(c, "num_experts_per_tok", None) or 1
        return cls(
            params=sum(sizes),
            layer=sum(p.numel() for p in layer.parameters()),
            largest=max(sizes),
            vocab=model.get_output_embeddings().weight.size(0),
            hidden=c.hidden_size,
            layers=c.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(c, "num_key_value_heads", None) or heads,
            size=getattr(c, "head_dim", None) or c.hidden_size // heads,
            mlp=mlp * experts,
            norms=len(norms) - len(qk_norms),
            qk_norm=len(qk_norms) > 0,
        )

    def saved(self, e: int, compiled: bool) -> int:
        """Bytes a token that a layer keeps for its backward, in a type of e bytes.

        Those are: q, k, v, the attention's output and its float32 log-sum-exp; gate, its activation, up and their
        product; of each norm the input in float32, 1 / rms, the normed and the scaled one. A compiled layer computes
        the activation and the norms' float32 again, and keeps their inputs.
        """
        qkv = self.size * (self.heads + self.kv_heads)  # of queries and keys, which is also that of output and values
        logsumexp = 4 * self.heads
        if compiled:
            return e * (2 * self.norms * self.hidden + (2 + self.qk_norm) * qkv + 3 * self.mlp) + logsumexp
        normed = self.norms * ((4 + 2 * e) * self.hidden + 4)
        normed += self.qk_norm * ((4 + e) * qkv + 4 * (self.heads + self.kv_heads))
        return normed + 2 * e * qkv + logsumexp + 4 * e * self.mlp

    def ends(self, e: int) -> int:
        """The same for what is outside of the layers: rotary angles, ids, the final norm."""
        return 2 * e * self.size + 12 + (4 + e) * self.hidden


class MicroBatch(NamedTuple):
    """The fullest micro-batch of a rank."""

    tokens: int
    sampled: int  # of the tokens
    rows: int  # sampled tokens that have logits at once
    several: bool  # whether a mini-batch may need more than one


def estimate(
    cfg, model_config, num_tokens: int, world_size: int, gpu_bytes: int, ref_config=None
) -> dict[str, dict[str, int]]:
    """{phase: {part: bytes}} of one GPU, for the phases that a step has, named as in timing_s/*.

    The reference is taken to be like the actor unless its config is given.
    """
    ref = ref_config and Shape.of(ref_config)
    return Estimate(cfg, Shape.of(model_config), num_tokens, world_size, gpu_bytes, ref).phases()


class Estimate:
    """What one GPU of world_size needs; `num_tokens` are the tokenizer's, `gpu_bytes` all that the GPU has."""

    def __init__(self, cfg, shape: Shape, num_tokens: int, world_size: int, gpu_bytes: int, ref: Shape | None = None):
        self.cfg = cfg
        self.shape = shape
        self.num_tokens = num_tokens
        self.world_size = world_size
        self.gpu_bytes = gpu_bytes
        self.ref = ref or shape
        self.shards = world_size if cfg.actor.fsdp_size == -1 else cfg.actor.fsdp_size
        self.e = getattr(torch, cfg.actor.dtype).itemsize  # bytes of a number in the compute type
        self.longest = cfg.data.max_prompt_length + cfg.data.max_response_length

    def of(self, cfg, world_size: int | None = None) -> "Estimate":
        """The same model and GPU with another configuration."""
        return Estimate(cfg, self.shape, self.num_tokens, world_size or self.world_size, self.gpu_bytes, self.ref)

    def fits(self, free: float) -> bool:
        """Whether `free` bytes are enough for every phase, vLLM's share for vLLM, and the budgets for one sequence."""
        a = self.cfg.actor
        budget = min(a.ppo_max_token_len_per_gpu, a.log_prob_max_token_len_per_gpu or math.inf)
        if a.use_dynamic_bsz and budget < self.longest:
            return False
        return not self.vllm_shortage() and peak(self.phases())[1] <= free

    def phases(self) -> dict[str, dict[str, int]]:
        """{phase: {part: bytes}}, for the phases that a step has."""
        cfg, shape = self.cfg, self.shape
        kept = self.kept()
        awake = {"vLLM awake": self.vllm_awake()}
        gathered = {"gathered weights": self.gathered(shape)}
        # A tensor is sent in the compute type and its bits are summed in int64; a probe gathers weights. What a sync
        # took stays cached until vLLM sleeps.
        on_its_way = {"tensor on its way": self.e * shape.largest + 8 * min(shape.largest, SUMMED_AT_ONCE)}
        table = {phase: kept | gathered | awake | on_its_way for phase in ("sync", "gen")}
        kept |= {"vLLM asleep": VLLM_ASLEEP} if cfg.rollout.free_cache_engine else awake
        if cfg.old_logprobs_from == "actor":
            table["old_log_prob"] = kept | gathered | self.scoring(shape)
        if cfg.needs_reference:
            table["ref"] = kept | {"gathered weights": self.gathered(self.ref)} | self.scoring(self.ref)
        fullest = max(self.updating(), key=lambda parts: sum(parts.values()))
        table["update_actor"] = kept | gathered | fullest
        return {phase: self.completed(phase, parts) for phase, parts in table.items()}

    def kept(self) -> Parts:
        """What stays through a whole step, vLLM aside."""
        parts = {
            "fp32 weights": 4 * self.shape.params / self.shards,
            "Adam moments": 8 * self.shape.params / self.shards,
        }
        if self.cfg.needs_reference:
            parts["reference"] = 0 if self.cfg.ref.param_offload else self.e * self.ref.params / self.shards
        return parts

    def completed(self, phase: str, parts: Parts) -> dict[str, int]:
        """A phase's parts in whole bytes, with what is on the card besides, and without moments that are on the CPU."""
        if self.cfg.actor.optimizer_offload and phase != "update_actor":
            parts = parts | {"Adam moments": 0}
        passing = sum(size for part, size in parts.items() if part not in LASTING)
        context = CONTEXT + NCCL * (self.world_size > 1)
        parts = parts | {"CUDA context": context, "fragmentation": FRAGMENTATION * passing}
        return {part: round(size) for part, size in parts.items()}

    def gathered(self, shape: Shape) -> int:
        """What FSDP2 holds whole: the layer at work, the next one, and the head; without resharding all."""
        if reshards(self.cfg.actor, self.shards):
            return self.e * min(2 * shape.layer + shape.vocab * shape.hidden, shape.params)
        return self.e * shape.params

    def micro_batch(self, budget: int, prompts: int, vocab: int) -> MicroBatch:
        """The fullest micro-batch when `prompts` prompts are shared out, and one holds `budget` tokens at most."""
        a, data, n = self.cfg.actor, self.cfg.data, self.cfg.rollout.n
        seqs = ceil_div(prompts * n, self.world_size)
        if a.share_prompts:
            whole = ceil_div(prompts, self.world_size) * (data.max_prompt_length + n * data.max_response_length)
        else:
            whole = seqs * self.longest
        most = budget if a.use_dynamic_bsz else a.ppo_micro_batch_size_per_gpu * self.longest
        tokens = min(most, whole)
        sampled = min(tokens, seqs * data.max_response_length)
        return MicroBatch(tokens, sampled, rows=min(sampled, rows_at_once(vocab)), several=whole > most)

    def scoring(self, shape: Shape) -> Parts:
        """A forward without gradient: a layer's intermediate values, or the head's logits and what is kept of them."""
        a, e, h = self.cfg.actor, self.e, shape.hidden
        budget = a.log_prob_max_token_len_per_gpu or a.ppo_max_token_len_per_gpu
        tokens, sampled, rows, _ = self.micro_batch(budget, self.cfg.data.train_batch_size, shape.vocab)
        layer = tokens * (2 * e * shape.size + 12 + e * max(8 * h, 4 * h + 3 * shape.mlp))
        # Three float32 of each block of the vocabulary, of the chunks and of all of them.
        statistics = 24 * sampled * ceil_div(self.num_tokens, BLOCK)
        head = e * h * (tokens + sampled) + e * rows * shape.vocab + statistics
        return {"batch": BATCH * tokens} | ({"LM head": head} if head > layer else {"layer at work": layer})

    def updating(self) -> list[Parts]:
        """The three moments that can be a backward's fullest.

        In the head, with logits that become their gradient; in the last layer; at the end, with all gradients.
        Gradients are float32 shards. A layer's are whole, in the compute type and in float32, until they are scattered,
        of one group all, in float32, and once more to be scattered; the head's from its first chunk on.
        """
        a, shape, e, h = self.cfg.actor, self.shape, self.e, self.shape.hidden
        most = self.micro_batch(a.ppo_max_token_len_per_gpu, a.ppo_mini_batch_size, shape.vocab)
        head = shape.vocab * h
        # Scattered gradients come from a stream with memory of its own, where the head's new ones stand beside the sum
        # of earlier micro-batches.
        scattered = 4 * (shape.params + head) / self.shards
        earlier = scattered * most.several
        saved = shape.saved(e, a.use_torch_compile)
        of_layers = shape.layers * (e * h if a.enable_gradient_checkpointing else saved)
        batch = {"batch": BATCH * most.tokens}
        kept = batch | {"activations": most.tokens * (of_layers + shape.ends(e))}
        in_head = {
            "gradients": earlier + e * head * (most.rows < most.sampled),
            "LM head": e * most.rows * shape.vocab + 2 * e * h * most.sampled,
        }
        in_layer = {
            "gradients": earlier + e * head + (e + 4) * shape.layer,
            "layer at work": most.tokens * self.last_layer(saved),
        }
        whole = one_group(a, self.world_size, lambda: shape.params)
        at_the_end = {"gradients": 12 * shape.params if whole else scattered + (2 * e + 4) * head}
        return [kept | in_head, kept | in_layer, batch | at_the_end]

    def last_layer(self, saved: int) -> int:
        """Bytes a token beside the activations in the backward of the final norm or of the last layer, the larger.

        `saved` is what a layer keeps, which gradient checkpointing computes again. What the final norm kept is gone by
        then.
        """
        e, h = self.e, self.shape.hidden
        again = saved if self.cfg.actor.enable_gradient_checkpointing else 0
        down = e * (h + 2 * self.shape.mlp)
        return max(9 * e * h, again + max(5 * e * h, down) - (4 + e) * h)

    def vllm_awake(self) -> float:
        """What vLLM takes while it samples: its share of the GPU, or a given KV cache and what it needs besides."""
        r = self.cfg.rollout
        if r.kv_cache_memory_bytes is None:
            return r.gpu_memory_utilization * self.gpu_bytes
        return r.kv_cache_memory_bytes + self.vllm_needs()

    def vllm_needs(self) -> float:
        """Beside its KV cache: weights, what stays when it sleeps, four float32 [sequences, V] to sample from."""
        r = self.cfg.rollout
        weights = self.e * self.shape.params / r.tensor_model_parallel_size
        return weights + VLLM_ASLEEP + 16 * r.max_num_seqs * self.shape.vocab

    def vllm_shortage(self) -> str | None:
        """What is wrong when vLLM's share can't hold its weights and the KV cache of one sequence."""
        r, s = self.cfg.rollout, self.shape
        sequence = 2 * self.e * s.layers * s.kv_heads * s.size * self.longest / r.tensor_model_parallel_size
        if r.kv_cache_memory_bytes is not None:
            if r.kv_cache_memory_bytes >= sequence:
                return None
            return (
                f"rollout.kv_cache_memory_bytes={r.kv_cache_memory_bytes} holds less than one sequence of "
                f"{self.longest} tokens: raise it to {round(sequence)} at least"
            )
        share = r.gpu_memory_utilization * self.gpu_bytes
        needs = self.vllm_needs()
        if share >= needs + sequence:
            return None
        return (
            f"rollout.gpu_memory_utilization={r.gpu_memory_utilization} gives vLLM {share / GIB:.1f} GiB; it needs "
            f"{needs / GIB:.1f} beside its KV cache, and {sequence / GIB:.1f} for one sequence of {self.longest} "
            f"tokens: raise it above {(needs + sequence) / self.gpu_bytes:.2f}, "
            "or raise rollout.tensor_model_parallel_size, or lower rollout.max_num_seqs"
        )


def peak(table: dict[str, dict[str, int]]) -> tuple[str, int]:
    """The phase that needs most, and how much."""
    needs = {phase: sum(parts.values()) for phase, parts in table.items()}
    fullest = max(needs, key=lambda phase: needs[phase])
    return fullest, needs[fullest]


def report(table: dict[str, dict[str, int]], total: int) -> str:
    """A line a part and a column a phase, in GiB."""
    names = dict.fromkeys(part for parts in table.values() for part in parts)
    rows = {name: [parts.get(name, 0) for parts in table.values()] for name in names}
    rows[f"of {total / GIB:.1f}"] = [sum(parts.values()) for parts in table.values()]
    lines = [f"{'GiB on a GPU':<18}" + "".join(f"{phase:>14}" for phase in table)]
    for name, sizes in rows.items():
        lines.append(f"{name:<18}" + "".join(f"{size / GIB:>14.2f}" if size else " " * 14 for size in sizes))
    return "\n".join(lines)


def preflight(cfg, num_tokens: int, world_size: int) -> None:
    """On a GPU, print what each phase will need, and refuse what can't fit. ValueError, from check_memory."""
    if torch.cuda.is_available():
        from transformers import AutoConfig

        model_config = AutoConfig.from_pretrained(cfg.actor.path)
        check_memory(cfg, model_config, num_tokens, world_size, say=int(os.environ.get("RANK", 0)) == 0)


def check_memory(
    cfg, model_config, num_tokens: int, world_size: int, gpu_bytes: int | None = None, say: bool = False
) -> None:
    """ValueError when a phase needs more than is free, or vLLM more than its share, with what would make it fit.

    Of a CPU no limit is known. `gpu_bytes` stands for a GPU that is not there; `say` prints the table.
    """
    if gpu_bytes is not None:
        free = total = gpu_bytes
    elif torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        free += CONTEXT  # to ask is to have made this process's context, which the table counts
    else:
        return
    ref = None
    if cfg.needs_reference and cfg.ref.path:
        from transformers import AutoConfig

        ref = Shape.of(AutoConfig.from_pretrained(cfg.ref.path))
    now = Estimate(cfg, Shape.of(model_config), num_tokens, world_size, total, ref)
    table = now.phases()
    if say:
        print(
            f"memory by arithmetic (look/memory.py); {free / GIB:.1f} GiB are free\n{report(table, total)}", flush=True
        )
    wrong = now.vllm_shortage()
    if wrong:
        raise ValueError(wrong)
    phase, need = peak(table)
    if need > free:
        raise ValueError(
            f"{phase} would need {need / GIB:.1f} GiB of the {free / GIB:.1f} free: "
            f"the largest parts are {largest_parts(cfg, table, phase)}; {advice(now, free)}"
        )


def largest_parts(cfg, table: dict[str, dict[str, int]], phase: str) -> str:
    """The three largest parts of a phase, each with the knob that it grows with."""
    parts = [(part, size) for part, size in table[phase].items() if part != "fragmentation"]
    parts.sort(key=lambda entry: -entry[1])
    return ", ".join(f"{part} {size / GIB:.1f}{knob_of(cfg, part, phase)}" for part, size in parts[:3])
