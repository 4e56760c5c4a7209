"""A mini-batch and the weights that met it, on disk, to look into offline: `python -m look.replay RUN/replays/000012`.

Written for the first of the steps that were skipped in a row because the gradient was not finite, and for those of log.replay_steps.
Prints loss, gradient norm and the other metrics, recomputed in one process, beside those of the run. Nothing in it is a pickle.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from actor import Actor, reduce_sums
from batch import Task, Trajectory
from checkpoint import export

TENSORS = ("loss_mask", "advantages", "old_logprobs", "ref_logprobs")


class Recorder:
    """Dumps what log.replay_steps asks for and what is skipped, and stops a run that skips log.max_skipped_steps steps in a row."""

    def __init__(self, cfg, actor, tokenizer):
        self.cfg, self.actor, self.tokenizer, self.skipped = cfg, actor, tokenizer, 0

    def folder(self, step: int) -> Path:
        return self.cfg.run_dir / "replays" / f"{step:06d}"

    def before_update(self, step: int) -> None:
        if step in self.cfg.log.replay_steps:
            export(self.folder(step) / "hf", self.actor, self.tokenizer, torch.float32)

    def after_update(self, step: int) -> None:
        """RuntimeError when too many steps in a row were skipped. A collective, as is before_update."""
        bad = not math.isfinite(self.actor.updates[-1][2])
        self.skipped = self.skipped + 1 if bad else 0
        if self.skipped == 1:
            export(
                self.folder(step) / "hf", self.actor, self.tokenizer, torch.float32
            )  # as they were: a skipped update changes nothing
        if self.skipped == 1 or step in self.cfg.log.replay_steps:
            dump_update(self.folder(step), self.actor, -1 if bad else 0, self.cfg)
        if self.skipped == self.cfg.log.max_skipped_steps:
            first = self.folder(step - self.skipped + 1)
            raise RuntimeError(
                f"the gradient was not finite in {self.skipped} steps in a row (log.max_skipped_steps); the first one's mini-batch and weights are in {first}: python -m look.replay {first}"
            )


def dump_update(folder: Path, actor, number: int, cfg) -> None:
    """The mini-batch of update `number` of the last step, and what the run made of it."""
    mini_batch, sums, norm = actor.updates[number]
    found = reduce_sums(sums) | {"actor/grad_norm": norm}
    if dist.get_rank() == 0:
        with open(folder / "mini_batch.jsonl", "w") as file:
            for t in mini_batch:
                given = {
                    name: getattr(t, name)
                    for name in (
                        "uid",
                        "session_id",
                        "index",
                        "tokens",
                        "response_mask",
                        "rollout_logprobs",
                        "response",
                    )
                }
                file.write(
                    json.dumps(
                        given
                        | {name: None if getattr(t, name) is None else getattr(t, name).tolist() for name in TENSORS}
                    )
                    + "\n"
                )
        (folder / "found.json").write_text(
            json.dumps({"metrics": found, "old_logprobs_from": cfg.old_logprobs_from}, indent=1)
        )


def read_trajectory(line: str, computed_old: bool) -> Trajectory:
    row = json.loads(line)
    tensors = {name: None if row[name] is None else torch.tensor(row.pop(name)) for name in TENSORS}
    if computed_old:
        tensors["old_logprobs"] = None  # the update gave them, at ratio 1
    return Trajectory(Task("", "", ""), **{name: row[name] for name in row if name not in TENSORS}, **tensors)


def replay(folder: Path) -> dict[str, tuple[float, float]]:
    """{metric: (the run's, recomputed)} of a dump; FileNotFoundError when it is none."""
    import dataclasses

    from config import load_config
    from fsdp import make_accelerator
    from policy import load_tokenizer

    if not (folder / "found.json").exists():
        raise FileNotFoundError(f"{folder} holds no dumped mini-batch (found.json)")
    found = json.loads((folder / "found.json").read_text())
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):  # of a run around it: this is one process of its own
        os.environ.pop(name, None)
    cfg = load_config(["--config", str(folder.parent.parent / "config.yaml")])
    cfg = dataclasses.replace(cfg, actor=dataclasses.replace(cfg.actor, path=str(folder / "hf"), fsdp_size=-1))
    actor = Actor(cfg.actor, make_accelerator(cfg.actor), len(load_tokenizer(cfg.actor.path)), cfg.rollout.temperature)
    actor.start_step()
    mini_batch = [
        read_trajectory(line, found["old_logprobs_from"] == "update")
        for line in (folder / "mini_batch.jsonl").read_text().splitlines()
    ]
    metrics = reduce_sums(actor.backward(mini_batch, cfg.loss)) | {"actor/grad_norm": actor.gradient()[1]}
    return {name: (value, metrics.get(name, float("nan"))) for name, value in found["metrics"].items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    try:
        table = replay(parser.parse_args().folder)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{'metric':<28} {'run':>14} {'now':>14}")
    for name, (then, now) in table.items():
        print(f"{name:<28} {then:>14.6g} {now:>14.6g}")
