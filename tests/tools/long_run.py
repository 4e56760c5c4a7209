"""What a long run holds on to: memory, open files, threads and processes at every tenth step, seen from outside: `python tests/tools/long_run.py`.

300 steps of the tiny model with everything that could pile up: checkpoints, validations, rollout dumps, failed sessions, a reference.
Of the run and all its children: RSS, which counts pages that they share several times, and PSS, which counts them once but depends on
other programs too. Fails when RSS grows by more than 2 % from step 50 to the end, or when files, threads, processes or zombies do at all.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from kill_resume import AGENT, flags, launch_command, launch_environment, make_tiny

COLUMNS = ("RSS MiB", "PSS MiB", "open files", "threads", "processes", "zombies")
MOST = 0.02  # growth of memory from step FROM to the end
FROM, EVERY = 50, 10
LOOKS, PAUSE_S = 5, 0.05  # of each sample; the least counts: a file that is open while it is written is no leak


def look(process: psutil.Process) -> dict[str, float]:
    """COLUMNS of a process and all that came of it. A process that ends meanwhile counts as gone."""
    found = dict.fromkeys(COLUMNS, 0)
    for p in [process, *process.children(recursive=True)]:
        try:
            if p.status() == psutil.STATUS_ZOMBIE:
                found["zombies"] += 1
                continue
            memory = p.memory_full_info()
            row = memory.rss / 2**20, memory.pss / 2**20, p.num_fds(), p.num_threads(), 1
        except psutil.NoSuchProcess:
            continue
        for column, value in zip(COLUMNS, row):
            found[column] += value
    return found


def look_often(process: psutil.Process) -> dict[str, float]:
    """The least of several looks."""
    looks = []
    for _ in range(LOOKS):
        looks.append(look(process))
        time.sleep(PAUSE_S)
    return {column: min(found[column] for found in looks) for column in COLUMNS}


def watch(folder: Path, processes: int, steps: int) -> list[tuple[int, dict]]:
    """Run it; (steps done, what `look` saw) at every tenth step."""
    tiny = make_tiny(folder / "tiny")
    (folder / "agent.py").write_text(AGENT)
    more = [
        "--log.default-local-dir",
        str(folder),
        "--trainer.total-training-steps",
        str(steps + EVERY),
        "--actor.lr",
        "1e-4",
        "--checkpoint.save-freq",
        "25",
        "--trainer.test-freq",
        "20",
        "--loss.use-kl-loss",
        "--algorithm.use-kl-in-reward",
        "--ref.param-offload",
        "--rollout.failed-groups",
        "refill",
        "--rollout.max-failed-fraction",
        "1",
        "--algorithm.max-num-gen-batches",
        "4",
        "--agent.custom-path",
        f"{folder / 'agent.py'}:fails_sometimes",
    ]
    command = launch_command(flags(tiny, *more), processes)
    samples, metrics = [], folder / "run" / "metrics.jsonl"
    with (
        open(folder / "console", "w") as console,
        subprocess.Popen(command, env=launch_environment(), stdout=console, stderr=subprocess.STDOUT) as run,
    ):
        while run.poll() is None:
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if done >= EVERY * (len(samples) + 1) and done <= steps:
                samples.append((done, look_often(psutil.Process(run.pid))))
                print(f"{done:>5}" + "".join(f"{samples[-1][1][column]:>12.0f}" for column in COLUMNS), flush=True)
            time.sleep(0.02)
    if run.returncode:
        sys.exit((folder / "console").read_text()[-3000:])
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    print(" step" + "".join(f"{column:>12}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        samples = watch(Path(folder), args.processes, args.steps)
    start, (_, end) = next(found for done, found in samples if done >= FROM), samples[-1]
    growth = {column: end[column] - start[column] for column in COLUMNS}
    print(
        f"growth from step {FROM} to {samples[-1][0]}: "
        + ", ".join(
            f"{column} {change:+.0f} ({change / max(start[column], 1):+.1%})" for column, change in growth.items()
        )
    )
    if growth["RSS MiB"] > MOST * start["RSS MiB"] or any(growth[column] > 0 for column in COLUMNS[2:]):
        sys.exit("it grows")


if __name__ == "__main__":
    main()
