"""A checkpoint's weights as a Hugging Face folder: `python -m look.export RUN OUT [--step N|best] [--dtype bfloat16]`.

In one process, without the original model: its settings are in the checkpoint.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch

from checkpoint import FOLDERS, read_best, set_in_config, write_weights
from host.disk import damage, newest
from model import meta_model


def export_checkpoint(run: Path, out: Path, step: str | None, dtype: str | None) -> None:
    """`export` from a checkpoint, in one process, without the original model: its settings are in the checkpoint."""
    import torch.distributed.checkpoint as dcp
    from transformers import AutoConfig

    checkpoint = choose(run / "checkpoints", step)
    config = AutoConfig.from_pretrained(checkpoint / "hf")
    dtype = dtype or str(config.dtype).removeprefix("torch.")
    model = meta_model(config)
    weights = {}
    for name, tensor in model.state_dict().items():
        kind = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
        weights[name] = torch.empty_like(tensor, device="cpu", dtype=kind)
    dcp.load({"model": weights}, checkpoint_id=checkpoint / FOLDERS[0], no_dist=True)
    write_weights(out, model, weights)
    shutil.copytree(checkpoint / "hf", out, dirs_exist_ok=True)
    set_in_config(out, dtype=dtype)
    print(f"{checkpoint} is now {out}, in {dtype}")


def choose(folder: Path, step: str | None) -> Path:
    """The complete checkpoint that `step` means: a number, `best`, or None for the newest. ValueError without one."""
    if step is None:
        chosen = newest(folder)
        if chosen is None:
            raise ValueError(f"there is no checkpoint in {folder}")
    elif step == "best":
        best = read_best(folder)
        if not best:
            raise ValueError(f"no best checkpoint in {folder}: validation must run at the steps that are saved")
        chosen = folder / best["folder"]
    elif step.isdecimal():
        chosen = folder / f"step-{int(step):06d}"
    else:
        raise ValueError(f"--step {step} is neither a number of steps nor best")
    if reason := damage(chosen):
        raise ValueError(f"{chosen} is no complete checkpoint: {reason}")
    if not (chosen / "hf").exists():
        raise ValueError(f"{chosen} was saved without the model's configuration and tokenizer")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m look.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--step", help="steps that the checkpoint had done, or `best`; the newest when not given")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="actor.dtype when not given")
    args = parser.parse_args()
    try:
        export_checkpoint(args.run, args.out, args.step, args.dtype)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
