"""Runs the policy's Python code in a child process that can do little, for a short while.

What stops it: limits on CPU time, memory, file size, open files and processes (setrlimit); an end after WALL_S seconds, or with
the process that asked for it, for the whole process group; an empty environment; an audit hook that refuses sockets, other programs,
ctypes, and files other than the standard library's and its own folder's. Where Linux lets it have user, network, process and mount
namespaces of its own, it also has no network at all, a read-only file system, and ends with all its descendants. Elsewhere (`isolate`
returns False) only the hook stands before network and files, and a hook stops habits, not somebody who sets out to get past it: that
is no security boundary. With the namespaces the kernel is the boundary, no more than that: it still reads what the user may read.
"""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types

CPU_S, WALL_S, MEMORY, FILE, OUTPUT, PROCESSES = 5, 8.0, 512 << 20, 4 << 20, 64 << 10, 32  # seconds, bytes, a number
REFUSED = (
    "socket.",
    "subprocess.",
    "os.fork",
    "os.posix_spawn",
    "os.exec",
    "os.system",
    "os.kill",
    "os.chown",
    "ctypes.",
    "pty.",
    "signal.pthread_kill",
    "syslog.",
)
READS = ("os.chdir", "os.listdir", "os.scandir")
WRITES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
    "os.utime",
    "shutil.rmtree",
)


def python(code: str) -> str:
    """Run a Python program and return what it prints. Only the standard library is there; no network, no other programs.

    Args:
        code: the program
    """
    command = [sys.executable, "-ISuXutf8", os.path.abspath(__file__), str(os.getpid()), tempfile.gettempdir()]
    with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as output:
        program.write(code.encode("utf8", "replace"))
        program.seek(0)
        child = subprocess.Popen(command, env={}, start_new_session=True, stdin=program, stdout=output, stderr=output)
        try:
            end = watch(child.pid, time.monotonic() + WALL_S)
        finally:
            child.terminate()
            child.wait()  # by then the program's group has been killed, and its folder is gone
        output.seek(0)
        text = output.read(OUTPUT + 1)
    notes = [end] * bool(end) + [f"only the first {OUTPUT} bytes of the output"] * (len(text) > OUTPUT)
    return text[:OUTPUT].decode("utf8", "replace") + "".join(f"\n[{note}]" for note in notes)


def watch(pid: int, deadline: float) -> str:
    """How a child ended, if not well, or that it has not by the deadline. It stays to be waited for."""
    while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
        if time.monotonic() > deadline:
            return f"killed after {WALL_S:g} s"
        time.sleep(0.002)
    if ended.si_code != os.CLD_EXITED or ended.si_status > 128:
        return f"killed: more than {CPU_S} s of CPU time, or a crash"
    return f"exit status {ended.si_status}" if ended.si_status else ""


def isolate(libc) -> bool:
    """Go on as the first process in namespaces of its own, where the kernel allows them. False: it does not."""
    folder, uid, gid = os.getcwd(), os.geteuid(), os.getegid()
    if uid == 0:
        os.setresuid(65534, 0, 0)  # the limit on processes does not hold for a real root
    libc.prctl(4, 1)  # PR_SET_DUMPABLE, which that took away: it may write its own maps
    if libc.unshare(
        0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000
    ):  # user, network, process, IPC, mount
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    failed = libc.syscall(442, -100, b"/", 0x8000, (ctypes.c_uint64 * 4)(1), 32)  # mount_setattr: all read-only
    failed = libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, b"size=%d" % (4 * FILE)) or failed
    os.chdir(folder)
    if pid := os.fork():
        libc.prctl(1, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    return not failed


def give_up(libc) -> None:
    """The limits, and whatever rights are left."""
    for name, limit in (
        ("CPU", CPU_S),
        ("AS", MEMORY),
        ("FSIZE", FILE),
        ("NOFILE", 64),
        ("NPROC", PROCESSES),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    libc.prctl(1, signal.SIGKILL)  # again: a change of rights takes it back
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.capset((ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)())


def make_guard(own: tuple[str, ...], readable: tuple[str, ...]):
    """The audit hook: PermissionError for what REFUSED names, and for files elsewhere."""

    def guard(event, args):
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event != "open" and event not in READS + WRITES:
            return
        writes = event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        for path in args[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
            if isinstance(path, (str, bytes)) and not (os.path.realpath(os.fsdecode(path)) + "/").startswith(
                own if writes else own + readable
            ):
                raise PermissionError(f"{path!r} is not open to {'writing' if writes else 'reading'} here")

    return guard


def end_with(pid: int, folder: str) -> None:
    """Wait until the program ends or SIGTERM comes; then end its process group, remove its folder, and exit as it did."""
    os.setpgid(pid, pid)
    signal.sigwait((signal.SIGTERM, signal.SIGCHLD))
    os.killpg(pid, signal.SIGKILL)  # it has not been waited for, so the number is still its group's
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """The child: has a child of its own read the program from its input, give up what it can, and run it, in a folder that goes with it."""
    libc, parent, temporary = ctypes.CDLL(None), *sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
    libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a parent that is killed removes no folder
    if os.getppid() != int(parent):
        os._exit(1)
    folder = tempfile.mkdtemp(dir=temporary)
    os.chdir(folder)
    if pid := os.fork():
        end_with(pid, folder)
    os.setpgid(0, 0)
    libc.prctl(1, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    code = sys.stdin.buffer.read().decode()
    isolate(libc)
    give_up(libc)
    sys.argv, main_module = [""], types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    sys.addaudithook(
        make_guard(
            (os.getcwd() + "/",),
            (os.path.dirname(os.__file__) + "/", "/usr/share/zoneinfo/", "/dev/null/", "/dev/urandom/"),
        )
    )
    try:
        exec(compile(code, "<code>", "exec"), vars(main_module))
    except Exception as error:
        report = traceback.TracebackException.from_exception(error)
        report.stack[:] = [
            frame for frame in report.stack if frame.filename == "<code>"
        ]  # the same text on every machine
        print("".join(report.format()).rstrip(), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
