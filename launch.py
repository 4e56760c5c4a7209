"""A rank as a process: how it becomes one, joins the others under FSDP2, what it does on SIGTERM, and how a failure of one ends all.

train.py needs `run(main)`, `make_accelerator(cfg.actor)`, and `told_to_stop(device)`, which says whether any rank was asked to end.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from host.console import printable

PR_SET_PDEATHSIG = 1
COLLECTIVE_TIMEOUT = timedelta(
    hours=2
)  # a rank that has sampled waits for the slowest, whose sessions may take rollout.group_timeout_s
SMALL_MODEL = 10**9  # parameters
sigterm = threading.Event()


def run(main) -> None:
    """Run `main`; on failure one line for the user's mistake, a traceback for anything else, and out at once, so that no rank waits for this one."""
    end_with_launcher()
    try:
        relaunch_ranks()
        watch_for_sigterm()
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    except SystemExit:  # tyro's, of --help and of a flag that is wrong
        raise
    except BaseException as error:
        here, where = Path(__file__).parent, Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        users = (
            isinstance(error, (ValueError, FileNotFoundError)) and where.parent == here
        )  # raised by Lockstep's own code
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            time.sleep(1.0)  # was it the end of another rank that this one noticed? Then its error is the one to read
            if sibling_ended():
                os._exit(1)
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            try:
                raise RuntimeError(printable(traceback.format_exc())) from None
            except RuntimeError as shown:
                get_error_handler().record_exception(shown)  # torchrun shows it once more, last
        print(printable(f"error: {error}" if users else traceback.format_exc()), file=sys.stderr, flush=True)
        os._exit(2 if users else 1)
    sys.stdout.flush()
    os._exit(0)  # a thread that an agent left behind would hold the process, and the GPU


def end_with_launcher() -> None:
    """Under accelerate or torchrun, get SIGTERM when the launcher dies: accelerate's own does not pass one on."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def relaunch_ranks() -> None:
    """On a machine without GPUs `accelerate launch --num_processes N` starts one process, silently. Become N of them.

    It leaves MASTER_ADDR but no rank in the environment; how many were asked for stands only in its command line.
    """
    if torch.cuda.is_available() or "LOCAL_RANK" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    import psutil

    words = psutil.Process(os.getppid()).cmdline()
    asked = [
        (word + "=" + after).split("=")[1]
        for word, after in zip(words, [*words[1:], ""])
        if word.split("=")[0] == "--num_processes"
    ]
    if not asked:
        raise ValueError(
            "accelerate starts one process on a machine without GPUs, whatever its configuration says: put --num_processes N on its command line"
        )
    os.execv(
        sys.executable,
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={asked[0]}", *sys.argv],
    )


def watch_for_sigterm() -> None:
    """SIGTERM (a pre-empted node) lets the step end; a second one, or one because another rank ended, ends this process at once.

    A thread decides, since the main one may be inside a collective that never returns.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer)  # every signal's number is written here, whatever the main thread is doing

    def watch():
        while (number := os.read(reader, 1)[0]) != signal.SIGTERM or not sigterm.is_set():
            if number == signal.SIGTERM:
                if sibling_ended():
                    break
                sigterm.set()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def sibling_ended() -> bool:
    """Whether one of torchrun's ranks on this host is gone."""
    import psutil

    alive = [p for p in psutil.Process(os.getppid()).children() if p.status() != psutil.STATUS_ZOMBIE]
    return len(alive) < int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def told_to_stop(device) -> bool:
    """Whether any rank got SIGTERM. A collective."""
    told = torch.tensor(float(sigterm.is_set()), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def make_accelerator(cfg):
    """An Accelerator with FSDP2 active, at any number of processes, on GPUs (NCCL) and on the CPU (gloo).

    accelerate ignores the FSDP plugin when no launcher set a rank, and on the CPU. Here neither passes silently.
    """
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs
    from torch.distributed.device_mesh import init_device_mesh

    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ.update(
                RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1])
            )
    world_size, shards, cpu = int(os.environ["WORLD_SIZE"]), num_shards(cfg), not torch.cuda.is_available()
    if world_size % shards:
        raise ValueError(
            f"actor.fsdp_size={shards} does not divide the {world_size} processes into copies of the same size: choose a divisor, or -1 for one copy"
        )
    plugin = make_plugin(cfg, activation_checkpointing=cfg.enable_gradient_checkpointing)
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
        cpu=cpu,
        fsdp_plugin=plugin,
        mixed_precision="bf16" if cfg.dtype == "bfloat16" else "no",
    )
    if cpu:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
        # Every AcceleratorState() copies PartialState again, so both have to say it.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    assert accelerator.distributed_type == DistributedType.FSDP, (
        f"FSDP is not active: accelerate says {accelerator.distributed_type}"
    )
    if shards < world_size:
        # accelerate's own way to a 2-D mesh refuses the CPU and copies of one shard. It reads these two when it prepares a model.
        copies = world_size // shards
        accelerator.state.parallelism_config = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards)
        accelerator.state.device_mesh = init_device_mesh(
            accelerator.device.type, (copies, shards), mesh_dim_names=("dp_replicate", "dp_shard_cp")
        )
    return accelerator


def num_shards(cfg) -> int:
    """Into how many parts one copy of the weights is cut."""
    return int(os.environ["WORLD_SIZE"]) if cfg.fsdp_size == -1 else cfg.fsdp_size


def reshards(cfg, shards: int) -> bool:
    """Whether a layer's weights are freed after its forward. With one shard that only casts them again."""
    return shards > 1 if cfg.reshard_after_forward is None else cfg.reshard_after_forward


def one_group(cfg, world_size: int, count_parameters) -> bool:
    """Whether FSDP takes a model as one group, not layer by layer: on one GPU nothing is gathered, and a small model waits for the hooks of its layers.
    (accelerate checkpoints what it wraps.) count_parameters() is asked last, since it may take a second."""
    return (
        world_size == 1
        and not reshards(cfg, 1)
        and not cfg.enable_gradient_checkpointing
        and count_parameters() < SMALL_MODEL
    )


def count_parameters(path: str) -> int:
    """Of a model that is not loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).parameters())


def make_plugin(cfg, **kwargs):
    """accelerate's FSDP2 plugin: one shard group a transformer layer, or one for all of it; compute in cfg.dtype, reduction in float32."""
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, cfg.dtype), reduce_dtype=torch.float32)
    kwargs |= {"reshard_after_forward": reshards(cfg, num_shards(cfg)), "mixed_precision_policy": policy}
    wrap = (
        "no_wrap"
        if one_group(cfg, int(os.environ["WORLD_SIZE"]), lambda: count_parameters(cfg.path))
        else "transformer_based_wrap"
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=wrap, cpu_ram_efficient_loading=False, **kwargs
    )
