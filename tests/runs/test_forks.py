"""How far a fork is from the house: what a researcher adds touches one file, a signal of its own for each token two."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, flags, launch_environment, read_metrics

ROOMS = ("fast", "look", "tasks", "host")


@dataclass(frozen=True)
class Fork:
    edits: dict[str, list[tuple[str, str]]]  # file -> (what stands there, what takes its place); "" is the file's end
    flags: tuple[str, ...] = ()  # that ask for it
    most_files: int = 1


ESTIMATOR = '''

def mine(scores: Tensor, mask: Tensor, cfg: AlgorithmConfig) -> Tensor:
    """Three times s minus the group's mean."""
    s, _, n = session_scores(scores, mask)
    return spread(3 * (s - group_mean(s, n)), mask)


ESTIMATORS["mine"] = mine
'''
LOSS = '''

def mine(logprobs, old_logprobs, advantages, mask, seq_ids, cfg) -> PerToken:
    """REINFORCE."""
    loss = -advantages * logprobs
    return loss, {"actor/mine": loss.detach()}


LOSSES["mine"] = mine
'''
AGENT = '''

async def mine(task, policy, cfg) -> Trajectory:
    """One turn, measured."""
    trajectory = await single_turn_agent(task, policy, cfg)
    trajectory.metrics["tokens"] = float(len(trajectory.tokens))
    return trajectory


AGENTS["mine"] = mine
'''
RULE = '''

def mine(task: Task, trajectory: Trajectory) -> dict:
    """The share of digits; their number is logged."""
    digits = sum(letter.isdigit() for letter in trajectory.answer)
    return {"score": digits / max(len(trajectory.answer), 1), "digits": digits}


REWARDS["mine"] = mine
'''
FIELD = "    surprises: torch.Tensor | None = None  # [{}] minus vLLM's log-prob\n"
FILL = "    for t in trajectories:\n        t.surprises = -torch.tensor(t.rollout_logprobs)\n"
KNOB = '    pg_scale: float = 1.0\n    """Factor of the policy loss."""\n'


def before(anchor: str, text: str) -> tuple[str, str]:
    """The edit that puts `text` in front of `anchor`."""
    return anchor, text + anchor


FORKS = {
    "estimator": Fork({"advantage.py": [("", ESTIMATOR)]}, ("--algorithm.adv-estimator", "mine")),
    "loss": Fork({"loss.py": [("", LOSS)]}, ("--loss.loss-mode", "mine")),
    "agent": Fork({"agent.py": [("", AGENT)]}, ("--agent.default-agent-loop", "mine")),
    "reward": Fork({"tasks/rules.py": [("", RULE)]}, ("--reward.custom-path", "None", "--reward.name", "mine")),
    "knob": Fork(
        {
            "loss.py": [
                before("    entropy_coeff: float", KNOB),
                before('            clip_ratio_low="', '            pg_scale="(0, inf)",\n'),
                before("    total = loss\n", "    loss = loss * cfg.pg_scale\n"),
            ]
        },
        ("--loss.pg-scale", "4"),
    ),
    "signal": Fork(
        {
            "batch.py": [
                ("PER_TOKEN = (", 'PER_TOKEN = ("surprises", '),
                before("\n    def observe(", FIELD.format("L")),
                before("    shared: Any", FIELD.format("T")),
            ],
            # Filled for all trajectories of a step, and read from the micro-batch.
            "loss.py": [
                before('    if cfg.rollout_rs == "none":', FILL),
                before('    metrics |= {"actor/entropy"', '    metrics["actor/surprises"] = batch.surprises\n'),
            ],
        },
        most_files=2,
    ),
}
NAMED = [name for name in FORKS if FORKS[name].flags]


def copy_tree(tree: Path) -> Path:
    tree.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tree)
    for room in ROOMS:
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def apply(fork: Fork, tree: Path) -> None:
    for file, edits in fork.edits.items():
        text = (tree / file).read_text()
        for old, new in edits:
            if old:
                assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
                text = text.replace(old, new)
            else:
                text += new
        (tree / file).write_text(text)


def contents(tree: Path) -> dict[str, bytes]:
    """File -> what is in it, of the root and its rooms."""
    paths = [*tree.glob("*.py"), *(path for room in ROOMS for path in (tree / room).rglob("*"))]
    return {str(path.relative_to(tree)): path.read_bytes() for path in paths if is_source(path)}


def is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def changed(tree: Path) -> set[str]:
    """Files that are not as they are in the repository."""
    ours, theirs = contents(ROOT), contents(tree)
    return {file for file in ours.keys() | theirs.keys() if ours.get(file) != theirs.get(file)}


@pytest.fixture(scope="module")
def trees(tmp_path_factory) -> dict[str, Path]:
    """Of each fork a copy of the repository with it alone."""
    folder = tmp_path_factory.mktemp("forks")
    found = {}
    for name, fork in FORKS.items():
        found[name] = copy_tree(folder / name)
        apply(fork, found[name])
    return found


@pytest.fixture(scope="module")
def configured(trees, tiny) -> dict[str, tuple[int, str]]:
    """What becomes of each fork's flags in its own tree: exit code and output; all at once, most of it is imports."""
    code = "import sys; from config import load_config; load_config(sys.argv[1:])"
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", code, *flags(tiny, *FORKS[name].flags)],
            cwd=trees[name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in NAMED
    }
    said = {name: process.communicate(timeout=100)[0] for name, process in started.items()}
    return {name: (process.returncode, said[name]) for name, process in started.items()}


@pytest.fixture(scope="module")
def together(tiny, tmp_path_factory) -> tuple[Path, Path]:
    """A tree with all forks at once, and the folder of a run of one step in it, of one update and all groups traced."""
    folder = tmp_path_factory.mktemp("together")
    tree = copy_tree(folder / "tree")
    for fork in FORKS.values():
        apply(fork, tree)
    asked = [word for fork in FORKS.values() for word in fork.flags]
    out = ["--log.default-local-dir", str(folder), "--log.experiment-name", "run"]
    more = ["--trainer.total-training-steps", "1", "--actor.ppo-mini-batch-size", "8", "--trainer.trace-groups", "8"]
    command = [sys.executable, str(tree / "train.py"), *flags(tiny, *out, *more, *asked)]
    done = subprocess.run(command, cwd=tree, env=launch_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree, folder / "run"


@pytest.fixture(scope="module")
def run_dir(together) -> Path:
    return together[1]


@pytest.fixture(scope="module")
def metrics(run_dir) -> dict[str, float]:
    return read_metrics(run_dir)[0]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", FORKS)
def test_a_fork_changes_one_file(trees, name):
    fork = FORKS[name]
    files = changed(trees[name])
    assert files == fork.edits.keys() and len(files) <= fork.most_files


@pytest.mark.parametrize("name", NAMED)
def test_a_forks_name_is_accepted_in_its_tree_and_refused_here(configured, tiny, name):
    from config import load_config

    code, said = configured[name]
    assert code == 0, said
    with pytest.raises((ValueError, SystemExit)):  # SystemExit: tyro's, of a knob that is not there
        load_config(flags(tiny, *FORKS[name].flags))


def test_estimator_gives_its_advantages(run_dir):
    groups: dict[str, list[dict]] = {}
    for record in read_lines(run_dir / "rollouts" / "000000.jsonl"):
        groups.setdefault(record["key"].split("_")[0], []).append(record)
    assert len(groups) == 8
    for group in groups.values():
        mean = sum(record["score"] for record in group) / len(group)
        for record in group:
            assert record["advantage"] == pytest.approx(3 * (record["score"] - mean), abs=1e-6)


def test_loss_logs_its_metric_and_the_knob_scales_it(metrics):
    assert metrics["actor/mine"] != 0
    assert metrics["actor/pg_loss"] == pytest.approx(4 * metrics["actor/mine"], rel=1e-4)


def test_agent_logs_its_metric(metrics):
    assert metrics["agent/tokens/mean"] * metrics["rollout/num_trajectories"] == metrics["perf/total_num_tokens"]


def test_reward_gives_score_and_part(metrics, run_dir):
    records = read_lines(run_dir / "rollouts" / "000000.jsonl")
    digits = [sum(letter.isdigit() for letter in record["response"]) for record in records]
    assert [record["score_parts"]["digits"] for record in records] == digits
    assert metrics["reward/digits/mean"] == pytest.approx(sum(digits) / len(digits))
    assert metrics["reward/mean"] == pytest.approx(sum(record["score"] for record in records) / len(records))


def test_signal_is_traced_and_on_the_batch_that_the_loss_read(metrics, run_dir):
    surprises = []
    for record in read_lines(run_dir / "traces" / "000000.jsonl"):
        assert record["surprises"] == pytest.approx([-x for x in record["rollout_logprobs"]])
        surprises += [x for x, counts in zip(record["surprises"], record["loss_mask"]) if counts]
    assert metrics["actor/surprises"] == pytest.approx(sum(surprises) / len(surprises), rel=1e-4)


def test_a_fork_is_looked_at_as_any_run(together):
    tree, run = together
    looks = [["--step", "0", "--group", "1", "--tokens"], ["--doctor"], ["--html", str(run / "page.html")]]
    said = []
    for words in looks:
        command = [sys.executable, "-m", "look", str(run), *words]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    heads = [line.split() for line in said[0].splitlines() if line.split()[:3] == ["t", "id", "token"]]
    assert heads and all(head[-1] == "surprises" for head in heads)
