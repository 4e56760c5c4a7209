"""What would make a run fit that needs more GPU memory than there is: `advice(now, free)`, of a memory.Estimate.

Every piece of advice has been tried in the arithmetic: it is given only if all phases fit with it. What it says ends
the error of memory.check_memory. `cfg` is config.Config everywhere.
"""

import functools
import math
from dataclasses import replace
from typing import Any

KNOBS = {  # part: the knob that it grows with
    "activations": "actor.ppo_max_token_len_per_gpu",
    "layer at work": "actor.ppo_max_token_len_per_gpu",
    "fp32 weights": "actor.fsdp_size",
    "Adam moments": "actor.fsdp_size",
    "gradients": "actor.fsdp_size",
    "gathered weights": "actor.reshard_after_forward",
    "reference": "ref.param_offload",
    "vLLM awake": "rollout.gpu_memory_utilization",
}
SWITCHES = {  # knob: the value that needs less memory
    "actor.enable_gradient_checkpointing": True,
    "actor.reshard_after_forward": True,
    "ref.param_offload": True,
    "rollout.free_cache_engine": True,
    "actor.optimizer_offload": True,
    "actor.fsdp_size": -1,
}
NUMBERS = {  # knob: the step by which it is lowered
    "actor.ppo_max_token_len_per_gpu": 256,
    "actor.log_prob_max_token_len_per_gpu": 256,
    "actor.ppo_micro_batch_size_per_gpu": 1,
    "rollout.gpu_memory_utilization": 0.01,
    "rollout.kv_cache_memory_bytes": 2**28,
}


def advice(now, free: float) -> str:
    """Each change that is enough alone; when none is, all switches that help together, and a number lowered."""
    switches = {name: value for name, value in SWITCHES.items() if helps(now, change(now.cfg, name, value), free)}
    alone = [told(name) for name, value in switches.items() if now.of(change(now.cfg, name, value)).fits(free)]
    alone += lowered(now, now.cfg, free)
    alone += more_gpus(now, free)
    if alone:
        return ", or ".join(alone)
    cfg = now.cfg
    for name, value in switches.items():
        cfg = change(cfg, name, value)
    together = " and ".join(told(name) for name in switches)
    if now.of(cfg).fits(free):
        return together
    rest = lowered(now, cfg, free)
    if together and rest:
        return f"{together}, and {', or '.join(rest)}"
    return "no knob alone is enough: use larger GPUs or a smaller model"


def helps(now, cfg, free: float) -> bool:
    """Whether a phase that does not fit needs less under another configuration."""
    before, after = now.phases(), now.of(cfg).phases()
    needs = {phase: sum(parts.values()) for phase, parts in before.items()}
    return any(need > free and sum(after[phase].values()) < need for phase, need in needs.items())


def told(name: str) -> str:
    """A switch as an advice."""
    return f"turn on {name}" if SWITCHES[name] is True else f"set {name}={SWITCHES[name]}"


def lowered(now, cfg, free: float) -> list[str]:
    """Of each number of cfg the largest smaller value at which everything fits, where there is one."""
    found = []
    for name, step in NUMBERS.items():
        most = math.ceil((value_of(cfg, name) or 0) / step) - 1
        for steps in range(most, 0, -1):
            value = round(steps * step, 2)
            if now.of(change(cfg, name, value)).fits(free):
                found.append(f"lower {name} to {value}")
                break
    return found


def more_gpus(now, free: float) -> list[str]:
    """Two, four or eight times the GPUs, if that is enough with the weights cut over all."""
    cfg = change(now.cfg, "actor.fsdp_size", -1)
    sharing = "" if now.cfg.actor.fsdp_size == -1 else " with actor.fsdp_size=-1"
    for times in (1, 2, 4, 8):
        gpus = now.world_size * times
        if gpus <= cfg.data.train_batch_size and now.of(cfg, gpus).fits(free):
            return [f"use {gpus} GPUs (--num_processes {gpus}){sharing}"] if times > 1 else []
    return []


def knob_of(cfg, part: str, phase: str) -> str:
    """` (KNOB=value)`, of the knob that a part grows with; empty when there is none."""
    name = KNOBS.get(part)
    if name is None:
        return ""
    if name == "actor.ppo_max_token_len_per_gpu":
        if not cfg.actor.use_dynamic_bsz:
            name = "actor.ppo_micro_batch_size_per_gpu"
        elif phase != "update_actor" and cfg.actor.log_prob_max_token_len_per_gpu:
            name = "actor.log_prob_max_token_len_per_gpu"
    elif part == "vLLM awake" and cfg.rollout.kv_cache_memory_bytes is not None:
        name = "rollout.kv_cache_memory_bytes"
    return f" ({name}={value_of(cfg, name)})"


def value_of(cfg, name: str) -> Any:
    """The value of `group.knob`."""
    return functools.reduce(getattr, name.split("."), cfg)


def change(cfg, name: str, value) -> Any:
    """The configuration with another value of `group.knob`."""
    group, knob = name.split(".")
    return replace(cfg, **{group: replace(getattr(cfg, group), **{knob: value})})
