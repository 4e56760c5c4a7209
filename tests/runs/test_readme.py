"""The README's commands, one after the other, in a copy of the repository, as a new user types them."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, launch_environment, read_metrics
from test_docs import TEXTS, fences

ELSEWHERE = "smollm2_arith.yaml", "qwen3_4b_fsdp.yaml", "make test"  # a hub, eight GPUs, and what runs this


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What git would clone, with the environment that runs this as its .venv."""
    folder = tmp_path_factory.mktemp("clone") / "lockstep"
    left_out = shutil.ignore_patterns("__pycache__", ".*", "runs", "data", "tests")
    shutil.copytree(ROOT, folder, ignore=lambda path, names: left_out(path, names) if path == str(ROOT) else [])
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture(scope="module")
def said(checkout):
    """What each block of commands printed, of those that can run here."""
    env = launch_environment(PATH=f"{checkout}/.venv/bin:{os.environ['PATH']}")
    printed = []
    for language, body in fences(TEXTS["README.md"]):
        if language not in ("", "bash"):
            continue
        commands = re.sub(r"\\\n", "", body)
        here = [line for line in commands.splitlines() if not any(name in line for name in ELSEWHERE)]
        here = [re.sub(r"^make ", "make -o install ", line) for line in here]
        if not any(re.match(r"make|python|accelerate|cat", line) for line in here):
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join(here)], cwd=checkout, env=env, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, body + done.stdout[-2000:] + done.stderr[-3000:]
        printed.append(done.stdout)
    return printed


@pytest.mark.slow
def test_quickstart_goes_from_a_third_to_nine_tenths_on_unseen_sums(checkout, said):
    rows = {
        split: [
            json.loads(line) for line in (checkout / "data" / "quickstart" / f"{split}.jsonl").read_text().splitlines()
        ]
        for split in ("train", "val")
    }
    prompts = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert not prompts["train"] & prompts["val"] and len(prompts["val"]) == 256
    metrics = read_metrics(checkout / "runs" / "quickstart")
    before, after = (metrics[i]["val/exact/mean@1"] for i in (0, -1))
    assert 0.2 <= before <= 0.4 and after > 0.9
    assert f"val/exact/mean@1: {before:.4f} before, {after:.4f} after" in said[0]


@pytest.mark.slow
def test_a_reward_of_ones_own_is_learned_and_shown(checkout, said):
    mine = read_metrics(checkout / "runs" / "mine")
    assert mine[-1]["step"] == 40 and mine[-1]["val/exact/mean@1"] > mine[0]["val/exact/mean@1"]
    assert "after 40" in said[2] and (checkout / "page.html").stat().st_size > 100_000
