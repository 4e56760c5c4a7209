"""AdamW's moments on the CPU between two updates: the same run, bit for bit, and no memory held meanwhile."""

import dataclasses

import pytest
import torch
from conftest import flags, launch, read_metrics
from test_actor import LOSS, sequences

from actor import Actor
from checkpoint import CheckpointConfig, RunState, save


def shards(actor):
    """All that an optimizer step reads and writes."""
    state = actor.optimizer.state
    return [p.to_local().clone() for p in actor.model.parameters()] + [
        v.to_local().clone() for p in state for name, v in state[p].items() if name != "step"
    ]


@pytest.fixture
def steps(cfg, tokenizer, accelerator, engine):
    def run(between):
        torch.manual_seed(0)
        settings = dataclasses.replace(cfg.actor, optimizer_offload=True)
        actor = Actor(settings, accelerator, len(tokenizer), 1.0)
        norms = []
        for step in range(3):
            between(actor)
            actor.score(sequences(tokenizer))
            norms.append(actor.update(sequences(tokenizer, seed=step), LOSS, step, 10, 0)["actor/grad_norm"])
        return norms, shards(actor)

    return run


def test_a_run_with_moments_that_come_and_go_is_the_same(steps):
    held = []

    def away(actor):
        actor.moments.offload()
        actor.moments.offload()  # again changes nothing
        held.append(sum(s.nbytes() for s, _ in actor.moments.away))
        junk = [torch.full((50_000,), 7.0) for _ in range(20)]  # takes the memory that was given back
        del junk

    norms, plain = steps(lambda actor: None)
    norms_away, moved = steps(away)
    assert norms == norms_away and all(torch.equal(a, b) for a, b in zip(plain, moved))
    assert held == [0, 0, 0]


def test_moments_are_really_away_and_come_back(steps):
    seen = []

    def away(actor):
        before = shards(actor)
        actor.moments.offload()
        seen.append((len(actor.moments.storages()), len(actor.moments.away)))
        actor.moments.load()
        assert all(torch.equal(a, b) for a, b in zip(before, shards(actor)))

    steps(away)
    assert seen[0] == (0, 0) and seen[1][0] == 0 and seen[1][1] > 10, (
        "none before the first step; then every moment's storage is empty"
    )


@pytest.mark.slow
def test_run_that_saves_and_resumes_with_its_moments_away(tiny, tmp_path):
    """The moments are back when a checkpoint is written, and those of a checkpoint go away too."""
    runs = {}
    for name, more, stops in [("plain", [], ["3"]), ("away", ["--actor.optimizer-offload"], ["1", "3"])]:
        args = flags(
            tiny,
            "--log.default-local-dir",
            str(tmp_path),
            "--log.experiment-name",
            name,
            "--checkpoint.save-freq",
            "1",
            *more,
        )
        for steps in stops:
            done = launch([*args, "--trainer.total-training-steps", steps])
            assert done.returncode == 0, done.stderr[-3000:]
        runs[name] = [
            (r["step"], r.get("reward/mean"), r.get("actor/grad_norm")) for r in read_metrics(tmp_path / name)
        ]
    assert "resuming from" in done.stdout and runs["plain"] == runs["away"] and len(runs["plain"]) == 4


def test_a_run_that_stops_while_they_are_away_saves_them(cfg, tokenizer, accelerator, engine, tmp_path):
    """Told to stop while vLLM samples, with the memory of the moments."""
    torch.manual_seed(0)
    actor = Actor(dataclasses.replace(cfg.actor, optimizer_offload=True), accelerator, len(tokenizer), 1.0)
    actor.update(sequences(tokenizer, seed=0), LOSS, 0, 10, 0)
    held = []
    for name in ("there", "away"):
        (tmp_path / name).mkdir()
        saved = save(CheckpointConfig(), tmp_path / name, actor, RunState(step=1), {})
        held.append({path.relative_to(saved): path.read_bytes() for path in saved.rglob("*.distcp")})
        actor.moments.offload()
        assert actor.moments.away
    assert held[0] and held[0] == held[1]
