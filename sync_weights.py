"""The actor's weights into vLLM, and the proof that they arrived.

Order: asleep -> wake(weights) -> every tensor -> post-load processing -> reset the prefix cache -> wake(KV cache).
Proof, at every sync: every parameter of vLLM was written, none twice, and the bits that vLLM holds add up to the bits
that were sent. At the first sync and every `sync.verify_every` steps vLLM also samples fixed prompts, and the actor
scores what it sampled.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist

from actor import Actor
from batch import Task, Trajectory, gather
from engine import Engine
from host.lookup import check_bounds
from policy import Policy

SUMMED_AT_ONCE = 2**23  # elements that are added up, or copied, in one call: torch makes them int64 to add them up
INTEGERS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element
Weights = Iterator[tuple[str, torch.Tensor]]  # (Hugging Face name, tensor)
Item = TypeVar("Item")


@dataclass(frozen=True)
class SyncConfig:
    may_change: ClassVar[bool] = True  # all of it, when a run is resumed

    verify_every: int = 10
    """Steps between probes that vLLM and the actor must agree on; 0 probes only at the start. Bits are compared at
    every sync."""
    probe_prompts: int = 8
    """Prompts of the probe: the first of the data."""
    probe_tokens: int = 32
    """Tokens that the probe samples for each, at most."""
    max_logprob_diff: float | None = None
    """Largest |vLLM - actor| of a probe's token, in nats; when not given 1.0 in bfloat16, 1e-3 in float32, and 0.05 in
    float32 on a GPU, where vLLM's kernels round to TF32."""
    mean_logprob_diff: float | None = None
    """Largest mean of it; a tenth of the largest when not given."""
    replay_copies: bool = True
    """From the second sync on, write vLLM's weights by the copies that its own loader made at the first: a few calls,
    instead of Python for every tensor (fast/copies.py)."""

    def __post_init__(self):
        check_bounds(
            "sync",
            self,
            verify_every="[0, inf)",
            probe_prompts="[1, inf)",
            probe_tokens="[1, inf)",
            max_logprob_diff="(0, inf]",
            mean_logprob_diff="(0, inf]",
        )


class SyncError(RuntimeError):
    """vLLM does not hold the actor's weights, or computes something else with them."""


def sync_weights(actor: Actor, engine: Engine, cfg: SyncConfig, probe: list[Task]) -> dict[str, float]:
    """Wake vLLM with the actor's current weights, ready to generate; when a probe is due, compare the two on its
    tasks. SyncError when vLLM can't be proven to hold the actor's weights. Returns metrics. A collective."""
    if actor.moments:
        actor.moments.offload()  # vLLM gets their memory
    due = probe_is_due(actor, engine, cfg)
    engine.wake_weights()
    ledger = Ledger()
    loaded = engine.load_weights(ledger.record(actor.weights(engine.dtype)))
    check_coverage(engine, loaded, ledger, actor)
    engine.wake_cache(actor.version)
    return check_probe(actor, engine, cfg, probe[: cfg.probe_prompts]) if due and probe else {}


def probe_is_due(actor: Actor, engine: Engine, cfg: SyncConfig) -> bool:
    """At the first sync of an engine, and every verify_every steps."""
    is_first = engine.weight_version is None
    return is_first or (cfg.verify_every > 0 and actor.version % cfg.verify_every == 0)


# The bits: what was sent, and what vLLM holds


class Ledger:
    """What a stream of weights contained: names, in order, and the sum of all their bits."""

    def __init__(self):
        self.names: list[str] = []
        self.bits: torch.Tensor | int = 0  # a tensor once it adds up, so that nobody waits for the device

    def record(self, weights: Weights) -> Weights:
        """Pass a stream on, and note what was in it."""
        for batch in batches(weights, lambda weight: weight[1].numel()):
            self.names.extend(name for name, _ in batch)
            self.bits = self.bits + bit_sum(*(tensor for _, tensor in batch))  # before anyone else has the tensors
            while batch:
                yield batch.pop(0)  # without keeping it, so that it can be freed


def batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Lists of neighbours, each full with the item that brings it to SUMMED_AT_ONCE elements. For a small tensor a
    call takes the host longer than the device. No item is kept once its list was handed out."""
    held: list[Item] = []
    total = 0
    for item in items:
        held.append(item)
        total += size(item)
        del item
        if total >= SUMMED_AT_ONCE:
            yield held
            held = []
            total = 0
    if held:
        yield held


def bit_sum(*tensors: torch.Tensor) -> torch.Tensor:
    """The tensors' elements, read as integers, added up: one int64. Fusing and splitting tensors, as vLLM does, leaves
    the sum as it is."""
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        integers = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
        # A small model has hundreds of small tensors: no call of torch for what is there already.
        parts.extend(integers.split(SUMMED_AT_ONCE) if integers.numel() > SUMMED_AT_ONCE else [integers])
    sums = []
    for batch in batches(parts, torch.Tensor.numel):
        together = batch[0] if len(batch) == 1 else torch.cat(batch)
        sums.append(together.sum(dtype=torch.int64))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def check_coverage(engine: Engine, loaded: set[str], ledger: Ledger, actor: Actor) -> None:
    """SyncError unless every parameter of vLLM was written, none twice, and all bits are there. A parameter that has
    two names (tied weights) counts once. A collective."""
    twice = sorted(name for name, times in Counter(ledger.names).items() if times > 1)
    if twice:
        raise SyncError(f"sent twice to vLLM: {', '.join(twice)}")
    parameters = dict(engine.model.named_parameters())  # without the second name of a tied one
    missing = sorted(parameters.keys() - loaded)
    if missing:
        raise SyncError(
            f"{len(missing)} of vLLM's {len(parameters)} parameters were not written: {', '.join(missing[:8])}"
        )
    differs = (held_bits(engine, parameters) != ledger.bits).int()
    if dist.get_world_size() > 1:  # naming the tensors is a collective: all ranks do it, or none
        dist.all_reduce(differs)
    if differs:
        raise SyncError(
            "vLLM holds other bits than the actor sent: a tensor was cut, changed or left from before. "
            + differing_tensors(actor, engine)
        )


def held_bits(engine: Engine, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of all bits that this engine holds, over its ranks; a parameter whole on each rank counts once."""
    if engine.ranks.world_size == 1:
        return bit_sum(*parameters.values())
    own = torch.stack([bit_sum(p) for p in parameters.values()])  # [parameters]
    gathered = [torch.empty_like(own) for _ in range(engine.ranks.world_size)]
    dist.all_gather(gathered, own, group=engine.ranks.device_group)
    shards = torch.stack(gathered)  # [ranks, parameters]
    whole = (shards == shards[0]).all(0)
    return torch.where(whole, shards[0], shards.sum(0)).sum()


def differing_tensors(actor: Actor, engine: Engine) -> str:
    """For the error message: which of the actor's tensors vLLM does not hold. A collective. Loads them once more, one
    at a time: those that change what vLLM holds were not in it."""
    parameters = dict(engine.model.named_parameters())
    differing = []
    for name, tensor in actor.weights(engine.dtype):
        before = {n: p.detach().clone() for n, p in parameters.items() if shares_layer(n, name)}
        for n in engine.model.load_weights([(name, tensor)]):
            if n in before and not torch.equal(before[n], parameters[n]):
                gap = float((before[n].float() - parameters[n].detach().float()).abs().max())
                differing.append(f"{name} (by up to {gap:.3g})")
    if not differing:
        return (
            "Every tensor in vLLM equals the actor's, so the two compute differently: look at the model's "
            "configuration, temperature and attention."
        )
    return f"In vLLM {len(differing)} of the actor's tensors were different: {', '.join(differing[:5])}"


def shares_layer(ours: str, theirs: str) -> bool:
    """Whether a vLLM parameter may hold a Hugging Face tensor: the same path up to the module, which may be fused."""
    return ours.rsplit(".", 2)[0] == theirs.rsplit(".", 2)[0]


# The probe: what vLLM computes with them


def check_probe(actor: Actor, engine: Engine, cfg: SyncConfig, tasks: list[Task]) -> dict[str, float]:
    """vLLM samples fixed prompts, the actor scores the same tokens: metrics of how far apart their log-probs are.
    SyncError, when that is too far, names the worst token and the tensors that differ. A collective."""
    trajectories = gather(engine.drive([probe_session(engine, cfg, task, seed) for seed, task in enumerate(tasks)]))
    total = 0.0
    count = 0
    worst = -1.0
    where = ""
    for i, (t, logprobs) in enumerate(zip(trajectories, actor.score(trajectories))):
        gaps = (logprobs - torch.tensor(t.rollout_logprobs)).abs()[t.prompt_length :]  # [response]
        gaps = gaps.nan_to_num(nan=math.inf)
        total += float(gaps.sum())
        count += len(gaps)
        if float(gaps.max()) > worst:
            worst = float(gaps.max())
            position = t.prompt_length + int(gaps.argmax())
            where = (
                f"token {t.tokens[position]}, position {position} of probe {i}: "
                f"vLLM {t.rollout_logprobs[position]:.4f}, actor {float(logprobs[position]):.4f}"
            )
    mean = total / count
    max_allowed, mean_allowed = tolerances(cfg, engine.dtype, actor.device.type)
    if worst > max_allowed or mean > mean_allowed:
        raise SyncError(
            f"vLLM and the actor disagree on the probe: mean {mean:.4g} (allowed {mean_allowed}), "
            f"worst {worst:.4g} (allowed {max_allowed}) at {where}. {differing_tensors(actor, engine)}"
        )
    return {"sync/probe_diff_max": worst, "sync/probe_diff_mean": mean}


def tolerances(cfg: SyncConfig, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Largest, and largest mean, |vLLM - actor| that passes. On one H200 in float32 0.006 and 0.0005 were seen, in
    bfloat16 0.02 and 0.006; stale weights differ by nats."""
    if dtype != torch.float32:
        most = 1.0
    elif device == "cpu":
        most = 1e-3
    else:
        most = 0.05
    return cfg.max_logprob_diff or most, cfg.mean_logprob_diff or most / 10


async def probe_session(engine: Engine, cfg: SyncConfig, task: Task, seed: int) -> Trajectory:
    """A short sampled continuation of a prompt, by this rank's engine: decoded as in rollouts, at their temperature."""
    sampling = replace(engine.cfg.rollout, top_p=1.0, top_k=0)
    max_tokens = min(cfg.probe_tokens, engine.cfg.data.max_response_length)
    trajectory = Trajectory(task)
    trajectory.observe(Policy(engine, task, sampling, seed).encode(task.messages))
    reply = await engine.generate(trajectory.tokens, sampling, max_tokens, seed)
    trajectory.act(reply.tokens, reply.logprobs)
    return trajectory
