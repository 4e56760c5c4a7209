"""A mini-batch and the weights that met it, on disk, to look into offline: `python -m look.replay RUN/replays/000012`.

Written for the steps of log.replay_steps and, with log.record_skipped, for the first of those that were skipped in a
row because the gradient was not finite. Prints loss, gradient norm and the other metrics, recomputed in one process,
beside those of the run. Nothing in it is a pickle.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actor import Actor, Update, reduce_sums
from batch import PER_TOKEN, Task, Trajectory
from checkpoint import export

PLAIN = ("uid", "session_id", "index", "tokens", "response_mask", "rollout_logprobs", "response")
TENSORS = ("loss_mask", *PER_TOKEN)  # of a trajectory; one that it lacks is null
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Recorder:
    """Writes what log.replay_steps and log.record_skipped ask for into replays/STEP. Actor.update calls it.

    `was_bad` says whether the step before was skipped, also before a run that is resumed.
    """

    def __init__(self, cfg, tokenizer, was_bad: bool = False):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.was_bad = was_bad

    def folder(self, step: int) -> Path:
        return self.cfg.run_dir / "replays" / f"{step:06d}"

    def before_update(self, actor: Actor, step: int) -> None:
        """Keep the weights that the first mini-batch will meet. A collective."""
        if step in self.cfg.log.replay_steps:
            self.keep_weights(actor, step)

    def after_update(self, actor: Actor, step: int) -> None:
        """Keep the mini-batch: the first, or the one whose gradient was not finite. A collective."""
        bad = not math.isfinite(actor.updates[-1].grad_norm)
        first_bad = bad and not self.was_bad
        self.was_bad = bad
        if step not in self.cfg.log.replay_steps and not (first_bad and self.cfg.log.record_skipped):
            return
        if bad:
            self.keep_weights(actor, step)  # as this mini-batch met them: a skipped update changes nothing
        dump_update(self.folder(step), actor.updates[-1 if bad else 0], self.cfg.old_logprobs_from)

    def keep_weights(self, actor: Actor, step: int) -> None:
        export(self.folder(step) / "hf", actor, self.tokenizer, torch.float32)


def dump_update(folder: Path, update: Update, old_logprobs_from: str) -> None:
    """The mini-batch of an update, and what the run made of it. A collective."""
    metrics = reduce_sums(update.sums) | {"actor/grad_norm": update.grad_norm}
    if dist.get_rank() == 0:
        rows = [json.dumps(to_row(trajectory)) + "\n" for trajectory in update.mini_batch]
        (folder / "mini_batch.jsonl").write_text("".join(rows))
        found = {"metrics": metrics, "old_logprobs_from": old_logprobs_from}
        (folder / "found.json").write_text(json.dumps(found, indent=1))


def to_row(t: Trajectory) -> dict[str, Any]:
    """What an update reads of a trajectory, as JSON has it."""
    row = {name: getattr(t, name) for name in PLAIN}
    for name in TENSORS:
        tensor = getattr(t, name)
        row[name] = None if tensor is None else tensor.tolist()
    return row


def from_row(row: dict[str, Any], computed_old: bool) -> Trajectory:
    """The trajectory again. With computed_old without old_logprobs: the update gave them, at ratio 1."""
    tensors = {name: torch.tensor(row[name]) for name in TENSORS if row.get(name) is not None}
    if computed_old:
        tensors.pop("old_logprobs", None)
    return Trajectory(Task("", "", ""), **{name: row[name] for name in PLAIN}, **tensors)


def replay(folder: Path) -> dict[str, tuple[float, float]]:
    """{metric: (the run's, recomputed)} of a dump; FileNotFoundError when it is none."""
    from config import load_config
    from fsdp import make_accelerator
    from policy import load_tokenizer

    if not (folder / "found.json").exists():
        raise FileNotFoundError(f"{folder} holds no dumped mini-batch (found.json)")
    found = json.loads((folder / "found.json").read_text())
    for name in OF_A_LAUNCHER:  # a run around it would have set these: this is one process of its own
        os.environ.pop(name, None)
    cfg = load_config(["--config", str(folder.parent.parent / "config.yaml")])
    actor_cfg = dataclasses.replace(cfg.actor, path=str(folder / "hf"), fsdp_size=-1)
    num_tokens = len(load_tokenizer(actor_cfg.path))
    actor = Actor(actor_cfg, make_accelerator(actor_cfg), num_tokens, cfg.rollout.temperature)
    rows = [json.loads(line) for line in (folder / "mini_batch.jsonl").read_text().splitlines()]
    mini_batch = [from_row(row, computed_old=found["old_logprobs_from"] == "update") for row in rows]
    update = actor.backward(mini_batch, cfg.loss)
    _, grad_norm = actor.gradient()
    now = reduce_sums(update.sums) | {"actor/grad_norm": grad_norm}
    return {name: (value, now.get(name, math.nan)) for name, value in found["metrics"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m look.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    try:
        table = replay(parser.parse_args().folder)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{'metric':<28} {'run':>14} {'now':>14}")
    for name, (then, now) in table.items():
        print(f"{name:<28} {then:>14.6g} {now:>14.6g}")


if __name__ == "__main__":
    main()
