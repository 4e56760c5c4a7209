"""The whole configuration: the modules' dataclasses joined, set from YAML, then flags, then checked against each other.

`train.py --config configs/x.yaml --actor.lr 1e-6`: the file sets, a flag overrides, the dataclass defaults document. Anything
wrong is a ValueError (or tyro's message, exit code 2) in under three seconds, before a model loads.
"""

import argparse
import dataclasses
import os
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from actor import ActorConfig, RefConfig
from advantage import ESTIMATORS, GROUP_ESTIMATORS, AlgorithmConfig
from agent import AgentConfig, check_agents
from checkpoint import CheckpointConfig
from data import DataConfig
from host.lookup import nearest, unknown
from log import LogConfig
from loss import LOSSES, LossConfig
from reward import RewardConfig, load_reward
from rollout import RolloutConfig, ValConfig
from sync_weights import SyncConfig


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: int = 1
    """Passes over the training data."""
    total_training_steps: int | None = None
    """Steps to train, instead of total_epochs passes."""
    test_freq: int = -1
    """Steps between validations; -1 validates only at the ends."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    seed: int = 0
    """Seed of everything: data order, sessions, initial states."""
    trace_groups: int = 1
    """Prompt groups that traces/STEP.jsonl keeps token by token, for `python -m look RUN --step STEP`; 0 for none."""
    trace_freq: int = 10
    """Steps between traces: 16 sessions of 8,192 tokens are 12 MB and two seconds."""

    check_memory: bool = True
    """Refuse a run that can't fit into the GPU's memory, before anything is loaded (memory.py; the arithmetic is good to some 15 %)."""

    def __post_init__(self):
        if (
            min(x for x in (self.total_epochs, self.total_training_steps, self.trace_freq) if x is not None) < 1
            or self.trace_groups < 0
        ):
            raise ValueError(
                f"trainer.total_epochs={self.total_epochs}, trainer.total_training_steps={self.total_training_steps} and trainer.trace_freq={self.trace_freq} must be at least 1, trainer.trace_groups={self.trace_groups} not negative"
            )


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
        return self.loss.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def old_logprobs_from(self) -> str:
        """Where a step's old log-probs come from. With one update a step its own forward gives them: they equal the current ones."""
        many_updates = self.actor.ppo_epochs * self.data.train_batch_size > self.actor.ppo_mini_batch_size
        needed_before = many_updates or self.algorithm.use_kl_in_reward or self.loss.rollout_rs != "none"
        return "rollout" if self.loss.bypass_mode else "actor" if needed_before else "update"

    @property
    def run_dir(self) -> Path:
        return Path(self.log.default_local_dir) / self.log.experiment_name


def load_config(argv: list[str]) -> Config:
    """`[--config FILE] [--group.knob value ...]` to a checked Config. ValueError names the knob, the value and what is allowed."""
    import tyro

    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    found, flags = parser.parse_known_args(argv)
    settings = yaml_flags(found.config) if found.config else []
    cfg = tyro.cli(
        Config,
        args=settings + flags,
        prog="train.py",
        description=f"{Config.__doc__}\n\n--config FILE sets knobs from YAML; flags override it.",
    )
    check(cfg, int(os.environ.get("WORLD_SIZE", 1)))
    return replace(
        cfg, loss=replace(cfg.loss, loss_scale_factor=cfg.loss.loss_scale_factor or float(cfg.data.max_response_length))
    )


def yaml_flags(path: str) -> list[str]:
    """A YAML file of groups and knobs as the flags that say the same, so that one parser does all the typing."""
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: there is no such file")
    try:
        tree = yaml.safe_load(Path(path).read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"--config {path} must hold groups of knobs, not {tree!r}")
    groups = {f.name: f.type for f in dataclasses.fields(Config)}
    flags = []
    for group, knobs in tree.items():
        knobs = {} if knobs is None else knobs  # a group whose knobs are all commented out
        if group in groups and not isinstance(knobs, dict):
            raise ValueError(f"{path}: {group} is a group of knobs, not {knobs!r}")
        if group not in groups:
            raise ValueError(
                f"{path}: {group!r} is not a group of knobs{nearest(str(group), groups)}; groups: {', '.join(groups)}"
            )
        known = {
            name: kind
            for name, kind in typing.get_type_hints(groups[group]).items()
            if name in groups[group].__dataclass_fields__
        }
        for knob, value in knobs.items():
            if knob not in known:
                raise ValueError(f"{path}: {group}.{knob} is not a knob{nearest(str(knob), known)}")
            flags += to_flag(f"{group}.{knob}", value, known[knob], path)
    return flags


def to_flag(name: str, value, kind, path: str) -> list[str]:
    wrong_list = isinstance(value, list) and typing.get_origin(kind) is not tuple
    wrong_none = value is None and type(None) not in typing.get_args(kind)
    if isinstance(value, dict) or wrong_list or wrong_none or (kind is bool and not isinstance(value, bool)):
        raise ValueError(
            f"{path}: {name}={value!r} must be {'true or false' if kind is bool else f'a value of type {kind}'}"
        )
    if kind is bool:
        group, knob = name.split(".")
        return [f"--{name}" if value else f"--{group}.no-{knob}"]
    return [f"--{name}", *("None" if v is None else str(v) for v in (value if isinstance(value, list) else [value]))]


def check(cfg: Config, world_size: int) -> None:
    """What no module can check alone. ValueError for what can't run; prints a note for what is rarely meant."""
    batch, mini, n = cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.rollout.n
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for knob, value, known in [
        ("algorithm.adv_estimator", cfg.algorithm.adv_estimator, ESTIMATORS),
        ("loss.loss_mode", cfg.loss.loss_mode, LOSSES),
    ]:
        if value not in known:
            raise unknown(knob, value, known)
    check_agents([], cfg.agent)
    load_reward(cfg.reward)  # the rule's name, or the user's file; the rows' data_sources come later
    if not cfg.actor.path:
        raise ValueError("actor.path is empty: name a Hugging Face model folder or id")
    if not cfg.data.train_files and not cfg.trainer.val_only:
        raise ValueError("data.train_files is empty: name a JSONL or Parquet file, or a dataset id")
    if cfg.trainer.val_only and not cfg.data.val_files:
        raise ValueError("trainer.val_only is on, but data.val_files is empty")
    if batch % mini:
        raise ValueError(
            f"data.train_batch_size={batch} is not a multiple of actor.ppo_mini_batch_size={mini}: a step is a whole number of mini-batches"
        )
    if batch < world_size or mini * n < world_size:
        raise ValueError(
            f"{world_size} processes are too many for data.train_batch_size={batch} prompts a step and actor.ppo_mini_batch_size={mini} x rollout.n={n} trajectories an update: each process needs one of both"
        )
    if world_size % cfg.rollout.tensor_model_parallel_size:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={cfg.rollout.tensor_model_parallel_size} does not divide the {world_size} processes (accelerate launch --num_processes)"
        )
    if n == 1 and (cfg.algorithm.adv_estimator in GROUP_ESTIMATORS or cfg.algorithm.filter_groups):
        raise ValueError(
            f"rollout.n=1 gives algorithm.adv_estimator={cfg.algorithm.adv_estimator} or filter_groups no group to compare in: set rollout.n to 2 or more"
        )
    for knob in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu") if cfg.actor.use_dynamic_bsz else ():
        budget = getattr(cfg.actor, knob)
        if budget is not None and budget < longest:
            raise ValueError(
                f"actor.{knob}={budget} is smaller than one sequence, data.max_prompt_length={cfg.data.max_prompt_length} + data.max_response_length={cfg.data.max_response_length} = {longest} tokens"
            )
    if cfg.loss.bypass_mode and (cfg.loss.rollout_is, cfg.loss.rollout_rs) != ("none", "none"):
        raise ValueError(
            f"loss.rollout_is={cfg.loss.rollout_is} and loss.rollout_rs={cfg.loss.rollout_rs} correct from rollout to old log-probs, but loss.bypass_mode makes them the same: turn one off"
        )
    for note in notes(cfg) if int(os.environ.get("RANK", 0)) == 0 else ():
        print(f"note: {note}")


def notes(cfg: Config) -> list[str]:
    found = []
    if cfg.loss.use_kl_loss and cfg.algorithm.use_kl_in_reward:
        found.append(
            "KL is in the loss (loss.use_kl_loss) and in the reward (algorithm.use_kl_in_reward): two different penalties, both on"
        )
    if cfg.loss.use_kl_loss and cfg.loss.kl_loss_type == "k1":
        found.append("loss.kl_loss_type=k1 has no KL gradient in expectation: use k2, k3 or k1+")
    if cfg.rollout.top_p < 1 or cfg.rollout.top_k:
        found.append(
            f"rollout.top_p={cfg.rollout.top_p}, rollout.top_k={cfg.rollout.top_k}: the actor does not reproduce the cut, so its log-probs and vLLM's differ"
        )
    return found
