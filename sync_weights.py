"""The actor's weights into vLLM, and the proof that they arrived.

Order: asleep -> wake(weights) -> every tensor -> post-load processing -> reset the prefix cache -> wake(KV cache). Proof, at
every sync: every parameter of vLLM was written, none twice, and the bits that vLLM holds add up to the bits that were
sent. At the first sync and every `sync.verify_every` steps vLLM also samples fixed prompts and the actor scores what it sampled.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from batch import Task, Trajectory, gather
from policy import Policy

SUMMED_AT_ONCE = 2**23  # elements, or copied: torch makes them int64 to add them up


@dataclass(frozen=True)
class SyncConfig:
    verify_every: int = 10
    """Steps between probes that vLLM and the actor must agree on; 0 probes only at the start. Bits are compared at every sync."""
    probe_prompts: int = 8
    """Prompts of the probe: the first of the data."""
    probe_tokens: int = 32
    """Tokens that the probe samples for each, at most."""
    max_logprob_diff: float | None = None
    """Largest |vLLM - actor| of a probe's token, in nats; when not given 1.0 in bfloat16, 1e-3 in float32, and 0.05 in float32 on a GPU, where vLLM's kernels round to TF32."""
    mean_logprob_diff: float | None = None
    """Largest mean of it; a tenth of the largest when not given."""

    def __post_init__(self):
        if self.verify_every < 0 or self.probe_prompts < 1 or self.probe_tokens < 1:
            raise ValueError(
                f"sync.verify_every={self.verify_every} must not be negative, sync.probe_prompts={self.probe_prompts} and sync.probe_tokens={self.probe_tokens} at least 1"
            )
        for knob in ("max_logprob_diff", "mean_logprob_diff"):
            if getattr(self, knob) is not None and not getattr(self, knob) > 0:
                raise ValueError(f"sync.{knob}={getattr(self, knob)} must be above 0")


class SyncError(RuntimeError):
    """vLLM does not hold the actor's weights, or computes something else with them."""


def batches(items, size):
    """Lists of neighbours, each full with the item that brings it to SUMMED_AT_ONCE: of a small tensor a call takes the host longer than the device."""
    held, total = [], 0
    for item in items:
        held.append(item)
        total += size(item)
        del item
        if total >= SUMMED_AT_ONCE:
            yield held
            held, total = [], 0
    if held:
        yield held


def bit_sum(*tensors: torch.Tensor) -> torch.Tensor:
    """The tensors' elements, read as integers, added up. Fusing and splitting tensors, as vLLM does, leaves the sum as it is."""
    integers = {2: torch.int16, 4: torch.int32}
    flat = [t.detach().reshape(-1).view(integers[t.element_size()]) for t in tensors]
    parts = [part for t in flat for part in (t.split(SUMMED_AT_ONCE) if t.numel() > SUMMED_AT_ONCE else (t,))]
    sums = [
        (batch[0] if len(batch) == 1 else torch.cat(batch)).sum(dtype=torch.int64)
        for batch in batches(parts, torch.Tensor.numel)
    ]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


class Ledger:
    """What a stream of weights contained: names, in order, and the sum of all their bits."""

    def __init__(self):
        self.names: list[str] = []
        self.bits = 0  # a tensor while it adds up, so that the device is not waited for

    def record(self, weights):
        for batch in batches(weights, lambda weight: weight[1].numel()):
            self.names += [name for name, _ in batch]
            self.bits = self.bits + bit_sum(*(tensor for _, tensor in batch))  # before anyone else has it
            while batch:
                yield batch.pop(0)  # and is not kept


def sync_weights(actor, engine, cfg: SyncConfig, probe: list[Task]) -> dict[str, float]:
    """Wake vLLM with the actor's current weights, ready to generate, and compare the two on the prompts of `probe`, if any.

    SyncError when vLLM can't be proven to hold the actor's weights. Returns metrics. A collective.
    """
    engine.wake_weights()
    ledger = Ledger()
    loaded = engine.load_weights(ledger.record(actor.weights(engine.dtype)))
    check_coverage(engine, loaded, ledger, actor)
    engine.wake_cache(actor.version)
    return check_probe(actor, engine, cfg, probe[: cfg.probe_prompts]) if probe else {}


def check_coverage(engine, loaded: set[str], ledger: Ledger, actor) -> None:
    """Every parameter of vLLM written, none twice, all bits there. A parameter that two names share counts once (tied weights)."""
    twice = sorted(name for name, times in Counter(ledger.names).items() if times > 1)
    if twice:
        raise SyncError(f"sent twice to vLLM: {', '.join(twice)}")
    parameters = dict(engine.model.named_parameters())  # without the second name of a tied one
    missing = sorted(parameters.keys() - loaded)
    if missing:
        raise SyncError(
            f"{len(missing)} of vLLM's {len(parameters)} parameters were not written: {', '.join(missing[:8])}"
        )
    differs = held_bits(engine, parameters) != ledger.bits
    if dist.get_world_size() > 1:  # what follows is a collective: all ranks or none
        dist.all_reduce(differs := differs.int())
    if differs:
        raise SyncError(
            f"vLLM holds other bits than the actor sent: a tensor was cut, changed or left from before. {differing_tensors(actor, engine)}"
        )


def held_bits(engine, parameters: dict) -> torch.Tensor:
    """The sum of all bits that this engine holds, over its ranks. Of a parameter that each of them holds whole, one counts."""
    if engine.ranks.world_size == 1:
        return bit_sum(*parameters.values())
    own = torch.stack([bit_sum(p) for p in parameters.values()])
    shards = [torch.empty_like(own) for _ in range(engine.ranks.world_size)]
    dist.all_gather(shards, own, group=engine.ranks.device_group)
    shards = torch.stack(shards)  # [ranks, parameters]
    whole = (shards == shards[0]).all(0)
    return torch.where(whole, shards[0], shards.sum(0)).sum()


def check_probe(actor, engine, cfg: SyncConfig, tasks: list[Task]) -> dict[str, float]:
    """vLLM samples fixed prompts, the actor scores the same tokens; SyncError names the worst token and the tensors that differ."""
    trajectories = gather(engine.drive([probe_session(engine, cfg, task, seed) for seed, task in enumerate(tasks)]))
    actor_logprobs = actor.score(trajectories)
    worst, total, count = (-1.0, None), 0.0, 0
    for i, (t, logprobs) in enumerate(zip(trajectories, actor_logprobs)):
        gaps = (logprobs - torch.tensor(t.rollout_logprobs)).abs()[t.prompt_length :]  # [response]
        gaps = gaps.nan_to_num(nan=float("inf"))
        total, count = total + float(gaps.sum()), count + len(gaps)
        if float(gaps.max()) > worst[0]:
            position = t.prompt_length + int(gaps.argmax())
            worst = (
                float(gaps.max()),
                (i, position, t.tokens[position], t.rollout_logprobs[position], float(logprobs[position])),
            )
    max_allowed, mean_allowed = tolerances(cfg, engine.dtype, actor.device.type)
    if worst[0] > max_allowed or total / count > mean_allowed:
        sequence, position, token, rollout, own = worst[1]
        raise SyncError(
            f"vLLM and the actor disagree on the probe: mean {total / count:.4g} (allowed {mean_allowed}), worst {worst[0]:.4g} (allowed {max_allowed}) "
            f"at token {token}, position {position} of probe {sequence}: vLLM {rollout:.4f}, actor {own:.4f}. {differing_tensors(actor, engine)}"
        )
    return {"sync/probe_diff_max": worst[0], "sync/probe_diff_mean": total / count}


def tolerances(cfg: SyncConfig, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Largest and largest mean |vLLM - actor| that is let pass. On one H200 in float32 0.006 and 0.0005 were seen, in bfloat16 0.02 and 0.006; stale weights differ by nats."""
    most = 1.0 if dtype != torch.float32 else 1e-3 if device == "cpu" else 0.05
    return cfg.max_logprob_diff or most, cfg.mean_logprob_diff or most / 10


async def probe_session(engine, cfg: SyncConfig, task: Task, seed: int) -> Trajectory:
    """A short sampled continuation of a prompt, by this rank's engine: the decoding that rollouts do, at their temperature."""
    sampling = replace(engine.cfg.rollout, top_p=1.0, top_k=0)
    trajectory = Trajectory(task)
    trajectory.observe(Policy(engine, task, sampling, seed).encode(task.messages))
    reply = await engine.generate(
        trajectory.tokens, sampling, min(cfg.probe_tokens, engine.cfg.data.max_response_length), seed
    )
    trajectory.act(reply.tokens, reply.logprobs)
    return trajectory


def differing_tensors(actor, engine) -> str:
    """Load the actor's tensors once more, one at a time: those that change vLLM's copy were not in it. For the error message."""
    parameters = dict(engine.model.named_parameters())
    differing = []
    for name, tensor in actor.weights(engine.dtype):
        before = {n: p.detach().clone() for n, p in parameters.items() if shares_layer(n, name)}
        for n in engine.model.load_weights([(name, tensor)]):
            if n in before and not torch.equal(before[n], parameters[n]):
                gap = float((before[n].float() - parameters[n].detach().float()).abs().max())
                differing.append(f"{name} (by up to {gap:.3g})")
    if not differing:
        return "Every tensor in vLLM equals the actor's, so the two compute differently: look at the model's configuration, temperature and attention."
    return f"In vLLM {len(differing)} of the actor's tensors were different: {', '.join(differing[:5])}"


def shares_layer(ours: str, theirs: str) -> bool:
    """Whether a vLLM parameter may hold this Hugging Face tensor: the same path up to the module that vLLM may have fused."""
    return ours.rsplit(".", 2)[0] == theirs.rsplit(".", 2)[0]
