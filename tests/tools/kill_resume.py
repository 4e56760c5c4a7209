"""kill -9 of a run at 20 moments, the same command again each time, and what comes out against the run that nobody killed: `python tests/tools/kill_resume.py`.

Eight steps of the tiny model with whatever a resumed run could get wrong: shuffled rows that failing groups draw at odd places, two updates
a step, KL in loss and (steered) in reward, validations, dumps. Every number of metrics.jsonl but the times, every file of rollouts and hf, and
weights, optimizer and random states of the last checkpoint must be the same bits; no step missing or twice. A chain of kills shares one folder.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from conftest import flags, launch_command, launch_environment, write_model  # noqa: E402

from host.disk import newest  # noqa: E402

STEPS = 8
FLAGS = (
    "--trainer.total-training-steps",
    str(STEPS),
    "--checkpoint.save-freq",
    "2",
    "--trainer.test-freq",
    "3",
    "--loss.use-kl-loss",
    "--ref.param-offload",
    "--loss.rollout-is",
    "token",
    "--algorithm.use-kl-in-reward",
    "--algorithm.kl-ctrl-type",
    "adaptive",
    "--loss.entropy-coeff",
    "0.01",
    "--actor.shuffle",
    "--rollout.failed-groups",
    "refill",
    "--rollout.max-failed-fraction",
    "1",
)
TIMES = ("timing_s/", "perf/")
MOST_S, END_S = 240, 30  # a launch; the end of the other processes after one was killed

AGENT = """
from agent import single_turn_agent


async def fails_sometimes(task, policy, cfg):
    if task.messages[0]["content"].startswith(("14", "23")):
        raise LookupError("nothing is known of " + task.messages[0]["content"])
    return await single_turn_agent(task, policy, cfg)
"""
SCRIPT = """
import sys
sys.path[:0] = [{tools!r}, {root!r}]
import kill_resume
from host import rank
import train
kill_resume.arm()
rank.run(lambda: train.main(sys.argv[1:]))
"""
DIGITS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""

POINTS = {  # name: (function, killed before it, after it or halfway through, what its arguments have in them)
    "start-up, vLLM is there": ("engine:Engine.__init__", "after", ""),
    "sessions run": ("rollout:Rollout.run_session", "before", ""),
    "between two updates": ("actor:Actor.optimizer_step", "after", ""),
    "weights in vLLM": ("engine:Engine.load_weights", "after", ""),
    "validation sampled": ("train:validation_metrics", "before", ""),
    "half a record": ("log:to_json", "half", "'step':"),
    "half a dump": ("log:to_json", "before", "'key':"),
    "record, no checkpoint": ("log:Logger.end_step", "after", ""),
    "inside a checkpoint's file": ("torch.distributed.checkpoint.filesystem:_write_item", "after", ""),
    "between the ranks' writes": ("torch.distributed.checkpoint.filesystem:_FileSystemWriter.write_data", "before", ""),
    "manifest, no name yet": ("os:rename", "before", "/.step-"),
    "renamed, no latest": ("checkpoint:write_durably", "before", "checkpoints/latest"),
    "saved, nothing pruned": ("checkpoint:prune", "before", ""),
    "half pruned": ("shutil:rmtree", "half", "/step-"),
    "best not named yet": ("checkpoint:write_durably", "before", "checkpoints/best"),
    "resume: half of config.yaml": ("pathlib:Path.write_text", "half", "config.yaml"),
    "resume: half of metrics.jsonl": ("pathlib:Path.write_text", "half", "metrics.jsonl"),
    "resume: metrics.jsonl not replaced": ("os:replace", "before", "/metrics.jsonl"),
    "half of hf's weights": ("checkpoint:write_weights", "half", ""),
    "any moment": None,  # from outside: the call is the number of records, then up to a second more
}


@dataclass(frozen=True)
class Kill:
    point: str
    calls: range | tuple = (1,)  # one of these is drawn: the how-manieth call of the function, in that process
    rank: int = 0
    alone: bool = (
        False  # only this rank is killed, and the others have to end by themselves; else every process at once
    )


CHAINS = [  # (processes, kills): each starts from nothing, and in the end the run is finished and compared
    (1, [Kill("start-up, vLLM is there"), Kill("sessions run", range(80, 100)), Kill("resume: half of metrics.jsonl")]),
    (
        2,
        [
            Kill("between two updates", range(5, 8, 2), rank=1, alone=True),
            Kill("resume: metrics.jsonl not replaced"),
            Kill("between the ranks' writes", range(1, 5), rank=1, alone=True),
        ],
    ),
    (
        1,
        [
            Kill("between two updates", range(5, 8, 2)),
            Kill("resume: half of config.yaml"),
            Kill("manifest, no name yet", (1, 2)),
        ],
    ),
    (
        2,
        [
            Kill("inside a checkpoint's file", range(130, 200), rank=1),
            Kill("weights in vLLM", (2, 3), alone=True),
            Kill("half pruned"),
        ],
    ),
    (
        1,
        [
            Kill("inside a checkpoint's file", range(130, 200)),
            Kill("half a record", (2, 3)),
            Kill("half of hf's weights"),
        ],
    ),
    (2, [Kill("any moment", range(1, 5)), Kill("any moment", range(5, 9))]),
    (1, [Kill("renamed, no latest", (2,)), Kill("validation sampled"), Kill("best not named yet")]),
    (
        2,
        [
            Kill("saved, nothing pruned", (1, 2)),
            Kill("record, no checkpoint", (2, 4), alone=True),
            Kill("half a dump", range(10, 30)),
        ],
    ),
    (1, [Kill("any moment", range(1, 5)), Kill("any moment", range(5, 9))]),
]


# In the process that is to die


def arm() -> None:
    """Wrap the function of this launch's kill, on the rank that it is for."""
    if "KILL" not in os.environ or os.environ.get("RANK", "0") != os.environ["KILL_ON"]:
        return
    where, when, text = POINTS[os.environ["KILL"]]
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    whole, calls = getattr(owner, name), iter(range(1, 10**9))

    @functools.wraps(whole)
    def counted(*args, **kwargs):
        if text not in str(args) or next(calls) != int(os.environ["KILL_CALL"]):
            return whole(*args, **kwargs)
        if when == "after":
            whole(*args, **kwargs)
        elif when == "half":
            {"write_text": half_text, "to_json": half_record, "rmtree": half_tree, "write_weights": half_weights}[name](
                whole, *args
            )
        elif name == "write_data":
            time.sleep(0.5)  # the other rank's are written meanwhile
        die()

    setattr(owner, name, counted)


def half_text(whole, path: Path, text: str) -> None:
    whole(path, text[: len(text) // 2])


def half_record(whole, record: dict) -> None:
    with open(Path(os.environ["KILL_RUN"]) / "metrics.jsonl", "a") as file:
        file.write(whole(record)[:200])


def half_tree(whole, folder: Path) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[::2]:
        path.unlink()


def half_weights(whole, folder: Path, *rest) -> None:
    whole(folder, *rest)
    os.truncate(folder / "model.safetensors", 10_000)


def die() -> None:
    """kill -9 of this process, or of the launcher and all that came of it."""
    (Path(os.environ["KILL_RUN"]).parent / "killed").touch()
    if os.environ["KILL_ALONE"] == "False":
        process = psutil.Process()
        while process.ppid() != int(os.environ["KILL_FROM"]):
            process = process.parent()
        kill_tree(process)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_tree(root: psutil.Process) -> None:
    """All of them but this process."""
    for process in [root, *root.children(recursive=True)]:
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.kill()


# In the process that watches


def make_tiny(folder: Path) -> Path:
    """What the fixture `tiny` makes, outside pytest."""
    from tasks.quickstart import make_row

    write_model(folder / "model")
    for split, numbers in (("train", range(10, 42)), ("val", range(42, 50))):
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(make_row(n, n + 3, split, i)) + "\n" for i, n in enumerate(numbers))
        )
    (folder / "digits.py").write_text(DIGITS)
    return folder


class Run:
    """A folder in which one command is started again and again, until it ends by itself."""

    def __init__(self, tiny: Path, folder: Path, processes: int):
        self.folder, self.run_dir, self.processes = folder, folder / "run", processes
        folder.mkdir()
        (tiny / "agent.py").write_text(AGENT)  # the same path in every folder: tracebacks are compared, too
        (folder / "start.py").write_text(SCRIPT.format(tools=str(ROOT / "tests" / "tools"), root=str(ROOT)))
        args = flags(
            tiny,
            *FLAGS,
            "--agent.custom-path",
            f"{tiny / 'agent.py'}:fails_sometimes",
            "--log.default-local-dir",
            str(folder),
        )
        self.command = launch_command(args, processes, folder / "start.py")

    def start(self, kill: Kill | None = None, call: int = 0) -> str:
        """Start it; returns its console once all of its processes are gone. AssertionError when they don't go, or do so with the wrong exit code."""
        env = (
            {}
            if kill is None or POINTS[kill.point] is None
            else {"KILL": kill.point, "KILL_ON": str(kill.rank), "KILL_CALL": str(call), "KILL_ALONE": str(kill.alone)}
        )
        (self.folder / "killed").unlink(missing_ok=True)
        with open(self.folder / "console", "w") as console:
            environment = launch_environment(KILL_RUN=str(self.run_dir), KILL_FROM=str(os.getpid()), **env)
            process = subprocess.Popen(self.command, env=environment, stdout=console, stderr=subprocess.STDOUT)
        if kill and not env:
            self.kill_after(process, call)
        code = process.wait(MOST_S)
        self.wait_until_gone()
        text = (self.folder / "console").read_text()
        assert (code != 0) == (kill is not None) == (self.folder / "killed").exists(), (
            f"exit code {code} of {kill}:\n{text[-3000:]}"
        )
        return text

    def kill_after(self, process, records: int) -> None:
        """From outside: once there are so many records, and up to a second later."""
        deadline = time.time() + MOST_S
        while len(self.records()) < records:
            assert process.poll() is None and time.time() < deadline, (self.folder / "console").read_text()[-3000:]
            time.sleep(0.02)
        time.sleep(random.random())
        if process.poll() is None:
            (self.folder / "killed").touch()
            kill_tree(psutil.Process(process.pid))

    def wait_until_gone(self) -> None:
        deadline = time.time() + END_S
        while left := [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(self.folder) in " ".join(p.info["cmdline"] or []) and p.pid != os.getpid()
        ]:
            assert time.time() < deadline, f"still there: {left}"
            time.sleep(0.05)

    def records(self) -> list[dict]:
        """Complete lines of metrics.jsonl, without the times."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [
            {k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)}
            for line in lines
            if line.endswith("\n")
        ]

    def lost(self, whole: "Run") -> list[str]:
        """What a kill took that no resume gives back: steps that a complete checkpoint has done, and that are not as they were in the whole run."""
        checkpoints = self.run_dir / "checkpoints"
        saved = newest(checkpoints) if list(checkpoints.glob("step-*")) else None
        expected = whole.records()[: int(saved.name[5:]) if saved else 0]
        return [f"record {record['step']} is lost" for record in expected if record not in self.records()]

    def differences(self, whole: "Run") -> list[str]:
        """How the finished run differs from the whole one, a line each."""
        steps, ours = [r["step"] for r in self.records()], {r["step"]: r for r in self.records()}
        found = [f"steps {steps} are in metrics.jsonl"] if steps != list(range(STEPS + 1)) else []
        pairs = [(ours[b["step"]], b) for b in whole.records() if b["step"] in ours]
        found += [
            f"step {b['step']}: {k} {a.get(k)} instead of {b.get(k)}"
            for a, b in pairs
            for k in sorted({*a, *b})
            if a.get(k) != b.get(k)
        ]
        for kind in ("rollouts", "hf"):
            a, b = ({path.name: path.read_bytes() for path in (run.run_dir / kind).iterdir()} for run in (self, whole))
            found += [f"{kind}/{name} is not the same" for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
        a, b = read_checkpoint(self.run_dir), read_checkpoint(whole.run_dir)
        return found + [
            f"the checkpoint's {name} is not the same" for name in sorted({*a, *b}) if a.get(name) != b.get(name)
        ]


def read_checkpoint(run_dir: Path) -> dict[str, bytes]:
    """The bytes of all that the newest checkpoint holds: every tensor of weights and optimizer, random states, and what the run noted."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = newest(run_dir / "checkpoints")
    state = json.loads((folder / "state.json").read_text())
    found = {
        f"state {name}": json.dumps(value).encode() for name, value in state.items() if name != "config"
    }  # which names the run's folder
    found |= {
        "best": (run_dir / "checkpoints" / "best").read_bytes(),
        "latest": (run_dir / "checkpoints" / "latest").read_bytes(),
    }
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(folder / name, file.name)
            found |= flatten(torch.load(file.name, weights_only=False), name)
    for path in folder.glob("random_states_*.pkl"):
        found |= flatten(torch.load(path, weights_only=False), path.stem)
    assert sum("model.layers" in name for name in found) > 50
    return found


def flatten(tree, name: str) -> dict[str, bytes]:
    import torch

    if isinstance(tree, (dict, list)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, value in items for k, v in flatten(value, f"{name} {key}").items()}
    return {name: tree.numpy().tobytes() if isinstance(tree, torch.Tensor) else pickle.dumps(tree)}


def kill_chain(run: Run, whole: Run, kills: list[Kill], say=print) -> int:
    """Each of the kills, then the rest of the run; a line each. Returns the number of differences."""
    rows, total = [], 0
    for kill in [*kills, None]:
        call = random.choice(kill.calls) if kill else 0
        console = run.start(kill, call)
        if rows:
            began = re.search(
                r"resuming from .*(step-\d+)|is now in|a new run", console
            )  # None: killed before it said so
            point, how, killed_at, lost = rows.pop()
            found = lost if kill else lost + run.differences(whole)
            say(
                f"{point:<36}{run.processes:>5}  {how:<10}{killed_at:<24}{(began and began[1]) or ('from the start' if began else 'killed before'):<16}{len(found)}"
            )
            for line in found:
                say(f"    {line}")
            total += len(found)
        if kill:
            done = len(run.records())
            rows.append(
                (
                    kill.point,
                    f"rank {kill.rank}" if kill.alone else "all",
                    f"call {call}, {done} records" if POINTS[kill.point] else f"{done} records",
                    run.lost(whole),
                )
            )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="the first so many of the list; more are at any moment")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    chains = CHAINS + [
        (1 + i % 2, [Kill("any moment", range(1, 5)), Kill("any moment", range(5, 9))]) for i in range(args.kills)
    ]
    differences, done, start = 0, 0, time.time()
    folder = Path(tempfile.mkdtemp())
    tiny = make_tiny(folder / "tiny")
    whole = {}
    print(f"{'killed':<36}{'ranks':>5}  {'who':<10}{'at':<24}{'went on from':<16}differences", flush=True)
    for number, (processes, kills) in enumerate(chains):
        if kills := kills[: args.kills - done]:
            if processes not in whole:
                whole[processes] = Run(tiny, folder / f"whole-{processes}", processes)
                whole[processes].start()
            differences += kill_chain(
                Run(tiny, folder / f"chain-{number}", processes),
                whole[processes],
                kills,
                functools.partial(print, flush=True),
            )
            done += len(kills)
    print(f"{done} kills, {differences} differences ({time.time() - start:.0f} s)")
    if differences:
        sys.exit(f"the runs are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
