"""A tiny random model and a little data, made once; one process group and one vLLM for the tests that run in this process."""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
with contextlib.suppress(ValueError):  # not the main thread
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would tests


def pytest_collection_modifyitems(items):
    """Whole runs first: what is quick fills the gaps between two workers at the end."""
    folders = "runs", "engine", "tests"
    items.sort(key=lambda item: folders.index(item.path.parent.name))


def slow(*values):
    """A case of a parametrized test that is left to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairwise(*axes: list) -> list:
    """All combinations, as a parametrized test's cases: enough of them for every pair of values of two axes, the others slow."""
    missing = {
        frozenset({(i, a), (j, b)})
        for (i, of_i), (j, of_j) in itertools.combinations(enumerate(axes), 2)
        for a in range(len(of_i))
        for b in range(len(of_j))
    }
    pairs = {
        case: {frozenset(pair) for pair in itertools.combinations(enumerate(case), 2)}
        for case in itertools.product(*(range(len(axis)) for axis in axes))
    }
    needed = set()
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        needed.add(best)
        missing -= pairs[best]
    cases = {case: tuple(axis[place] for axis, place in zip(axes, case)) for case in pairs}
    return [pytest.param(*values) if case in needed else slow(*values) for case, values in cases.items()]


def write_model(folder: Path, **kwargs) -> Path:
    from tasks.quickstart import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    make_model(tokenizer, hidden=64, layers=2, intermediate=128, **kwargs).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # What a published model ships, and what must not be used: the most likely token only.
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"do_sample": True, "top_k": 1}))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with model/, untied/, train.jsonl and val.jsonl. The task's reward is the share of digits, so that a random model gets some."""
    from tasks.quickstart import make_row

    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model")
    write_model(folder / "untied", tie_word_embeddings=False)
    for split, numbers in (("train", range(10, 42)), ("val", range(42, 50))):
        rows = [json.dumps(make_row(n, n + 3, split, i)) + "\n" for i, n in enumerate(numbers)]
        (folder / f"{split}.jsonl").write_text("".join(rows))
    (folder / "digits.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)\n"
    )
    return folder


def flags(tiny: Path, *more: str) -> list[str]:
    """The flags of a run of a few seconds on the tiny model."""
    return [
        "--actor.path",
        str(tiny / "model"),
        "--actor.dtype",
        "float32",
        "--actor.lr",
        "1e-2",
        "--actor.ppo-mini-batch-size",
        "4",
        "--actor.ppo-max-token-len-per-gpu",
        "256",
        "--data.train-files",
        str(tiny / "train.jsonl"),
        "--data.val-files",
        str(tiny / "val.jsonl"),
        "--data.train-batch-size",
        "8",
        "--data.max-prompt-length",
        "24",
        "--data.max-response-length",
        "12",
        "--reward.custom-path",
        str(tiny / "digits.py"),
        "--rollout.n",
        "4",
        "--rollout.kv-cache-memory-bytes",
        str(32 << 20),
        "--trainer.total-training-steps",
        "2",
        "--sync.verify-every",
        "1",
        *more,
    ]


@pytest.fixture(scope="session")
def cfg(tiny):
    from config import load_config

    return load_config(flags(tiny))


@pytest.fixture(scope="session")
def tokenizer(tiny):
    from policy import load_tokenizer

    return load_tokenizer(str(tiny / "model"))


@pytest.fixture(scope="session")
def accelerator(cfg):
    from fsdp import make_accelerator

    return make_accelerator(cfg.actor)


@pytest.fixture(scope="session")
def engine(cfg, tokenizer, accelerator):
    """vLLM as a run makes it."""
    from train import make_engine

    return make_engine(cfg, tokenizer)


@pytest.fixture
def actor(cfg, tokenizer, accelerator, engine):
    """A fresh actor; the engine is asleep and without its weights."""
    from actor import Actor

    if engine.state == "awake":
        engine.sleep()
    return Actor(cfg.actor, accelerator, len(tokenizer), cfg.rollout.temperature)


def launch_command(args: list[str], processes: int = 1, script: Path = ROOT / "train.py") -> list[str]:
    return [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--num_processes",
        str(processes),
        str(script),
        *args,
    ]


def launch_environment(**more: str) -> dict[str, str]:
    return (
        {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        | {"WANDB_MODE": "offline"}
        | more
    )


def launch(
    args: list[str],
    processes: int = 1,
    cwd: Path = ROOT,
    script: Path = ROOT / "train.py",
    env: dict | None = None,
    accelerate: bool = False,
) -> subprocess.CompletedProcess:
    """A run of train.py to its end. Through `accelerate launch`, as a user does it, where that is what matters: starting accelerate takes a third of a short run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = (
        launch_command(args, processes, script)
        if accelerate
        else [*(torchrun if processes > 1 else [sys.executable]), str(script), *args]
    )
    return subprocess.run(
        command, cwd=cwd, env=launch_environment(**(env or {})), capture_output=True, text=True, timeout=300
    )


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# Four steps of two updates, KL in loss and reward against an offloaded reference, a checkpoint after two.
FOUR_STEPS = (
    "--trainer.total-training-steps",
    "4",
    "--checkpoint.save-freq",
    "2",
    "--loss.use-kl-loss",
    "--ref.param-offload",
    "--algorithm.use-kl-in-reward",
    "--algorithm.kl-ctrl-type",
    "adaptive",
    "--loss.rollout-is",
    "token",
    "--loss.entropy-coeff",
    "0.01",
    "--actor.shuffle",
    "--trainer.test-freq",
    "3",
)


def run_here(engine, args: list[str]) -> tuple[list[dict], str]:
    """A run of train.py in this process, on the engine of the session: its metrics and its console."""
    import train
    from config import load_config

    if engine.state == "awake":
        engine.sleep()
    cfg, said, before = load_config(args), io.StringIO(), engine.cfg
    try:
        with contextlib.redirect_stdout(said):
            run = train.start(cfg, engine)
            train.train(run)
            kept = {name: getattr(engine, name) for name in ("weight_version", "dtype", "sleep")}
            run.engine = SimpleNamespace(**kept, close=lambda: None)  # the next run goes on with it
            train.finish(run)
    finally:
        engine.cfg = before
    return read_metrics(cfg.run_dir / ("val-only" if cfg.trainer.val_only else "")), said.getvalue()
