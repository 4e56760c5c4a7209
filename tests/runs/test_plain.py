"""trainer.plain: without fast/ and look/, the same run."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, flags, launch_environment, read_metrics

FOLDERS = ("host", "tasks")
SAME = ("reward/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss", "correction/k3")


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """{name: run folder} of two steps: plain in a tree that has neither folder, and with every speed-up."""
    tree = tmp_path_factory.mktemp("plain")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tree)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    found = {}
    for name, where, more in (("plain", tree, ["--trainer.plain"]), ("fast", ROOT, [])):
        out = ["--log.default-local-dir", str(tree), "--log.experiment-name", name]
        command = [sys.executable, str(where / "train.py"), *flags(tiny, *out, *more)]
        done = subprocess.run(command, cwd=where, env=launch_environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = tree / name
    return found


def test_two_plain_steps_run_without_the_folders_and_export_a_model(runs):
    records = read_metrics(runs["plain"])
    assert [record["step"] for record in records] == [0, 1, 2] and (runs["plain"] / "hf" / "config.json").exists()
    assert records[1]["sync/probe_diff_max"] < 1e-3


def test_plain_samples_and_learns_the_same(runs):
    """On the CPU both sample the same tokens; sums of floats are taken in other orders."""
    plain, fast = read_metrics(runs["plain"]), read_metrics(runs["fast"])
    for one, other in zip(plain[:2], fast[:2]):
        for name in SAME:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    responses = [
        [json.loads(line)["response"] for line in (runs[name] / "rollouts" / "000001.jsonl").read_text().splitlines()]
        for name in runs
    ]
    assert responses[0] == responses[1]


def test_the_configuration_says_what_ran(runs):
    import yaml

    from config import PLAIN

    settings = yaml.safe_load((runs["plain"] / "config.yaml").read_text())
    for name, value in PLAIN.items():
        group, knob = name.split(".")
        assert settings[group][knob] == (list(value) if isinstance(value, tuple) else value), name
