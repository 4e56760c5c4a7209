"""Save and resume a run, keep its best checkpoint, and export a model. (Of a checkpoint: python -m look.export RUN OUT)

A checkpoint is written to a temporary folder, its manifest last, renamed, and named by `latest`: a kill at any moment,
or a full disk, leaves the last complete one usable, and one that is not complete is never loaded. Its weights and
optimizer are in torch's distributed format, which any number of ranks reads, and which can run code when it is read:
resume only what you trust.
"""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from actor import Actor
from batch import gather
from host.console import say
from host.disk import code_version, damage, name_again, newest, write_durably, write_manifest
from host.lookup import check_bounds

ATTEMPTS = 3
BACKOFF_S = 2.0  # before the second attempt, twice as long before the third
FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")  # accelerate's names for the weights and the optimizer
Change = tuple[str, Any, Any]  # knob, old value, new value


@dataclass(frozen=True)
class CheckpointConfig:
    may_change: ClassVar[bool] = True  # all of it, when a run is resumed

    save_freq: int = -1
    """Steps between checkpoints; -1 saves only at the end, 0 never."""
    max_ckpt_to_keep: int = 2
    """Checkpoints to leave on disk, the newest; the best one stays besides."""
    best_metric: str | None = "val/mean"
    """The validation metric, higher is better, that picks `checkpoints/best` among saved steps; None keeps no best."""
    resume: str = "auto"
    """auto: from the run's newest complete checkpoint, if any; never: start afresh; or the folder of a checkpoint."""
    allow_changes: bool = False
    """Go on even if knobs that make it a different run are not those of the checkpoint."""
    export_hf: bool = True
    """At the end, also write the weights as a Hugging Face folder (RUN/hf)."""

    def __post_init__(self):
        check_bounds("checkpoint", self, save_freq="[-1, inf)", max_ckpt_to_keep="[1, inf)")
        if self.best_metric is not None and not self.best_metric.startswith("val/"):
            raise ValueError(f"checkpoint.best_metric={self.best_metric} must be one of validation's metrics, val/...")


@dataclass
class RunState:
    """What a run has to remember, besides weights, optimizer and RNGs, to go on as if it had never stopped."""

    step: int = 0  # training steps done
    kl_coef: float | None = None  # None: not yet set
    skipped: int = 0  # steps in a row that were skipped
    wandb_id: str | None = None
    stream: dict | None = None  # position in the training data


@dataclass
class SavedState:
    """What a checkpoint says of its run. Of a fresh start nothing is known."""

    state: RunState
    config: dict | None = None  # {group: {knob: value}}
    world_size: int | None = None


def find(cfg: CheckpointConfig, run_dir: Path) -> Path | None:
    """The checkpoint to go on from, or None. ValueError when a named one is not complete, or none is left that is."""
    if cfg.resume == "auto":
        return newest(run_dir / "checkpoints")
    if cfg.resume == "never":
        return None
    if reason := damage(Path(cfg.resume)):
        raise ValueError(
            f"checkpoint.resume={cfg.resume} is neither auto, never, nor the folder of a complete checkpoint: {reason}"
        )
    return Path(cfg.resume)


def read_state(checkpoint: Path | None) -> SavedState:
    """What `save` was given, in this version of the code or another. Without a checkpoint: that of a fresh start."""
    if checkpoint is None:
        return SavedState(RunState())
    stored = json.loads((checkpoint / "state.json").read_text())
    state = RunState(**{field.name: stored[field.name] for field in fields(RunState) if field.name in stored})
    return SavedState(state, stored.get("config"), stored.get("world_size"))


def load(folder: Path, actor: Actor) -> None:
    """Restore the weights, optimizer and RNGs that `save` wrote, whatever the number of ranks. A collective."""
    actor.accelerator.load_state(str(folder))
    saved = read_state(folder)
    actor.version = saved.state.step
    if saved.world_size not in (None, dist.get_world_size()):
        say(
            f"{folder} was saved by {saved.world_size} processes and goes on with {dist.get_world_size()}: "
            "weights and optimizer are sharded anew; numbers may differ in rounding"
        )


def check_changes(cfg: CheckpointConfig, saved: SavedState, config) -> None:
    """Say which knobs a resumed run changes; ValueError when one makes it a different run, unless cfg.allow_changes."""
    if saved.config is None or config.trainer.val_only:
        return
    different, harmless = changed_knobs(saved.config, config)
    if different and not cfg.allow_changes:
        raise ValueError(
            f"the checkpoint is of a run with other settings: {listed(different)}. "
            "Set them back, or checkpoint.allow_changes, or checkpoint.resume=never"
        )
    if different or harmless:
        say(f"resuming with other settings: {listed(different + harmless)}")


def changed_knobs(old: dict, config) -> tuple[list[Change], list[Change]]:
    """Knobs of a config.Config that are not as in a checkpoint: those that make it a different run, and the others. A
    knob says itself whether it may change (host.lookup.may_change), or its group does. One that an older or newer
    version of the code lacks is no change."""
    new = json.loads(json.dumps(asdict(config)))  # as the old one was: tuples are lists
    lr_goes_by_steps = config.actor.lr_scheduler_type != "constant"  # by those that are left
    different: list[Change] = []
    harmless: list[Change] = []
    for group in fields(config):
        knobs = getattr(config, group.name)
        before, now = old.get(group.name, {}), new[group.name]
        for knob in fields(knobs):
            if knob.name not in before or before[knob.name] == now[knob.name]:
                continue
            name = f"{group.name}.{knob.name}"
            may_change = getattr(knobs, "may_change", False) or knob.metadata.get("may_change", False)
            if lr_goes_by_steps and name.startswith("trainer.total_"):
                may_change = False
            (harmless if may_change else different).append((name, before[knob.name], now[knob.name]))
    return different, harmless


def listed(changes: list[Change]) -> str:
    return "; ".join(f"{knob}: {old} -> {new}" for knob, old, new in changes)


# Saving


class DiskError(Exception):
    """The disk of a rank failed. Raised on all ranks."""


def is_due(step: int, total_steps: int, freq: int) -> bool:
    """Whether to save after `step` steps."""
    return freq != 0 and (step == total_steps or (freq > 0 and step % freq == 0))


def save(cfg: CheckpointConfig, run_dir: Path, actor: Actor, state: RunState, config: dict, tokenizer=None) -> Path:
    """Write weights, optimizer and every rank's RNG (through accelerate), state and configuration. A collective. When
    the disk fails it tries again; then ValueError on every rank, with the earlier checkpoints as they were."""
    if actor.moments:
        actor.moments.load()  # a run that was told to stop saves while vLLM has their memory
    lead = dist.get_rank() == 0
    final = run_dir / "checkpoints" / f"step-{state.step:06d}"
    temporary = final.with_name(f".{final.name}")
    stored = {"world_size": dist.get_world_size(), **asdict(state), "config": config}
    error = ""
    for number in range(ATTEMPTS):
        time.sleep(BACKOFF_S * number)
        try:
            attempt(temporary, final, actor, stored, tokenizer)
        except DiskError as failed:
            error = str(failed)
            say(f"saving {final} failed (attempt {number + 1} of {ATTEMPTS}): {error}")
            if lead:
                shutil.rmtree(temporary, ignore_errors=True)
            continue
        if lead:
            prune(cfg, final)
        actor.accelerator.wait_for_everyone()
        return final
    free = f", {shutil.disk_usage(run_dir).free / 2**30:.2f} GiB free" if run_dir.exists() else ""
    raise ValueError(
        f"{final} can't be saved (log.default_local_dir{free}): {error}. "
        "Mend the disk and start again: the earlier checkpoints are as they were"
    )


def attempt(temporary: Path, final: Path, actor: Actor, stored: dict, tokenizer) -> None:
    """Write a checkpoint into `temporary` and rename it to `final`. DiskError when a disk fails. A collective."""
    lead = dist.get_rank() == 0
    with failing_together():
        if lead:
            prepare(temporary)
    with failing_together():
        actor.accelerator.save_state(str(temporary))
    with failing_together():
        if lead:
            publish(temporary, final, actor, stored, tokenizer)


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """When the disk fails any rank within this block, DiskError on all of them at its end. A collective."""
    from torch.distributed.checkpoint.api import CheckpointException

    error: BaseException | None = None
    try:
        yield
    except CheckpointException as failed:  # of one or more ranks, raised on all
        error = next(iter(failed.failures.values()))[0]
    except OSError as raised:
        error = raised
    except RuntimeError as raised:
        if "inline_container" not in str(raised):  # the file of torch's writer that says that a disk is full
            raise
        error = raised
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # what torch's writer stumbled on
    said = f"{type(error).__name__}: {error}".splitlines()[0] if error else None
    errors = [e for e in gather([said]) if e]
    if errors:
        raise DiskError(errors[0])


def prepare(temporary: Path) -> None:
    """An empty folder, with all folders that other ranks would make in it. What killed runs left goes."""
    temporary.parent.mkdir(exist_ok=True)  # not the run's folder: when that is gone, so is its disk
    name_again(temporary.parent)
    for leftover in temporary.parent.glob(".step-*"):
        shutil.rmtree(leftover)
    for name in FOLDERS:
        (temporary / name).mkdir(parents=True)


def publish(temporary: Path, final: Path, actor: Actor, stored: dict, tokenizer) -> None:
    """State and manifest into the temporary folder; everything onto the disk; then its name, and `latest`."""
    if tokenizer:
        write_settings(temporary / "hf", actor.accelerator.unwrap_model(actor.model), tokenizer, actor.cfg.dtype)
    (temporary / "state.json").write_text(json.dumps({"code": code_version()} | stored))
    write_manifest(temporary)
    replaced = temporary.with_suffix(".old")
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    shutil.rmtree(replaced, ignore_errors=True)
    write_durably(final.parent / "latest", final.name)


def prune(cfg: CheckpointConfig, final: Path) -> None:
    """Leave the newest checkpoints up to `final`, just saved, and the best one. Later ones are of a run left behind."""
    best = read_best(final.parent).get("folder")
    saved = sorted(path for path in final.parent.glob("step-*") if path.name <= final.name)
    for old in saved[: -cfg.max_ckpt_to_keep]:
        if old.name != best:
            shutil.rmtree(old)


def read_best(folder: Path) -> dict:
    """What `mark_best` wrote into a run's folder of checkpoints; {} when it has not."""
    return json.loads((folder / "best").read_text()) if (folder / "best").exists() else {}


def mark_best(cfg: CheckpointConfig, run_dir: Path, step: int, metrics: dict[str, float]) -> bool:
    """After a validation at `step`: name its checkpoint in `checkpoints/best`, if there is one and it is the best yet.
    Returns whether it did. ValueError when cfg.best_metric is not among the metrics."""
    name = cfg.best_metric
    if name is None:
        return False
    if name not in metrics:
        known = sorted(metric for metric in metrics if metric.startswith("val/"))
        raise ValueError(f"checkpoint.best_metric={name} is not measured; known: {', '.join(known)}")
    value = metrics[name]
    folder = run_dir / "checkpoints"
    final = folder / f"step-{step:06d}"
    if math.isnan(value) or not final.exists():
        return False
    best = read_best(folder)
    # One of a later step is of a run that this one left.
    best_holds = best.get("metric") == name and best["step"] < step and (folder / best["folder"]).exists()
    if best_holds and value <= best["value"]:
        return False
    if os.environ.get("RANK", "0") == "0":
        write_durably(folder / "best", json.dumps({"step": step, "metric": name, "value": value, "folder": final.name}))
    return True


# The weights for others: a Hugging Face folder


def export(folder: Path, actor: Actor, tokenizer, dtype: torch.dtype) -> None:
    """Write a folder that from_pretrained and vLLM load, in dtype: whole or not at all. A collective."""
    weights = actor.accelerator.get_state_dict(actor.model)
    if dist.get_rank() == 0:
        model = actor.accelerator.unwrap_model(actor.model)
        temporary = folder.with_name(f".{folder.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        write_weights(temporary, model, {name: tensor.to(dtype) for name, tensor in weights.items()})
        write_settings(temporary, model, tokenizer, str(dtype).removeprefix("torch."))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    actor.accelerator.wait_for_everyone()


def write_weights(folder: Path, model, weights: dict[str, torch.Tensor]) -> None:
    from transformers import GenerationConfig

    kept = model.generation_config
    model.generation_config = GenerationConfig()  # save_pretrained refuses published ones that contradict themselves
    model.save_pretrained(folder, state_dict=weights)
    model.generation_config = kept


def write_settings(folder: Path, model, tokenizer, dtype: str) -> None:
    """All of a Hugging Face folder but the weights. The generation config as it came, even if it contradicts itself."""
    model.config.save_pretrained(folder)
    # What it wrote says the type of the master weights, and the name that FSDP gave to the model's class.
    # model.published is what the head took over from the model (model.take_logit_transform).
    architecture = type(model).__name__.removeprefix("FSDP")
    set_in_config(folder, dtype=dtype, architectures=[architecture], **getattr(model, "published", {}))
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)


def set_in_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2))
