"""Save and resume a run, and keep its best checkpoint. `python checkpoint.py export RUN OUT` makes a Hugging Face folder of one (export.py).

A checkpoint is written to a temporary folder, its manifest last, renamed, and named by `latest`: a kill at any moment, or a full
disk, leaves the last complete one usable, and one that is not complete is never loaded. Its weights and optimizer are torch's
distributed format, which any number of ranks reads, and which can run code when it is read: resume only what you trust.
"""

import argparse
import fnmatch
import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from batch import gather
from host.disk import damage, name_again, newest, say, write_durably, write_manifest

ATTEMPTS, BACKOFF_S = 3, 2.0
HARMLESS = (  # knobs that a resumed run may change: they say what is watched and how it is computed, not what is learnt
    "checkpoint.*",
    "log.*",
    "sync.*",
    "val.*",
    "trainer.total_*",
    "trainer.test_freq",
    "trainer.trace_*",
    "trainer.check_memory",
    "trainer.val_*",
    "data.val_*",
    "*timeout_s",
    "*.max_failed_fraction",
    "*_workers",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_memory_bytes",
    "rollout.free_cache_engine",
    "rollout.enforce_eager",
    "rollout.lean_*",
    "rollout.max_num_*",
    "rollout.tensor_model_parallel_size",
    "actor.use_dynamic_bsz",
    "actor.*_per_gpu",
    "actor.enable_gradient_checkpointing",
    "actor.use_torch_compile",
    "actor.share_prompts",
    "actor.reshard_after_forward",
    "actor.fsdp_size",
    "*offload*",
)


@dataclass(frozen=True)
class CheckpointConfig:
    save_freq: int = -1
    """Steps between checkpoints; -1 saves only at the end, 0 never."""
    max_ckpt_to_keep: int = 2
    """Checkpoints to leave on disk, the newest; the best one stays besides."""
    best_metric: str | None = "val/mean"
    """The validation metric, higher is better, that `checkpoints/best` goes by, of the steps that are saved; None keeps no best."""
    resume: str = "auto"
    """auto: go on from the run's newest complete checkpoint, if there is one; never: start afresh; or the folder of a checkpoint."""
    allow_changes: bool = False
    """Go on even if knobs that make it a different run are not those of the checkpoint."""
    export_hf: bool = True
    """At the end, also write the weights as a Hugging Face folder (RUN/hf)."""

    def __post_init__(self):
        if self.max_ckpt_to_keep < 1 or self.save_freq < -1:
            raise ValueError(
                f"checkpoint.max_ckpt_to_keep={self.max_ckpt_to_keep} must be at least 1 and checkpoint.save_freq={self.save_freq} at least -1"
            )
        if self.best_metric is not None and not self.best_metric.startswith("val/"):
            raise ValueError(f"checkpoint.best_metric={self.best_metric} must be one of validation's metrics, val/...")


def is_due(step: int, total_steps: int, freq: int) -> bool:
    """Whether to save after `step` steps."""
    return freq != 0 and (step == total_steps or (freq > 0 and step % freq == 0))


def find(cfg: CheckpointConfig, run_dir: Path) -> Path | None:
    """The checkpoint to go on from, or None. ValueError when a named one is not complete, or none is left that is."""
    if cfg.resume in ("auto", "never"):
        return newest(run_dir / "checkpoints") if cfg.resume == "auto" else None
    if reason := damage(Path(cfg.resume)):
        raise ValueError(
            f"checkpoint.resume={cfg.resume} is neither auto, never, nor the folder of a complete checkpoint: {reason}"
        )
    return Path(cfg.resume)


def read_state(checkpoint: Path | None) -> dict:
    """What `save` was given, and the number of steps done; of a fresh start, no steps."""
    return json.loads((checkpoint / "state.json").read_text()) if checkpoint else {"step": 0}


def changed_knobs(old: dict, new: dict) -> tuple[list[tuple], list[tuple]]:
    """Knobs whose values differ in two resolved configurations, as (knob, old, new): those that make it a different run, and the others."""
    new = json.loads(json.dumps(new))  # as the old one was: tuples are lists
    both = [
        (group, knob) for group, knobs in new.items() for knob in knobs if knob in old.get(group, {})
    ]  # a knob of another version is no change
    changes = [
        (f"{group}.{knob}", old[group][knob], new[group][knob])
        for group, knob in both
        if old[group][knob] != new[group][knob]
    ]
    harmless = [c for c in changes if any(fnmatch.fnmatch(c[0], pattern) for pattern in HARMLESS)]
    if new["actor"]["lr_scheduler_type"] != "constant":  # the learning rate goes by the steps that are left
        harmless = [c for c in harmless if not c[0].startswith("trainer.total_")]
    return [c for c in changes if c not in harmless], harmless


def check_changes(cfg: CheckpointConfig, state: dict, config: dict) -> None:
    """Say which knobs a resumed run changes; ValueError when one makes it a different run and cfg.allow_changes is off."""
    if "config" not in state or config["trainer"]["val_only"]:
        return
    different, harmless = (
        "; ".join(f"{knob}: {old} -> {new}" for knob, old, new in changes)
        for changes in changed_knobs(state["config"], config)
    )
    if different and not cfg.allow_changes:
        raise ValueError(
            f"the checkpoint is of a run with other settings: {different}. Set them back, or checkpoint.allow_changes, or checkpoint.resume=never"
        )
    if different or harmless:
        say(f"resuming with other settings: {'; '.join(filter(None, [different, harmless]))}")


def save(cfg: CheckpointConfig, run_dir: Path, step: int, actor, state: dict, tokenizer=None) -> Path:
    """Write weights, optimizer and every rank's RNG (through accelerate), and `state`, after `step` steps. A collective.

    When the disk fails it tries again; then ValueError on every rank, with the earlier checkpoints as they were.
    """
    folder, lead = run_dir / "checkpoints", dist.get_rank() == 0
    final, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}"
    state = {"step": step, "world_size": dist.get_world_size(), **state}
    stages = [
        (lead, lambda: prepare(temporary)),
        (True, lambda: actor.accelerator.save_state(str(temporary))),
        (lead, lambda: publish(temporary, final, actor, state, tokenizer)),
    ]
    for attempt in range(ATTEMPTS):
        time.sleep(BACKOFF_S * attempt)
        for mine, stage in stages:
            errors = [error for error in gather([failure(stage) if mine else None]) if error]
            if errors:
                break
        else:
            if lead:
                prune(cfg, final)
            actor.accelerator.wait_for_everyone()
            return final
        say(f"saving {final} failed (attempt {attempt + 1} of {ATTEMPTS}): {errors[0]}")
        if lead:
            shutil.rmtree(temporary, ignore_errors=True)
    free = f", {shutil.disk_usage(run_dir).free / 2**30:.2f} GiB free" if run_dir.exists() else ""
    raise ValueError(
        f"{final} can't be saved (log.default_local_dir{free}): {errors[0]}. Mend the disk and start again: the earlier checkpoints are as they were"
    )


def failure(stage) -> str | None:
    """What went wrong in it, when that was the disk."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        stage()
        return None
    except CheckpointException as failed:  # of one or more ranks, raised on all
        error = next(iter(failed.failures.values()))[0]
    except (OSError, RuntimeError) as raised:
        if isinstance(raised, RuntimeError) and "inline_container" not in str(
            raised
        ):  # the file of torch's writer that says that a disk is full
            raise
        error = raised
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # what torch's writer stumbled on
    return f"{type(error).__name__}: {error}".splitlines()[0]


def prepare(temporary: Path) -> None:
    """An empty folder, with all that other ranks would make in it; what killed runs left goes."""
    temporary.parent.mkdir(exist_ok=True)  # not the run's folder: when that is gone, so is its disk
    name_again(temporary.parent)
    for leftover in temporary.parent.glob(".step-*"):
        shutil.rmtree(leftover)
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (temporary / name).mkdir(parents=True)


def publish(temporary: Path, final: Path, actor, state: dict, tokenizer) -> None:
    """State and manifest into the temporary folder; everything onto the disk; then its name, and `latest`."""
    if tokenizer:
        write_settings(temporary / "hf", actor.accelerator.unwrap_model(actor.model), tokenizer, actor.cfg.dtype)
    (temporary / "state.json").write_text(json.dumps(state))
    write_manifest(temporary)
    if final.exists():
        os.rename(final, temporary.with_suffix(".old"))
    os.rename(temporary, final)
    shutil.rmtree(temporary.with_suffix(".old"), ignore_errors=True)
    write_durably(final.parent / "latest", final.name)


def prune(cfg: CheckpointConfig, final: Path) -> None:
    """Leave the newest checkpoints up to `final`, which was just saved, and the best one. Later ones are of a run that this one left."""
    best = read_best(final.parent).get("folder")
    for old in sorted(path for path in final.parent.glob("step-*") if path.name <= final.name)[: -cfg.max_ckpt_to_keep]:
        if old.name != best:
            shutil.rmtree(old)


def read_best(folder: Path) -> dict:
    return json.loads((folder / "best").read_text()) if (folder / "best").exists() else {}


def mark_best(cfg: CheckpointConfig, run_dir: Path, step: int, metrics: dict[str, float]) -> bool:
    """After a validation at `step`: name its checkpoint in `checkpoints/best`, if there is one and it is the best so far. Says whether it is."""
    name, folder = cfg.best_metric, run_dir / "checkpoints"
    if name is None:
        return False
    if name not in metrics:
        raise ValueError(
            f"checkpoint.best_metric={name} is not measured; known: {', '.join(sorted(m for m in metrics if m.startswith('val/')))}"
        )
    best, value, final = read_best(folder), metrics[name], folder / f"step-{step:06d}"
    held = (
        best.get("metric") == name and best["step"] < step and (folder / best["folder"]).exists()
    )  # one of a later step is of a run that this one left
    if math.isnan(value) or not final.exists() or (held and value <= best["value"]):
        return False
    if os.environ.get("RANK", "0") == "0":
        write_durably(folder / "best", json.dumps({"step": step, "metric": name, "value": value, "folder": final.name}))
    return True


def load(folder: Path, actor) -> None:
    """Restore the weights, optimizer and RNGs that `save` wrote, whatever the number of ranks."""
    actor.accelerator.load_state(str(folder))
    state = read_state(folder)
    actor.version = state["step"]
    if state.get("world_size", dist.get_world_size()) != dist.get_world_size():
        say(
            f"{folder} was saved by {state['world_size']} processes and goes on with {dist.get_world_size()}: weights and optimizer are sharded anew; numbers may differ in rounding"
        )


def write_settings(folder: Path, model, tokenizer, dtype: str) -> None:
    """All of a Hugging Face folder but the weights. The generation config as it came: save_pretrained refuses published ones that contradict themselves."""
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())  # which says the master weights' type
    (folder / "config.json").write_text(
        json.dumps(config | {"dtype": dtype, "architectures": [type(model).__name__.removeprefix("FSDP")]}, indent=2)
    )
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)


def write_weights(folder: Path, model, weights: dict) -> None:
    from transformers import GenerationConfig

    model.generation_config, kept = GenerationConfig(), model.generation_config
    model.save_pretrained(folder, state_dict=weights)
    model.generation_config = kept


def export(folder: Path, actor, tokenizer, dtype) -> None:
    """Write the weights in dtype, with configuration and tokenizer, as a folder that from_pretrained and vLLM load, whole or not at all. A collective."""
    weights = actor.accelerator.get_state_dict(actor.model)
    if dist.get_rank() == 0:
        model, temporary = actor.accelerator.unwrap_model(actor.model), folder.with_name(f".{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        write_weights(temporary, model, {name: tensor.to(dtype) for name, tensor in weights.items()})
        write_settings(temporary, model, tokenizer, str(dtype).removeprefix("torch."))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    actor.accelerator.wait_for_everyone()


def choose(folder: Path, step: str | None) -> Path:
    """The complete checkpoint among a run's that `step` means. ValueError when there is none."""
    best = folder / "best"
    if step not in (None, "best") and not step.isdecimal():
        raise ValueError(f"--step {step} is neither a number of steps nor best")
    if step == "best" and not best.exists():
        raise ValueError(f"no best checkpoint is named in {folder}: validation must run at the steps that are saved")
    chosen = (
        newest(folder)
        if step is None
        else folder / (json.loads(best.read_text())["folder"] if step == "best" else f"step-{int(step):06d}")
    )
    if chosen is None or (reason := damage(chosen)):
        raise ValueError(
            f"there is no checkpoint in {folder}" if chosen is None else f"{chosen} is no complete checkpoint: {reason}"
        )
    if not (chosen / "hf").exists():
        raise ValueError(f"{chosen} was saved without the model's configuration and tokenizer")
    return chosen


def export_checkpoint(run: Path, out: Path, step: str | None, dtype: str | None) -> None:
    """The same from a checkpoint of a run, in one process, without the original model: its settings are in the checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = choose(run / "checkpoints", step)
    config = AutoConfig.from_pretrained(checkpoint / "hf")
    dtype = dtype or str(config.dtype).removeprefix("torch.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = model.state_dict().items()
    weights = {
        name: torch.empty_like(x, device="cpu", dtype=getattr(torch, dtype) if x.is_floating_point() else x.dtype)
        for name, x in shapes
    }
    dcp.load({"model": weights}, checkpoint_id=checkpoint / "pytorch_model_fsdp_0", no_dist=True)
    write_weights(out, model, weights)
    shutil.copytree(checkpoint / "hf", out, dirs_exist_ok=True)
    (out / "config.json").write_text(
        json.dumps(json.loads((out / "config.json").read_text()) | {"dtype": dtype}, indent=2)
    )
    print(f"{checkpoint} is now {out}, in {dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    export_parser = parser.add_subparsers(required=True).add_parser(
        "export", help="write a checkpoint's weights as a Hugging Face folder"
    )
    export_parser.add_argument("run", type=Path, help="the run's folder")
    export_parser.add_argument("out", type=Path, help="the folder to write")
    export_parser.add_argument(
        "--step", help="steps that the checkpoint had done, or `best`; the newest when not given"
    )
    export_parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="actor.dtype when not given")
    args = parser.parse_args()
    try:
        export_checkpoint(args.run, args.out, args.step, args.dtype)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
