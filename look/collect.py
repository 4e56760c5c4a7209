"""What docs/runs keeps of runs that differ in their seed: `python -m look.collect RUN... OUT`.

Writes OUT.jsonl, a line for each seed and step, and OUT.yaml: the runs' commit and what they set otherwise than
configs/smollm2_arith.yaml does.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

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
    "reward.num_workers",  # as many as the machine has cores, at most 4
}


def kept(record: dict, seed: int) -> dict[str, Any]:
    """METRICS and validation's of one record, in five significant digits."""
    line = {"seed": seed, "step": record["step"]}
    for name, value in record.items():
        if name in METRICS or name.startswith("val/"):
            line[name] = float(f"{value:.5g}") if isinstance(value, float) else value
    return line


def knobs(tree: dict) -> dict[str, Any]:
    """{group.knob: value} of a configuration's tree."""
    return {f"{group}.{knob}": value for group, values in tree.items() for knob, value in values.items()}


def differences(settings: dict[str, Any]) -> dict[str, Any]:
    """The run's knobs that are not what this checkout makes of the config file.

    A model's folder is named by its published name.
    """
    from config import load_config

    cfg = load_config(["--config", str(ROOT / "configs" / "smollm2_arith.yaml")])
    usual = knobs(json.loads(json.dumps(dataclasses.asdict(cfg))))  # tuples are lists, as in the run's file
    if settings["actor.path"].endswith("/smollm2"):
        settings = settings | {"actor.path": usual["actor.path"]}
    changed = {name: value for name, value in settings.items() if name not in usual or usual[name] != value}
    return {name: value for name, value in changed.items() if name not in OF_THE_RUN}


def main(runs: list[Path], out: Path) -> None:
    """ValueError when the runs differ in more than their seed."""
    lines, changes, commits = [], [], set()
    for run in runs:
        text = (run / "config.yaml").read_text()
        settings = knobs(yaml.safe_load(text))
        commits.add(text.splitlines()[0])
        changes.append(differences(settings))
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines += [kept(record, settings["trainer.seed"]) for record in records]
    if len(commits) > 1 or any(change != changes[0] for change in changes):
        names = [str(run) for run in runs]
        raise ValueError(f"RUN {names} must differ in nothing but their seed: {commits}, {changes}")
    lines.sort(key=lambda line: (line["seed"], line["step"]))
    out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings_text = yaml.safe_dump(changes[0], sort_keys=False)
    heading = f"{commits.pop()}\n# otherwise than configs/smollm2_arith.yaml:\n"
    out.with_suffix(".yaml").write_text(heading + settings_text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m look.collect", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the two files to write, without their ending")
    args = parser.parse_args()
    main(args.runs, args.out)
