"""Who may import whom: one total order, imports point down it only; fast/ and look/ only inside the `if` of a knob."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

# From the ground up: each may import those before it.
ORDER = [
    *("host", "batch", "tasks", "loss", "advantage", "data", "metrics", "policy", "model", "fsdp", "reward", "agent"),
    *("engine", "rollout", "actor", "sync_weights", "checkpoint", "log", "config", "train"),
]
EXTRAS = ("fast", "look")  # may import all of ORDER; imported where a knob asks for it
FILES = [*ROOT.glob("*.py"), *(path for room in (*EXTRAS, "host", "tasks") for path in ROOT.glob(f"{room}/*.py"))]


def room(module: str) -> str:
    return module.split(".")[0]


def room_of(path) -> str:
    return path.parent.name if path.parent != ROOT else path.stem


def imports(tree) -> list[tuple[ast.AST, str]]:
    """(statement, module) of every import in it, those in functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found.append((node, node.module))
    return found


def guarded(tree) -> set[ast.AST]:
    """Statements inside an `if` that is inside a function."""
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for branch in (node for node in ast.walk(function) if isinstance(node, ast.If)):
            found.update(statement for part in branch.body for statement in ast.walk(part))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    tree, own = ast.parse(path.read_text()), room_of(path)
    below = ORDER[: ORDER.index(own)] if own in ORDER else ORDER + list(EXTRAS)
    if own == "tasks":
        below = ["host", "batch"]
    allowed = guarded(tree)
    for statement, module in imports(tree):
        if room(module) in EXTRAS and own not in EXTRAS:
            assert own not in ("host", "tasks") and statement in allowed, (
                f"line {statement.lineno}: {module} outside the `if` of a knob"
            )
        elif room(module) in ORDER and room(module) != own:
            assert room(module) in below, f"line {statement.lineno}: {own} may not import {module}"


@pytest.mark.parametrize("folder", [*EXTRAS, "host", "tasks"])
def test_no_circle_in_a_folder(folder):
    """Imports at the top of files, from which Python can't recover; and no file imports one that imports it in a function."""
    uses = {}
    for path in ROOT.glob(f"{folder}/*.py"):
        modules = [module for _, module in imports(ast.parse(path.read_text()))]
        uses[path.stem] = {name.split(".")[1] for name in modules if name.startswith(f"{folder}.")} - {path.stem}
        for node, module in imports(ast.parse(path.read_text())):
            if module == folder:
                uses[path.stem] |= {alias.name for alias in node.names}
    while leaves := [name for name, used in uses.items() if not used & uses.keys()]:
        for name in leaves:
            del uses[name]
    assert not uses, f"these import each other: {uses}"


def test_every_folder_is_a_package():
    """An installed package of the same name would win over a folder that is none."""
    assert all((ROOT / folder / "__init__.py").is_file() for folder in (*EXTRAS, "host", "tasks"))


@pytest.mark.parametrize("library, only", [("accelerate", {"fsdp"}), ("vllm", {"engine", "fast"}), ("peft", set())])
def test_libraries_are_imported_by_their_own_rooms(library, only):
    users = {
        room_of(path) for path in FILES for _, name in imports(ast.parse(path.read_text())) if room(name) == library
    }
    assert users <= only


def test_the_loop_is_imported_without_speed_ups_or_vllm():
    """So that --help, unit tests and a wrong knob need neither, and take a second or two."""
    code = "import sys, train; print(*sorted(name for name in sys.modules if name.split('.')[0] in sys.argv[1:]))"
    words = [sys.executable, "-c", code, *EXTRAS, "vllm", "accelerate", "triton", "plotly", "wandb"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split() == []


def test_every_speed_up_has_a_knob_that_plain_turns_off():
    """The table in fast/ names each file with its knob."""
    import fast
    from config import PLAIN

    for path in (ROOT / "fast").glob("[a-z]*.py"):
        row = re.search(rf"^ +{path.name}\b.*$", fast.__doc__, re.MULTILINE)
        assert row, f"{path.name} is not in fast/__init__.py's table"
        knobs = re.findall(r"\w+\.\w+", row[0].removeprefix(path.name).replace(path.name, ""))
        assert knobs and all(knob in PLAIN for knob in knobs), row[0]
