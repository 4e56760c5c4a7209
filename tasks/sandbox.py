"""Runs the policy's Python code in a child process that can do little, for a short while.

What stops it:
* limits on CPU time, memory, file size, open files and processes (setrlimit);
* the end of its whole process group after WALL_S seconds, or with the process that asked for it;
* an empty environment;
* an audit hook that refuses sockets, other programs, ctypes, and files other than the standard library's and those of
  its own folder;
* user, network, process, IPC and mount namespaces of its own, where Linux allows them: then it also has no network at
  all and a read-only file system, and ends with all its descendants.

Where there are no namespaces (`isolate` returns False), only the hook stands before network and files. It stops habits,
not somebody who sets out to get past it: that is no security boundary. With the namespaces the boundary is the kernel,
and no more than that: the code still reads what the user may read.
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
from collections.abc import Callable

CPU_S = 5  # seconds
WALL_S = 8.0  # seconds
MEMORY = 512 << 20  # bytes of address space
FILE = 4 << 20  # bytes of a file
OUTPUT = 64 << 10  # bytes
PROCESSES = 32
NOBODY = 65534  # user id

# Linux's constants, which the standard library doesn't have.
PR_SET_PDEATHSIG = 1  # the signal that comes when the parent ends
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWPID = 0x20000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWNS = 0x00020000  # mounts
MS_NOSUID = 2
MS_NODEV = 4
SYS_MOUNT_SETATTR = 442
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
CAPABILITY_VERSION_3 = 0x20080522

# Audit events, by how they begin.
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
# Audit events whose first arguments are paths.
TWO_PATHS = ("os.rename", "os.link", "os.symlink")
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
    """  # noqa: E501 (prompts hold it as it stands)
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
    notes = []
    if end:
        notes.append(end)
    if len(text) > OUTPUT:
        notes.append(f"only the first {OUTPUT} bytes of the output")
    return text[:OUTPUT].decode("utf8", "replace") + "".join(f"\n[{note}]" for note in notes)


def watch(pid: int, deadline: float) -> str:
    """Wait for a child's end or the deadline: how it ended, if not well. The child stays to be waited for."""
    while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
        if time.monotonic() > deadline:
            return f"killed after {WALL_S:g} s"
        time.sleep(0.002)
    if ended.si_code != os.CLD_EXITED or ended.si_status > 128:
        return f"killed: more than {CPU_S} s of CPU time, or a crash"
    return f"exit status {ended.si_status}" if ended.si_status else ""


def isolate(libc: ctypes.CDLL) -> bool:
    """Go on as the first process in namespaces of its own. False when the kernel doesn't allow that in full."""
    folder, uid, gid = os.getcwd(), os.geteuid(), os.getegid()
    if uid == 0:
        os.setresuid(NOBODY, 0, 0)  # the limit on processes does not hold for a real root
    libc.prctl(PR_SET_DUMPABLE, 1)  # setresuid took that away, and without it the process can't write its own maps
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNS) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY)
    size = ctypes.sizeof(attributes)
    all_read_only = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size) == 0
    room = b"size=%d" % (4 * FILE)
    own_mounted = libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, room) == 0
    os.chdir(folder)
    pid = os.fork()  # the child is the first process of the new namespace
    if pid:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os._exit(wait(pid))
    return all_read_only and own_mounted


def wait(pid: int) -> int:
    """The exit status of a child when it ends; where a signal ended it 128 plus the signal's number, as in shells."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def give_up(libc: ctypes.CDLL) -> None:
    """Set the limits, and give up whatever rights are left."""
    limits = {"CPU": CPU_S, "AS": MEMORY, "FSIZE": FILE, "NOFILE": 64, "NPROC": PROCESSES, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # again: a change of rights clears it
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3), (ctypes.c_uint32 * 6)())


def make_guard(own: tuple[str, ...], readable: tuple[str, ...]) -> Callable[[str, tuple], None]:
    """The audit hook: PermissionError for what REFUSED names, and for files elsewhere.

    Paths begin with one of `own` (to read and write) or of `readable`, each of which ends with a slash.
    """

    def guard(event: str, args: tuple) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event != "open" and event not in READS + WRITES:
            return
        writes = event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        allowed = own if writes else own + readable
        for path in args[: 2 if event in TWO_PATHS else 1]:
            if not isinstance(path, (str, bytes)):  # an open file's number
                continue
            if not (os.path.realpath(os.fsdecode(path)) + "/").startswith(allowed):
                raise PermissionError(f"{path!r} is not open to {'writing' if writes else 'reading'} here")

    return guard


def end_with(pid: int, folder: str) -> None:
    """Wait for the program's end or SIGTERM; then end its process group, remove its folder, and exit as it did."""
    os.setpgid(pid, pid)
    signal.sigwait((signal.SIGTERM, signal.SIGCHLD))
    os.killpg(pid, signal.SIGKILL)  # it has not been waited for, so the number is still its group's
    code = wait(pid)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def enter() -> str:
    """Go on as a child in a folder that goes with it, without what it can give up; the program, from the input.

    The arguments are the process that asked for it and the folder for temporary files.
    """
    parent, temporary = sys.argv[1:]
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a parent that is killed removes no folder
    if os.getppid() != int(parent):  # it has ended already
        os._exit(1)
    folder = tempfile.mkdtemp(dir=temporary)
    os.chdir(folder)
    pid = os.fork()
    if pid:
        end_with(pid, folder)
    os.setpgid(0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    code = sys.stdin.buffer.read().decode()
    isolate(libc)
    give_up(libc)
    return code


def run(code: str) -> None:
    """Run a program as __main__ under the audit hook. An exception of its own ends the process, with a report."""
    sys.argv = [""]
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    standard_library = os.path.dirname(os.__file__) + "/"
    readable = (standard_library, "/usr/share/zoneinfo/", "/dev/null/", "/dev/urandom/")
    sys.addaudithook(make_guard((os.getcwd() + "/",), readable))
    try:
        exec(compile(code, "<code>", "exec"), vars(main_module))
    except Exception as error:
        report = traceback.TracebackException.from_exception(error)
        # Without our own frames it is the same text on every machine.
        report.stack[:] = [frame for frame in report.stack if frame.filename == "<code>"]
        print("".join(report.format()).rstrip(), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(enter())
