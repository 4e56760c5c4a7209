"""Folders that are complete or not there at all, and files of JSON lines.

What a checkpoint's manifest says, and how its files get onto the disk. How an earlier run's folder makes room. How
records are written and read again, though a kill cut the last one short.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from host.console import say

VERSION = "0.1.0"  # the newest of CHANGELOG.md
# Files up to this size are hashed, at 1.4 GB/s. Of larger ones, which are flushed before the manifest is written, the
# size must do.
HASHED_BYTES = 64 * 2**20


def newest(folder: Path) -> Path | None:
    """The complete checkpoint that was saved last; says which later ones are not complete. ValueError when there are
    checkpoints and none is complete."""
    name_again(folder)
    found = set(folder.glob("step-*"))
    marker = folder / "latest"
    if marker.exists():
        found.add(folder / marker.read_text().strip())  # may be gone
    reasons = {path: damage(path) for path in sorted(found)}
    complete = [path for path, reason in reasons.items() if not reason]
    chosen = max(complete, key=saved_at, default=None)
    for path, reason in reasons.items():
        if reason and (chosen is None or path.name > chosen.name):
            say(f"{path} is passed over: {reason}")
    if reasons and not chosen:
        raise ValueError(
            f"no checkpoint in {folder} is complete: set checkpoint.resume=never to start afresh, "
            "or to the folder of another one"
        )
    return chosen


def saved_at(folder: Path) -> float:
    """The time of a complete checkpoint, in seconds."""
    return json.loads((folder / "manifest.json").read_text())["time"]


def name_again(folder: Path) -> None:
    """A checkpoint that was making room for a new one of its step when a kill came gets its name back."""
    for old in folder.glob(".step-*.old"):
        with contextlib.suppress(OSError):  # another rank did it, or the new one is there
            os.rename(old, folder / old.stem.removeprefix("."))


def damage(folder: Path) -> str | None:
    """Why a checkpoint is not complete; None when its files are those of its manifest."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"its manifest can't be read ({type(error).__name__})"
    for name, (size, digest) in files:
        path = folder / name
        if not path.is_file():
            return f"{name} is gone"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
        if hash_of(path) != digest:
            return f"{name} has other bytes than were written"
    return None


def hash_of(path: Path) -> str | None:
    """SHA-256 of a file's bytes; None for a file that is larger than HASHED_BYTES."""
    if path.stat().st_size > HASHED_BYTES:
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(folder: Path) -> None:
    """Everything in the folder onto the disk, then the list of it."""
    paths = sorted(folder.rglob("*"))
    for path in paths:
        flush(path)
    files = {str(path.relative_to(folder)): (path.stat().st_size, hash_of(path)) for path in paths if path.is_file()}
    write_durably(folder / "manifest.json", json.dumps({"time": time.time(), "files": files}))


def write_durably(path: Path, text: str) -> None:
    """Replace a file at once: whatever happens, either the old or the new text is there."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_aside(run_dir: Path) -> Path | None:
    """Rename an earlier run's folder, so that a fresh start neither mixes with it nor loses it. Returns its new name;
    None when no run was there."""
    if not (run_dir / "metrics.jsonl").exists():
        return None
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    os.rename(run_dir, aside)
    return aside


def to_json(record: dict) -> str:
    """One line that any JSON reader takes. NaN and infinities, which JSON lacks, become null, and what is no JSON
    becomes text."""
    return json.dumps(without_nan(record), default=str, allow_nan=False)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def whole_lines(path: Path) -> Iterator[tuple[bytes, Any]]:
    """(line, record) of a file of JSON lines, less a last one that a kill cut short. ValueError for any other that is
    no JSON."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
            yield line, record


def keep_lines_before(path: Path, step: int) -> list[dict]:
    """Drop the records of steps that a resumed run does again, and one that a kill cut short; returns the others. A
    kill here loses none of them."""
    if not path.exists():
        return []
    records = [record for _, record in whole_lines(path) if record["step"] < step]
    write_durably(path, "".join(to_json(record) + "\n" for record in records))
    return records


@functools.cache  # the code that runs, whatever is checked out meanwhile
def code_version() -> str:
    """Lockstep's version and commit, as configurations and checkpoints say it."""
    return f"Lockstep {VERSION}, commit {git_commit()}"


def git_commit() -> str:
    """The commit of this checkout, and whether its files differ from it."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent.parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with local changes" if changed else "")
