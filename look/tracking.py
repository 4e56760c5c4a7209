"""Metrics and samples into wandb and TensorBoard, for those who look there; nothing that Lockstep itself reads."""

from pathlib import Path

import yaml

from metrics import sample_table

COLUMNS = ["prompt", "response", "ground_truth", "score", "advantage", "finish_reason"]


class Trackers:
    """The trackers that log.logger names, on rank 0."""

    def __init__(self, cfg, run_dir: Path, first_step: int, settings: dict, wandb_id: str | None):
        """A run that is resumed goes on in the same wandb run; steps from first_step on are shown as they are done again."""
        from accelerate.utils import is_tensorboard_available, is_wandb_available

        self.wandb = self.tensorboard = None
        if "wandb" in cfg.logger:
            if not is_wandb_available():
                raise ValueError("log.logger names wandb, which is not installed: pip install wandb")
            import wandb

            self.wandb = wandb.init(
                project=cfg.project_name,
                name=cfg.experiment_name,
                dir=run_dir,
                config=settings,
                id=wandb_id,
                resume="allow",
            )
            self.wandb.define_metric(
                "*", step_metric="step"
            )  # not wandb's own count, which drops steps that are done again
        if "tensorboard" in cfg.logger:
            from accelerate.tracking import TensorBoardTracker

            if not is_tensorboard_available():
                raise ValueError("log.logger names tensorboard, which is not installed: pip install tensorboard")
            self.tensorboard = TensorBoardTracker("tensorboard", logging_dir=run_dir, purge_step=first_step)
            self.tensorboard.start()
            self.tensorboard.writer.add_text("config", as_code(yaml.safe_dump(settings, sort_keys=False)))

    @property
    def wandb_id(self) -> str | None:
        return self.wandb and self.wandb.id

    def log(self, step: int, metrics: dict[str, float], samples: list[dict]) -> None:
        """samples are records of dump.samples; none, no table."""
        if self.wandb:
            import wandb

            rows = [[r[c] if isinstance(r[c], float) else str(r[c]) for c in COLUMNS] for r in samples]
            self.wandb.log({"step": step, **metrics} | ({"samples": wandb.Table(COLUMNS, rows)} if rows else {}))
        if self.tensorboard:
            self.tensorboard.log(metrics, step=step)
            if samples:
                self.tensorboard.writer.add_text("samples", as_code(sample_table(samples, 200)), step)

    def finish(self) -> None:
        for tracker in (self.wandb, self.tensorboard):
            if tracker:
                tracker.finish()


def as_code(text: str) -> str:
    """Markdown that shows a text as it is."""
    return "\n".join("    " + line for line in text.splitlines())
