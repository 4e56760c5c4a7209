"""Metrics and samples into wandb and TensorBoard, for those who look there; nothing that Lockstep itself reads."""

import importlib.util
from pathlib import Path
from typing import Any

import yaml

from metrics import sample_table

COLUMNS = ["prompt", "response", "ground_truth", "score", "advantage", "finish_reason"]  # of wandb's table of samples


class Trackers:
    """The trackers that log.logger names, on rank 0."""

    def __init__(self, cfg, run_dir: Path, first_step: int, settings: dict, wandb_id: str | None):
        """Start them, in RUN/wandb and RUN/tensorboard. ValueError when a package is not installed.

        A resumed run goes on in the same wandb run, and its steps from first_step on replace those of the same number.
        """
        self.wandb = self.tensorboard = None
        if "wandb" in cfg.logger:
            self.wandb = start_wandb(cfg, run_dir, settings, wandb_id)
        if "tensorboard" in cfg.logger:
            self.tensorboard = start_tensorboard(run_dir, first_step, settings)

    @property
    def wandb_id(self) -> str | None:
        return self.wandb.id if self.wandb else None

    def log(self, step: int, metrics: dict[str, float], samples: list[dict]) -> None:
        """The numbers of a step; samples are records of metrics.samples, and without any there is no table of them."""
        if self.wandb:
            record = {"step": step, **metrics}
            if samples:
                record["samples"] = wandb_table(samples)
            self.wandb.log(record)
        if self.tensorboard:
            for name, value in metrics.items():
                if isinstance(value, (int, float)):
                    self.tensorboard.add_scalar(name, value, global_step=step)
            self.tensorboard.flush()
            if samples:
                self.tensorboard.add_text("samples", as_code(sample_table(samples, 200)), step)

    def finish(self) -> None:
        if self.wandb:
            self.wandb.finish()
        if self.tensorboard:
            self.tensorboard.close()


def start_wandb(cfg, run_dir: Path, settings: dict, wandb_id: str | None) -> Any:
    """Its run, which is the earlier one where wandb_id names one."""
    need("wandb")
    import wandb

    run = wandb.init(
        project=cfg.project_name,
        name=cfg.experiment_name,
        dir=run_dir,
        config=settings,
        id=wandb_id,
        resume="allow",
    )
    # The training step is the axis, not wandb's own count, which drops steps that are done again.
    run.define_metric("*", step_metric="step")
    return run


def start_tensorboard(run_dir: Path, first_step: int, settings: dict) -> Any:
    """Its writer, with the configuration as a text."""
    need("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)
    writer.add_text("config", as_code(yaml.safe_dump(settings, sort_keys=False)))
    return writer


def need(package: str) -> None:
    """ValueError when a tracker's package is not installed."""
    spec = importlib.util.find_spec(package)
    # A mere folder of that name, such as a run's own, is found as well, but has no file that an import would run.
    if spec is None or spec.origin is None:
        raise ValueError(f"log.logger names {package}, which is not installed: pip install {package}")


def wandb_table(samples: list[dict]) -> Any:
    """Samples as a table: floats as they are, all else as text."""
    import wandb

    rows = [[r[c] if isinstance(r[c], float) else str(r[c]) for c in COLUMNS] for r in samples]
    return wandb.Table(COLUMNS, rows)


def as_code(text: str) -> str:
    """Markdown that shows a text as it is."""
    return "\n".join("    " + line for line in text.splitlines())
