"""Synchronous GRPO, the whole loop: `accelerate launch train.py --config configs/quickstart.yaml [--group.knob value ...]`.

One process a GPU. Each step: the weights go to vLLM, vLLM samples, rewards are computed, the batch is gathered, vLLM sleeps, and
from there every rank holds the same list: old (and reference) log-probs, advantages, and the actor's updates.
"""
import gc
import os
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch

from actor import Actor, Reference, make_accelerator
from advantage import compute_advantages, punish_overlong, set_baselines, set_loss_mask, set_token_level_rewards, update_kl_coef
from agent import check_agents, load_tokenizer
from batch import Trajectory, gather, group_by_prompt, group_kind, relaunch_ranks
from checkpoint import export, find, is_due, load, read_state, save
from config import Config, load_config
from data import TaskStream, filter_overlong, load_tasks
from log import Logger, rollout_metrics, start_log, validation_metrics
from loss import reject_mismatched, rollout_mismatch
from reward import check_failures, load_reward, score
from rollout import Engine, ValConfig
from sync_weights import sync_weights


def train(cfg: Config) -> None:
    tokenizer = load_tokenizer(cfg.actor.path)
    train_tasks, val_tasks, reward_fn = load_data(cfg, tokenizer)
    stream = None if cfg.trainer.val_only else TaskStream(train_tasks, cfg.data, cfg.trainer.seed)
    total_steps = None if cfg.trainer.val_only else cfg.trainer.total_training_steps or cfg.trainer.total_epochs * stream.steps_per_epoch

    accelerator = make_accelerator(cfg.actor)
    checkpoint = find(cfg.checkpoint, cfg.run_dir)
    state = read_state(checkpoint)
    if cfg.trainer.val_only:
        total_steps = state["step"]
    if state["step"] > total_steps:
        raise ValueError(f"{checkpoint} has done {state['step']} steps, more than the {total_steps} asked for: raise trainer.total_training_steps, or set checkpoint.resume=never")
    log = start_log(cfg, accelerator.process_index, checkpoint, state, total_steps)
    engine = Engine(cfg, tokenizer)  # first, since vLLM measures the memory that it finds free
    actor = Actor(cfg.actor, accelerator, len(tokenizer), cfg.rollout.temperature)
    reference = Reference(cfg.ref, cfg.actor, accelerator, len(tokenizer), cfg.rollout.temperature) if cfg.needs_reference else None
    first_step, kl_coef = state["step"], state.get("kl_coef", cfg.algorithm.kl_coef)
    if checkpoint:
        load(checkpoint, actor)
        if stream:
            stream.load_state_dict(state["stream"])

    gc.collect()
    gc.freeze()  # what is there by now stays: collections need not look at it
    log.start_clock()
    for step in range(first_step, total_steps + 1):
        # The sampler gets the weights that the last step left: every trajectory of this step is on-policy.
        with log.timer("sync"):
            due = step == first_step or (cfg.sync.verify_every > 0 and step % cfg.sync.verify_every == 0)
            log.add(sync_weights(actor, engine, cfg.sync, (train_tasks or val_tasks) if due else []))
        if val_tasks and validation_is_due(cfg, step, total_steps):
            with log.timer("testing"):
                log.add(validate(cfg, engine, val_tasks, reward_fn, step, log))
        if step == total_steps:
            engine.sleep()
            log.end_step(step)
            break

        trajectories = sample(cfg, engine, stream, reward_fn, step, log)  # from here on the same list on every rank
        with log.timer("sleep"):
            engine.sleep()
        log.add(punish_overlong(trajectories, cfg.algorithm, cfg.data.max_response_length))
        set_loss_mask(trajectories, cfg.algorithm)

        if cfg.old_logprobs_from != "update":
            with log.timer("old_log_prob"):
                bypass = cfg.old_logprobs_from == "rollout"
                for t, logprobs in zip(trajectories, [torch.tensor(t.rollout_logprobs) for t in trajectories] if bypass else actor.score(trajectories)):
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
        with log.timer("update_actor"):
            log.add(actor.update(trajectories, cfg.loss, step, total_steps, cfg.trainer.seed))
        log.add(rollout_metrics(trajectories) | ({} if cfg.loss.bypass_mode else rollout_mismatch(trajectories)))

        if is_due(step + 1, total_steps, cfg.checkpoint.save_freq):
            with log.timer("save_checkpoint"):
                state = {"stream": stream.state_dict(), "kl_coef": kl_coef, "wandb_id": log.wandb and log.wandb.id}
                save(cfg.checkpoint, cfg.run_dir, step + 1, actor, state)
        if cfg.log.rollout_dump_freq and step % cfg.log.rollout_dump_freq == 0:
            log.dump(f"{step:06d}", trajectories)
        log.end_step(step)

    if cfg.checkpoint.export_hf and not cfg.trainer.val_only:
        export(cfg.run_dir / "hf", actor, tokenizer, engine.dtype)
    log.finish()
    engine.close()


def load_data(cfg: Config, tokenizer):
    """Training and validation tasks that fit, and the reward function. Everything wrong with them is found here, before a model loads."""
    train_files = () if cfg.trainer.val_only else cfg.data.train_files
    train_tasks, val_tasks = (
        filter_overlong(load_tasks(files, cfg.data, most, knob), tokenizer, cfg.data) if files else []
        for files, most, knob in [(train_files, cfg.data.train_max_samples, "data.train_files"), (cfg.data.val_files, cfg.data.val_max_samples, "data.val_files")]
    )
    check_agents(train_tasks + val_tasks, cfg.agent)
    return train_tasks, val_tasks, load_reward(cfg.reward, {t.data_source for t in train_tasks + val_tasks})


def sample(cfg: Config, engine: Engine, stream: TaskStream, reward_fn, step: int, log: Logger) -> list[Trajectory]:
    """A step's scored trajectories, train_batch_size groups of rollout.n sessions: the same list on every rank, in submission order.

    Dynamic sampling (filter_groups) replaces groups whose scores are all equal by fresh prompts, for a bounded number of batches.
    """
    kept, counts, tried = [], Counter(), 0
    most, wanted = cfg.algorithm.max_num_gen_batches if cfg.algorithm.filter_groups else 1, cfg.data.train_batch_size
    while len(kept) < wanted:
        if tried == most:
            raise ValueError(f"algorithm.max_num_gen_batches={most} batches gave {len(kept)} groups with different scores, {wanted} are needed; {counts['solved']} groups were solved, {counts['failed']} failed: change the data, or raise it")
        tasks = stream.next_batch()  # [P]
        with log.timer("gen"):
            own = engine.run(tasks, step, cfg.rollout, tried * wanted)  # this rank's prompts, G sessions each
            greedy = engine.run(tasks, step, ValConfig()) if cfg.algorithm.adv_estimator == "remax" else []
        with log.timer("reward"):
            score(own + greedy, reward_fn, engine.tokenizer, cfg.reward)
            set_baselines(own, greedy)
            trajectories = gather(own)
            log.add(check_failures(trajectories, cfg.reward))
        groups = group_by_prompt(trajectories)
        kinds = [group_kind(group) for group in groups]
        counts, tried = counts + Counter(kinds), tried + 1
        kept += [g for g, kind in zip(groups, kinds) if kind == "informative" or not cfg.algorithm.filter_groups]
        if not cfg.algorithm.filter_groups:
            break
    log.add({f"rollout/groups_{kind}": counts[kind] for kind in ("informative", "solved", "failed")} | {"rollout/gen_batches": tried})
    return [t for group in kept[:wanted] for t in group]


def validation_is_due(cfg: Config, step: int, total_steps: int) -> bool:
    """After `step` steps: before the first when asked for, every test_freq, and always at the end."""
    if cfg.trainer.val_only or step == 0:
        return cfg.trainer.val_before_train or cfg.trainer.val_only
    return step == total_steps or (cfg.trainer.test_freq > 0 and step % cfg.trainer.test_freq == 0)


def validate(cfg: Config, engine: Engine, tasks: list, reward_fn, step: int, log: Logger) -> dict[str, float]:
    """Sample and score the validation tasks with validation's own sampling; dump them; return val/ metrics."""
    trajectories = engine.run(tasks, step, cfg.val)
    score(trajectories, reward_fn, engine.tokenizer, cfg.reward)
    trajectories = gather(trajectories)
    log.dump(f"val-{step:06d}", trajectories)
    return validation_metrics(trajectories) | {"val/error": check_failures(trajectories, cfg.reward)["reward/error"]}


def main() -> None:
    """Run; on failure one line for the user's mistake, a traceback for anything else, and out at once, so that no rank waits for this one."""
    try:
        relaunch_ranks()
        train(load_config(sys.argv[1:]))
    except Exception as error:
        here, where = Path(__file__).parent, Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        users = isinstance(error, (ValueError, FileNotFoundError)) and where.parent == here  # raised by Lockstep's own code
        print(f"error: {error}" if users else traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(2 if users else 1)


if __name__ == "__main__":
    main()
