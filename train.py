"""Synchronous GRPO, the whole loop: `accelerate launch train.py --config configs/x.yaml [--group.knob value ...]`.

Each step: the weights go to vLLM, vLLM samples, rewards are computed, the batch is gathered, vLLM sleeps, and from
there every rank holds the same list: old (and reference) log-probs, advantages, and the actor's updates.

Decided once, for all of the code: no critic; no asynchrony, so every trajectory is on-policy; one process a GPU, which
holds actor, reference and vLLM; old log-probs come from the update itself when a step has only one.
"""

import contextlib
import gc
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from actor import Actor, Reference
from advantage import compute_advantages, mask_and_punish, set_token_level_rewards, update_kl_coef
from agent import agent_prompt, check_agents
from batch import Task, Trajectory, gather
from checkpoint import RunState, check_changes, export, find, is_due, load, mark_best, read_state, save
from config import Config, load_config
from data import TaskStream, filter_overlong, load_tasks
from engine import Engine
from fsdp import make_accelerator
from host import rank
from host.rank import ToldToStop, told_to_stop
from log import Logger, start_log
from loss import reject_mismatched, rollout_mismatch
from metrics import rollout_metrics, validation_metrics
from model import check_heads, check_model
from policy import load_tokenizer
from reward import Scorer, check_failures
from rollout import Rollout, check_groups, sample
from sync_weights import sync_weights
from tasks.tools import Toolbox


@dataclass
class Run:
    """What is there while a run goes on."""

    cfg: Config
    tokenizer: object
    engine: Engine
    actor: Actor
    reference: Reference | None
    scorer: Scorer
    stream: TaskStream | None  # of training tasks; None when it only validates
    val_tasks: list[Task]
    probe: list[Task]  # that a sync is proven with
    log: Logger
    state: RunState  # what a checkpoint remembers
    total_steps: int
    saved_step: int | None  # of the newest checkpoint


def main(argv: list[str]) -> None:
    run = start(load_config(argv))  # data, vLLM, actor, reference, log; and from a checkpoint, state
    with contextlib.suppress(ToldToStop):  # SIGTERM or Ctrl-C while sampling: the step is given up, nothing has changed
        train(run)
    finish(run)  # says where a stopped run goes on; exports one that ended


def train(run: Run) -> None:
    cfg, engine, actor, reference, log, state = run.cfg, run.engine, run.actor, run.reference, run.log, run.state

    for step in range(state.step, run.total_steps + 1):
        log.phase("sync")
        log.add(sync_weights(actor, engine, cfg.sync, run.probe))  # so every trajectory of this step is on-policy

        log.phase("testing")
        log.add(validate(run, step))  # {} when it is not due
        if step == run.total_steps:
            break

        log.phase("gen")
        trajectories = sample(run, step)  # B prompts x G sessions, scored as they end

        log.phase("sleep")
        engine.sleep()

        log.phase("old_log_prob")
        log.add(mask_and_punish(trajectories, cfg))
        fill_old_logprobs(trajectories, actor, cfg.old_logprobs_from)  # actor's, vLLM's, or left to the update
        log.add(reject_mismatched(trajectories, cfg.loss))

        if reference:
            log.phase("ref")
            fill(trajectories, "ref_logprobs", reference.score(trajectories))

        log.phase("adv")
        kl, metrics = set_token_level_rewards(trajectories, cfg.algorithm, state.kl_coef)
        log.add(metrics | compute_advantages(trajectories, cfg.algorithm))
        state.kl_coef = update_kl_coef(state.kl_coef, kl, len(trajectories), cfg.algorithm)

        log.phase("update_actor")
        log.add(actor.update(trajectories, cfg.loss, step, run.total_steps, cfg.trainer.seed))

        if finish_step(run, step, trajectories):  # metrics, dump, trace, checkpoint; True: told to stop
            break


def start(cfg: Config, engine: Engine | None = None) -> Run:
    """Everything that a run needs. What is wrong with its data or its checkpoint is found before a model loads. An
    `engine` that sleeps, as of an earlier run in this process, is used again, as it was made."""
    tokenizer = load_tokenizer(cfg.actor.path)
    check_models(cfg, len(tokenizer))
    train_tasks, val_tasks = load_data(cfg, tokenizer)
    scorer = Scorer(cfg.reward, {task.data_source for task in train_tasks + val_tasks})
    stream = None if cfg.trainer.val_only else TaskStream(train_tasks, cfg.data, cfg.trainer.seed)
    accelerator = make_accelerator(cfg.actor)
    checkpoint = find(cfg.checkpoint, cfg.run_dir)
    saved = read_state(checkpoint)
    state = saved.state
    total_steps = count_steps(cfg, stream, state, checkpoint)
    check_changes(cfg.checkpoint, saved, cfg)
    log = start_log(cfg, state, checkpoint, total_steps)
    if cfg.trainer.check_memory:
        from look.memory import preflight

        preflight(cfg, len(tokenizer), accelerator.num_processes)
    if engine:
        engine.cfg, engine.weight_version = cfg, None
    engine = engine or make_engine(cfg, tokenizer)  # before the actor: vLLM measures the memory that it finds free
    actor = Actor(cfg.actor, accelerator, len(tokenizer), cfg.rollout.temperature)
    reference = None
    if cfg.needs_reference:
        reference = Reference(cfg.ref, cfg.actor, accelerator, len(tokenizer), cfg.rollout.temperature)
    if cfg.log.replay_steps or cfg.log.record_skipped:
        from look.replay import Recorder

        actor.recorder = Recorder(cfg, tokenizer, was_bad=state.skipped > 0)
    if checkpoint:
        load(checkpoint, actor)
    go_on(state, cfg, stream)
    state.wandb_id = log.wandb_id or state.wandb_id  # a run without wandb in between keeps it
    gc.collect()
    gc.freeze()  # what is there by now stays: collections need not look at it
    log.start_clock()
    probe = train_tasks or val_tasks
    saved_step = state.step if checkpoint and checkpoint.parent.parent == cfg.run_dir else None
    return Run(
        cfg, tokenizer, engine, actor, reference, scorer, stream, val_tasks, probe, log, state, total_steps, saved_step
    )


def check_models(cfg: Config, num_tokens: int) -> None:
    """ValueError for a policy or a reference that would be trained or scored wrong."""
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    check_model("actor.path", cfg.actor.path, num_tokens, longest)
    check_heads(cfg.actor.path, cfg.rollout.tensor_model_parallel_size)
    if cfg.needs_reference and cfg.ref.path:
        check_model("ref.path", cfg.ref.path, num_tokens, longest)


def go_on(state: RunState, cfg: Config, stream: TaskStream | None) -> None:
    """Where the checkpoint stopped, in the data and with the KL's weight; from the start when it knows of neither."""
    if stream and state.stream:
        stream.load_state_dict(state.stream)
    state.stream = stream.state_dict() if stream else None
    state.kl_coef = cfg.algorithm.kl_coef if state.kl_coef is None else state.kl_coef


def load_data(cfg: Config, tokenizer) -> tuple[list[Task], list[Task]]:
    """Training and validation tasks that fit. Everything wrong with them is found here, before a model loads."""

    def load_split(files: tuple[str, ...], most: int, knob: str) -> list[Task]:
        tasks = load_tasks(files, cfg.data, most, knob) if files else []
        check_agents(tasks, cfg.agent)
        if not tasks:
            return []
        return filter_overlong(tasks, tokenizer, cfg.data, lambda task: agent_prompt(task, tokenizer, cfg.agent))

    train_files = () if cfg.trainer.val_only else cfg.data.train_files
    train_tasks = load_split(train_files, cfg.data.train_max_samples, "data.train_files")
    return train_tasks, load_split(cfg.data.val_files, cfg.data.val_max_samples, "data.val_files")


def count_steps(cfg: Config, stream: TaskStream | None, state: RunState, checkpoint: Path | None) -> int:
    """Training steps of the whole run. ValueError when the checkpoint has done more, or ranks see different ones."""
    seen = set(gather([f"step {state.step} ({checkpoint})"]))
    if len(seen) > 1:
        raise ValueError(
            f"the ranks see different checkpoints in {cfg.run_dir}: {', '.join(sorted(seen))}: "
            "log.default_local_dir must be one folder for all hosts"
        )
    if stream is None:
        return state.step
    total_steps = cfg.trainer.total_training_steps or cfg.trainer.total_epochs * stream.steps_per_epoch
    if state.step > total_steps:
        raise ValueError(
            f"{checkpoint} has done {state.step} steps, more than the {total_steps} asked for: "
            "raise trainer.total_training_steps, or set checkpoint.resume=never"
        )
    return total_steps


def make_engine(cfg: Config, tokenizer) -> Engine:
    """vLLM, asleep: one plain way through it, or with shorter ways where a knob allows one."""
    tools = Toolbox(cfg.agent)
    if cfg.wants_lean_engine:
        from fast.engine import LeanEngine

        return LeanEngine(cfg, tokenizer, tools)
    return Engine(cfg, tokenizer, tools)


def validate(run: Run, step: int) -> dict[str, float]:
    """When it is due after `step` steps: sample and score the validation tasks, dump them, mark the best checkpoint.
    With validation's own sampling; a failed session counts as wrong. Returns val/ metrics. A collective."""
    cfg, log = run.cfg, run.log
    if not run.val_tasks or not validation_is_due(cfg, step, run.total_steps):
        return {}
    groups = gather(Rollout(run.engine, run.scorer, step, cfg.val).run(run.val_tasks))
    check_groups(groups, cfg.rollout)
    trajectories = [t for group in groups for t in group.trajectories]
    log.failures(f"val-{step:06d}", groups)
    log.dump(f"val-{step:06d}", trajectories)
    failed = check_failures(trajectories, cfg.reward)
    metrics = validation_metrics(trajectories, run.val_tasks, cfg.val.n)
    metrics |= {name.replace("reward", "val"): number for name, number in failed.items()}
    if not cfg.trainer.val_only:
        mark_best(cfg.checkpoint, cfg.run_dir, step, metrics)
    return metrics


def validation_is_due(cfg: Config, step: int, total_steps: int) -> bool:
    """After `step` steps: before the first when asked for, every test_freq, and always at the end."""
    if cfg.trainer.val_only or step == 0:
        return cfg.trainer.val_before_train or cfg.trainer.val_only
    return step == total_steps or (cfg.trainer.test_freq > 0 and step % cfg.trainer.test_freq == 0)


def fill_old_logprobs(trajectories: list[Trajectory], actor: Actor, source: str) -> None:
    """From the actor, before it changes, or vLLM's own; "update" leaves them to the step's only update."""
    if source == "actor":
        fill(trajectories, "old_logprobs", actor.score(trajectories))
    elif source == "rollout":
        fill(trajectories, "old_logprobs", [torch.tensor(t.rollout_logprobs) for t in trajectories])


def fill(trajectories: list[Trajectory], name: str, values: list[torch.Tensor]) -> None:
    """Give every trajectory its values [L]."""
    for trajectory, own in zip(trajectories, values):
        setattr(trajectory, name, own)


def finish_step(run: Run, step: int, trajectories: list[Trajectory]) -> bool:
    """What a step leaves on disk; True when any rank was told to stop. A collective. Dump and record come before the
    checkpoint: a kill between them does a step again, and none is lost. The next record has the time that saving took.
    """
    cfg, log, state = run.cfg, run.log, run.state
    log.phase(None)
    count_skipped(run, step)
    log.add(rollout_metrics(trajectories))
    if not cfg.loss.bypass_mode:
        log.add(rollout_mismatch(trajectories))
    log.phase("dump")
    log.keep(step, trajectories, cfg, run.actor, run.tokenizer)
    log.end_step(step)
    state.step = step + 1
    state.stream = run.stream.state_dict()
    stops = told_to_stop(run.actor.device)
    if is_due(state.step, run.total_steps, cfg.checkpoint.save_freq) or (stops and cfg.checkpoint.save_freq):
        log.phase("save_checkpoint")
        save_checkpoint(run)
    return stops


def count_skipped(run: Run, step: int) -> None:
    """RuntimeError after log.max_skipped_steps steps in a row whose gradient was not finite."""
    cfg, state = run.cfg, run.state
    bad = not math.isfinite(run.actor.updates[-1].grad_norm)
    state.skipped = state.skipped + 1 if bad else 0
    if state.skipped == cfg.log.max_skipped_steps:
        found = ""
        if cfg.log.record_skipped:
            first = cfg.run_dir / "replays" / f"{step - state.skipped + 1:06d}"
            found = f"; the first one's mini-batch and weights are in {first}: python -m look.replay {first}"
        raise RuntimeError(
            f"the gradient was not finite in {state.skipped} steps in a row (log.max_skipped_steps){found}"
        )


def save_checkpoint(run: Run) -> None:
    """Weights, optimizer, RNGs and state, as of now. A collective."""
    save(run.cfg.checkpoint, run.cfg.run_dir, run.actor, run.state, asdict(run.cfg), run.tokenizer)
    run.saved_step = run.state.step


def finish(run: Run) -> None:
    """End a run: write the last record and the Hugging Face folder, or say where a stopped one goes on."""
    cfg, engine, log, state = run.cfg, run.engine, run.log, run.state
    if engine.weight_version == run.total_steps:  # vLLM has got the last weights: it ended
        log.phase("sleep")
        engine.sleep()
        log.end_step(run.total_steps)
        if cfg.checkpoint.export_hf and not cfg.trainer.val_only:
            export(cfg.run_dir / "hf", run.actor, run.tokenizer, engine.dtype)
    else:
        kept = "not saved: checkpoint.save_freq=0" if state.step else "there is nothing to save yet"
        if engine.state == "awake":
            engine.sleep()  # its memory may be what the optimizer's state needs
        if state.step and cfg.checkpoint.save_freq:
            if run.saved_step != state.step:
                save_checkpoint(run)
            kept = "saved, the same command goes on from there"
            if cfg.checkpoint.resume != "auto":
                kept = "saved, checkpoint.resume=auto goes on from there"
        log.say(f"told to stop (SIGTERM or Ctrl-C) after {state.step} steps: {kept}")
    log.finish()
    run.scorer.close()
    engine.close()


if __name__ == "__main__":
    rank.run(lambda: main(sys.argv[1:]))
