"""Where a run leaves its traces: metrics.jsonl, one console line a step, wandb and TensorBoard, the rollouts, and the time and memory of each phase."""

import contextlib
import dataclasses
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import yaml

from batch import Trajectory
from host.console import printable
from host.disk import move_aside, to_json, whole_lines, write_durably
from look.doctor import Doctor
from look.trace import gather_entropies, trace_records
from look.tracking import Trackers
from metrics import dump_record, sample_table, samples


@dataclass(frozen=True)
class LogConfig:
    project_name: str = "lockstep"
    """Project, for wandb."""
    experiment_name: str = "run"
    """Name of the run, and of its folder."""
    default_local_dir: str = "runs"
    """Folder that runs are put into."""
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = ("console",)
    """Where metrics go besides metrics.jsonl: console, wandb, tensorboard (RUN/tensorboard)."""
    samples_every: int = 10
    """Steps between tables of a few samples, on the console and in the trackers; 0 for none."""
    rollout_dump_freq: int = 1
    """Steps between dumps of the rollouts to rollouts/STEP.jsonl; 0 for none. Validations are always dumped."""
    replay_steps: tuple[int, ...] = ()
    """Steps whose first mini-batch is written to replays/STEP with the weights that it met, for `python -m look.replay`. Skipped ones are, too."""
    max_skipped_steps: int = 3
    """Stop after so many steps in a row that were skipped because a gradient was not finite."""

    def __post_init__(self):
        if self.max_skipped_steps < 1 or min(self.rollout_dump_freq, self.samples_every, *self.replay_steps) < 0:
            raise ValueError(
                f"log.max_skipped_steps={self.max_skipped_steps} must be at least 1, log.rollout_dump_freq={self.rollout_dump_freq}, log.samples_every={self.samples_every} and log.replay_steps={self.replay_steps} not negative"
            )


class Logger:
    """Rank 0 writes; the other ranks time themselves and stay silent."""

    def __init__(
        self, cfg: LogConfig, run_dir: Path, rank: int, steps: tuple[int, int], settings: dict, wandb_id: str | None
    ):
        first_step, total_steps = steps
        self.cfg, self.run_dir, self.rank, self.total_steps = cfg, run_dir, rank, total_steps
        self.metrics, self.seconds, self.steps_timed, self.started = {}, 0.0, 0, time.perf_counter()
        self.first_val, self.last_val, self.memory, self.samples, self.trackers, self.bar = {}, {}, {}, [], None, None
        if rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            before = keep_lines_before(run_dir / "metrics.jsonl", first_step)
            self.first_val = next((record for record in before if validation_means(record)), {})
            self.doctor = Doctor(settings)
            for record in before:
                self.doctor.lines(record)
            for path in (run_dir / "rollouts").glob(
                "*.failed.jsonl"
            ):  # of steps that are done again; dumps are overwritten, these grow
                if int(path.name.removeprefix("val-").partition(".")[0]) >= first_step:
                    path.unlink()
            if "console" in cfg.logger and sys.stderr.isatty():
                from tqdm import tqdm

                self.bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)
            self.trackers = Trackers(cfg, run_dir, first_step, settings, wandb_id)

    def start_clock(self) -> None:  # of the first step
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def timer(self, phase: str):
        """Adds to timing_s/PHASE; on a GPU also notes torch's peak in the phase and all else that the card holds, without what torch keeps idle."""
        start, on_gpu = time.perf_counter(), torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        yield
        if on_gpu:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            held = (total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_allocated()) / 2**30
            self.metrics[f"perf/memory_gb/{phase}"] = max(held, self.metrics.get(f"perf/memory_gb/{phase}", 0.0))
        self.metrics[f"timing_s/{phase}"] = self.metrics.get(f"timing_s/{phase}", 0.0) + time.perf_counter() - start

    def add(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def end_step(self, step: int) -> None:
        """Write what was added since the last step as one record."""
        m, self.metrics, started, self.started = self.metrics, {}, self.started, time.perf_counter()
        m["timing_s/step"] = self.started - started
        if "perf/total_num_tokens" in m:
            self.seconds, self.steps_timed = self.seconds + m["timing_s/step"], self.steps_timed + 1
            m["perf/throughput"] = (
                m["perf/total_num_tokens"]
                / m["timing_s/step"]
                / (dist.get_world_size() if dist.is_initialized() else 1)
            )
            m["perf/gen_tokens_per_s"] = m.pop("perf/response_tokens") / m["timing_s/gen"]
            m["perf/train_tokens_per_s"] = m["perf/total_num_tokens"] / m["timing_s/update_actor"]
        memory = {
            name.removeprefix("perf/memory_gb/"): value
            for name, value in m.items()
            if name.startswith("perf/memory_gb/")
        }
        self.memory |= {phase: max(gb, self.memory.get(phase, 0.0)) for phase, gb in memory.items()}
        m["perf/max_memory_gb"] = (
            max(memory.values()) if memory else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        )
        if val := {name: value for name, value in m.items() if name.startswith("val/")}:
            self.first_val, self.last_val = self.first_val or val, val
        if self.rank:
            return
        with open(self.run_dir / "metrics.jsonl", "a") as file:
            file.write(to_json({"step": step, **m}) + "\n")
            file.flush()
            os.fsync(file.fileno())  # no checkpoint may know of a step that the records lost
        self.trackers.log(step, m, self.samples)
        if "console" in self.cfg.logger:
            self.say(self.console_line(step, m))
            for line in self.doctor.lines({"step": step, **m}):
                self.say(line)
            if self.samples:
                self.say(sample_table(self.samples, shutil.get_terminal_size((160, 24)).columns))
        self.samples = []
        if self.bar:
            self.bar.update(min(step + 1, self.total_steps) - self.bar.n)

    def console_line(self, step: int, m: dict[str, float]) -> str:
        parts = [
            f"step {min(step + 1, self.total_steps)}/{self.total_steps}"
            if "timing_s/gen" in m
            else f"end of {self.total_steps} steps"
        ]
        for label, name, form in [
            ("reward", "reward/mean", ".3f"),
            ("len", "response_length/mean", ".1f"),
            ("loss", "actor/pg_loss", ".4f"),
            ("kl", "actor/kl_loss", ".4f"),
            ("grad", "actor/grad_norm", ".2f"),
            ("entropy", "actor/entropy", ".3f"),
            ("zero-std", "reward/frac_zero_std", ".0%"),
        ]:
            if name in m:
                parts.append(f"{label} {m[name]:{form}}")
        parts += [f"{name.removeprefix('val/')} {m[name]:.3f}" for name in validation_means(m)]
        if m.get("actor/skipped_steps"):
            parts.append(f"SKIPPED {m['actor/skipped_steps']} updates: the gradient was not finite")
        if self.steps_timed and "timing_s/gen" in m:
            left = (self.total_steps - step - 1) * self.seconds / self.steps_timed
            parts.append(
                f"{m['perf/throughput']:.0f} tok/s  {m['timing_s/step']:.2f} s  {int(left) // 60}:{int(left) % 60:02d} left"
            )
        return "  ".join(parts)

    def say(self, text: str) -> None:
        """One line on the console of rank 0, above the progress bar."""
        if self.rank == 0:
            text = printable(text)
            self.bar.write(text, file=sys.stdout) if self.bar else print(text, flush=True)

    def dump(self, name: str, trajectories: list[Trajectory]) -> None:
        """One JSON line a trajectory into rollouts/NAME.jsonl."""
        self.write_lines(Path("rollouts") / f"{name}.jsonl", map(dump_record, trajectories))

    def keep(self, step: int, trajectories: list[Trajectory], cfg, actor, tokenizer) -> None:
        """What is left of a step's trajectories: the dump, the trace, the samples, each when it is due. A collective."""
        if self.cfg.rollout_dump_freq and step % self.cfg.rollout_dump_freq == 0:
            self.dump(f"{step:06d}", trajectories)
        if cfg.trainer.trace_groups and step % cfg.trainer.trace_freq == 0:
            gather_entropies(trajectories, cfg.trainer.trace_groups, actor)
            self.write_lines(
                Path("traces") / f"{step:06d}.jsonl",
                trace_records(trajectories, cfg.trainer.trace_groups, actor, tokenizer, cfg.algorithm.gamma),
            )
        if self.cfg.samples_every and step % self.cfg.samples_every == 0:
            self.samples = samples(trajectories)

    def write_lines(self, name: Path, records: Iterable[dict]) -> None:
        """A file of them, there when it is whole."""
        if self.rank == 0:
            path = self.run_dir / name
            path.parent.mkdir(exist_ok=True)
            with open(path.with_name(f".{path.name}"), "w") as file:
                file.writelines(to_json(record) + "\n" for record in records)
            os.replace(path.with_name(f".{path.name}"), path)

    def failures(self, name: str, groups: list) -> None:
        """The traceback of every session that failed into rollouts/NAME.failed.jsonl, and a line about the first."""
        failed = [{"row": g.task.index, "place": g.index, "error": error} for g in groups for error in g.errors]
        if self.rank or not failed:
            return
        path = self.run_dir / "rollouts" / f"{name}.failed.jsonl"
        path.parent.mkdir(exist_ok=True)
        with open(path, "a") as file:
            file.writelines(to_json(record) + "\n" for record in failed)
        self.say(
            f"{len(failed)} sessions of {sum(bool(g.errors) for g in groups)} groups failed ({path}); the first: {failed[0]['error'].strip().splitlines()[-1]}"
        )

    def finish(self) -> None:
        """The last lines of a run: validation before and after, the memory of each phase, where the files are."""
        for name in validation_means(self.last_val):
            self.say(f"{name}: {self.first_val.get(name, math.nan):.4f} before, {self.last_val[name]:.4f} after")
        if self.memory:
            self.say(
                "GPU memory at the fullest moment of each phase, GiB: "
                + ", ".join(f"{phase} {gb:.1f}" for phase, gb in self.memory.items())
            )
        self.say(
            f"the run's files are in {self.run_dir}: {', '.join(sorted(p.name for p in self.run_dir.iterdir())) if self.rank == 0 else ''}"
        )
        if self.bar:
            self.bar.close()
        if self.trackers:
            self.trackers.finish()


def start_log(cfg, rank: int, checkpoint: Path | None, state: dict, total_steps: int) -> Logger:
    """The run's folder, with the resolved configuration in it and on the console. A validation alone has one of its own in it, and leaves the run as it is."""
    run_dir = cfg.run_dir / "val-only" if cfg.trainer.val_only else cfg.run_dir
    if rank == 0:
        aside = None if checkpoint and not cfg.trainer.val_only else move_aside(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"log.default_local_dir={cfg.log.default_local_dir}: no folder can be made there: {error}"
            ) from error
        settings = to_yaml(cfg)
        write_durably(run_dir / "config.yaml", settings)
        print(settings)
        print(
            f"resuming from {checkpoint}"
            if checkpoint
            else f"the earlier run in {run_dir} is now in {aside}"
            if aside
            else f"a new run in {run_dir}",
            flush=True,
        )
    return Logger(
        cfg.log,
        run_dir,
        rank,
        (state["step"], total_steps),
        dataclasses.asdict(cfg),
        None if cfg.trainer.val_only else state.get("wandb_id"),
    )


def validation_means(metrics: dict[str, float]) -> list[str]:
    return [name for name in metrics if re.fullmatch(r"val/.+/mean@\d+", name)]


def keep_lines_before(path: Path, step: int) -> list[dict]:
    """Drop the records of steps that a resumed run does again, and one that a kill cut short; returns the others. A kill here loses none of them."""
    if not path.exists():
        return []
    records = [record for _, record in whole_lines(path) if record["step"] < step]
    write_durably(path, "".join(to_json(record) + "\n" for record in records))
    return records


def to_yaml(cfg) -> str:
    """The resolved configuration, readable by --config again, with the commit that ran it."""
    tree = dataclasses.asdict(cfg)
    plain = {
        group: {k: list(v) if isinstance(v, tuple) else v for k, v in knobs.items()} for group, knobs in tree.items()
    }
    return f"# commit {git_commit()}\n" + yaml.safe_dump(plain, sort_keys=False)


def git_commit() -> str:
    commands = ["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "-uno"]
    try:
        commit, changed = (
            subprocess.run(
                command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with local changes" if changed else "")
