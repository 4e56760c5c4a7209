"""The whole configuration: the modules' dataclasses joined, set from YAML, then flags, then checked against each other.

`train.py --config configs/x.yaml --actor.lr 1e-6`: the file sets, a flag overrides, the dataclass defaults document.
Anything wrong is a ValueError (or tyro's message, exit code 2) in under three seconds, before a model loads.
"""

import argparse
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from actor import ActorConfig, RefConfig
from advantage import ESTIMATORS, AlgorithmConfig
from agent import AgentConfig, check_agents
from checkpoint import CheckpointConfig
from data import DataConfig
from host.console import say
from host.lookup import check_bounds, may_change, unknown
from host.settings import yaml_flags
from log import LogConfig
from loss import LOSSES, LossConfig
from reward import RewardConfig, load_reward
from rollout import RolloutConfig, ValConfig
from sync_weights import SyncConfig

# What trainer.plain sets: stock vLLM and plain torch, without a file of fast/ or look/.
PLAIN = {
    "actor.use_torch_compile": False,
    "actor.flash_attention": False,
    "actor.lean_kernels": False,
    "actor.share_prompts": False,
    "actor.optimizer_offload": False,
    "rollout.lean_engine": False,
    "rollout.lean_scheduler": False,
    "rollout.lean_kernels": False,
    "sync.replay_copies": False,
    "log.diagnose": False,
    "log.record_skipped": False,
    "log.replay_steps": (),
    "log.logger": ("console",),
    "trainer.trace_groups": 0,
    "trainer.check_memory": False,
}


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: int = may_change(1)
    """Passes over the training data."""
    total_training_steps: int | None = may_change(None)
    """Steps to train, instead of total_epochs passes."""
    test_freq: int = may_change(-1)
    """Steps between validations; -1 validates only at the ends."""
    val_before_train: bool = may_change(True)
    """Validate before the first step."""
    val_only: bool = may_change(False)
    """Validate once and stop."""
    seed: int = 0
    """Seed of everything: data order, sessions, initial states."""
    plain: bool = may_change(False)
    """Stock vLLM and plain torch: no file of fast/ or look/, no layer compiled. What to try first when a number is
    wrong on a GPU: does it happen with --trainer.plain? It sets the knob of every speed-up, over whatever sets it."""
    trace_groups: int = may_change(1)
    """Prompt groups that traces/STEP.jsonl keeps token by token, for `python -m look RUN --step STEP`; 0 for none."""
    trace_freq: int = may_change(10)
    """Steps between traces: 16 sessions of 8,192 tokens are 12 MB and two seconds."""
    check_memory: bool = may_change(True)
    """Refuse a run that can't fit into the GPU's memory, before anything is loaded (look/memory.py; the arithmetic is
    good to some 15 %)."""

    def __post_init__(self):
        at_least_one = dict.fromkeys(("total_epochs", "total_training_steps", "trace_freq"), "[1, inf)")
        check_bounds("trainer", self, trace_groups="[0, inf)", **at_least_one)


@dataclass(frozen=True)
class Config:
    """Synchronous GRPO: vLLM samples and sleeps, FSDP trains, the weights go back."""

    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    val: ValConfig = field(default_factory=ValConfig)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference is asked for."""
        return self.loss.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def wants_lean_engine(self) -> bool:
        """Whether a knob asks for a short way of fast/engine.py."""
        r = self.rollout
        return r.lean_engine or r.lean_scheduler or r.lean_kernels or self.sync.replay_copies

    @property
    def old_logprobs_from(self) -> str:
        """Where a step's old log-probs come from: actor, rollout (vLLM's own), or update. The forward of a step's only
        update gives them, since they equal the current ones there."""
        if self.loss.bypass_mode:
            return "rollout"
        many_updates = self.actor.ppo_epochs * self.data.train_batch_size > self.actor.ppo_mini_batch_size
        needed_before = many_updates or self.algorithm.use_kl_in_reward or self.loss.rollout_rs != "none"
        return "actor" if needed_before else "update"

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.log.default_local_dir) / self.log.experiment_name


def load_config(argv: list[str]) -> Config:
    """`[--config FILE] [--group.knob value ...]` to a checked Config. ValueError names the knob, the value and what is
    allowed."""
    import tyro

    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found, flags = parser.parse_known_args(argv)
    settings = yaml_flags(found.config, Config) if found.config else []
    about = f"{Config.__doc__}\n\n--config FILE sets knobs from YAML; flags override it."
    cfg = tyro.cli(Config, args=settings + flags, prog="train.py", description=about)
    if cfg.trainer.plain:
        cfg = make_plain(cfg)
    check(cfg, int(os.environ.get("WORLD_SIZE", 1)))
    for note in notes(cfg):
        say(f"note: {note}")
    divisor = cfg.loss.loss_scale_factor or float(cfg.data.max_response_length)
    return replace(cfg, loss=replace(cfg.loss, loss_scale_factor=divisor))


def make_plain(cfg: Config) -> Config:
    """trainer.plain resolved into the knobs of PLAIN, so that the run's config.yaml says what ran."""
    for name, value in PLAIN.items():
        group, knob = name.split(".")
        cfg = replace(cfg, **{group: replace(getattr(cfg, group), **{knob: value})})
    return cfg


def check(cfg: Config, world_size: int) -> None:
    """What no module can check alone. ValueError for what can't run."""
    if cfg.algorithm.adv_estimator not in ESTIMATORS:
        raise unknown("algorithm.adv_estimator", cfg.algorithm.adv_estimator, ESTIMATORS)
    if cfg.loss.loss_mode not in LOSSES:
        raise unknown("loss.loss_mode", cfg.loss.loss_mode, LOSSES)
    check_agents([], cfg.agent)
    load_reward(cfg.reward)  # the rule's name, or the user's file; the rows' data_sources come later
    if not cfg.actor.path:
        raise ValueError("actor.path is empty: name a Hugging Face model folder or id")
    if not cfg.data.train_files and not cfg.trainer.val_only:
        raise ValueError("data.train_files is empty: name a JSONL or Parquet file, or a dataset id")
    if cfg.trainer.val_only and not cfg.data.val_files:
        raise ValueError("trainer.val_only is on, but data.val_files is empty")
    check_batches(cfg, world_size)
    check_token_budgets(cfg)
    if cfg.loss.bypass_mode and (cfg.loss.rollout_is, cfg.loss.rollout_rs) != ("none", "none"):
        raise ValueError(
            f"loss.rollout_is={cfg.loss.rollout_is} and loss.rollout_rs={cfg.loss.rollout_rs} correct from rollout to "
            "old log-probs, but loss.bypass_mode makes them the same: turn one off"
        )


def check_batches(cfg: Config, world_size: int) -> None:
    """Prompts, sessions and processes must divide as a step needs it."""
    batch, mini, n = cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.rollout.n
    if batch % mini:
        raise ValueError(
            f"data.train_batch_size={batch} is not a multiple of actor.ppo_mini_batch_size={mini}: "
            "a step is a whole number of mini-batches"
        )
    if batch < world_size or mini * n < world_size:
        raise ValueError(
            f"{world_size} processes are too many for data.train_batch_size={batch} prompts a step and "
            f"actor.ppo_mini_batch_size={mini} x rollout.n={n} trajectories an update: each process needs one of both"
        )
    engine_ranks = cfg.rollout.tensor_model_parallel_size
    if world_size % engine_ranks:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={engine_ranks} does not divide the {world_size} processes "
            "(accelerate launch --num_processes)"
        )
    estimator = cfg.algorithm.adv_estimator
    by_group = getattr(ESTIMATORS[estimator], "by_group", True)
    if n == 1 and (by_group or cfg.algorithm.filter_groups):
        raise ValueError(
            f"rollout.n=1 gives algorithm.adv_estimator={estimator} or filter_groups no group to compare in: "
            "set rollout.n to 2 or more"
        )


def check_token_budgets(cfg: Config) -> None:
    """A micro-batch must hold one sequence at least."""
    prompt, response = cfg.data.max_prompt_length, cfg.data.max_response_length
    for knob in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"):
        budget = getattr(cfg.actor, knob)
        if cfg.actor.use_dynamic_bsz and budget is not None and budget < prompt + response:
            raise ValueError(
                f"actor.{knob}={budget} is smaller than one sequence, data.max_prompt_length={prompt} + "
                f"data.max_response_length={response} = {prompt + response} tokens"
            )


def notes(cfg: Config) -> list[str]:
    """What is rarely meant, and yet runs."""
    found = []
    if cfg.loss.use_kl_loss and cfg.algorithm.use_kl_in_reward:
        found.append(
            "KL is in the loss (loss.use_kl_loss) and in the reward (algorithm.use_kl_in_reward): "
            "two different penalties, both on"
        )
    if cfg.loss.use_kl_loss and cfg.loss.kl_loss_type == "k1":
        found.append("loss.kl_loss_type=k1 has no KL gradient in expectation: use k2, k3 or k1+")
    if cfg.rollout.top_p < 1 or cfg.rollout.top_k:
        found.append(
            f"rollout.top_p={cfg.rollout.top_p}, rollout.top_k={cfg.rollout.top_k}: the actor does not reproduce the "
            "cut, so its log-probs and vLLM's differ"
        )
    if cfg.trainer.plain:
        found.append(f"trainer.plain sets {', '.join(PLAIN)}")
    return found
