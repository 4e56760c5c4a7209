"""Which checkpoints are on disk, which one a run goes on from, and what comes out of it. (Whole runs that resume: tests/runs/test_train.py.)"""

import dataclasses
import errno
import fnmatch
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import checkpoint
from checkpoint import (
    CheckpointConfig,
    RunState,
    SavedState,
    changed_knobs,
    check_changes,
    find,
    mark_best,
    read_state,
    save,
)
from config import Config
from host import disk
from look.export import choose


def save_weights(folder):
    (Path(folder) / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"weights" * 100)
    (Path(folder) / "random_states_0.pkl").write_bytes(b"random")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Saves a checkpoint of a step whose weights are a few bytes."""
    monkeypatch.setattr(checkpoint, "BACKOFF_S", 0)
    monkeypatch.setattr(checkpoint, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    fake = SimpleNamespace(save_state=save_weights, wait_for_everyone=lambda: None)

    def write(step, keep=9, run_dir=tmp_path, **state):
        state = RunState(step, stream={"place": step}, **state)
        actor = SimpleNamespace(accelerator=fake, moments=None)
        return save(CheckpointConfig(max_ckpt_to_keep=keep), run_dir, actor, state, {})

    write.accelerator = fake
    return write


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# What is kept


def test_oldest_go_first(tmp_path, write):
    for step in range(1, 5):
        write(step, keep=2)
    assert names(tmp_path) == ["latest", "step-000003", "step-000004"]
    assert read_state(find(CheckpointConfig(), tmp_path)) == SavedState(RunState(4, stream={"place": 4}), {}, 1)


def test_run_that_went_back_keeps_what_it_just_saved_and_goes_on_from_there(tmp_path, write):
    for step in (1, 5, 6):
        write(step)
    write(2, keep=1)
    assert find(CheckpointConfig(), tmp_path).name == "step-000002" and "step-000001" not in names(tmp_path)


def test_same_step_again_replaces_it(tmp_path, write):
    write(3, wandb_id="first")
    write(3, wandb_id="second")
    assert names(tmp_path) == ["latest", "step-000003"]
    assert read_state(find(CheckpointConfig(), tmp_path)).state.wandb_id == "second"


def test_what_a_killed_save_left_goes(tmp_path, write):
    (tmp_path / "checkpoints" / ".step-000007").mkdir(parents=True)
    write(8)
    assert names(tmp_path) == ["latest", "step-000008"]


# Which one a run goes on from


def test_fresh_start_and_no_resume(tmp_path, write):
    assert find(CheckpointConfig(), tmp_path) is None and read_state(None) == SavedState(RunState())
    write(1)
    assert find(CheckpointConfig(resume="never"), tmp_path) is None
    assert find(CheckpointConfig(resume=str(tmp_path / "checkpoints" / "step-000001")), tmp_path).name == "step-000001"
    with pytest.raises(ValueError, match="checkpoint.resume=nowhere"):
        find(CheckpointConfig(resume="nowhere"), tmp_path)


def test_all_of_the_state_comes_back(tmp_path, write):
    write(3, kl_coef=0.25, skipped=2, wandb_id="abc")
    assert read_state(find(CheckpointConfig(), tmp_path)).state == RunState(3, 0.25, 2, "abc", {"place": 3})


@pytest.mark.parametrize("lacks", [(), ("kl_coef", "wandb_id", "skipped", "config", "world_size", "stream")])
def test_state_of_a_checkpoint_of_before_is_read(tmp_path, lacks):
    """As it was written when it was a dict; what it lacks has its default, what is unknown is passed over."""
    stored = {
        "step": 2,
        "world_size": 4,
        "stream": {"epoch": 0, "next": 16},
        "kl_coef": 0.125,
        "wandb_id": "abc",
        "skipped": 1,
        "config": {"actor": {"lr": 1e-6}},
        "more": 1,
    }
    (tmp_path / "state.json").write_text(json.dumps({name: v for name, v in stored.items() if name not in lacks}))
    whole = SavedState(RunState(2, 0.125, 1, "abc", {"epoch": 0, "next": 16}), {"actor": {"lr": 1e-6}}, 4)
    assert read_state(tmp_path) == (SavedState(RunState(2)) if lacks else whole)


def cut(folder):
    path = folder / "pytorch_model_fsdp_0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "__0_0.distcp has 699 bytes, 700 were written": cut,
    "random_states_0.pkl is gone": lambda folder: (folder / "random_states_0.pkl").unlink(),
    "state.json has other bytes": lambda folder: (folder / "state.json").write_text(
        (folder / "state.json").read_text().replace("2", "3")
    ),
    "its manifest can't be read": lambda folder: (folder / "manifest.json").unlink(),
    "its manifest can't be read (JSON": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text()[:-5]
    ),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_torn_checkpoint_is_passed_over_with_one_line_and_never_loaded(tmp_path, write, capsys, says):
    write(1)
    DAMAGES[says](torn := write(2))
    assert find(CheckpointConfig(), tmp_path).name == "step-000001"
    [line] = capsys.readouterr().out.splitlines()
    assert "step-000002 is passed over" in line and says in line
    with pytest.raises(ValueError, match="checkpoint.resume=.*step-000002 is neither"):
        find(CheckpointConfig(resume=str(torn)), tmp_path)


def test_older_torn_checkpoint_is_not_worth_a_line(tmp_path, write, capsys):
    cut(write(1))
    write(2)
    assert find(CheckpointConfig(), tmp_path).name == "step-000002" and not capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda latest: latest.unlink(),
        lambda latest: latest.write_text("step-000009"),
        lambda latest: latest.write_text(""),
    ],
)
def test_marker_is_not_needed(tmp_path, write, change):
    write(1)
    write(2)
    change(tmp_path / "checkpoints" / "latest")
    assert find(CheckpointConfig(), tmp_path).name == "step-000002"


def test_gone_newest_falls_back(tmp_path, write, capsys):
    write(1)
    shutil.rmtree(write(2))
    assert find(CheckpointConfig(), tmp_path).name == "step-000001"
    assert "step-000002 is passed over" in capsys.readouterr().out


def test_run_that_lost_all_its_checkpoints_does_not_start_over_in_silence(tmp_path, write):
    shutil.rmtree(write(1))
    with pytest.raises(ValueError, match="no checkpoint in .* is complete: set checkpoint.resume=never"):
        find(CheckpointConfig(), tmp_path)


def test_large_files_go_by_their_size(tmp_path, write, monkeypatch):
    monkeypatch.setattr(disk, "HASHED_BYTES", 99)
    folder = write(1)
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"w" * 700)
    assert disk.damage(folder) is None
    cut(folder)
    assert "699 bytes" in disk.damage(folder)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("again", [False, True])
def test_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path, write, again):
    """Stop before each call that changes what is on disk, in turn; also where the step is saved for the second time."""
    real = {
        (module, name): getattr(module, name)
        for module, name in [
            (os, "rename"),
            (os, "replace"),
            (os, "fsync"),
            (os, "mkdir"),
            (shutil, "rmtree"),
            (Path, "write_text"),
        ]
    }
    write(1)
    if again:
        write(2)
    for moment in range(1000):
        folder = tmp_path / f"run{moment}"
        shutil.copytree(tmp_path / "checkpoints", folder / "checkpoints")
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            for (module, name), function in real.items():

                def counted(*args, function=function, calls=calls, moment=moment, **kwargs):
                    calls.append(function)
                    if len(calls) > moment:
                        raise Killed
                    return function(*args, **kwargs)

                patch.setattr(module, name, counted)
            try:
                write(2, run_dir=folder)
                break
            except Killed:
                pass
        assert find(CheckpointConfig(), folder).name in (["step-000002"] if again else ["step-000001", "step-000002"])
        write(3, keep=1, run_dir=folder)
        assert names(folder) == ["latest", "step-000003"]
    assert moment > 15


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path, write, monkeypatch):
    """A machine that loses power keeps names before bytes: a renamed folder of empty files would look complete by its sizes."""
    events, flush, rename = [], disk.flush, os.rename
    monkeypatch.setattr(disk, "flush", lambda path: (events.append(path.name), flush(path)))
    monkeypatch.setattr(os, "rename", lambda *args: (events.append("rename"), rename(*args)))
    write(1)
    before = events[: events.index("rename")]
    assert set(before) >= {"__0_0.distcp", "pytorch_model_fsdp_0", "random_states_0.pkl", "state.json", ".step-000001"}
    assert before.index(".manifest.json") > before.index("__0_0.distcp") and events[-2:] == [".latest", "checkpoints"]


# When the disk fails


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_disk_that_stays_full_leaves_the_last_checkpoint(tmp_path, write, capsys):
    write(1)
    attempts = []

    def save_state(folder):
        save_weights(folder)
        attempts.append(folder)
        full()

    write.accelerator.save_state = save_state
    with pytest.raises(
        ValueError,
        match="step-000002 can't be saved .log.default_local_dir, .* GiB free.: OSError.*No space left.*the earlier checkpoints are as they were",
    ):
        write(2, keep=1)
    assert len(attempts) == 3 and names(tmp_path) == ["latest", "step-000001"], "what was written of it takes no room"
    assert (
        find(CheckpointConfig(), tmp_path).name == "step-000001" and capsys.readouterr().out.count("No space left") == 3
    )


@pytest.mark.parametrize("place", ["os.rename", "os.replace", "os.fsync", "shutil.rmtree"])
def test_disk_that_fails_once_is_tried_again(tmp_path, write, monkeypatch, place):
    write(1)
    (tmp_path / "checkpoints" / ".step-000001").mkdir()
    module, name = {"os": os, "shutil": shutil}[place.split(".")[0]], place.split(".")[1]
    real, calls = getattr(module, name), []

    def once(*args, **kwargs):
        calls.append(args)
        return full() if len(calls) == 1 else real(*args, **kwargs)

    monkeypatch.setattr(module, name, once)
    write(2)
    assert find(CheckpointConfig(), tmp_path).name == "step-000002" and calls


def test_error_that_is_not_the_disks_is_not_tried_again(write):
    def save_state(folder):
        raise RuntimeError("NCCL")

    write.accelerator.save_state = save_state
    with pytest.raises(RuntimeError, match="NCCL"):
        write(1)


def test_folder_of_a_run_that_is_gone_is_not_made_again(tmp_path, write):
    """A mount that vanished leaves its empty mount point: what is written there would be on another disk."""
    tmp_path.rmdir()
    with pytest.raises(ValueError, match="can't be saved"):
        write(1)
    assert not tmp_path.exists()
    tmp_path.mkdir()


# The best one


def test_best_is_named_and_never_pruned(tmp_path, write):
    marked = []
    for step, value in enumerate([0.1, 0.5, 0.3, 0.5, 0.4], 1):
        write(step, keep=1)
        marked.append(mark_best(CheckpointConfig(), tmp_path, step, {"val/mean": value}))
    assert marked == [True, True, False, False, False]
    assert json.loads((tmp_path / "checkpoints" / "best").read_text()) == {
        "step": 2,
        "metric": "val/mean",
        "value": 0.5,
        "folder": "step-000002",
    }
    assert names(tmp_path) == ["best", "latest", "step-000002", "step-000005"]
    assert not mark_best(CheckpointConfig(), tmp_path, 6, {"val/mean": 0.9}), "no checkpoint of that step"
    write(6, keep=1)
    assert not mark_best(CheckpointConfig(), tmp_path, 6, {"val/mean": float("nan")})
    assert mark_best(CheckpointConfig(), tmp_path, 6, {"val/mean": 0.9})
    write(7, keep=1)
    assert names(tmp_path) == ["best", "latest", "step-000006", "step-000007"]


def test_best_of_a_future_that_the_run_left_or_of_another_metric_does_not_hold(tmp_path, write):
    for step in (2, 5):
        write(step)
    assert mark_best(CheckpointConfig(), tmp_path, 5, {"val/mean": 0.9})
    assert mark_best(CheckpointConfig(), tmp_path, 2, {"val/mean": 0.4})
    write(6)
    other = CheckpointConfig(best_metric="val/exact/pass@4")
    assert mark_best(other, tmp_path, 6, {"val/mean": 0.1, "val/exact/pass@4": 0.2})


def test_best_metric_that_is_not_measured(tmp_path):
    with pytest.raises(
        ValueError, match=r"checkpoint.best_metric=val/maen is not measured; known: val/a/mean@1, val/mean"
    ):
        mark_best(
            CheckpointConfig(best_metric="val/maen"),
            tmp_path,
            1,
            {"val/mean": 1.0, "val/a/mean@1": 1.0, "reward/mean": 1.0},
        )
    with pytest.raises(ValueError, match="checkpoint.best_metric=reward/mean must be one of validation's"):
        CheckpointConfig(best_metric="reward/mean")
    assert mark_best(CheckpointConfig(best_metric=None), tmp_path, 1, {}) is False


# Changed settings


def settings(**changes):
    """A configuration, with knobs of it changed."""
    knobs = {
        "data__train_files": ("a.jsonl",),
        "data__val_files": ("v.jsonl",),
        "data__train_batch_size": 8,
        "actor__path": "m",
        "actor__ppo_mini_batch_size": 8,
        "actor__ppo_max_token_len_per_gpu": 64,
        "rollout__n": 4,
        "rollout__session_timeout_s": 9.0,
        "trainer__total_training_steps": 4,
        "checkpoint__save_freq": 2,
        "log__project_name": "x",
        **changes,
    }
    config = Config()
    for knob, value in knobs.items():
        group, name = knob.split("__")
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{name: value})})
    return config


def stored(config):
    return json.loads(json.dumps(dataclasses.asdict(config)))


def saved_by(config):
    return SavedState(RunState(), stored(config))


def value_in(config, knob):
    group, name = knob.split("__")
    return stored(config)[group][name]


@pytest.mark.parametrize(
    "knob, value",
    [
        ("data__train_batch_size", 4),
        ("data__train_files", ("b.jsonl",)),
        ("data__shuffle", False),
        ("actor__path", "n"),
        ("actor__lr", 2e-6),
        ("actor__betas", (0.9, 0.99)),
        ("actor__ppo_mini_batch_size", 4),
        ("rollout__n", 8),
        ("rollout__temperature", 0.9),
        ("trainer__seed", 1),
        ("algorithm__adv_estimator", "rloo"),
        ("loss__clip_ratio", 0.3),
    ],
)
def test_other_run_is_refused_and_allowed_when_asked(capsys, knob, value):
    old, new = settings(), settings(**{knob: value})
    line = f"{knob.replace('__', '.')}: {value_in(old, knob)} -> {value_in(new, knob)}"
    with pytest.raises(ValueError) as e:
        check_changes(CheckpointConfig(), saved_by(old), new)
    assert line in str(e.value) and "checkpoint.allow_changes" in str(e.value) and "\n" not in str(e.value)
    check_changes(CheckpointConfig(allow_changes=True), saved_by(old), new)
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    "knob, value",
    [
        ("trainer__total_training_steps", 9),
        ("trainer__test_freq", 5),
        ("checkpoint__save_freq", 1),
        ("log__project_name", "y"),
        ("data__val_files", ()),
        ("actor__ppo_max_token_len_per_gpu", 128),
        ("rollout__gpu_memory_utilization", 0.4),
        ("rollout__session_timeout_s", 1.0),
    ],
)
def test_harmless_changes_are_said_and_pass(capsys, knob, value):
    old, new = settings(), settings(**{knob: value})
    check_changes(CheckpointConfig(), saved_by(old), new)
    line = f"{knob.replace('__', '.')}: {value_in(old, knob)} -> {value_in(new, knob)}"
    assert capsys.readouterr().out == f"resuming with other settings: {line}\n"


def test_changes_of_both_kinds_are_said_together(capsys):
    new = settings(data__val_files=(), actor__lr=2e-6)
    check_changes(CheckpointConfig(allow_changes=True), saved_by(settings()), new)
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith("settings: actor.lr: 1e-06 -> 2e-06; data.val_files: ['v.jsonl'] -> []")


def test_nothing_changed_says_nothing(capsys):
    check_changes(CheckpointConfig(), saved_by(settings()), settings())
    check_changes(CheckpointConfig(), SavedState(RunState()), settings())
    check_changes(CheckpointConfig(), saved_by(settings()), settings(trainer__val_only=True, actor__lr=1.0))
    assert not capsys.readouterr().out


def test_knob_of_another_version_is_no_change(capsys):
    old = stored(settings())
    del old["actor"]["lr"], old["loss"]
    old["actor"]["gone"] = old["gone"] = {"gone": 1}
    check_changes(CheckpointConfig(), SavedState(RunState(), old), settings())
    assert not capsys.readouterr().out


def test_more_steps_are_another_run_when_the_learning_rate_goes_by_them():
    old = settings(actor__lr_scheduler_type="cosine")
    new = settings(actor__lr_scheduler_type="cosine", trainer__total_training_steps=8)
    assert changed_knobs(stored(old), new) == ([("trainer.total_training_steps", 4, 8)], [])


# The knobs that might change when checkpoint.py had a list of their names, and those that there were not then.
MIGHT_CHANGE = (
    "checkpoint.*",
    "log.*",
    "sync.*",
    "val.*",
    "trainer.total_*",
    "trainer.test_freq",
    "trainer.trace_*",
    "trainer.check_memory",
    "trainer.val_*",
    "data.val_*",
    "*timeout_s",
    "*.max_failed_fraction",
    "*_workers",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_memory_bytes",
    "rollout.free_cache_engine",
    "rollout.enforce_eager",
    "rollout.lean_*",
    "rollout.max_num_*",
    "rollout.tensor_model_parallel_size",
    "actor.use_dynamic_bsz",
    "actor.*_per_gpu",
    "actor.enable_gradient_checkpointing",
    "actor.use_torch_compile",
    "actor.share_prompts",
    "actor.reshard_after_forward",
    "actor.fsdp_size",
    "*offload*",
)
NEW = {
    "actor.flash_attention",
    "actor.lean_kernels",
    "rollout.lean_engine",
    "sync.replay_copies",
    "log.diagnose",
    "log.record_skipped",
    "trainer.plain",
}


def test_knobs_that_a_resumed_run_may_change():
    """All that might change before, and of the new ones these. A knob that is renamed must not become another kind unseen."""
    config = Config()
    old = {
        g.name: {k.name: "another" for k in dataclasses.fields(getattr(config, g.name))}
        for g in dataclasses.fields(config)
    }
    different, harmless = changed_knobs(old, config)
    may, may_not = ({knob for knob, *_ in changes} for changes in (harmless, different))
    before = {knob for knob in may | may_not if any(fnmatch.fnmatch(knob, pattern) for pattern in MIGHT_CHANGE)}
    assert (sorted(before - may), sorted(may - before - NEW), sorted(NEW - may)) == ([], [], [])
    unused = [pattern for pattern in MIGHT_CHANGE if not fnmatch.filter(may, pattern)]
    assert not unused


# Real weights, in processes of their own: RANKS writes and reads checkpoints of the tiny model without vLLM.

RANKS = """
import json, resource, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from transformers import AutoTokenizer
import checkpoint
from actor import Actor, ActorConfig
from fsdp import make_accelerator

path, run_dir, todo = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
cfg = ActorConfig(path=path, dtype="bfloat16" if todo == "bfloat16" else "float32", lr=1e-2)
tokenizer = AutoTokenizer.from_pretrained(path)
actor = Actor(cfg, make_accelerator(cfg), len(tokenizer), 1.0)
checkpoint.BACKOFF_S = 0.01

def everything():
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    moments = get_optimizer_state_dict(actor.model, actor.optimizer.optimizer, options=options).get("state", {})  # on rank 0
    return {name: tensor.clone() for name, tensor in actor.weights(torch.float32)} | {f"{name}/{part}": x for name, parts in moments.items() for part, x in parts.items()}

def learn():
    for i, (name, p) in enumerate(actor.model.named_parameters()):
        p.grad = torch.ones_like(p) * (0.1 + i)
    actor.optimizer.step()
    actor.optimizer.zero_grad()

run_dir.mkdir(exist_ok=True)
if todo == "load":
    checkpoint.load(checkpoint.find(checkpoint.CheckpointConfig(), run_dir), actor)
    found, expected = everything(), torch.load(run_dir / "expected.pt") if dist.get_rank() == 0 else {}
    assert actor.version == 1 and (dist.get_rank() or found.keys() == expected.keys() and len(found) > 50)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    learn()
else:
    learn()
    checkpoint.save(checkpoint.CheckpointConfig(), run_dir, actor, checkpoint.RunState(1), {}, tokenizer)
    expected = everything()
    if dist.get_rank() == 0:
        torch.save(expected, run_dir / "expected.pt")
if todo == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    checkpoint.save(checkpoint.CheckpointConfig(), run_dir, actor, checkpoint.RunState(2), {}, tokenizer)
dist.barrier()
dist.destroy_process_group()
"""


def ranks(model, run_dir, todo, processes):
    script = run_dir.parent / "ranks.py"
    script.write_text(RANKS)
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    } | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        str(script),
        str(model),
        str(run_dir),
        todo,
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def export(*args):
    return subprocess.run(
        [sys.executable, "-m", "look.export", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """The folder of a run that two ranks saved, after which its model was deleted."""
    folder = tmp_path_factory.mktemp("saved")
    return saved_run(tiny / "model", folder, 2)


def saved_run(model, folder, processes):
    shutil.copytree(model, folder / "model")
    # Published generation configs may contradict themselves; transformers reads but does not write such.
    odd = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 3}
    (folder / "model" / "generation_config.json").write_text(json.dumps(odd))
    done = ranks(folder / "model", folder / "run", "bfloat16", processes)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(folder / "model")
    return folder / "run"


@pytest.mark.slow
def test_weights_and_optimizer_of_two_ranks_go_on_with_one(tiny, saved):
    loaded = ranks(tiny / "model", saved, "load", 1)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert loaded.stdout.count("saved by 2 processes and goes on with 1") == 1


def test_export_needs_no_original_and_loads(saved, tmp_path):
    assert export(saved, tmp_path / "out", "--step", "1").returncode == 0
    assert export(saved, tmp_path / "exact", "--dtype", "float32").returncode == 0
    check_export(saved, tmp_path / "out", torch.bfloat16, tied=True)
    model = check_export(saved, tmp_path / "exact", torch.float32, tied=True)
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(tmp_path / "exact")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    prompt = torch.tensor([[5, 6, 7]])
    for token in json.loads(done.stdout.splitlines()[-1]):
        assert token == int(model(prompt).logits[0, -1].argmax())
        prompt = torch.cat([prompt, torch.tensor([[token]])], 1)


@pytest.mark.slow
def test_untied_model_of_one_rank_goes_on_with_two_and_is_exported(tiny, tmp_path):
    run = saved_run(tiny / "untied", tmp_path, 1)
    loaded = ranks(tiny / "untied", run, "load", 2)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert loaded.stdout.count("saved by 1 processes and goes on with 2") == 1
    assert export(run, tmp_path / "out").returncode == 0
    check_export(run, tmp_path / "out", torch.bfloat16, tied=False)


def check_export(run, folder, dtype, tied):
    model, expected = AutoModelForCausalLM.from_pretrained(folder), torch.load(run / "expected.pt")
    assert model.dtype == dtype == model.config.dtype and model.config.architectures == ["Qwen3ForCausalLM"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    weights = dict(model.named_parameters())
    assert weights.keys() == {name for name in expected if "/" not in name} and all(
        torch.equal(w, expected[name].to(dtype)) for name, w in weights.items()
    )
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["temperature"] == 0.6 and GenerationConfig.from_pretrained(folder).eos_token_id == 3
    assert AutoTokenizer.from_pretrained(folder).chat_template
    return model


@pytest.mark.slow
def test_disk_that_fills_up_on_two_ranks_stops_both_and_leaves_the_last_checkpoint(tiny, tmp_path):
    done = ranks(tiny / "model", tmp_path / "run", "full", 2)
    assert done.returncode != 0 and done.stdout.count("step-000002 failed (attempt") == 3, done.stderr[-3000:]
    assert done.stderr.count("ValueError: ") == 2 and "the earlier checkpoints are as they were" in done.stderr
    assert (
        names(tmp_path / "run") == ["latest", "step-000001"]
        and find(CheckpointConfig(), tmp_path / "run").name == "step-000001"
    )


GENERATE = """
import os, sys, json
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR")
from engine import import_vllm
import_vllm()  # its own linear layers use instructions that not every machine which claims them has
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
llm = LLM(sys.argv[1], kv_cache_memory_bytes=32 << 20, max_model_len=128, enforce_eager=True)
print(json.dumps(list(llm.generate([TokensPrompt(prompt_token_ids=[5, 6, 7])], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids)))
"""


def test_export_of_what_is_not_there_is_one_line(tmp_path, write):
    folder = tmp_path / "checkpoints"
    for step, says in [
        (None, "no checkpoint in"),
        ("3", "step-000003 is no complete checkpoint"),
        ("x", "--step x is neither"),
        ("best", "no best checkpoint"),
    ]:
        with pytest.raises(ValueError, match=says):
            choose(folder, step)
    write(1)
    with pytest.raises(ValueError, match="without the model's configuration"):
        choose(folder, None)
    cut(write(2))
    with pytest.raises(
        ValueError, match="step-000002 is no complete checkpoint: pytorch_model_fsdp_0/__0_0.distcp has 699 bytes"
    ):
        choose(folder, "2")
    done = export(tmp_path, tmp_path / "out", "--step", "2")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_export_finds_the_best(tmp_path, write):
    write(1)
    mark_best(CheckpointConfig(), tmp_path, 1, {"val/mean": 1.0})
    write(2)
    with pytest.raises(ValueError, match="step-000001 was saved without"):
        choose(tmp_path / "checkpoints", "best")
