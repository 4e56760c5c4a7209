"""One model over the ranks: accelerate's FSDP2, on GPUs (NCCL) and on the CPU (gloo), at any number of processes.

accelerate ignores its FSDP plugin where no launcher has set a rank, and on the CPU; here neither passes silently. No
other file imports accelerate. `cfg` is actor.ActorConfig everywhere.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from model import meta_model

COLLECTIVE_TIMEOUT = timedelta(hours=2)  # a rank that has sampled waits for the slowest: rollout.group_timeout_s
SMALL_MODEL = 10**9  # parameters


def make_accelerator(cfg) -> Any:
    """An Accelerator with FSDP2 active. ValueError when actor.fsdp_size does not divide the processes."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    if "RANK" not in os.environ:
        set_single_rank()
    world_size = int(os.environ["WORLD_SIZE"])
    shards = num_shards(cfg)
    on_cpu = not torch.cuda.is_available()
    if world_size % shards:
        raise ValueError(
            f"actor.fsdp_size={shards} does not divide the {world_size} processes into copies of the same size: "
            "choose a divisor, or -1 for one copy"
        )
    plugin = make_plugin(cfg, activation_checkpointing=cfg.enable_gradient_checkpointing)
    accelerator = Accelerator(
        cpu=on_cpu,
        fsdp_plugin=plugin,
        mixed_precision="bf16" if cfg.dtype == "bfloat16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
    )
    if on_cpu:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
        # Every AcceleratorState() copies PartialState again, so both have to say it.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    kind = accelerator.distributed_type
    assert kind == DistributedType.FSDP, f"FSDP is not active: accelerate says {kind}"
    if shards < world_size:
        set_mesh(accelerator, world_size // shards, shards)
    return accelerator


def set_single_rank() -> None:
    """What a launcher would have put into the environment, for one process on its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def set_mesh(accelerator, copies: int, shards: int) -> None:
    """HSDP: `copies` of the weights, each cut over `shards` ranks. accelerate's own way to a 2-D mesh refuses the CPU
    and copies of one shard. When it prepares a model it reads these."""
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh

    names = ("dp_replicate", "dp_shard_cp")
    state = accelerator.state
    state.parallelism_config = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards)
    state.device_mesh = init_device_mesh(accelerator.device.type, (copies, shards), mesh_dim_names=names)


def make_plugin(cfg, **kwargs) -> Any:
    """accelerate's FSDP2 plugin: a group a layer, or one for the whole model; computes in cfg.dtype, adds float32."""
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    whole = one_group(cfg, int(os.environ["WORLD_SIZE"]), lambda: count_parameters(cfg.path))
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="no_wrap" if whole else "transformer_based_wrap",
        reshard_after_forward=reshards(cfg, num_shards(cfg)),
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=getattr(torch, cfg.dtype), reduce_dtype=torch.float32),
        cpu_ram_efficient_loading=False,
        **kwargs,
    )


def prepare_frozen(accelerator, model, cfg, param_offload: bool) -> torch.nn.Module:
    """Shard a model that is never trained, like the actor, its weights on the CPU between uses when asked for."""
    from accelerate.utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy

    offload = CPUOffloadPolicy(pin_memory=accelerator.device.type == "cuda") if param_offload else None
    # The accelerator's state holds one plugin, and preparing a model changes it: lend it one of this model's own.
    state = accelerator.state
    actors = state.fsdp_plugin
    state.fsdp_plugin = make_plugin(cfg, cpu_offload=offload)
    try:
        return fsdp2_prepare_model(accelerator, model)
    finally:
        state.fsdp_plugin = actors


def num_shards(cfg) -> int:
    """Into how many parts one copy of the weights is cut."""
    return int(os.environ["WORLD_SIZE"]) if cfg.fsdp_size == -1 else cfg.fsdp_size


def reshards(cfg, shards: int) -> bool:
    """Whether a layer's gathered weights are freed after its forward. With one shard it would only cast them again."""
    return shards > 1 if cfg.reshard_after_forward is None else cfg.reshard_after_forward


def one_group(cfg, world_size: int, count) -> bool:
    """Whether FSDP takes the model as one group instead of layer by layer. On one GPU nothing is gathered, and a small
    model waits for the hooks of its layers. (accelerate checkpoints what it wraps, so not with gradient
    checkpointing.) count() -> parameters; asked last, since it may take a second."""
    alone = world_size == 1 and not reshards(cfg, 1) and not cfg.enable_gradient_checkpointing
    return alone and count() < SMALL_MODEL


def count_parameters(path: str) -> int:
    """Of a model that is not loaded; tied ones once."""
    from transformers import AutoConfig

    return sum(p.numel() for p in meta_model(AutoConfig.from_pretrained(path)).parameters())


def reshard(model) -> None:
    """Free gathered weights. A no-grad forward leaves the last FSDP group gathered, and an optimizer step after it
    would not reach the next forward or sync."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
