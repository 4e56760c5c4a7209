"""Rows of JSONL and Parquet files, of Hugging Face datasets, and of reasoning_gym's tasks, each with the place it
stands at.

To read another kind of file, write a reader, `(path, knob) -> (place, row), ...`, and put it into READERS.
"""

import glob
import json
import os
import reprlib
from collections.abc import Iterator
from typing import Any

from tasks.procedural import PREFIX, make_rows


def read_rows(source: str, knob: str) -> Iterator[tuple[str, dict]]:
    """(place, row) of every row of a file, a glob, a Hugging Face dataset or a task of reasoning_gym."""
    read = READERS.get(os.path.splitext(source)[1])
    if source.startswith(PREFIX):
        yield from make_rows(source, knob)
    elif read:
        for path in matching_files(source, knob):
            yield from read(path, knob)
    elif source.startswith("reasoning_gym/"):  # how rows name it as their data_source; the error says how to ask for it
        yield from make_rows(source, knob)
    else:
        yield from read_hub(source, knob)


def matching_files(source: str, knob: str) -> list[str]:
    """The file of this name, or those that match it as a glob, sorted by name. FileNotFoundError when there is none."""
    if os.path.isfile(source):
        return [source]
    paths = sorted(glob.glob(source, recursive=True))
    if not paths:
        raise FileNotFoundError(f"{knob}: there is no file {source!r} (looked from {os.getcwd()})")
    return paths


def read_jsonl(path: str, knob: str) -> Iterator[tuple[str, dict]]:
    """Rows of a file with a JSON object on every line that is not blank. ValueError names the line that has none."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"it is {reprlib.repr(row)}")
            except ValueError as e:  # also when it is not UTF-8
                raise ValueError(f"{knob}: {path} line {number} is not a JSON object: {e}") from e
            yield f"{path} line {number}", row


def read_parquet(path: str, knob: str) -> Iterator[tuple[str, dict]]:
    """Rows of a Parquet file. ValueError when it is not readable as one."""
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
    except ArrowException as e:
        raise ValueError(f"{knob}: {path} is not readable as Parquet: {e}") from e


def read_hub(source: str, knob: str) -> Iterator[tuple[str, dict]]:
    """Rows of a Hugging Face dataset `id[:config[:split]]`, or of a folder in the id's place."""
    import datasets

    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as e:
        cause = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0]
        raise ValueError(
            f"{knob}: {source!r} is no {' '.join(READERS)} file, nor loads as a Hugging Face dataset id:config:split: "
            f"{cause}"
        ) from e
    for number, row in enumerate(rows):
        yield f"{source} row {number}", row


READERS = {".jsonl": read_jsonl, ".json": read_jsonl, ".parquet": read_parquet}


def without_none(value: Any) -> Any:
    """Parquet gives every message the keys of all of them; a template asks whether a key is there."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_none(v) for v in value]
    return value
