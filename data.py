"""Rows of a dataset to Tasks, their prompts to token ids, and an order that a checkpoint can resume.

Two row shapes load unchanged: verl's (`prompt` as messages, `data_source`, `reward_model.ground_truth`, `extra_info`,
maybe `agent_name`) and TRL's (`prompt` as text or messages, beside `ground_truth`, `answer` or `solution`). Other
columns go to `extra_info`. Kinds of files: tasks/readers.py.
"""

import random
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from batch import Task
from host.console import say
from host.lookup import check_bounds, may_change
from tasks.chat import prompt_text
from tasks.procedural import check_disjoint
from tasks.readers import read_rows, without_none


@dataclass(frozen=True)
class DataConfig:
    train_files: tuple[str, ...] = ()
    """Rows to train on: JSONL or Parquet files (globs too), Hugging Face datasets as `id`, `id:config` or
    `id:config:split` (the split is `train` when left out: `org/set::test`), or tasks of reasoning_gym:
    `reasoning_gym:chain_sum,countdown?size=500&seed=42`."""
    val_files: tuple[str, ...] = may_change(())
    """Rows to validate on, named as in train_files. Of reasoning_gym, with a seed that is at least `size` away: row i
    is made from seed + i."""
    train_batch_size: int = 64
    """Prompts a step (B); each is sampled rollout.n times."""
    max_prompt_length: int = 512
    """Tokens that a prompt may have, chat template and generation prompt included."""
    max_response_length: int = 512
    """Tokens that a response may have, tool results included."""
    filter_overlong_prompts: bool = True
    """Drop rows whose prompt is longer than max_prompt_length before the first step, and say how many."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """For an over-long prompt that reaches the rollout: error stops, left keeps its end, right its start, middle both
    ends."""
    shuffle: bool = True
    """Reshuffle the training rows every epoch; the order depends on the seed and the epoch alone."""
    train_max_samples: int = -1
    """Train on the first so many rows; -1 is all."""
    val_max_samples: int = may_change(-1)
    """Validate on the first so many rows; -1 is all."""
    prompt_key: str = "prompt"
    """Column that holds the prompt."""
    default_data_source: str | None = None
    """data_source of rows that have no such column, as TRL's. Not set: the dataset id or file name in train_files."""

    def __post_init__(self) -> None:
        check_bounds(
            "data",
            self,
            train_batch_size="[1, inf)",
            max_prompt_length="[1, inf)",
            max_response_length="[1, inf)",
            train_max_samples="-1 or [1, inf)",
            val_max_samples="-1 or [1, inf)",
        )
        if self.truncation not in ("error", "left", "right", "middle"):
            raise ValueError(f"data.truncation={self.truncation!r} must be error, left, right or middle")
        check_disjoint(self.train_files, self.val_files)


def load_tasks(
    files: tuple[str, ...], cfg: DataConfig, max_samples: int = -1, knob: str = "data.train_files"
) -> list[Task]:
    """The first max_samples rows (-1: all) of the files that `knob` names. ValueError says what is wrong, and where."""
    tasks: list[Task] = []
    for source in files:
        data_source = cfg.default_data_source or source.partition(":")[0]
        for where, row in read_rows(source, knob):
            tasks.append(task_from_row(row, f"{knob}: {where}", len(tasks), data_source, cfg))
            if len(tasks) == max_samples:
                return tasks
    if not tasks:
        raise ValueError(
            f"{knob}={list(files)} has no rows: name JSONL or Parquet files with some, or a Hugging Face dataset id"
        )
    return tasks


def task_from_row(row: dict, where: str, index: int, data_source: str, cfg: DataConfig) -> Task:
    """A row in verl's or TRL's shape as a Task, `data_source` being that of a row without one. Empties the row.
    ValueError, which begins with `where`, when it has neither shape."""
    columns = f"its columns are: {', '.join(row)}"
    if cfg.prompt_key not in row:
        raise ValueError(
            f"{where} has no column {cfg.prompt_key!r}: set data.prompt_key to the one that holds the prompt; {columns}"
        )
    prompt = without_none(row.pop(cfg.prompt_key))
    if not is_prompt(prompt):
        raise ValueError(
            f"{where}: {cfg.prompt_key!r} must be a text or a list of messages with role and content, "
            f"not {reprlib.repr(prompt)}"
        )
    ground_truth = pop_ground_truth(row, where, columns)
    data_source = row.pop("data_source", None) or data_source
    agent_name = row.pop("agent_name", None)
    extra_info = row.pop("extra_info", None) or {}
    if not isinstance(extra_info, dict):
        extra_info = {"extra_info": extra_info}
    return Task(prompt, data_source, ground_truth, {**row, **extra_info}, agent_name, index)


def is_prompt(prompt: Any) -> bool:
    """Whether it is a text or a list of messages, and not empty."""
    if isinstance(prompt, list):
        are_messages = all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt)
        return are_messages and len(prompt) > 0
    return isinstance(prompt, str) and prompt != ""


def pop_ground_truth(row: dict, where: str, columns: str) -> Any:
    """Take the ground truth out of a row: verl's, else TRL's. ValueError, with its `columns`, when it has none."""
    judged_by = row.pop("reward_model", None)
    if isinstance(judged_by, dict) and judged_by.get("ground_truth") is not None:
        return judged_by["ground_truth"]
    for name in ("ground_truth", "answer", "solution"):
        if row.get(name) is not None:
            return row.pop(name)
    raise ValueError(
        f"{where} has no ground truth: it needs reward_model.ground_truth (verl's) or ground_truth, answer or solution "
        f"(TRL's); {columns}"
    )


def render(messages: list[dict] | str, tokenizer, tools: list | None = None) -> list[int]:
    """Token ids [L] of a prompt. A text gets the tokenizer's special tokens (BOS); a template writes its own."""
    return tokenizer.encode(prompt_text(messages, tokenizer, tools), add_special_tokens=isinstance(messages, str))


def fit(tokens: list[int], cfg: DataConfig, task: Task) -> list[int]:
    """Prompt tokens [L] as they are when within cfg.max_prompt_length, else cut as cfg.truncation says."""
    limit = cfg.max_prompt_length
    if len(tokens) <= limit:
        return tokens
    if cfg.truncation == "error":
        raise ValueError(
            f"the prompt of row {task.index} has {len(tokens)} tokens, more than data.max_prompt_length={limit}: "
            "raise it, or set data.truncation"
        )
    from_start = {"left": 0, "right": limit, "middle": limit // 2}[cfg.truncation]
    from_end = limit - from_start
    return tokens[:from_start] + tokens[len(tokens) - from_end :]


def own_prompt(task: Task) -> tuple[list[dict] | str, list | None]:
    """(messages, tools) of a prompt to which nothing is added."""
    return task.messages, None


def filter_overlong(tasks: list[Task], tokenizer, cfg: DataConfig, prompt_of: Callable = own_prompt) -> list[Task]:
    """Tasks whose prompt has at most cfg.max_prompt_length tokens, when cfg.filter_overlong_prompts. `prompt_of(task)`
    -> (messages, tools) is what the prompt is rendered from. Rank 0 says how many tasks were dropped."""
    if not cfg.filter_overlong_prompts:
        return tasks
    lengths = prompt_lengths(tasks, tokenizer, prompt_of)
    kept = [task for task, length in zip(tasks, lengths) if length <= cfg.max_prompt_length]
    limit = f"data.max_prompt_length={cfg.max_prompt_length}"
    if not kept:
        raise ValueError(f"all {len(tasks)} prompts are longer than {limit}")
    say(f"dropped {len(tasks) - len(kept)} of {len(tasks)} rows: longer than {limit}")
    return kept


def prompt_lengths(tasks: list[Task], tokenizer, prompt_of: Callable) -> list[int]:
    """Number of tokens that `render` makes of each task's prompt. All are encoded together, which is much faster."""
    rendered = []
    are_texts = []  # as opposed to messages
    for task in tasks:
        try:
            messages, tools = prompt_of(task)
            rendered.append(prompt_text(messages, tokenizer, tools))
        except Exception as e:
            raise ValueError(f"the prompt of row {task.index} can't be rendered: {type(e).__name__}: {e}") from e
        are_texts.append(isinstance(messages, str))
    lengths = [0] * len(tasks)
    for special in (True, False):  # a text gets the tokenizer's special tokens, messages do not
        places = [place for place, is_text in enumerate(are_texts) if is_text == special]
        if places:
            encoded = tokenizer([rendered[place] for place in places], add_special_tokens=special)["input_ids"]
            for place, tokens in zip(places, encoded):
                lengths[place] = len(tokens)
    return lengths


class TaskStream:
    """Endless batches of cfg.train_batch_size tasks, epoch after epoch; what is left over of an epoch is dropped."""

    def __init__(self, tasks: list[Task], cfg: DataConfig, seed: int):
        if len(tasks) < cfg.train_batch_size:
            raise ValueError(
                f"the dataset has {len(tasks)} rows, fewer than data.train_batch_size={cfg.train_batch_size}"
            )
        self.tasks = tasks
        self.cfg = cfg
        self.seed = seed
        self.steps_per_epoch = len(tasks) // cfg.train_batch_size
        self.load_state_dict({"epoch": 0, "position": 0})

    def next_batch(self, size: int | None = None) -> list[Task]:
        """The next `size` tasks (cfg.train_batch_size), all of one epoch."""
        size = size or self.cfg.train_batch_size
        if self.position + size > len(self.tasks):
            self.load_state_dict({"epoch": self.epoch + 1, "position": 0})
        start = self.position
        self.position += size
        return [self.tasks[i] for i in self.order[start : self.position]]

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        """Go to a place in the endless stream, and put the rows into the order of its epoch."""
        self.epoch: int = state["epoch"]
        self.position: int = state["position"]  # rows of the epoch that were handed out
        if self.position > len(self.tasks):
            raise ValueError(
                f"the checkpoint is {self.position} rows into an epoch, and data.train_files has {len(self.tasks)}: "
                "resume with the same files"
            )
        self.order = list(range(len(self.tasks)))
        if self.cfg.shuffle:  # a function of (seed, epoch) alone
            random.Random(f"{self.seed}/{self.epoch}").shuffle(self.order)
