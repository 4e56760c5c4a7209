"""Rows that a program makes: the tasks of reasoning_gym, as `reasoning_gym:chain_sum,countdown?size=500&seed=42`.

Row i of a task follows from its options and from seed + i alone. Some tasks also look at Python's hash seed or the global
random state, so rows are made in a process where both are fixed: every rank and every restart gets the same ones.
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

from host.lookup import nearest

PREFIX = "reasoning_gym:"
ROOT = str(Path(__file__).parent.parent)
INSTRUCTION = "Think step by step. Then give your final answer between <answer> and </answer>, in exactly the form that the question asks for."


def parse(source: str, knob: str) -> tuple[list[str], dict[str, str]]:
    """Names and options of `reasoning_gym:NAME,NAME?option=value&option=value`; 500 rows of each from seed 0 when it doesn't say."""
    if not source.startswith(PREFIX):  # as their data_source is written
        raise ValueError(
            f"{knob}: {source!r} is no file; rows that reasoning_gym makes are asked for as {PREFIX}{source.partition('/')[2]}"
        )
    names, _, query = source.removeprefix(PREFIX).partition("?")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    if not all(names.split(",")) or not all(equals for _, equals, _ in pairs):
        raise ValueError(f"{knob}: {source!r} must be {PREFIX}NAME,NAME?option=value&option=value")
    options = {"size": "500", "seed": "0"} | {option: value for option, _, value in pairs}
    for option in ("size", "seed"):
        if not options[option].isdecimal() or (option, int(options[option])) == ("size", 0):
            raise ValueError(
                f"{knob}: {source!r} has {option}={options[option]!r}: a whole number, and at least one row"
            )
    return names.split(","), options


def check_disjoint(train_files: tuple[str, ...], val_files: tuple[str, ...]) -> None:
    """ValueError when validation holds rows of training: with seed s, row i is the row 0 of seed s + i."""
    train, val = (
        [parse(s, knob) for s in files if s.startswith(PREFIX)]
        for files, knob in [(train_files, "data.train_files"), (val_files, "data.val_files")]
    )
    for names, options in val:
        for others, theirs in train:
            same = (
                sorted(set(names) & set(others))
                if {**options, "size": "", "seed": ""} == {**theirs, "size": "", "seed": ""}
                else []
            )
            (first, size), (start, count) = ((int(o["seed"]), int(o["size"])) for o in (options, theirs))
            if same and first < start + count and start < first + size:
                raise ValueError(
                    f"data.val_files: rows of {PREFIX}{same[0]} are also in data.train_files, since row i is made from seed + i: set a seed of {start + count} or more"
                )


def make_rows(source: str, knob: str) -> Iterator[tuple[str, dict]]:
    """Every row with the place it stands at; of several tasks one row each in turn."""
    names, options = parse(source, knob)
    work = [(name, typed_options(name, options, knob)) for name in names]
    made = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {ROOT!r}); from {__name__} import main; main()"],
        input=pickle.dumps(work),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    if made.returncode:
        raise ValueError(
            f"{knob}: {source!r} can't be made: {made.stderr.decode(errors='replace').strip().splitlines()[-1]}"
        )
    for number, (name, entry) in enumerate(pickle.loads(made.stdout)):
        prompt = [{"role": "user", "content": f"{entry['question'].rstrip()}\n\n{INSTRUCTION}"}]
        truth = (
            "" if entry["answer"] is None else entry["answer"]
        )  # where many answers are right there may be none to show: the scorer reads extra_info
        yield (
            f"{source} row {number}",
            {
                "prompt": prompt,
                "data_source": f"reasoning_gym/{name}",
                "reward_model": {"ground_truth": truth},
                "extra_info": entry,
            },
        )


def typed_options(name: str, options: dict[str, str], knob: str) -> dict:
    """The options as the task's configuration wants them. ValueError names what is not there or not allowed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"{knob}: {PREFIX}{name} needs the package reasoning_gym: pip install reasoning-gym"
        ) from error
    tasks = sorted(set(DATASETS) - {"composite"})  # a mixture of the others: name them instead
    if name not in tasks:
        raise ValueError(
            f"{knob}: reasoning_gym has no task {name!r}" + (nearest(name, tasks) or f"; it has {', '.join(tasks)}")
        )
    config = DATASETS[name][1]
    kinds = {f.name: typing.get_type_hints(config)[f.name] for f in dataclasses.fields(config)}
    typed = {}
    for option, text in options.items():
        if option not in kinds:
            raise ValueError(f"{knob}: {PREFIX}{name} has no option {option!r}; its options: {', '.join(kinds)}")
        try:
            typed[option] = cast(text, kinds[option])
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{knob}: {PREFIX}{name}?{option}={text} is no {getattr(kinds[option], '__name__', kinds[option])}: {error}"
            ) from error
    return typed


def cast(text: str, kind):
    """A text as a value of the type `kind`; lists as `a,b`."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if type(None) in inner:  # optional
        return None if text == "None" else cast(text, next(k for k in inner if k is not type(None)))
    if origin is bool:
        return {"true": True, "false": False}[text]
    if hasattr(kind, "fromisoformat"):  # dates and times
        return kind.fromisoformat(text)
    if kind in (int, float, str) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return kind(text)
    if origin is typing.Literal and text in inner:
        return text
    if origin in (list, tuple, Sequence) and (
        not inner or not (typing.get_args(inner[0]) or dataclasses.is_dataclass(inner[0]))
    ):
        return (list if origin is list else tuple)(cast(part, inner[0] if inner else str) for part in text.split(","))
    raise ValueError(f"use {', '.join(inner)}" if origin is typing.Literal else "it can't be set here")


def main() -> None:
    """Make the rows that stdin asks for; they go to stdout, and what a task prints to stderr."""
    import numpy
    from reasoning_gym import create_dataset

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
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
