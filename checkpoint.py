"""Save and resume a run, and export its weights as a Hugging Face folder.

A checkpoint is written to a temporary folder and renamed, and `latest` is written last: a kill at any moment leaves the
last complete one usable.
"""
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True)
class CheckpointConfig:
    save_freq: int = -1
    """Steps between checkpoints; -1 saves only at the end, 0 never."""
    max_ckpt_to_keep: int = 2
    """Checkpoints to leave on disk, the newest."""
    resume: str = "auto"
    """auto: go on from the run's newest checkpoint, if there is one; never: start afresh; or the folder of a checkpoint."""
    export_hf: bool = True
    """At the end, also write the weights as a Hugging Face folder (RUN/hf)."""

    def __post_init__(self):
        if self.max_ckpt_to_keep < 1 or self.save_freq < -1:
            raise ValueError(f"checkpoint.max_ckpt_to_keep={self.max_ckpt_to_keep} must be at least 1 and checkpoint.save_freq={self.save_freq} at least -1")


def is_due(step: int, total_steps: int, freq: int) -> bool:
    """Whether to save after `step` steps."""
    return freq != 0 and (step == total_steps or (freq > 0 and step % freq == 0))


def find(cfg: CheckpointConfig, run_dir: Path) -> Path | None:
    """The checkpoint to go on from, or None. ValueError when a named one is not there."""
    if cfg.resume == "never":
        return None
    if cfg.resume != "auto":
        if not (Path(cfg.resume) / "state.json").exists():
            raise ValueError(f"checkpoint.resume={cfg.resume} is neither auto, never, nor the folder of a checkpoint")
        return Path(cfg.resume)
    latest = run_dir / "checkpoints" / "latest"
    if not latest.exists():
        return None
    if not (newest := latest.parent / latest.read_text().strip()).exists():
        raise ValueError(f"{latest} names {newest.name}, which is gone: set checkpoint.resume to the folder of a checkpoint, or to never")
    return newest


def read_state(checkpoint: Path | None) -> dict:
    """What `save` was given, and the number of steps done; of a fresh start, no steps."""
    return json.loads((checkpoint / "state.json").read_text()) if checkpoint else {"step": 0}


def save(cfg: CheckpointConfig, run_dir: Path, step: int, actor, state: dict) -> Path:
    """Write weights, optimizer and every rank's RNG (through accelerate), and `state`, after `step` steps. A collective."""
    folder = run_dir / "checkpoints"
    final, temporary = folder / f"step-{step:06d}", folder / f".step-{step:06d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    actor.accelerator.wait_for_everyone()
    actor.accelerator.save_state(str(temporary))
    actor.accelerator.wait_for_everyone()
    if dist.get_rank() == 0:
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        marker = folder / ".latest"
        marker.write_text(final.name)
        os.replace(marker, folder / "latest")
        done = sorted(path for path in folder.glob("step-*") if path.name <= final.name)  # later ones are of a run that this one left
        for old in done[: -cfg.max_ckpt_to_keep]:
            shutil.rmtree(old)
    actor.accelerator.wait_for_everyone()
    return final


def load(folder: Path, actor) -> None:
    """Restore the weights, optimizer and RNGs that `save` wrote."""
    actor.accelerator.load_state(str(folder))
    actor.version = read_state(folder)["step"]


def export(folder: Path, actor, tokenizer, dtype) -> None:
    """Write the weights in dtype, with configuration and tokenizer, as a folder that from_pretrained and vLLM load. A collective."""
    weights = actor.accelerator.get_state_dict(actor.model)
    if dist.get_rank() == 0:
        model = actor.accelerator.unwrap_model(actor.model)
        model.save_pretrained(folder, state_dict={name: tensor.to(dtype) for name, tensor in weights.items()})
        model.config.dtype = dtype  # save_pretrained says the master weights' type
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    actor.accelerator.wait_for_everyone()
