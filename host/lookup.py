"""What users name: the nearest name that is known, and functions in their Python files."""

import difflib
import importlib.util
import os
import sys
import types
import zlib
from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for an error message; empty when nothing is near."""
    close = difflib.get_close_matches(str(name), list(known), 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not among `known`."""
    return ValueError(f"{what}={name!r} is not known{nearest(name, known)}; known: {', '.join(known)}")


def load_function(path: str, function: str, blame: str) -> Callable | None:
    """`function` of a user's Python file, None when the file has none. ValueError, which begins with `blame`, when the file can't be loaded."""
    if not (path.endswith(".py") and os.path.isfile(path)):
        raise ValueError(f"{blame}: there is no Python file {path!r} (looked from {os.getcwd()})")
    try:
        found = getattr(import_file(os.path.abspath(path)), function, None)
    except (Exception, SystemExit) as e:
        raise ValueError(f"{blame}: importing it fails with {type(e).__name__}: {e}") from e
    return found if callable(found) else None


def import_file(path: str) -> types.ModuleType:
    """Run a file as a module of a package that is its folder, so that `from . import helper` and `import helper` both find its neighbours."""
    folder, name = os.path.dirname(path), os.path.basename(path).removesuffix(".py")
    root = f"custom_{zlib.crc32(path.encode()):x}_{os.stat(path).st_mtime_ns:x}"  # a file that holds a reward and an agent runs once
    if loaded := sys.modules.get(root if name == "__init__" else f"{root}.{name}"):
        return loaded
    package = sys.modules[root] = types.ModuleType(root)
    package.__path__ = [folder]
    if folder not in sys.path:
        sys.path.append(folder)  # behind the libraries: it may hide none
    name = root if name == "__init__" else f"{root}.{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half of it
        raise
    return module
