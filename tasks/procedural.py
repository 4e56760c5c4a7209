"""Rows that a program makes: the tasks of reasoning_gym, as `reasoning_gym:chain_sum,countdown?size=500&seed=42`.

Row i of a task follows from its options and from seed + i alone. Some tasks also look at Python's hash seed or the
global random state. So rows are made in a process where both are fixed: every rank and every restart gets the same.
"""

import dataclasses
import enum
import os
import pickle
import random
import subprocess
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from host.lookup import nearest

PREFIX = "reasoning_gym:"
ROOT = str(Path(__file__).parent.parent)
INSTRUCTION = (
    "Think step by step. Then give your final answer between <answer> and </answer>, "
    "in exactly the form that the question asks for."
)


def parse(source: str, knob: str) -> tuple[list[str], dict[str, str]]:
    """Names and options of `reasoning_gym:NAME,NAME?option=value&option=value`; by default 500 rows each, seed 0."""
    if not source.startswith(PREFIX):  # a data_source, which has a slash: reasoning_gym/NAME
        asked_for = f"{PREFIX}{source.partition('/')[2]}"
        raise ValueError(f"{knob}: {source!r} is no file; rows that reasoning_gym makes are asked for as {asked_for}")
    names, _, query = source.removeprefix(PREFIX).partition("?")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    if not all(names.split(",")) or not all(equals for _, equals, _ in pairs):
        raise ValueError(f"{knob}: {source!r} must be {PREFIX}NAME,NAME?option=value&option=value")
    options = {"size": "500", "seed": "0"} | {option: value for option, _, value in pairs}
    for option, least in (("size", 1), ("seed", 0)):
        text = options[option]
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{knob}: {source!r} has {option}={text!r}: a whole number, and at least one row")
    return names.split(","), options


def check_disjoint(train_files: tuple[str, ...], val_files: tuple[str, ...]) -> None:
    """ValueError when validation holds rows of training: with seed s, row i is the row 0 of seed s + i."""
    train = [parse(source, "data.train_files") for source in train_files if source.startswith(PREFIX)]
    val = [parse(source, "data.val_files") for source in val_files if source.startswith(PREFIX)]
    for names, options in val:
        for train_names, train_options in train:
            shared = sorted(set(names) & set(train_names))
            placeless = {"size": "", "seed": ""}
            if not shared or options | placeless != train_options | placeless:
                continue
            first, size = int(options["seed"]), int(options["size"])
            start, count = int(train_options["seed"]), int(train_options["size"])
            if first < start + count and start < first + size:
                raise ValueError(
                    f"data.val_files: rows of {PREFIX}{shared[0]} are also in data.train_files, "
                    f"since row i is made from seed + i: set a seed of {start + count} or more"
                )


def make_rows(source: str, knob: str) -> Iterator[tuple[str, dict]]:
    """Every row, in verl's shape, with the name of its place; of several tasks one row each in turn."""
    names, options = parse(source, knob)
    work = [(name, typed_options(name, options, knob)) for name in names]
    made = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {ROOT!r}); from {__name__} import main; main()"],
        input=pickle.dumps(work),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    if made.returncode:
        error = made.stderr.decode(errors="replace").strip().splitlines()[-1]
        raise ValueError(f"{knob}: {source!r} can't be made: {error}")
    for number, (name, entry) in enumerate(pickle.loads(made.stdout)):
        # Where many answers are right there may be none to show: the scorer reads extra_info.
        truth = "" if entry["answer"] is None else entry["answer"]
        row = {
            "prompt": [{"role": "user", "content": f"{entry['question'].rstrip()}\n\n{INSTRUCTION}"}],
            "data_source": f"reasoning_gym/{name}",
            "reward_model": {"ground_truth": truth},
            "extra_info": entry,
        }
        yield f"{source} row {number}", row


def typed_options(name: str, options: dict[str, str], knob: str) -> dict:
    """The options as the task's configuration wants them. ValueError names what is not there or not allowed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        needs = "needs the package reasoning_gym: pip install reasoning-gym"
        raise ValueError(f"{knob}: {PREFIX}{name} {needs}") from error
    tasks = sorted(set(DATASETS) - {"composite"})  # a mixture of the others: name them instead
    if name not in tasks:
        known = nearest(name, tasks) or f"; it has {', '.join(tasks)}"
        raise ValueError(f"{knob}: reasoning_gym has no task {name!r}{known}")
    config = DATASETS[name][1]
    hints = typing.get_type_hints(config)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    typed = {}
    for option, text in options.items():
        if option not in kinds:
            raise ValueError(f"{knob}: {PREFIX}{name} has no option {option!r}; its options: {', '.join(kinds)}")
        try:
            typed[option] = cast(text, kinds[option])
        except (ValueError, KeyError) as error:
            kind = getattr(kinds[option], "__name__", kinds[option])
            raise ValueError(f"{knob}: {PREFIX}{name}?{option}={text} is no {kind}: {error}") from error
    return typed


def cast(text: str, kind: Any) -> Any:
    """A text as a value of the type `kind`; lists as `a,b`. ValueError or KeyError when it is none."""
    origin = typing.get_origin(kind) or kind
    inner = typing.get_args(kind)
    if type(None) in inner:  # optional
        given = next(k for k in inner if k is not type(None))
        return None if text == "None" else cast(text, given)
    if origin is bool:
        return {"true": True, "false": False}[text]
    if hasattr(kind, "fromisoformat"):  # dates and times
        return kind.fromisoformat(text)
    if kind in (int, float, str) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return kind(text)
    if origin is typing.Literal:
        if text in inner:
            return text
        raise ValueError(f"use {', '.join(inner)}")
    if origin in (list, tuple, Sequence):
        item = inner[0] if inner else str
        if not typing.get_args(item) and not dataclasses.is_dataclass(item):
            items = [cast(part, item) for part in text.split(",")]
            return items if origin is list else tuple(items)
    raise ValueError("it can't be set here")


def main() -> None:
    """Make the rows that stdin asks for, [(name, options)]; they go to stdout, and what a task prints to stderr."""
    import numpy
    from reasoning_gym import create_dataset

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that print() writes to stderr
    work = [(name, create_dataset(name, **options)) for name, options in pickle.load(sys.stdin.buffer)]
    rows = []
    for i in range(max(len(dataset) for _, dataset in work)):
        for name, dataset in work:
            if i < len(dataset):
                random.seed(f"{name}/{dataset.seed + i}")
                numpy.random.seed((dataset.seed + i) % 2**32)
                rows.append((name, dataset[i]))
    pickle.dump(rows, out)
    out.close()
