"""Hugging Face folders, which from_pretrained and vLLM load, of the actor and of checkpoints: `python checkpoint.py export RUN OUT [--step N|best] [--dtype bfloat16|float32]`."""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from host.disk import damage, newest


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
