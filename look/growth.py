"""How a step's cost grows with the length of responses and the number of sessions.

`python -m look.growth OUT.json [flags of train.py]`: one process and one vLLM for all points, on look.bench's fixed
workload and by its loop, with another number of prompts and tokens for each step. Of a point's steps the last counts,
the ones before it warm up.
"""

import argparse
import contextlib
import json
import tempfile
from pathlib import Path

from batch import Trajectory
from host import rank
from look import bench

POINTS = [  # prompts of 8 sessions, tokens of a response, steps
    (64, 512, 4),
    (32, 1024, 2),
    (16, 2048, 1),
    (8, 4096, 1),
    (4, 8192, 1),
    (8, 512, 2),
    (16, 512, 2),
    (32, 512, 2),
    (128, 512, 2),
]
FLAGS = [
    *bench.QUIET,
    *("--config", "configs/bench_qwen3_0_6b.yaml"),
    *("--data.train-batch-size", "128"),
    *("--actor.ppo-mini-batch-size", "128"),
    *("--rollout.max-num-seqs", "1024"),
    *("--log.samples-every", "0"),
    *("--trainer.trace-groups", "0"),
    "--data.val-files",  # none
]
PHASES = ("gen", "old_log_prob", "update_actor", "sync", "step")


def run(out: str, flags: list[str], points: list = POINTS, shape: str = "qwen3-0.6b") -> None:
    """Run all points, write OUT and print the table."""
    steps = [(prompts, tokens) for prompts, tokens, repeats in points for _ in range(repeats)]
    longest = max(tokens for _, tokens in steps)
    flags = [*FLAGS, *flags, "--data.max-response-length", str(longest)]
    with tempfile.TemporaryDirectory() as folder:
        cfg, records = train_points(steps, flags, shape, folder)
    if len(records) <= len(steps):
        raise SystemExit(f"stopped after {len(records)} of {len(steps)} steps: {out} is not written")
    last = dict(zip(steps, records))
    args, _ = bench.parse([])
    rows = []
    for (prompts, tokens), record in last.items():
        phases = bench.measure([record], bench.Work(cfg, record, 1), args)
        of_point = {name: phases[name] for name in PHASES}
        rows.append({"sessions": prompts * cfg.rollout.n, "response": tokens, "phases": of_point})
    Path(out).write_text(json.dumps({"points": rows, "metrics": records}, indent=1))
    print_table(rows)


def train_points(steps: list[tuple[int, int]], flags: list[str], shape: str, folder: str) -> tuple:
    """A run in `folder` whose steps have these (prompts, tokens of a response): its configuration and its records."""
    import train
    from config import load_config

    sizes = load_config([*flags, "--actor.path", "dummy", "--data.train-files", "dummy"]).data
    rows = 4 * sizes.train_batch_size
    dummy = bench.dummy_flags(shape, rows, sizes.max_prompt_length, tempfile.gettempdir())
    ends = ["--trainer.total-training-steps", str(len(steps)), "--log.default-local-dir", folder]
    cfg = load_config([*flags, *dummy, *ends])
    sample = train.sample

    def sample_point(run, step: int) -> list[Trajectory]:
        data = run.cfg.data  # a frozen dataclass, that everything reads when it needs it
        prompts, tokens = steps[step]
        object.__setattr__(data, "train_batch_size", prompts)
        object.__setattr__(data, "max_response_length", tokens)
        return sample(run, step)

    train.sample = sample_point
    training = train.start(cfg)
    with contextlib.suppress(rank.ToldToStop):
        train.train(training)
    train.finish(training)
    return cfg, [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]


def print_table(rows: list[dict]) -> None:
    """A line a point."""
    head = f"{'sessions':>9}{'response':>9}" + "".join(f"{name:>14}" for name in PHASES)
    print(head + f"{'tokens/s':>10}{'gen tokens/s':>14}{'update MFU':>12}{'x floor':>9}")
    for row in rows:
        phases = row["phases"]
        step = phases["step"]
        line = f"{row['sessions']:>9}{row['response']:>9}"
        line += "".join(f"{phases[name]['seconds']:>14.2f}" for name in PHASES)
        line += f"{step['tokens_per_s']:>10,.0f}{phases['gen']['tokens_per_s']:>14,.0f}"
        print(line + f"{phases['update_actor']['mfu']:>12.1%}{step['ratio']:>9.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m look.growth", description=__doc__, allow_abbrev=False)
    parser.add_argument("out", metavar="OUT.json", help="the file to write; what follows are flags of train.py")
    args, flags = parser.parse_known_args()
    rank.run(lambda: run(args.out, flags))
