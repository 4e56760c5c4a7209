"""What docs/runs keeps of runs that differ in their seed: `python -m look.collect RUN... OUT`.

Writes OUT.jsonl, a line for each seed and step, and OUT.yaml: the runs' commit and what they set otherwise than configs/smollm2_arith.yaml does.
"""

import json
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
METRICS = (
    "reward/mean",
    "reward/frac_zero_std",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "correction/prob_diff_mean",
    "correction/prob_diff_max",
    "correction/k3",
)
OF_THE_RUN = {
    "log.experiment_name",
    "log.default_local_dir",
    "trainer.seed",
    "reward.num_workers",
}  # the last is as many as the machine has cores, at most 4


def kept(record: dict, seed: int) -> dict:
    numbers = {name: value for name, value in record.items() if name in METRICS or name.startswith("val/")}
    return {"seed": seed, "step": record["step"]} | {
        name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in numbers.items()
    }


def knobs(tree: dict) -> dict:
    return {f"{group}.{knob}": value for group, values in tree.items() for knob, value in values.items()}


def differences(settings: dict) -> dict:
    """The run's knobs that are not what this checkout makes of the config file; a model's folder is named by its published name."""
    import dataclasses

    from config import load_config

    usual = knobs(
        json.loads(
            json.dumps(dataclasses.asdict(load_config(["--config", str(ROOT / "configs" / "smollm2_arith.yaml")])))
        )
    )
    model = {"actor.path": usual["actor.path"]} if settings["actor.path"].endswith("/smollm2") else {}
    return {
        name: value
        for name, value in (settings | model).items()
        if name not in OF_THE_RUN and (name not in usual or usual[name] != value)
    }


def main(runs: list[Path], out: Path) -> None:
    lines, changes, commits = [], [], set()
    for run in runs:
        text = (run / "config.yaml").read_text()
        settings = knobs(yaml.safe_load(text))
        commits.add(text.splitlines()[0])
        changes.append(differences(settings))
        lines += [
            kept(json.loads(line), settings["trainer.seed"])
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
    if len(commits) > 1 or any(change != changes[0] for change in changes):
        raise ValueError(
            f"RUN {[str(run) for run in runs]} must differ in nothing but their seed: {commits}, {changes}"
        )
    lines.sort(key=lambda line: (line["seed"], line["step"]))
    out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out.with_suffix(".yaml").write_text(
        f"{commits.pop()}\n# otherwise than configs/smollm2_arith.yaml:\n{yaml.safe_dump(changes[0], sort_keys=False)}"
    )


if __name__ == "__main__":
    main([Path(run) for run in sys.argv[1:-1]], Path(sys.argv[-1]))
