"""The policy and the reference: models under FSDP2 that score trajectories, and AdamW's steps of the policy.

`Actor.score` gives log-probs without gradient, `Actor.update` takes a step's optimizer steps, `Actor.weights` streams
the weights for vLLM. How one log-prob is computed stands in model.py, how the ranks share a model in fsdp.py.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist

from batch import Batch, Trajectory, collate, group_by_prompt, pack, send, token_imbalance
from fsdp import prepare_frozen, reshard, reshards
from host.lookup import check_bounds, may_change
from loss import LossConfig, count_totals, policy_loss
from model import forward, load_model

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # added to parameters' names by checkpointing and compiling
Plan = list[list[list[int]]]  # [rank][micro-batch] -> indices of trajectories


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
    use_dynamic_bsz: bool = may_change(True)
    """Cut micro-batches by tokens (ppo_max_token_len_per_gpu), not by trajectories (ppo_micro_batch_size_per_gpu)."""
    ppo_max_token_len_per_gpu: int = may_change(16384)
    """Most tokens of a micro-batch with gradient."""
    log_prob_max_token_len_per_gpu: int | None = may_change(None)
    """Most tokens of a micro-batch without gradient; ppo_max_token_len_per_gpu when not given."""
    ppo_micro_batch_size_per_gpu: int = may_change(8)
    """Trajectories of a micro-batch when use_dynamic_bsz is off."""
    enable_gradient_checkpointing: bool = may_change(True)
    """Recompute each layer's activations in the backward pass."""
    use_torch_compile: bool = may_change(True)
    """Compile the layers, once for all shapes: half a minute more at a first step, half the time of each. (On a GPU.)
    """
    flash_attention: bool = may_change(True)
    """Attend by FlashAttention in bfloat16 on a GPU, not by torch's own attention on padded rows."""
    lean_kernels: bool = may_change(True)
    """On a GPU, the head's softmax and attention's backward by kernels in Triton, not by torch."""
    share_prompts: bool = may_change(False)
    """Compute a prompt once for all of its sessions in a micro-batch: exact, and less work, the more the longer prompts
    are. Needs use_dynamic_bsz."""
    reshard_after_forward: bool | None = may_change(None)
    """Free each layer's gathered weights after its forward (ZeRO-3), or keep them until the backward (ZeRO-2), on one
    GPU for all micro-batches. When not given: free them where there are several GPUs."""
    optimizer_offload: bool = may_change(False)
    """Keep AdamW's moments on the CPU from a step's sync to its update: vLLM and the log-probs have their memory."""
    fsdp_size: int = may_change(-1)
    """GPUs that share one copy of weights and optimizer (HSDP); a divisor of all, say those of one host. -1: all; 1:
    each has a whole copy."""

    def __post_init__(self):
        counts = "ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu"
        not_negative = "lr", "grad_clip", "weight_decay", "lr_warmup_steps"
        check_bounds("actor", self, **dict.fromkeys(counts, "[1, inf)"), **dict.fromkeys(not_negative, "[0, inf)"))
        check_bounds("actor", self, min_lr_ratio="[0, 1]", betas="[0, 1)", fsdp_size="-1 or [1, inf)")
        if self.share_prompts and not self.use_dynamic_bsz:
            raise ValueError(
                "actor.share_prompts needs actor.use_dynamic_bsz: "
                "micro-batches cut by trajectories take those of a prompt apart"
            )


@dataclass(frozen=True)
class RefConfig:
    path: str | None = None
    """Reference model; the actor's initial weights when not given."""
    param_offload: bool = may_change(False)
    """Keep the reference's weights on the CPU between uses."""


def lr_factor(step: int, total_steps: int, cfg: ActorConfig) -> float:
    """Learning rate of training step `step` (from 0) as a share of cfg.lr."""
    if step < cfg.lr_warmup_steps:
        return step / cfg.lr_warmup_steps
    if cfg.lr_scheduler_type == "constant":
        return 1.0
    progress = min((step - cfg.lr_warmup_steps) / max(total_steps - cfg.lr_warmup_steps, 1), 1.0)
    return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def speed_up(model, cfg: ActorConfig, device: torch.device) -> None:
    """Put quicker twins in place of plain torch, as the knobs say. What is computed stays the same but for rounding."""
    on_gpu = device.type == "cuda"
    if cfg.share_prompts or (cfg.flash_attention and on_gpu):
        from fast.attention import use_fast_attention

        use_fast_attention(model, flash=cfg.flash_attention and on_gpu, kernels=cfg.lean_kernels and on_gpu)
    if cfg.lean_kernels and on_gpu:
        from fast import kernels

        model.get_output_embeddings().ops = kernels
    if cfg.use_torch_compile and on_gpu:
        for layer in model.modules():
            if type(layer).__name__ in model._no_split_modules:
                layer.forward = torch.compile(
                    layer.forward, dynamic=True
                )  # hooks of FSDP and checkpointing stay outside


def plan_micro_batches(trajectories: list[Trajectory], cfg: ActorConfig, max_tokens: int) -> Plan:
    """Micro-batches of max_tokens tokens at most, or of ppo_micro_batch_size_per_gpu trajectories."""
    if cfg.share_prompts:
        from fast.prompts import pack_shared

        return pack_shared(trajectories, dist.get_world_size(), max_tokens)
    lengths = [len(t.tokens) for t in trajectories]
    if cfg.use_dynamic_bsz:
        return pack(lengths, dist.get_world_size(), max_tokens)
    return pack(lengths, dist.get_world_size(), None, cfg.ppo_micro_batch_size_per_gpu)


def collate_for(trajectories: list[Trajectory], cfg: ActorConfig, device: torch.device) -> Batch:
    """The packed batch on the device; with share_prompts it also says which prompts are computed once."""
    batch = collate(trajectories, device)
    if cfg.share_prompts:
        from fast.prompts import share

        batch.shared = share(trajectories, device)
    return batch


def score(model, trajectories: list[Trajectory], cfg: ActorConfig, device: torch.device) -> list[torch.Tensor]:
    """Log-probs [L] of every trajectory, on every rank; each rank computes its share. No gradient. A collective."""
    plan = plan_micro_batches(trajectories, cfg, cfg.log_prob_max_token_len_per_gpu or cfg.ppo_max_token_len_per_gpu)
    computed: list[tuple[list[int], torch.Tensor]] = []
    with torch.no_grad():
        for indices in plan[dist.get_rank()]:
            # A rank with nothing left runs a forward all the same, since FSDP needs every rank.
            batch = collate_for([trajectories[i] for i in indices or [0]], cfg, device)
            computed.append((indices, forward(model, batch)[0]))
    reshard(model)
    return share_logprobs(computed, [len(t.tokens) for t in trajectories], device)


def share_logprobs(
    computed: list[tuple[list[int], torch.Tensor]], lengths: list[int], device: torch.device
) -> list[torch.Tensor]:
    """Every trajectory's log-probs [L] on every rank, from (indices, log-probs [T]) of each one's micro-batches."""
    whole = torch.zeros(sum(lengths), device=device)  # all trajectories end to end
    starts = [0, *accumulate(lengths)]
    for indices, logprobs in computed:
        if indices:
            places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices])
            whole[send(places, device)] = logprobs
    if dist.get_world_size() > 1:
        dist.all_reduce(whole)
    return list(whole.cpu().split(lengths))


class Reference:
    """The frozen model that KL is measured against, sharded like the actor, on the CPU between uses when asked for."""

    def __init__(self, cfg: RefConfig, actor_cfg: ActorConfig, accelerator, num_tokens: int, temperature: float):
        self.cfg = actor_cfg
        self.device = accelerator.device
        dtype = getattr(torch, actor_cfg.dtype)
        model = load_model(cfg.path or actor_cfg.path, dtype, num_tokens, temperature)
        speed_up(model, actor_cfg, self.device)
        model.eval().requires_grad_(False)
        self.model = prepare_frozen(accelerator, model, actor_cfg, cfg.param_offload)

    def score(self, trajectories: list[Trajectory]) -> list[torch.Tensor]:
        """Log-probs [L] of every trajectory. A collective."""
        return score(self.model, trajectories, self.cfg, self.device)


@dataclass
class Update:
    """One optimizer step of a training step."""

    mini_batch: list[Trajectory]
    plan: Plan  # how the ranks shared it
    sums: dict[str, list] = field(default_factory=dict)  # {metric: [sum, count]} of this rank
    computed: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)  # its log-probs, when they are kept
    grad_norm: float = math.nan  # over all ranks, before clipping


class Actor:
    """The policy: float32 master weights and AdamW, sharded over the ranks."""

    def __init__(self, cfg: ActorConfig, accelerator, num_tokens: int, temperature: float):
        self.cfg = cfg
        self.accelerator = accelerator
        self.device = accelerator.device
        model = load_model(cfg.path, torch.float32, num_tokens, temperature)
        speed_up(model, cfg, self.device)
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
        self.version = 0  # training steps done
        self.moments: Any = None
        if cfg.optimizer_offload:
            from fast.offload import Moments

            self.moments = Moments(self.optimizer, self.device)
        self.recorder: Any = None  # look.replay.Recorder, when log.replay_steps or log.record_skipped ask for it
        self.start_step()

    def score(self, trajectories: list[Trajectory]) -> list[torch.Tensor]:
        """Log-probs [L] of every trajectory under the current weights. A collective."""
        return score(self.model, trajectories, self.cfg, self.device)

    def update(
        self, trajectories: list[Trajectory], loss_cfg: LossConfig, step: int, total_steps: int, seed: int
    ) -> dict[str, float]:
        """ppo_epochs passes over the step's mini-batches, one optimizer step each; then one learning-rate step.
        Trajectories that come without old_logprobs, for a single update, leave with those that it computed. An update
        whose gradient is not finite changes nothing and ends the step. Returns metrics. A collective."""
        if self.recorder:
            self.recorder.before_update(self, step)
        if self.moments:
            self.moments.load()
        lr = self.cfg.lr * lr_factor(step, total_steps, self.cfg)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.start_step()
        computes_old = trajectories[0].old_logprobs is None
        for mini_batch in self.mini_batches(trajectories, f"{seed}/{step}"):
            assert not (computes_old and self.updates), "a second update needs old_logprobs from before the first"
            update = self.backward(mini_batch, loss_cfg, keep_logprobs=computes_old)
            update.grad_norm = self.optimizer_step()
            self.updates.append(update)
            if not math.isfinite(update.grad_norm):
                break  # the rest of the step is left out, so that the weights stay those that this mini-batch met
        if computes_old:
            self.fill_old_logprobs()
        self.version = step + 1
        if self.recorder:
            self.recorder.after_update(self, step)
        return self.metrics() | {"actor/lr": lr}

    def start_step(self) -> None:
        """Forget the last training step's updates."""
        self.updates: list[Update] = []
        # [L] by the key of a trajectory that this rank computed, of the first update that met it
        self.entropies: dict[str, torch.Tensor] = {}

    def backward(self, mini_batch: list[Trajectory], loss_cfg: LossConfig, keep_logprobs: bool = False) -> Update:
        """The gradient of a mini-batch's loss, into the parameters. A collective."""
        plan = plan_micro_batches(mini_batch, self.cfg, self.cfg.ppo_max_token_len_per_gpu)
        update = Update(mini_batch, plan)
        totals = count_totals(mini_batch)
        for indices, batch in self.micro_batches(update):
            logprobs, entropy = forward(self.model, batch)
            loss, metrics = policy_loss(batch, logprobs, entropy, loss_cfg, totals)
            self.accelerator.backward(loss * dist.get_world_size())  # FSDP averages gradients over the ranks
            add_sums(update.sums, metrics)
            if keep_logprobs:
                update.computed.append((indices, logprobs.detach()))
            of_rows = entropy.detach().split([len(mini_batch[i].tokens) for i in indices or [0]])
            for i, values in zip(indices, of_rows):
                self.entropies.setdefault(mini_batch[i].key, values)
        return update

    def mini_batches(self, trajectories: list[Trajectory], seed: str) -> Iterator[list[Trajectory]]:
        """Trajectories of ppo_mini_batch_size prompts at a time, ppo_epochs times."""
        groups = group_by_prompt(trajectories)
        size = self.cfg.ppo_mini_batch_size
        for epoch in range(self.cfg.ppo_epochs):
            if self.cfg.shuffle:
                groups = random.Random(f"{seed}/{epoch}").sample(groups, len(groups))
            for start in range(0, len(groups), size):
                yield [t for group in groups[start : start + size] for t in group]

    def micro_batches(self, update: Update) -> Iterator[tuple[list[int], Batch]]:
        """This rank's part of a mini-batch, as (indices, packed batch). A rank with nothing left runs a forward that
        adds 0, since FSDP needs every rank."""
        own = update.plan[dist.get_rank()]
        for number, indices in enumerate(own):
            self.sync_gradients(is_last=number == len(own) - 1)
            batch = collate_for([update.mini_batch[i] for i in indices or [0]], self.cfg, self.device)
            if not indices:
                batch.loss_mask = torch.zeros_like(batch.loss_mask)
            yield indices, batch

    def sync_gradients(self, is_last: bool) -> None:
        """What FSDP does after the next backward. With one shard there is nothing to gather or scatter: the weights
        stay cast between micro-batches, unless that is too much memory, and gradients add up; the last micro-batch
        ends both. Copies of the weights (HSDP) add up their gradients once, at the last."""
        if self.num_shards == 1:
            self.model.set_reshard_after_backward(is_last or reshards(self.cfg, self.num_shards))
            self.model.set_requires_gradient_sync(is_last)
        self.model.set_requires_all_reduce(is_last)

    def gradient(self) -> tuple[list[torch.Tensor], float]:
        """This rank's shards of the gradient, and the whole one's norm. A collective."""
        grads = [p.grad.to_local() for p in self.model.parameters() if p.grad is not None]
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        return grads, float((square / self.num_copies).sqrt())  # every copy has added its own

    def optimizer_step(self) -> float:
        """Clip, step, and clear the gradients; one that is not finite changes nothing. Its norm over all ranks."""
        grads, norm = self.gradient()
        if math.isfinite(norm):
            torch._foreach_mul_(grads, min(1.0, self.cfg.grad_clip / (norm + 1e-6)))
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def fill_old_logprobs(self) -> None:
        """Give the trajectories of a single update the log-probs that it computed before it stepped. A collective."""
        [update] = self.updates
        lengths = [len(t.tokens) for t in update.mini_batch]
        logprobs = share_logprobs(update.computed, lengths, self.device)
        for trajectory, own in zip(update.mini_batch, logprobs):
            trajectory.old_logprobs = own

    def metrics(self) -> dict[str, float]:
        """Of the step's updates: means over their tokens, and of the gradients' norms. A collective."""
        sums: dict[str, list] = {}
        for update in self.updates:
            add_sums(sums, update.sums)
        norms = [update.grad_norm for update in self.updates if math.isfinite(update.grad_norm)]
        return reduce_sums(sums) | {
            "actor/grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "actor/skipped_steps": len(self.updates) - len(norms),
            "actor/num_updates": len(self.updates),
            "perf/token_imbalance": token_imbalance([(update.mini_batch, update.plan) for update in self.updates]),
        }

    @torch.no_grad()
    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter as (Hugging Face name, whole tensor in dtype), one at a time. Tied weights come once. A
        collective, all ranks in the same order. Never a second copy of the model."""
        reshard(self.model)
        for name, parameter in self.model.named_parameters():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            if self.num_shards == 1:
                yield name, parameter.to_local().to(dtype)  # the shard is the whole
            else:
                yield name, parameter.to(dtype).full_tensor()  # cast before it is gathered: half the bytes


def add_sums(sums: dict[str, list], more: dict) -> None:
    """Add {metric: (sum, count)} to sums, in place."""
    for name, (total, count) in more.items():
        old_total, old_count = sums.get(name, (0.0, 0.0))
        sums[name] = [old_total + total, old_count + count]


def reduce_sums(sums: dict[str, list]) -> dict[str, float]:
    """Mean of each metric over all micro-batches of all ranks, from its sums and counts. A collective."""
    if not sums:
        return {}
    table = torch.stack([torch.stack(pair).double() for pair in sums.values()])  # [metrics, 2]
    if dist.get_world_size() > 1:
        dist.all_reduce(table)
    return {name: float(total / count) for name, (total, count) in zip(sums, table.tolist()) if count}
