"""The policy and the reference: Hugging Face models under accelerate's FSDP2, on packed sequences.

`Actor.score` gives log-probs without gradient, `Actor.update` takes a step's optimizer steps, `Actor.weights` streams the
weights for vLLM. [T, V] logits never exist whole (head.py).
"""

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist

from batch import Batch, Trajectory, collate, group_by_prompt, pack, send, token_imbalance
from fast.attention import packed_attention
from fast.offload import Moments
from fast.prompts import pack_shared, share
from head import replace_head
from launch import make_plugin, reshards
from loss import count_totals, policy_loss

WRAPPERS = (
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
)  # what activation checkpointing and compile add to a parameter's name


@dataclass(frozen=True)
class ActorConfig:
    path: str = ""
    """Model: a Hugging Face folder or id."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute type of the actor and of vLLM. Master weights, gradients' reduction and optimizer are float32."""
    lr: float = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; one step of it a training step."""
    lr_warmup_steps: int = 0
    """Training steps of linear warm-up from 0 (the first has learning rate 0)."""
    min_lr_ratio: float = 0.0
    """The learning rate that cosine ends at, as a share of lr."""
    weight_decay: float = 0.01
    """AdamW's weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    ppo_mini_batch_size: int = 64
    """Prompts an optimizer step."""
    ppo_epochs: int = 1
    """Passes over a step's batch."""
    shuffle: bool = False
    """Shuffle the prompts among the mini-batches of an epoch."""
    use_dynamic_bsz: bool = True
    """Cut micro-batches by tokens (ppo_max_token_len_per_gpu), not by trajectories (ppo_micro_batch_size_per_gpu)."""
    ppo_max_token_len_per_gpu: int = 16384
    """Most tokens of a micro-batch with gradient."""
    log_prob_max_token_len_per_gpu: int | None = None
    """Most tokens of a micro-batch without gradient; ppo_max_token_len_per_gpu when not given."""
    ppo_micro_batch_size_per_gpu: int = 8
    """Trajectories of a micro-batch when use_dynamic_bsz is off."""
    enable_gradient_checkpointing: bool = True
    """Recompute each layer's activations in the backward pass."""
    use_torch_compile: bool = True
    """Compile the layers, once for all shapes: half a minute more at a first step, half the time of each. (Not on the CPU.)"""
    share_prompts: bool = False
    """Compute a prompt once for all of its sessions in a micro-batch: exact, and less work, the more the longer prompts are. Needs use_dynamic_bsz."""
    reshard_after_forward: bool | None = None
    """Free each layer's gathered weights after its forward (ZeRO-3), or keep them until the backward (ZeRO-2), on one GPU for all micro-batches. When not given: free, but on one GPU."""
    optimizer_offload: bool = False
    """Keep AdamW's moments on the CPU from the sync of a step to its update, so that vLLM and the log-probs have their memory."""
    fsdp_size: int = -1
    """GPUs that share one copy of weights and optimizer (HSDP); a divisor of all, say those of one host. -1: all; 1: each has a whole copy."""

    def __post_init__(self):
        for knob in ("ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"):
            if getattr(self, knob) < 1:
                raise ValueError(f"actor.{knob}={getattr(self, knob)} must be at least 1")
        for knob in ("lr", "grad_clip", "weight_decay", "lr_warmup_steps"):
            if not 0 <= getattr(self, knob) < math.inf:
                raise ValueError(f"actor.{knob}={getattr(self, knob)} must be a number that is not negative")
        if not 0 <= self.min_lr_ratio <= 1 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"actor.min_lr_ratio={self.min_lr_ratio} must be in 0..1, actor.betas={self.betas} at least 0 and below 1"
            )
        if self.share_prompts and not self.use_dynamic_bsz:
            raise ValueError(
                "actor.share_prompts needs actor.use_dynamic_bsz: micro-batches cut by trajectories take those of a prompt apart"
            )
        if self.fsdp_size < 1 and self.fsdp_size != -1:
            raise ValueError(f"actor.fsdp_size={self.fsdp_size} must be at least 1, or -1 for all processes")


@dataclass(frozen=True)
class RefConfig:
    path: str | None = None
    """Reference model; the actor's initial weights when not given."""
    param_offload: bool = False
    """Keep the reference's weights on the CPU between uses."""


def lr_factor(step: int, total_steps: int, cfg: ActorConfig) -> float:
    """Learning rate of training step `step` (from 0) as a share of cfg.lr."""
    if step < cfg.lr_warmup_steps:
        return step / cfg.lr_warmup_steps
    if cfg.lr_scheduler_type == "constant":
        return 1.0
    progress = min((step - cfg.lr_warmup_steps) / max(total_steps - cfg.lr_warmup_steps, 1), 1.0)
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def load_model(path: str, dtype: torch.dtype, num_tokens: int, temperature: float, compiled: bool = False):
    """A causal LM with packed attention and the chunked log-prob head. ValueError for a model that either would get wrong."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    for knob in (
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "logits_scaling",
        "logit_scale",
        "quantization_config",
    ):
        if getattr(config, knob, None) not in (None, 1.0):
            raise ValueError(
                f"actor.path={path}: its config has {knob}, which the packed log-prob forward does not compute; use a model without it"
            )
    AttentionInterface.register("packed", packed_attention)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="packed")
    head = model.get_output_embeddings()
    if num_tokens > head.weight.size(0):
        raise ValueError(
            f"actor.path={path}: the tokenizer has {num_tokens} tokens, the model only {head.weight.size(0)}"
        )
    replace_head(head, num_tokens, temperature)
    if compiled:  # hooks of FSDP and checkpointing stay outside
        for layer in (m for m in model.modules() if type(m).__name__ in model._no_split_modules):
            layer.forward = torch.compile(layer.forward, dynamic=True)
    return model


def forward(model, batch: Batch):
    """`(logprobs [T], entropy [T])` of a packed batch, 0 at tokens that the policy did not sample. The one place that shifts.

    The head sees only the positions whose next token was sampled.
    """
    sampled = batch.sampled  # [K]
    assert len(sampled), "a micro-batch without a sampled token has nothing to compute"
    model.get_output_embeddings().targets = batch.tokens[sampled]
    tokens, position_ids, before = batch.tokens, batch.position_ids, sampled - 1
    if batch.shared:
        tokens, position_ids, before = (
            tokens[batch.shared.index],
            position_ids[batch.shared.index],
            batch.shared.places[before],
        )
    inputs = {"input_ids": tokens[None], "position_ids": position_ids[None], "attention_mask": None}
    out = model(**inputs, use_cache=False, logits_to_keep=before, packing=batch).logits[0]  # [K, 2]
    zeros = out.new_zeros(len(batch.tokens))
    return zeros.index_put((sampled,), out[:, 0]), zeros.index_put((sampled,), out[:, 1])


def reshard(model) -> None:
    """Free gathered weights. A no-grad forward leaves the last FSDP group gathered, and a step after it would not reach the next forward or sync."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def plan_of(trajectories: list[Trajectory], cfg: ActorConfig, max_tokens: int) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices, of max_tokens tokens at most, or of ppo_micro_batch_size_per_gpu trajectories."""
    if cfg.use_dynamic_bsz and cfg.share_prompts:
        return pack_shared(trajectories, dist.get_world_size(), max_tokens)
    return pack(
        [len(t.tokens) for t in trajectories],
        dist.get_world_size(),
        max_tokens if cfg.use_dynamic_bsz else None,
        cfg.ppo_micro_batch_size_per_gpu,
    )


def collate_for(trajectories: list[Trajectory], cfg: ActorConfig, device) -> Batch:
    batch = collate(trajectories, device)
    batch.shared = share(trajectories, device) if cfg.share_prompts else None
    return batch


def score(model, trajectories: list[Trajectory], cfg: ActorConfig, device) -> list[torch.Tensor]:
    """Log-probs [L] of every trajectory, on every rank; each rank computes its share. No gradient."""
    lengths = [len(t.tokens) for t in trajectories]
    own: list[tuple[list[int], torch.Tensor]] = []
    with torch.no_grad():
        for indices in plan_of(trajectories, cfg, cfg.log_prob_max_token_len_per_gpu or cfg.ppo_max_token_len_per_gpu)[
            dist.get_rank()
        ]:
            batch = collate_for([trajectories[i] for i in indices or [0]], cfg, device)
            own.append((indices, forward(model, batch)[0]))
    reshard(model)
    return share_logprobs(own, lengths, device)


def share_logprobs(own: list[tuple[list[int], torch.Tensor]], lengths: list[int], device) -> list[torch.Tensor]:
    """Every trajectory's log-probs [L] on every rank, from (indices, log-probs [T]) of each micro-batch that a rank computed. A collective."""
    whole = torch.zeros(sum(lengths), device=device)  # all trajectories end to end
    starts = [0, *accumulate(lengths)]
    for indices, logprobs in own:
        if indices:
            whole[send(torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices]), device)] = logprobs
    if dist.get_world_size() > 1:
        dist.all_reduce(whole)
    return list(whole.cpu().split(lengths))


class Reference:
    """The frozen model that KL is measured against, sharded like the actor, on the CPU between uses when asked for."""

    def __init__(self, cfg: RefConfig, actor_cfg: ActorConfig, accelerator, num_tokens: int, temperature: float):
        from accelerate.utils import fsdp2_prepare_model
        from torch.distributed.fsdp import CPUOffloadPolicy

        self.cfg, self.device = actor_cfg, accelerator.device
        model = (
            load_model(
                cfg.path or actor_cfg.path,
                getattr(torch, actor_cfg.dtype),
                num_tokens,
                temperature,
                actor_cfg.use_torch_compile and self.device.type == "cuda",
            )
            .eval()
            .requires_grad_(False)
        )
        offload = CPUOffloadPolicy(pin_memory=accelerator.device.type == "cuda") if cfg.param_offload else None
        # The accelerator's state holds one plugin, and preparing changes the plugin: lend it this model's own.
        state = accelerator.state
        actors, state.fsdp_plugin = state.fsdp_plugin, make_plugin(actor_cfg, cpu_offload=offload)
        try:
            self.model = fsdp2_prepare_model(accelerator, model)
        finally:
            state.fsdp_plugin = actors

    def score(self, trajectories: list[Trajectory]) -> list[torch.Tensor]:
        return score(self.model, trajectories, self.cfg, self.device)


class Actor:
    """The policy: fp32 master weights and AdamW, sharded over the ranks."""

    def __init__(self, cfg: ActorConfig, accelerator, num_tokens: int, temperature: float):
        self.cfg, self.accelerator, self.device = cfg, accelerator, accelerator.device
        model = load_model(
            cfg.path, torch.float32, num_tokens, temperature, cfg.use_torch_compile and self.device.type == "cuda"
        )
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=cfg.lr,
            betas=cfg.betas,
            weight_decay=cfg.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.model.eval()  # no dropout: vLLM has none, and old and current log-probs must be of one policy
        self.num_shards = next(self.model.parameters()).device_mesh.shape[-1]
        self.num_copies = dist.get_world_size() // self.num_shards
        self.moments = Moments(self.optimizer, self.device)
        self.version = 0  # training steps done

    def score(self, trajectories: list[Trajectory]) -> list[torch.Tensor]:
        """Log-probs [L] of every trajectory under the current weights."""
        return score(self.model, trajectories, self.cfg, self.device)

    def update(
        self, trajectories: list[Trajectory], loss_cfg, step: int, total_steps: int, seed: int
    ) -> dict[str, float]:
        """ppo_epochs passes over the step's mini-batches, one optimizer step each; then one learning-rate step. Returns metrics.

        Trajectories that come without old_logprobs, for a single update, leave with those that it computed.
        """
        self.moments.load()
        lr = self.cfg.lr * lr_factor(step, total_steps, self.cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.start_step()
        own: list | None = [] if trajectories[0].old_logprobs is None else None
        for mini_batch in self.mini_batches(trajectories, f"{seed}/{step}"):
            assert own is None or not self.updates, "a second update needs old_logprobs from before the first"
            self.updates.append((mini_batch, self.backward(mini_batch, loss_cfg, own), self.optimizer_step()))
            if not math.isfinite(self.updates[-1][2]):
                break  # the rest of the step is left out, so that the weights stay those that this mini-batch met
        if own is not None:
            places = {id(t): i for i, t in enumerate(mini_batch)}
            shared = share_logprobs(own, [len(t.tokens) for t in mini_batch], self.device)
            for t in trajectories:
                t.old_logprobs = shared[places[id(t)]]
        self.version = step + 1
        sums: dict[str, list] = {}
        for _, more, _ in self.updates:
            add_sums(sums, more)
        norms = [norm for _, _, norm in self.updates if math.isfinite(norm)]
        return reduce_sums(sums) | {
            "actor/grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "actor/skipped_steps": len(self.updates) - len(norms),
            "actor/num_updates": len(self.updates),
            "actor/lr": lr,
            "perf/token_imbalance": token_imbalance(self.plans),
        }

    def start_step(self) -> None:
        self.updates = []  # (mini-batch, sums of its metrics, gradient norm) of each optimizer step
        self.plans = []  # (mini-batch, [rank][micro-batch] -> its indices) of each
        self.entropies: dict[
            str, torch.Tensor
        ] = {}  # [L] by the key of a trajectory that this rank computed, of the first update that met it

    def backward(self, mini_batch: list[Trajectory], loss_cfg, own: list | None = None) -> dict[str, list]:
        """The gradient of a mini-batch's loss, into the parameters. Returns its metrics as [sum, count] of this rank; puts its log-probs into `own`."""
        totals, sums = count_totals(mini_batch), {}
        for indices, batch in self.micro_batches(mini_batch):
            logprobs, entropy = forward(self.model, batch)
            loss, metrics = policy_loss(batch, logprobs, entropy, loss_cfg, totals)
            self.accelerator.backward(loss * dist.get_world_size())  # FSDP averages gradients over the ranks
            add_sums(sums, metrics)
            if own is not None:
                own.append((indices, logprobs.detach()))
            for i, values in zip(indices, entropy.detach().split([len(mini_batch[i].tokens) for i in indices or [0]])):
                self.entropies.setdefault(mini_batch[i].key, values)
        return sums

    def mini_batches(self, trajectories: list[Trajectory], seed: str):
        """Trajectories of ppo_mini_batch_size prompts at a time, ppo_epochs times."""
        groups = group_by_prompt(trajectories)
        for epoch in range(self.cfg.ppo_epochs):
            if self.cfg.shuffle:
                groups = random.Random(f"{seed}/{epoch}").sample(groups, len(groups))
            for i in range(0, len(groups), self.cfg.ppo_mini_batch_size):
                yield [t for group in groups[i : i + self.cfg.ppo_mini_batch_size] for t in group]

    def micro_batches(self, mini_batch: list[Trajectory]):
        """This rank's part of a mini-batch as (indices, packed batch). A rank with nothing left runs a forward that adds 0, since FSDP needs every rank."""
        plan = plan_of(mini_batch, self.cfg, self.cfg.ppo_max_token_len_per_gpu)
        self.plans.append((mini_batch, plan))
        for left, indices in zip(range(len(plan[0]))[::-1], plan[dist.get_rank()]):
            if (
                self.num_shards == 1
            ):  # nothing to gather or scatter: the weights stay cast, unless that is too much, and gradients add up; the last one ends both
                self.model.set_reshard_after_backward(left == 0 or reshards(self.cfg, self.num_shards))
                self.model.set_requires_gradient_sync(left == 0)
            self.model.set_requires_all_reduce(
                left == 0
            )  # copies of the weights (HSDP) add up their gradients once, at the last
            batch = collate_for([mini_batch[i] for i in indices or [0]], self.cfg, self.device)
            if not indices:
                batch.loss_mask = torch.zeros_like(batch.loss_mask)
            yield indices, batch

    def gradient(self) -> tuple[list[torch.Tensor], float]:
        """This rank's shards of the gradient, and the whole one's norm. A collective."""
        grads = [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        return grads, float((square / self.num_copies).sqrt())  # every copy has added its own

    def optimizer_step(self) -> float:
        """Clip, step, and clear the gradients; a gradient that is not finite changes nothing. Returns its norm over all ranks."""
        grads, norm = self.gradient()
        if math.isfinite(norm):
            torch._foreach_mul_(grads, min(1.0, self.cfg.grad_clip / (norm + 1e-6)))
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def weights(self, dtype: torch.dtype):
        """Every parameter as (Hugging Face name, whole tensor in dtype), one at a time: a collective, all ranks in the same order.

        Tied weights come once. Never a second copy of the model.
        """
        reshard(self.model)
        for name, parameter in self.model.named_parameters():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            # The shard is cast before it is gathered: half the bytes. With one shard it is the whole.
            yield name, parameter.to_local().to(dtype) if self.num_shards == 1 else parameter.to(dtype).full_tensor()


def add_sums(sums: dict[str, list], more: dict) -> None:
    for name, pair in more.items():
        sums[name] = [old + new for old, new in zip(sums.get(name, (0.0, 0.0)), pair)]


def reduce_sums(sums: dict[str, list]) -> dict[str, float]:
    """Mean of each metric over all micro-batches of all ranks, from its sums and counts."""
    if not sums:
        return {}
    table = torch.stack([torch.stack(pair).double() for pair in sums.values()])  # [metrics, 2]
    if dist.get_world_size() > 1:
        dist.all_reduce(table)
    return {name: float(total / count) for name, (total, count) in zip(sums, table.tolist()) if count}
