"""Synchronous GRPO, the whole loop: `accelerate launch train.py --config configs/quickstart.yaml [--group.knob value ...]`.

One process a GPU. Each step: the weights go to vLLM, vLLM samples, rewards are computed, the batch is gathered, vLLM sleeps, and
from there every rank holds the same list: old (and reference) log-probs, advantages, and the actor's updates.
"""

import dataclasses
import gc
import sys

import torch
from launch import run

from actor import Actor, Reference
from advantage import compute_advantages, punish_overlong, set_loss_mask, set_token_level_rewards, update_kl_coef
from agent import agent_prompt, check_agents
from batch import gather
from checkpoint import check_changes, export, find, is_due, load, mark_best, read_state, save
from config import Config, load_config
from data import TaskStream, filter_overlong, load_tasks
from engine import Engine
from fsdp import make_accelerator
from host.rank import told_to_stop
from log import Logger, start_log
from look.memory import preflight
from look.replay import Recorder
from loss import reject_mismatched, rollout_mismatch
from metrics import rollout_metrics, validation_metrics
from policy import load_tokenizer
from reward import Scorer, check_failures
from rollout import Rollout, check_groups, sample
from sync_weights import sync_weights
from tasks.tools import Toolbox


def train(cfg: Config) -> None:
    tokenizer = load_tokenizer(cfg.actor.path)
    train_tasks, val_tasks = load_data(cfg, tokenizer)
    scorer = Scorer(cfg.reward, {t.data_source for t in train_tasks + val_tasks})
    stream = None if cfg.trainer.val_only else TaskStream(train_tasks, cfg.data, cfg.trainer.seed)
    total_steps = (
        None
        if cfg.trainer.val_only
        else cfg.trainer.total_training_steps or cfg.trainer.total_epochs * stream.steps_per_epoch
    )

    accelerator = make_accelerator(cfg.actor)
    checkpoint = find(cfg.checkpoint, cfg.run_dir)
    state = read_state(checkpoint)
    if len(seen := set(gather([f"step {state['step']} ({checkpoint})"]))) > 1:
        raise ValueError(
            f"the ranks see different checkpoints in {cfg.run_dir}: {', '.join(sorted(seen))}: log.default_local_dir must be one folder for all hosts"
        )
    if cfg.trainer.val_only:
        total_steps = state["step"]
    if state["step"] > total_steps:
        raise ValueError(
            f"{checkpoint} has done {state['step']} steps, more than the {total_steps} asked for: raise trainer.total_training_steps, or set checkpoint.resume=never"
        )
    check_changes(cfg.checkpoint, state, dataclasses.asdict(cfg))
    log = start_log(cfg, accelerator.process_index, checkpoint, state, total_steps)
    if cfg.trainer.check_memory:
        preflight(cfg, len(tokenizer), accelerator.num_processes)
    engine = Engine(cfg, tokenizer, Toolbox(cfg.agent))  # first, since vLLM measures the memory that it finds free
    actor = Actor(cfg.actor, accelerator, len(tokenizer), cfg.rollout.temperature)
    reference = (
        Reference(cfg.ref, cfg.actor, accelerator, len(tokenizer), cfg.rollout.temperature)
        if cfg.needs_reference
        else None
    )
    first_step, kl_coef = state["step"], state.get("kl_coef", cfg.algorithm.kl_coef)
    if checkpoint:
        load(checkpoint, actor)
        if stream:
            stream.load_state_dict(state["stream"])

    recorder = Recorder(cfg, actor, tokenizer)
    recorder.skipped = state.get("skipped", 0)
    gc.collect()
    gc.freeze()  # what is there by now stays: collections need not look at it
    log.start_clock()
    ends = False
    for step in range(first_step, total_steps + 1):
        # The sampler gets the weights that the last step left: every trajectory of this step is on-policy.
        with log.timer("sync"):
            if cfg.actor.optimizer_offload:
                actor.moments.offload()
            due = step == first_step or (cfg.sync.verify_every > 0 and step % cfg.sync.verify_every == 0)
            log.add(sync_weights(actor, engine, cfg.sync, (train_tasks or val_tasks) if due else []))
        if val_tasks and validation_is_due(cfg, step, total_steps):
            with log.timer("testing"):
                log.add(validate(cfg, engine, scorer, val_tasks, step, log))
            if not cfg.trainer.val_only:
                mark_best(cfg.checkpoint, cfg.run_dir, step, log.metrics)
        if step == total_steps:
            engine.sleep()
            log.end_step(step)
            break

        trajectories = sample(cfg, engine, scorer, stream, step, log)  # from here on the same list on every rank
        with log.timer("sleep"):
            engine.sleep()
        log.add(punish_overlong(trajectories, cfg.algorithm, cfg.data.max_response_length))
        set_loss_mask(trajectories, cfg.algorithm)

        if cfg.old_logprobs_from != "update":
            with log.timer("old_log_prob"):
                bypass = cfg.old_logprobs_from == "rollout"
                for t, logprobs in zip(
                    trajectories,
                    [torch.tensor(t.rollout_logprobs) for t in trajectories] if bypass else actor.score(trajectories),
                ):
                    t.old_logprobs = logprobs
            log.add(reject_mismatched(trajectories, cfg.loss))
        if reference:
            with log.timer("ref"):
                for t, logprobs in zip(trajectories, reference.score(trajectories)):
                    t.ref_logprobs = logprobs
        with log.timer("adv"):
            log.add(set_token_level_rewards(trajectories, cfg.algorithm, kl_coef))
            log.add(compute_advantages(trajectories, cfg.algorithm))
            kl_coef = update_kl_coef(kl_coef, log.metrics.get("reward/kl", 0.0), len(trajectories), cfg.algorithm)
        recorder.before_update(step)
        with log.timer("update_actor"):
            log.add(actor.update(trajectories, cfg.loss, step, total_steps, cfg.trainer.seed))
        recorder.after_update(step)
        log.add(rollout_metrics(trajectories) | ({} if cfg.loss.bypass_mode else rollout_mismatch(trajectories)))

        # Dump and record come before the checkpoint: a kill between them does a step again, and none is lost. The next record has the time that saving took.
        with log.timer("dump"):
            log.keep(step, trajectories, cfg, actor, tokenizer)
        log.end_step(step)
        ends = told_to_stop(actor.device)
        if is_due(step + 1, total_steps, cfg.checkpoint.save_freq) or (ends and cfg.checkpoint.save_freq):
            with log.timer("save_checkpoint"):
                state = {
                    "stream": stream.state_dict(),
                    "kl_coef": kl_coef,
                    "wandb_id": log.trackers and log.trackers.wandb_id,
                    "skipped": recorder.skipped,
                    "config": dataclasses.asdict(cfg),
                }
                save(cfg.checkpoint, cfg.run_dir, step + 1, actor, state, tokenizer)
        if ends:
            log.say(
                f"told to end (SIGTERM) after {step + 1} steps"
                + (
                    ": saved, the same command goes on from there"
                    if cfg.checkpoint.save_freq
                    else ", not saved: checkpoint.save_freq=0"
                )
            )
            break

    if cfg.checkpoint.export_hf and not cfg.trainer.val_only and not ends:
        export(cfg.run_dir / "hf", actor, tokenizer, engine.dtype)
    log.finish()
    scorer.close()
    engine.close()


def load_data(cfg: Config, tokenizer):
    """Training and validation tasks that fit. Everything wrong with them is found here, before a model loads."""
    found = []
    for files, most, knob in [
        (cfg.data.train_files, cfg.data.train_max_samples, "data.train_files"),
        (cfg.data.val_files, cfg.data.val_max_samples, "data.val_files"),
    ]:
        tasks = (
            load_tasks(files, cfg.data, most, knob) if files and not (cfg.trainer.val_only and "train" in knob) else []
        )
        check_agents(tasks, cfg.agent)
        found.append(
            filter_overlong(tasks, tokenizer, cfg.data, lambda task: agent_prompt(task, tokenizer, cfg.agent))
            if tasks
            else []
        )
    return found


def validation_is_due(cfg: Config, step: int, total_steps: int) -> bool:
    """After `step` steps: before the first when asked for, every test_freq, and always at the end."""
    if cfg.trainer.val_only or step == 0:
        return cfg.trainer.val_before_train or cfg.trainer.val_only
    return step == total_steps or (cfg.trainer.test_freq > 0 and step % cfg.trainer.test_freq == 0)


def validate(cfg: Config, engine: Engine, scorer: Scorer, tasks: list, step: int, log: Logger) -> dict[str, float]:
    """Sample and score the validation tasks with validation's own sampling; dump them; return val/ metrics. A failed session counts as wrong."""
    groups = gather(Rollout(engine, scorer, step, cfg.val).run(tasks))
    check_groups(groups, cfg.rollout)
    trajectories = [t for group in groups for t in group.trajectories]
    log.failures(f"val-{step:06d}", groups)
    log.dump(f"val-{step:06d}", trajectories)
    failed = {
        name.replace("reward", "val"): number for name, number in check_failures(trajectories, cfg.reward).items()
    }
    return validation_metrics(trajectories, tasks, cfg.val.n) | failed


if __name__ == "__main__":
    run(lambda: train(load_config(sys.argv[1:])))
