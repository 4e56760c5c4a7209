"""The checks of look/selftest.py that look at whole runs: two steps of a tiny model, by the default settings and plain.

`python -m look.run_checks FOLDER default` is such a run, in a process of its own, since a process has one vLLM.
"""

import functools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import engine
import fast.engine
from host import rank
from host.console import printable
from look.kernel_checks import TIMES, Check, NotHere, Wrong, device, dtype, installed_vllm, on_gpu
from sync_weights import SyncConfig, tolerances

OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONGEST_S = 600  # of a run
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""


def write_model(folder: Path) -> None:
    """The quickstart's model, untrained and with heads that all kernels take, and rows with a reward that a random
    model gets some of."""
    from tasks.quickstart import make_model, make_row, make_tokenizer, write_rows

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=128, layers=2, intermediate=256)
    model.config.head_dim, model.config.num_attention_heads, model.config.num_key_value_heads = 128, 16, 8
    torch.manual_seed(0)
    type(model)(model.config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    # Prompts of more than a block of the KV cache, which their sessions share.
    write_rows(folder / "rows.jsonl", [make_row(10**9 + i, 10**9 + 7 * i, "train", i) for i in range(160)])
    (folder / "reward.py").write_text(REWARD)


def flags(folder: Path, name: str) -> list[str]:
    """train.py's. On a GPU as many sessions, and as many prompts of the probe, as the decode kernel wants at once."""
    prompts, sessions, probe = (16, 12, 160) if on_gpu() else (8, 4, 8)
    knobs: dict[str, Any] = {
        "actor.path": folder / "model",
        "actor.dtype": str(dtype()).removeprefix("torch."),
        "actor.lr": 1e-3,
        "actor.ppo-mini-batch-size": prompts // 2,
        "actor.ppo-max-token-len-per-gpu": 1024,
        "data.train-files": folder / "rows.jsonl",
        "data.train-batch-size": prompts,
        "data.max-prompt-length": 32,
        "data.max-response-length": 12,
        "reward.custom-path": folder / "reward.py",
        "rollout.n": sessions,
        "rollout.gpu-memory-utilization": 0.2,
        "rollout.kv-cache-memory-bytes": 2**28,
        "sync.verify-every": 1,
        "sync.probe-prompts": probe,
        "checkpoint.resume": "never",
        "checkpoint.save-freq": 0,
        "log.default-local-dir": folder,
        "log.experiment-name": name,
        "trainer.total-training-steps": 2,
    }
    words = [word for knob, value in knobs.items() for word in (f"--{knob}", str(value))]
    plain = ["--trainer.plain"] if name == "plain" else []
    return [*words, "--rollout.enforce-eager", "--checkpoint.no-export-hf", *plain]


def run_steps(folder: Path, name: str) -> None:
    """A run, in the process that is for it: metrics into `folder`/NAME, and how often kernels were called."""
    import train

    if not (folder / "model").exists():
        write_model(folder)
    calls: Counter = Counter()
    if name == "default":
        count_calls(calls)
    train.main(flags(folder, name))
    (folder / name / "calls.json").write_text(json.dumps(calls))


def count_calls(calls: Counter) -> None:
    """Let what speeds a run up count its calls."""
    from fast.copies import Copies

    places: list[tuple[Any, str]] = [(Copies, "load_again")]
    if on_gpu():
        from fast import attention, attention_kernels, decoding, kernels, sampling

        places += [(decoding, "decode_attention"), (sampling, "sample_tokens"), (kernels, "logit_gradient")]
        places += [(attention, "flash_forward"), (attention_kernels, "flash_backward")]

    def counted(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs) -> Any:
            calls[function.__name__] += 1
            return function(*args, **kwargs)

        return call

    for holder, name in places:
        setattr(holder, name, counted(getattr(holder, name)))


class RunFailed(Wrong):
    """A run has no results."""


class Runs:
    """The runs that checks ask for. Each is started once; the default one while kernels are compared."""

    def __init__(self, folder: Path, verbose: bool, any_vllm: bool):
        self.folder = folder
        self.verbose = verbose
        self.any_vllm = any_vllm
        self.started: dict[str, subprocess.Popen] = {}
        self.told: set[str] = set()  # runs whose errors were shown

    def start(self, name: str) -> subprocess.Popen:
        """Its process, with an environment that no launcher has left anything in."""
        words = [sys.executable, "-m", "look.run_checks", str(self.folder), name]
        words += ["--any-vllm"] if self.any_vllm else []
        left_out = (*OF_A_LAUNCHER, "TRITON_INTERPRET")
        environment = {variable: value for variable, value in os.environ.items() if variable not in left_out}
        if not on_gpu():
            environment.setdefault("OMP_NUM_THREADS", "1")
        with open(self.folder / f"{name}.out", "w") as out, open(self.folder / f"{name}.err", "w") as err:
            self.started[name] = subprocess.Popen(words, cwd=rank.ROOT, env=environment, stdout=out, stderr=err)
        return self.started[name]

    def records(self, name: str) -> list[dict]:
        """The metrics of a run that has ended: of two steps, and of the sync behind them. Wrong when it failed."""
        process = self.started.get(name) or self.start(name)
        try:
            end = f"ended with {process.wait(LONGEST_S)}"
        except subprocess.TimeoutExpired:
            process.kill()
            end = f"was killed after {LONGEST_S} s"
        if end != "ended with 0":
            said = (self.folder / f"{name}.err").read_text()
            if self.verbose and name not in self.told:
                print(printable(said), file=sys.stderr, flush=True)
            self.told.add(name)
            lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
            raise RunFailed(f"the {name} run {end}: {lines[-1].strip()}")
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def calls(self) -> Counter:
        """How often the default run called what speeds it up."""
        self.records("default")
        return Counter(json.loads((self.folder / "default" / "calls.json").read_text()))

    def close(self) -> None:
        for process in self.started.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def steps(runs: Runs, name: str) -> str:
    """Two steps ran, and taught something."""
    records = runs.records(name)
    if [record["step"] for record in records] != [0, 1, 2]:
        raise Wrong(f"records of the steps {[record['step'] for record in records]}, where 0, 1 and 2 are due")
    for record in records[:2]:
        norm = record["actor/grad_norm"]
        if not (norm and math.isfinite(norm)) or record["actor/skipped_steps"]:
            raise Wrong(
                f"step {record['step']}: a gradient of norm {norm}, {record['actor/skipped_steps']:.0f} skipped"
            )
    shown = {
        "rewards": "reward/mean",
        "gradients": "actor/grad_norm",
        "entropies": "actor/entropy",
        "seconds": "timing_s/step",
    }
    return "; ".join(f"{label} {', '.join(f'{r[metric]:.3g}' for r in records[:2])}" for label, metric in shown.items())


def sync(runs: Runs, name: str) -> str:
    """Every sync's bits added up (else the run has stopped), and vLLM computes what the actor does."""
    records = runs.records(name)
    largest = max(record["sync/probe_diff_max"] for record in records)
    mean = max(record["sync/probe_diff_mean"] for record in records)
    most, most_mean = tolerances(SyncConfig(), dtype(), device())
    found = f"{largest:.1e} at most ({most:g} allowed), {mean:.1e} on average ({most_mean:g} allowed)"
    if not (largest <= most and mean <= most_mean):
        raise Wrong(f"vLLM's log-probs and the actor's differ by {found}")
    replayed = f", {runs.calls()['load_again']} by noted copies" if name == "default" else ""
    return f"bits equal {len(records)} times{replayed}; vLLM's log-probs and the actor's differ by {found}"


def kernels_at_work(runs: Runs) -> str:
    """The kernels that a default run is to call were called: what was compared is what runs."""
    if not on_gpu():
        raise NotHere("torch and vLLM's own: there is no GPU")
    calls = runs.calls()
    from fast.attention_kernels import serves
    from fast.engine import kernels_fit

    wanted = ["logit_gradient", "flash_forward"]
    q, k = torch.empty(2, 1, 16, 128, dtype=dtype(), device=device())
    wanted += ["flash_backward"] if serves(q, k, 1) else []
    wanted += ["decode_attention", "sample_tokens"] if kernels_fit(installed_vllm()) else []
    idle = [name for name in wanted if not calls[name]]
    if idle:
        raise Wrong(f"never called in two steps: {', '.join(idle)}")
    others = "" if "sample_tokens" in wanted else "; vLLM samples and decodes by its own kernels"
    return ", ".join(f"{name} {calls[name]} times" for name in wanted) + others


def agrees(runs: Runs) -> str:
    """The first step of the default run and the plain one's: as near to vLLM, and rewards as high but for chance."""
    ours, plain = runs.records("default")[0], runs.records("plain")[0]
    rounding = torch.finfo(dtype()).eps / 2
    parts = []
    for label, distance in (("the probe's", lambda r: r["sync/probe_diff_mean"]), ("the rollouts'", typical_gap)):
        found, theirs = distance(ours), distance(plain)
        parts.append(f"{label} log-probs off by {found:.1e} (plain {theirs:.1e})")
        if not found <= TIMES * (theirs + rounding):
            raise Wrong(f"vLLM's and the actor's differ: {parts[-1]}")
    gap = abs(ours["reward/mean"] - plain["reward/mean"])
    variance = (ours["reward/std"] ** 2 + plain["reward/std"] ** 2) / ours["rollout/num_trajectories"]
    parts.append(f"rewards differ by {gap:.2g} ({5 * variance**0.5:.2g} allowed)")
    if not gap <= 5 * variance**0.5:
        raise Wrong(f"default and plain {parts[-1]}")
    return "; ".join(parts)


def typical_gap(record: dict) -> float:
    """The root mean square of log-probs' gaps d between vLLM and the actor, when small: k3 is about d^2 / 2."""
    return math.sqrt(max(2 * record["correction/k3"], 0.0))


def run_checks(runs: Runs) -> dict[str, Check]:
    """By name, in the order in which they run."""
    checks = {}
    for name, knobs in (("default", ("trainer.plain", "sync.replay_copies")), ("plain", (None, None))):
        checks[f"steps-{name}"] = Check(functools.partial(steps, runs, name), knobs[0])
        checks[f"sync-{name}"] = Check(functools.partial(sync, runs, name), knobs[1])
    checks["kernels-at-work"] = Check(functools.partial(kernels_at_work, runs), "trainer.plain")
    checks["agrees-with-plain"] = Check(functools.partial(agrees, runs), "trainer.plain")
    return checks


def with_their_runs(names: list[str]) -> set[str]:
    """The checks that were asked for, and those of the runs that they need."""
    runs = {"sync-default": "default", "sync-plain": "plain", "kernels-at-work": "default"}
    needed = {f"steps-{runs[name]}" for name in names if name in runs}
    if "agrees-with-plain" in names:
        needed |= {"steps-default", "steps-plain"}
    return {*names, *needed}


def let_any_vllm_in() -> None:
    """In this process, whatever engine.py and fast/engine.py know."""
    engine.VLLM_VERSIONS = fast.engine.KERNEL_VERSIONS = ((0,), (10**9,))


if __name__ == "__main__":
    where, which, *options = sys.argv[1:]
    if options:
        let_any_vllm_in()
    rank.run(lambda: run_steps(Path(where), which))
