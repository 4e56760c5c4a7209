"""What users write: names, of which the nearest known one is told; numbers, which have bounds; functions in files."""

import dataclasses
import difflib
import importlib.util
import math
import os
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterable
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for an error message; empty when nothing is near."""
    close = difflib.get_close_matches(str(name), list(known), 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not among `known`."""
    return ValueError(f"{what}={name!r} is not known{nearest(name, known)}; known: {', '.join(known)}")


def may_change(default: Any) -> Any:
    """The default of a knob that a resumed run may change.

    For those that say what is watched and how something is computed, not what is learnt: checkpoint.check_changes asks.
    """
    return dataclasses.field(default=default, metadata={"may_change": True})


INTERVAL = re.compile(r"(?:(-?\d+) or )?([\[(])(\S+), (\S+)([\])])")


def check_bounds(group: str, cfg: object, **intervals: str) -> None:
    """ValueError that names the first knob of a group whose number is not in its interval.

    An interval is written as in mathematics, maybe after a value that is allowed besides: `lr="[0, inf)"`,
    `fsdp_size="-1 or [1, inf)"`. NaN is in none. None, for a knob that was not given, is in all; of a tuple each number
    counts.
    """
    for knob, interval in intervals.items():
        value = getattr(cfg, knob)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(number is None or in_interval(number, interval) for number in numbers):
            raise ValueError(f"{group}.{knob}={value} must be {interval_text(interval)}")


def in_interval(number: float, interval: str) -> bool:
    """Whether a number is in an interval as `check_bounds` takes it."""
    besides, left, low, high, right = parts_of(interval)
    above = number > float(low) or (left == "[" and number == float(low))
    below = number < float(high) or (right == "]" and number == float(high))
    return (above and below) or (besides is not None and number == float(besides))


def parts_of(interval: str) -> tuple[str | None, str, str, str, str]:
    """The value that is allowed besides, the left bracket, both ends and the right bracket."""
    match = INTERVAL.fullmatch(interval)
    if match is None:
        raise ValueError(f"{interval!r} is not written as an interval, such as '[0, inf)' or '-1 or [1, inf)'")
    besides, left, low, high, right = match.groups()
    return besides, left, low, high, right


def interval_text(interval: str) -> str:
    """The interval in words: `at least 0`, `-1 or at least 1`, `above 0 and at most 1`."""
    besides, left, low, high, right = parts_of(interval)
    words = [f"{'at least' if left == '[' else 'above'} {low}"] if math.isfinite(float(low)) else []
    words += [f"{'at most' if right == ']' else 'below'} {high}"] if math.isfinite(float(high)) else []
    return (f"{besides} or " if besides else "") + (" and ".join(words) or "a finite number")


def load_function(path: str, function: str, blame: str) -> Callable | None:
    """`function` of a user's Python file; None when the file has none.

    ValueError, which begins with `blame`, when the file can't be loaded.
    """
    if not (path.endswith(".py") and os.path.isfile(path)):
        raise ValueError(f"{blame}: there is no Python file {path!r} (looked from {os.getcwd()})")
    try:
        found = getattr(import_file(os.path.abspath(path)), function, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{blame}: importing it fails with {type(error).__name__}: {error}") from error
    return found if callable(found) else None


def import_file(path: str) -> types.ModuleType:
    """Run a file as a module of a package that is its folder, and only once, though it holds a reward and an agent.

    So both `from . import helper` and `import helper` find the file's neighbours.
    """
    folder = os.path.dirname(path)
    stem = os.path.basename(path).removesuffix(".py")
    root = f"custom_{zlib.crc32(path.encode()):x}_{os.stat(path).st_mtime_ns:x}"  # an edited file runs again
    name = root if stem == "__init__" else f"{root}.{stem}"
    if loaded := sys.modules.get(name):
        return loaded
    package = sys.modules[root] = types.ModuleType(root)
    package.__path__ = [folder]
    if folder not in sys.path:
        sys.path.append(folder)  # behind the libraries: it may hide none
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} has a name that Python can import"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half of it
        raise
    return module
