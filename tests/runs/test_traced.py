"""Numbers about the code, measured: what one training step passes through, and how long files and functions are.

As a script, `python tests/runs/test_traced.py OUT [flag ...]`, this file is train.py that writes to OUT, as JSON, which files
of the repository ran a line of their own functions in the first training step, each with its number of lines.
"""

import ast
import inspect
import json
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fast", "look", "tasks", "host")
FILES = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in ROOT.glob(f"{room}/*.py"))]
SAID = {  # where a document says the numbers
    "README.md": r"^\| Python that a step passes through \| (\d+) files, ([\d,]+) lines \|",
    "docs/compared.md": r"^(?:\*\*1 Files\.\*\* Lockstep:|\| Python files that one step passes through \|) (\d+) files, ([\d,]+) lines",
}

MOST_FILES, MOST_LINES = 21, 5800  # of the root, with all that is planned; 18 and 4,898 when the house was built
LONGEST_FILE, WIDEST = 400, 120  # lines, columns
WIDE = {"tasks/sandbox.py": 1}  # lines that may be wider: a docstring that prompts hold as it stands
LONGEST_BODY = 40  # lines of a function of the root, its docstring aside
ONE_SCREEN = 45  # lines: train.train


# In the run that is traced


def trace(argv: list[str]) -> None:
    """Run train.py. What runs from the first `log.phase("sync")` to the end of the first `finish_step` is noted, in this
    process: workers are others.
    """
    sys.path.insert(0, str(ROOT))
    import log
    import train
    from host import rank

    out, flags = Path(argv[0]), argv[1:]
    found: set[str] = set()
    ours = {str(path) for path in FILES}

    def note(frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if name in ours and name not in found and runs_a_function(frame):
            found.add(name)

    def phase(self: log.Logger, name: str | None) -> None:
        if name == "sync" and not out.exists():
            threading.settrace(note)
            sys.settrace(note)
        begin(self, name)

    def finish_step(*args) -> bool:
        stops = finish(*args)
        sys.settrace(None)
        threading.settrace(None)
        if not out.exists():
            out.write_text(json.dumps({path: count_lines(ROOT / path) for path in map(relative, sorted(found))}))
        return stops

    begin, log.Logger.phase = log.Logger.phase, phase
    finish, train.finish_step = train.finish_step, finish_step
    rank.run(lambda: train.main(flags))


def runs_a_function(frame: FrameType) -> bool:
    """Whether the call that begins is one of a function, and not made by an import that goes on."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module's or a class's body
        return False
    importing = False
    caller = frame.f_back
    while caller and not importing:
        importing = "importlib._bootstrap" in caller.f_code.co_filename
        caller = caller.f_back
    return not importing


def relative(path: str | Path) -> str:
    return str(Path(path).relative_to(ROOT))


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


# The tests


def test_a_step_passes_through_as_many_files_as_the_documents_say(tiny, tmp_path, request, capsys):
    from conftest import flags, launch

    out = tmp_path / "files.json"
    args = [*flags(tiny), "--sync.verify-every", "10", "--log.default-local-dir", str(tmp_path)]
    done = launch([str(out), *args], script=Path(__file__))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(out.read_text())
    table = "\n".join(f"{count:>5} {path}" for path, count in lines.items())
    if request.config.get_verbosity() > 0:
        with capsys.disabled():
            print(f"\n{table}")
    measured = len(lines), sum(lines.values())
    for name, pattern in SAID.items():
        said = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert said, name
        for files, of_them in said:  # with room for a fork, which is no news: a file, and one line in twenty
            assert int(files) == pytest.approx(measured[0], abs=1), table
            assert int(of_them.replace(",", "")) == pytest.approx(measured[1], rel=0.05), table


def test_the_root_is_what_a_step_is_and_no_more():
    lines = [count_lines(path) for path in ROOT.glob("*.py")]
    assert len(lines) <= MOST_FILES and sum(lines) <= MOST_LINES, f"{len(lines)} files, {sum(lines)} lines"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_short_and_narrow(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= LONGEST_FILE
    wide = [number for number, line in enumerate(lines, 1) if len(line) > WIDEST]
    assert len(wide) <= WIDE.get(relative(path), 0), f"lines {wide} are over {WIDEST} columns"


@pytest.mark.parametrize("path", [*ROOT.glob("*.py")], ids=relative)
def test_functions_of_the_root_are_short(path):
    bodies = {function.name: body_lines(function) for function in functions(path)}
    long = {name: lines for name, lines in bodies.items() if lines > LONGEST_BODY}
    assert not long, f"these have more than {LONGEST_BODY} lines: {long}"


def test_the_loop_fits_one_screen():
    (loop,) = [function for function in functions(ROOT / "train.py") if function.name == "train"]
    assert loop.end_lineno - loop.lineno + 1 <= ONE_SCREEN


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All that a file defines, methods and those in functions too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` on, without those of the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


if __name__ == "__main__":
    trace(sys.argv[1:])
