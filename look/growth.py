"""How a step's cost grows with the length of responses and the number of sessions: `python -m look.growth OUT.json [flags of train.py]`.

One process and one vLLM for all points, on bench.py's fixed workload: its loop, with another number of prompts and tokens for each step. Of a point's steps
the last counts, the ones before it warm up.
"""

import json
import sys
import tempfile
from pathlib import Path

from host import rank
from look import bench

POINTS = [
    (64, 512, 4),
    (32, 1024, 2),
    (16, 2048, 1),
    (8, 4096, 1),
    (4, 8192, 1),
    (8, 512, 2),
    (16, 512, 2),
    (32, 512, 2),
    (128, 512, 2),
]  # prompts of 8 sessions, tokens of a response, steps
FLAGS = [
    *bench.QUIET,
    *"""--config configs/bench_qwen3_0_6b.yaml --data.train-batch-size 128 --actor.ppo-mini-batch-size 128 --rollout.max-num-seqs 1024
 --log.samples-every 0 --trainer.trace-groups 0 --data.val-files""".split(),
]
PHASES = ("gen", "old_log_prob", "update_actor", "sync", "step")


def run(out: str, flags: list[str], points=POINTS, shape: str = "qwen3-0.6b") -> None:
    import train
    from config import load_config

    steps = [point[:2] for point in points for _ in range(point[2])]
    longest = ["--data.max-response-length", str(max(tokens for _, tokens in steps))]
    sample = train.sample

    def sample_point(cfg, engine, scorer, stream, step, log):
        for knob, value in zip(("train_batch_size", "max_response_length"), steps[step]):
            object.__setattr__(cfg.data, knob, value)  # a frozen dataclass, that everything reads when it needs it
        return sample(cfg, engine, scorer, stream, step, log)

    train.sample = sample_point
    with tempfile.TemporaryDirectory() as folder:
        sizes = load_config([*FLAGS, *flags, *longest, "--actor.path", "dummy", "--data.train-files", "dummy"]).data
        dummy = bench.dummy_flags(shape, 4 * sizes.train_batch_size, sizes.max_prompt_length, tempfile.gettempdir())
        cfg = load_config(
            [
                *FLAGS,
                *flags,
                *longest,
                *dummy,
                "--trainer.total-training-steps",
                str(len(steps)),
                "--log.default-local-dir",
                folder,
            ]
        )
        train.train(cfg)
        records = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
    last = {point: record for point, record in zip(steps, records)}
    args, rows = bench.parse([])[0], []
    for (prompts, tokens), record in last.items():
        phases = bench.measure([record], bench.Work(cfg, record, 1), args)
        rows.append(
            {"sessions": prompts * cfg.rollout.n, "response": tokens, "phases": {name: phases[name] for name in PHASES}}
        )
    Path(out).write_text(json.dumps({"points": rows, "metrics": records}, indent=1))
    print(
        f"{'sessions':>9}{'response':>9}"
        + "".join(f"{name:>14}" for name in PHASES)
        + f"{'tokens/s':>10}{'gen tokens/s':>14}{'update MFU':>12}{'x floor':>9}"
    )
    for row in rows:
        p = row["phases"]
        print(
            f"{row['sessions']:>9}{row['response']:>9}"
            + "".join(f"{p[name]['seconds']:>14.2f}" for name in PHASES)
            + f"{p['step']['tokens_per_s']:>10,.0f}{p['gen']['tokens_per_s']:>14,.0f}{p['update_actor']['mfu']:>12.1%}{p['step']['ratio']:>9.1f}"
        )


if __name__ == "__main__":
    rank.run(lambda: run(sys.argv[1], sys.argv[2:]))
