"""Where a run leaves its numbers: metrics.jsonl, a console line a step, trackers, rollouts, each phase's time."""

import math
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from batch import Trajectory
from host.console import printable, put
from host.disk import keep_lines_before, move_aside, to_json, write_durably
from host.lookup import check_bounds
from host.settings import to_yaml
from metrics import dump_record, sample_table, samples

LEAST_S = 0.001  # seconds: a phase that took less is not recorded
SHOWN = (  # on the console: label, metric, format
    ("reward", "reward/mean", ".3f"),
    ("len", "response_length/mean", ".1f"),
    ("loss", "actor/pg_loss", ".4f"),
    ("kl", "actor/kl_loss", ".4f"),
    ("grad", "actor/grad_norm", ".2f"),
    ("entropy", "actor/entropy", ".3f"),
    ("zero-std", "reward/frac_zero_std", ".0%"),
)


@dataclass(frozen=True)
class LogConfig:
    may_change: ClassVar[bool] = True  # all of it, when a run is resumed

    project_name: str = "lockstep"
    """Project, for wandb."""
    experiment_name: str = "run"
    """Name of the run, and of its folder."""
    default_local_dir: str = "runs"
    """Folder that runs are put into."""
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = ("console",)
    """Where metrics go besides metrics.jsonl: console, wandb, tensorboard (RUN/tensorboard)."""
    diagnose: bool = True
    """Say on the console what looks wrong with a step, in words (look/doctor.py)."""
    samples_every: int = 10
    """Steps between tables of a few samples, on the console and in the trackers; 0 for none."""
    rollout_dump_freq: int = 1
    """Steps between dumps of the rollouts to rollouts/STEP.jsonl; 0 for none. Validations are always dumped."""
    replay_steps: tuple[int, ...] = ()
    """Steps whose first mini-batch and the weights that it met are written to replays/STEP: `python -m look.replay`."""
    record_skipped: bool = True
    """The same for the first of the steps that are skipped in a row because a gradient was not finite."""
    max_skipped_steps: int = 3
    """Stop after so many steps in a row that were skipped because a gradient was not finite."""

    def __post_init__(self):
        not_negative = dict.fromkeys(("rollout_dump_freq", "samples_every", "replay_steps"), "[0, inf)")
        check_bounds("log", self, max_skipped_steps="[1, inf)", **not_negative)


class Logger:
    """Rank 0 writes; the other ranks time themselves and stay silent."""

    def __init__(
        self, cfg: LogConfig, run_dir: Path, first_step: int, total_steps: int, settings: dict, wandb_id: str | None
    ):
        self.cfg = cfg
        self.run_dir = run_dir
        self.total_steps = total_steps
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.metrics: dict[str, float] = {}  # of the step that goes on
        self.samples: list[dict] = []  # that it shows
        self.running: tuple[str, float] | None = None  # the phase that goes on, and when it began
        self.started = time.perf_counter()  # the step
        self.seconds = 0.0  # of all steps that trained
        self.steps_timed = 0
        self.memory: dict[str, float] = {}  # GiB at the fullest moment of each phase
        self.first_val: dict[str, float] = {}
        self.last_val: dict[str, float] = {}
        self.trackers: Any = None  # look.tracking.Trackers
        self.doctor: Any = None  # look.doctor.Doctor
        self.bar: Any = None
        if self.rank == 0:
            self.open(first_step, settings, wandb_id)

    def open(self, first_step: int, settings: dict, wandb_id: str | None) -> None:
        """What rank 0 needs: the folder, less what steps left that are done again; progress bar, doctor, trackers."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        before = keep_lines_before(self.run_dir / "metrics.jsonl", first_step)
        drop_failures_from(self.run_dir / "rollouts", first_step)
        self.first_val = next((record for record in before if validation_means(record)), {})
        if self.cfg.diagnose:
            from look.doctor import Doctor

            self.doctor = Doctor(settings)
            for record in before:
                self.doctor.lines(record)
        if "console" in self.cfg.logger and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=self.total_steps, initial=first_step, unit="step", dynamic_ncols=True)
        if set(self.cfg.logger) - {"console"}:
            from look.tracking import Trackers

            self.trackers = Trackers(self.cfg, self.run_dir, first_step, settings, wandb_id)

    @property
    def wandb_id(self) -> str | None:
        """The wandb run's, on rank 0."""
        return self.trackers.wandb_id if self.trackers else None

    def start_clock(self) -> None:
        """The first step begins."""
        self.started = time.perf_counter()

    def phase(self, name: str | None) -> None:
        """Begin a phase of the step, and end the one before: its seconds are added to timing_s/PHASE. On a GPU also
        perf/memory_gb/PHASE: torch's peak and all else on the card, without what torch keeps idle."""
        now = time.perf_counter()
        if self.running:
            before, start = self.running
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                now = time.perf_counter()
            if now - start >= LEAST_S:
                self.metrics[f"timing_s/{before}"] = self.metrics.get(f"timing_s/{before}", 0.0) + now - start
                if torch.cuda.is_available():
                    held = f"perf/memory_gb/{before}"
                    self.metrics[held] = max(memory_held(), self.metrics.get(held, 0.0))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.running = (name, now) if name else None

    def add(self, metrics: dict[str, float]) -> None:
        """Numbers of the step that goes on."""
        self.metrics |= metrics

    def end_step(self, step: int) -> None:
        """Write what was added since the last step as one record."""
        self.phase(None)
        m, self.metrics = self.metrics, {}
        shown, self.samples = self.samples, []
        now = time.perf_counter()
        m["timing_s/step"] = now - self.started
        self.started = now
        self.add_rates(m)
        if val := {name: value for name, value in m.items() if name.startswith("val/")}:
            self.first_val = self.first_val or val
            self.last_val = val
        if self.rank:
            return
        with open(self.run_dir / "metrics.jsonl", "a") as file:
            file.write(to_json({"step": step, **m}) + "\n")
            file.flush()
            os.fsync(file.fileno())  # no checkpoint may know of a step that the records lost
        if self.trackers:
            self.trackers.log(step, m, shown)
        self.show(step, m, shown)
        if self.bar:
            self.bar.update(min(step + 1, self.total_steps) - self.bar.n)

    def add_rates(self, m: dict[str, float]) -> None:
        """Tokens a second, and the step's memory."""
        if "perf/total_num_tokens" in m:
            self.seconds += m["timing_s/step"]
            self.steps_timed += 1
            world_size = dist.get_world_size() if dist.is_initialized() else 1
            m["perf/throughput"] = m["perf/total_num_tokens"] / m["timing_s/step"] / world_size
            m["perf/gen_tokens_per_s"] = m.pop("perf/response_tokens") / m["timing_s/gen"]
            m["perf/train_tokens_per_s"] = m["perf/total_num_tokens"] / m["timing_s/update_actor"]
        prefix = "perf/memory_gb/"
        memory = {name.removeprefix(prefix): value for name, value in m.items() if name.startswith(prefix)}
        for phase, gb in memory.items():
            self.memory[phase] = max(gb, self.memory.get(phase, 0.0))
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        m["perf/max_memory_gb"] = max(memory.values()) if memory else host

    def show(self, step: int, m: dict[str, float], shown: list[dict]) -> None:
        """The step on the console: a line, what looks wrong with it, and samples when they are due."""
        if "console" not in self.cfg.logger:
            return
        self.say(self.console_line(step, m))
        for line in self.doctor.lines({"step": step, **m}) if self.doctor else ():
            self.say(line)
        if shown:
            self.say(sample_table(shown, shutil.get_terminal_size((160, 24)).columns))

    def console_line(self, step: int, m: dict[str, float]) -> str:
        """A step in one line: how far, the numbers that matter, how fast."""
        trained = "timing_s/gen" in m
        done = f"step {min(step + 1, self.total_steps)}/{self.total_steps}"
        parts = [done if trained else f"end of {self.total_steps} steps"]
        parts += [f"{label} {m[name]:{form}}" for label, name, form in SHOWN if name in m]
        parts += [f"{name.removeprefix('val/')} {m[name]:.3f}" for name in validation_means(m)]
        if m.get("actor/skipped_steps"):
            parts.append(f"SKIPPED {m['actor/skipped_steps']} updates: the gradient was not finite")
        if self.steps_timed and trained:
            left = int((self.total_steps - step - 1) * self.seconds / self.steps_timed)
            speed = f"{m['perf/throughput']:.0f} tok/s  {m['timing_s/step']:.2f} s"
            parts.append(f"{speed}  {left // 60}:{left % 60:02d} left")
        return "  ".join(parts)

    def say(self, text: str) -> None:
        """One line on the console of rank 0, above the progress bar."""
        if self.rank == 0:
            text = printable(text)
            if self.bar:
                self.bar.write(text, file=sys.stdout)
            else:
                put(text)

    def dump(self, name: str, trajectories: list[Trajectory]) -> None:
        """One JSON line a trajectory into rollouts/NAME.jsonl."""
        self.write_lines(Path("rollouts") / f"{name}.jsonl", map(dump_record, trajectories))

    def keep(self, step: int, trajectories: list[Trajectory], cfg, actor, tokenizer) -> None:
        """What is left of a step's trajectories: dump, trace, samples, each when it is due. A collective."""
        if self.cfg.rollout_dump_freq and step % self.cfg.rollout_dump_freq == 0:
            self.dump(f"{step:06d}", trajectories)
        traced = cfg.trainer.trace_groups
        if traced and step % cfg.trainer.trace_freq == 0:
            from look.trace import gather_entropies, trace_records

            gather_entropies(trajectories, traced, actor)
            records = trace_records(trajectories, traced, actor, tokenizer, cfg.algorithm.gamma)
            self.write_lines(Path("traces") / f"{step:06d}.jsonl", records)
        if self.cfg.samples_every and step % self.cfg.samples_every == 0:
            self.samples = samples(trajectories)

    def write_lines(self, name: Path, records: Iterable[dict]) -> None:
        """A file of them, there when it is whole."""
        if self.rank == 0:
            path = self.run_dir / name
            part = path.with_name(f".{path.name}")
            path.parent.mkdir(exist_ok=True)
            with open(part, "w") as file:
                file.writelines(to_json(record) + "\n" for record in records)
            os.replace(part, path)

    def failures(self, name: str, groups: list) -> None:
        """The traceback of every session that failed into rollouts/NAME.failed.jsonl, and a line about the first."""
        failed = [{"row": g.task.index, "place": g.index, "error": error} for g in groups for error in g.errors]
        if self.rank or not failed:
            return
        path = self.run_dir / "rollouts" / f"{name}.failed.jsonl"
        path.parent.mkdir(exist_ok=True)
        with open(path, "a") as file:
            file.writelines(to_json(record) + "\n" for record in failed)
        num_groups = sum(bool(g.errors) for g in groups)
        last_line = failed[0]["error"].strip().splitlines()[-1]
        self.say(f"{len(failed)} sessions of {num_groups} groups failed ({path}); the first: {last_line}")

    def finish(self) -> None:
        """The last lines of a run: validation before and after, the memory of each phase, where the files are."""
        for name in validation_means(self.last_val):
            before = self.first_val.get(name, math.nan)
            self.say(f"{name}: {before:.4f} before, {self.last_val[name]:.4f} after")
        if self.memory:
            phases = ", ".join(f"{phase} {gb:.1f}" for phase, gb in self.memory.items())
            self.say(f"GPU memory at the fullest moment of each phase, GiB: {phases}")
        if self.rank == 0:
            files = ", ".join(sorted(path.name for path in self.run_dir.iterdir()))
            self.say(f"the run's files are in {self.run_dir}: {files}")
        if self.bar:
            self.bar.close()
        if self.trackers:
            self.trackers.finish()


def memory_held() -> float:
    """GiB on the card at the fullest moment since the phase began."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_allocated()) / 2**30


def start_log(cfg, state, checkpoint: Path | None, total_steps: int) -> Logger:
    """The run's folder, with the resolved configuration in it and on the console (cfg: Config, state: RunState). A
    validation alone has a folder of its own in it, and leaves the run as it is."""
    alone = cfg.trainer.val_only
    run_dir = cfg.run_dir / "val-only" if alone else cfg.run_dir
    if not dist.is_initialized() or dist.get_rank() == 0:
        aside = None if checkpoint and not alone else move_aside(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            knob = f"log.default_local_dir={cfg.log.default_local_dir}"
            raise ValueError(f"{knob}: no folder can be made there: {error}") from error
        settings = to_yaml(cfg)
        write_durably(run_dir / "config.yaml", settings)
        print(settings)
        if checkpoint:
            print(f"resuming from {checkpoint}", flush=True)
        elif aside:
            print(f"the earlier run in {run_dir} is now in {aside}", flush=True)
        else:
            print(f"a new run in {run_dir}", flush=True)
    return Logger(cfg.log, run_dir, state.step, total_steps, asdict(cfg), None if alone else state.wandb_id)


def validation_means(metrics: dict[str, float]) -> list[str]:
    """Names of validation's mean@n, one a data source."""
    return [name for name in metrics if re.fullmatch(r"val/.+/mean@\d+", name)]


def drop_failures_from(folder: Path, step: int) -> None:
    """Delete tracebacks of steps that are done again: other dumps are overwritten, these grow."""
    for path in folder.glob("*.failed.jsonl"):
        if int(path.name.removeprefix("val-").partition(".")[0]) >= step:
            path.unlink()
