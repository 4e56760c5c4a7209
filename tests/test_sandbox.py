"""What the policy's code can't do in the sandbox, with the audit hook and without it."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from agent import AgentConfig
from tasks import sandbox
from tasks.sandbox import python
from tasks.tools import Call, Toolbox


def test_prints_and_results_come_in_order():
    assert python("print(6 * 7)") == "42\n"
    modules = "math, random, json, itertools, datetime, statistics, zoneinfo"
    program = f"import {modules}\nprint(math.sqrt(4), zoneinfo.ZoneInfo('Europe/Paris'))"
    assert python(program) == "2.0 Europe/Paris\n"
    report = 'before\nTraceback (most recent call last):\n  File "<code>", line 3, in <module>\n  File "<code>", line 2, in f\nZeroDivisionError: division by zero\n\n[exit status 1]'
    assert python("print('before')\ndef f(): return 1 / 0\nf()") == report  # no path of this machine


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import sys; print('x'); sys.exit(3)", "x\n\n[exit status 3]"),
        ("import os; os._exit(0)", ""),
        ("input()", "EOFError"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("\ud800", "\n[exit status 1]"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(3))", "A(x=3)"),
        ("import threading\nt = threading.Thread(target=print, args=(5,)); t.start(); t.join()", "5"),
        ("open('a.txt', 'w').write('hi'); print(open('a.txt').read())", "hi"),
    ],
)
def test_programs_end_as_they_do(code, text):
    assert text in python(code)


def test_endless_loop_and_sleep_are_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "WALL_S", 3.0)
    start = time.monotonic()
    assert python("print('on', flush=True)\nwhile True: pass") == "on\n\n[killed after 3 s]"
    assert python("import time; time.sleep(1000)") == "\n[killed after 3 s]"
    assert time.monotonic() - start < 200


def test_cpu_time_is_limited(monkeypatch):
    monkeypatch.setattr(sandbox, "WALL_S", 100.0)  # on a busy machine CPU time comes slowly
    assert python("while True: pass") == "\n[killed: more than 5 s of CPU time, or a crash]"


def test_memory_is_limited():
    assert "MemoryError" in python("x = bytearray(2 << 30)")
    assert "MemoryError" in python("x = []\nwhile True: x.append(bytearray(1 << 24))")


def test_output_and_files_are_limited():
    text = python("while True: print('x' * 1000)")
    assert len(text) < sandbox.OUTPUT + 100 and text.endswith("[only the first 65536 bytes of the output]")
    assert "File too large" in python("with open('big', 'w') as f:\n    while True: f.write('x' * 10**6)")


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', PORT), 2)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT', timeout=2)",
        "import subprocess; subprocess.run(['ls'])",
        "import os; os.system('ls')",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.execv('/bin/ls', ['ls'])",
        "import ctypes; ctypes.CDLL(None)",
        "open('OUT/evil', 'w')",
        "import os; os.open('OUT/evil', os.O_CREAT | os.O_WRONLY)",
        "import os; os.mkdir('OUT/evil')",
        "import pathlib; pathlib.Path('OUT/evil').write_text('x')",
        "import shutil; shutil.rmtree('OUT')",
        "import os; os.symlink('OUT', 'link'); open('link/evil', 'w')",
        "open('a', 'w'); import os; os.rename('a', 'OUT/evil')",
        "open('OUT/secret').read()",
        "open('/proc/self/environ').read()",
        "import os; os.listdir('OUT')",
        "open('../' * 20 + 'OUT/secret')",
    ],
)
def test_what_is_refused(code, tmp_path):
    (tmp_path / "secret").write_text("swordfish")
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = python(code.replace("OUT", str(tmp_path)).replace("PORT", str(server.getsockname()[1])))
    assert ("PermissionError" in result or "is not allowed here" in result) and "swordfish" not in result
    assert os.listdir(tmp_path) == ["secret"]


def test_hook_follows_links(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (own / "link").symlink_to(other)
    guard = sandbox.make_guard((f"{own}/",), (f"{other}/readable/",))
    guard("open", (str(own / "a"), "w", os.O_WRONLY))
    guard("open", (str(own / "link" / "readable" / "a"), "r", os.O_RDONLY))
    for event, args in (
        ("open", (str(own / "link" / "a"), "w", os.O_WRONLY)),
        ("open", (str(own / "link" / "readable" / "a"), "r+", os.O_RDWR)),
        ("os.rename", (str(own / "a"), str(other / "a"), -1, -1)),
    ):
        with pytest.raises(PermissionError):
            guard(event, args)


def test_environment_is_empty(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "swordfish")
    printed = python("import os; print(dict(os.environ))")
    assert "swordfish" not in printed and "WANDB" not in printed


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    python("open('a', 'w').write('x')\nimport os; os.mkdir('b')")
    assert not os.listdir(tmp_path)


def test_tool_that_is_stopped_at_its_deadline_leaves_no_folder(tmp_path, monkeypatch):
    """Its worker is killed long before the sandbox's own deadline, and clears up nothing."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    box = Toolbox(AgentConfig(tools=("python",), tool_timeout_s=3.0, tool_workers=1))
    call = Call("python", {"code": "open('a', 'w').write('x')\nwhile True: pass"})

    async def ask_and_look():
        asked = asyncio.ensure_future(box.call(call))
        while not os.listdir(tmp_path) and not asked.done():
            await asyncio.sleep(0.005)
        return os.listdir(tmp_path), await asked

    for _ in range(3):
        folders, (text, ok) = asyncio.run(ask_and_look())
        assert len(folders) == 1 and (text, ok) == ("error: python took more than 3 s and was stopped", False)
    wait_for(lambda: not os.listdir(tmp_path), "the end of the folders")
    box.close()


def test_code_and_its_folder_go_with_the_process_that_runs_it(tmp_path):
    """A worker of the pool is killed at its deadline: the code that it runs must go too."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tasks import sandbox; sandbox.WALL_S = 1000.0\nsandbox.python('import time\\nwhile True: time.sleep(0.1)  # {tmp_path.name}')"
    worker = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(tmp_path)})
    children = wait_for(lambda: descendants(worker.pid), "a child")
    wait_for(lambda: os.listdir(tmp_path), "its folder")
    time.sleep(0.5)  # until it has its own namespaces
    children |= {pid for child in children for pid in descendants(child)}
    assert len(children) > 1
    worker.kill()
    worker.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in children) and not os.listdir(tmp_path), "their end")


def descendants(pid: int) -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def is_alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, what):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"waited for {what} in vain")


# Behind the hook: what the kernel refuses, wherever it lets a process have namespaces of its own.

BEHIND = """
import sys
sys.path.insert(0, {root!r})
import ctypes
import os
import resource
import socket
import time
from tasks import sandbox
isolated = sandbox.isolate(ctypes.CDLL(None))
print("isolated", isolated)
sandbox.give_up(ctypes.CDLL(None))
def attempt(name, f):
    try: f(); print(name, "done")
    except OSError as e: print(name, "refused")
def bomb():
    for _ in range(1000):
        if os.fork() == 0: time.sleep(60); os._exit(0)
if isolated:
    attempt("own", lambda: open("mine", "w"))
    attempt("write", lambda: open({out!r} + "/evil", "w"))
    attempt("connect", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
    attempt("environment", lambda: open("/proc/{parent}/environ").read())
    attempt("kill", lambda: os.kill({parent}, 0))
    libc = ctypes.CDLL(None)
    print("remount", "refused" if libc.mount(None, b"/", None, 32 | 4096, None) else "done")
attempt("bomb", bomb)
"""


def test_kernel_refuses_too(tmp_path):
    out, own = tmp_path / "out", tmp_path / "own"
    out.mkdir()
    own.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.accept, daemon=True).start()
        code = BEHIND.format(root=str(ROOT), out=str(out), port=server.getsockname()[1], parent=os.getpid())
        done = subprocess.run([sys.executable, "-c", code], cwd=own, capture_output=True, text=True, timeout=60)
    said = dict(line.split() for line in done.stdout.splitlines())
    print(done.stdout, done.stderr)
    assert said.pop("bomb") == "refused"
    if said.pop("isolated") == "True":
        assert said.pop("own") == "done" and set(said.values()) == {"refused"} and len(said) == 5
        assert not os.listdir(own)  # it wrote to a file system of its own
    assert not os.listdir(out)
