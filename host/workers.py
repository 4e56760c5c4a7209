"""Processes that run calls of one function, each call under a deadline.

A call that hangs is killed with its worker, and takes no other call with it.

    this process --control--> fork server --fork--> workers, each with a socket to this process

The fork server is a fresh Python that imports the function's module: no CUDA context, no threads and no __main__ of
this process, so it may start at any time, and a killed worker's replacement is a fork of it, there in milliseconds. It
runs no call, so it never hangs, sees this process end however it ends, and takes the workers along; were it killed
itself, the kernel would kill them (PR_SET_PDEATHSIG).
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from host.console import SpeltOut, traceback_text

# Seconds of work, at the mean pace of late, that a worker may hold, so that it need not wait for this process, which
# may be busy elsewhere.
AHEAD_S = 0.02
LEAST_AHEAD = 8  # calls that a worker may hold however slow they are
MOST_AHEAD = 128  # and however quick
TOGETHER = 32  # calls in the queue that wait for no others to be sent with
AT_ONCE = 1 << 16  # bytes of a read: memory for many more costs more than the read
LENGTH = struct.Struct("!Q")  # before every message: a pickle


class WorkerError(RuntimeError):
    """The call raised in the worker; the message is its traceback. Or no worker can be had; the message says why."""


class WorkerTimeout(RuntimeError):
    """The call passed its deadline; its worker was killed and replaced."""


class WorkerDied(WorkerTimeout):
    """The call took its worker down: os._exit, a crash in C, or the kernel short of memory. The worker was replaced."""


@dataclass(eq=False)
class Call:
    future: asyncio.Future
    message: bytes
    timeout_s: float


@dataclass(eq=False)
class Worker:
    number: int
    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    ready: bool = False  # its setup is done
    sent: deque[Call] = field(default_factory=deque)  # in the order it runs them, so it is busy with the first
    timer: asyncio.TimerHandle | None = None  # the first one's deadline


class WorkerPool:
    """num_workers processes, started once, that run calls of one function, each under a deadline."""

    def __init__(self, setup: Callable[[], Callable], num_workers: int, preload: Iterable[str] = ()):
        """setup, which pickle must know by name, runs once in each worker and returns the function.

        preload names modules that the fork server imports, so that the workers have them.
        """
        self.setup = pack(pickle.dumps(setup))
        self.queue: deque[Call] = deque()
        self.workers: list[Worker] = []
        self.num_started = 0
        self.loop: Any = None  # the event loop of the latest call
        self.broken: str | None = None  # why no call can be served any more
        self.pace = AHEAD_S / LEAST_AHEAD  # seconds that a call takes, of late
        modules = [getattr(setup, "func", setup).__module__, *preload]  # func: of a functools.partial
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.server = start_server(theirs.fileno(), modules)
        for _ in range(num_workers):
            self._start_worker()

    async def call(self, *args: Any, timeout_s: float) -> Any:
        """function(*args) from a worker. WorkerError, WorkerTimeout or WorkerDied.

        The deadline counts from when a worker begins with it.
        """
        self._watch_from(asyncio.get_running_loop())
        if self.broken:
            raise WorkerError(self.broken)
        try:
            message = pack(pickle.dumps(args))
        except Exception as error:
            raise WorkerError(traceback_text()) from error
        call = Call(self.loop.create_future(), message, timeout_s)
        self.queue.append(call)
        is_first = len(self.queue) == 1
        some_worker_is_idle = is_first and any(w.ready and not w.sent for w in self.workers)
        if len(self.queue) % TOGETHER == 0 or some_worker_is_idle:
            self._feed()
        elif is_first:  # with those that come in the same turn of the loop
            self.loop.call_soon(self._feed)
        return await call.future

    def close(self) -> None:
        """End the workers, whatever they are doing, and wait until they are gone; calls that wait raise WorkerError."""
        self._break("the pool is closed")
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()

    def _watch_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """Every asyncio.run has a loop of its own: sockets and deadlines move to this one."""
        if loop is self.loop:
            return
        for worker in self.workers:
            self._unwatch(worker)
        self.loop = loop
        for worker in self.workers:
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        self.loop.add_reader(worker.sock, self._read, worker)
        self._write(worker)
        self._set_deadline(worker)

    def _unwatch(self, worker: Worker) -> None:
        if worker.timer:
            worker.timer.cancel()
        if self.loop and not self.loop.is_closed():
            self.loop.remove_reader(worker.sock)
            self.loop.remove_writer(worker.sock)

    def _start_worker(self) -> None:
        ours, theirs = socket.socketpair()
        worker = Worker(self.num_started, ours)
        self.num_started += 1
        self.workers.append(worker)
        with theirs:
            try:
                socket.send_fds(self.control, [b"fork %d" % worker.number], [theirs.fileno()])
            except OSError as e:
                return self._break(f"the process that starts workers is gone: {e}")
            ours.sendall(self.setup)
        ours.setblocking(False)
        if self.loop:
            self._watch(worker)

    def _feed(self) -> None:
        """Spread the queue over the workers, many calls in one write, ahead of time only what would wait anyway."""
        ready = [worker for worker in self.workers if worker.ready]
        most = 1  # while a worker still starts up: it may be free before the others are
        if len(ready) == len(self.workers):
            most = min(max(int(AHEAD_S / self.pace), LEAST_AHEAD), MOST_AHEAD)
        # Not a write for every answer: who holds more than half of its share waits.
        hungry = [worker for worker in ready if 2 * len(worker.sent) <= self._share(most)]
        while self.queue and hungry:
            worker = min(hungry, key=lambda w: len(w.sent))
            if len(worker.sent) >= self._share(most):
                break
            call = self.queue.popleft()
            if call.future.done():  # cancelled
                continue
            worker.sent.append(call)
            worker.outbox += call.message
            if len(worker.sent) == 1:
                self._set_deadline(worker)
        for worker in hungry:
            if worker.outbox:
                self._write(worker)

    def _share(self, most: int) -> int:
        """Calls that a worker should hold, of those in the queue and at most so many."""
        return min(most, 1 + len(self.queue) // len(self.workers))

    def _set_deadline(self, worker: Worker) -> None:
        if worker.timer:
            worker.timer.cancel()
        worker.timer = None
        if worker.sent:
            worker.timer = self.loop.call_later(worker.sent[0].timeout_s, self._expire, worker)

    def _write(self, worker: Worker) -> None:
        try:
            del worker.outbox[: worker.sock.send(worker.outbox)]
        except BlockingIOError:
            pass
        except OSError:  # it is dead, which _read finds out after its last results
            worker.outbox.clear()
        if worker.outbox:
            self.loop.add_writer(worker.sock, self._write, worker)
        else:
            self.loop.remove_writer(worker.sock)

    def _read(self, worker: Worker) -> None:
        """Take the answers that are there, and send more calls. A worker that is gone is replaced."""
        ended = self._receive(worker)
        answers = list(unpack(worker.inbox))
        for message in answers:
            try:
                ok, value, seconds = pickle.loads(message)
            except Exception:  # what the worker pickled can't be read here
                ok, value, seconds = False, traceback_text(), self.pace
            if worker.ready:
                finish(worker.sent.popleft(), value if ok else WorkerError(value))
                self.pace += (seconds - self.pace) / 64
            elif ok:
                worker.ready = True
            else:
                return self._break(value)
        if answers:
            self._set_deadline(worker)
        if ended:
            self._replace(worker, WorkerDied("the worker died in this call: it exited, crashed, or was out of memory"))
        self._feed()

    def _receive(self, worker: Worker) -> bool:
        """Read into a worker's inbox what has come; True when nothing more will."""
        try:
            while True:
                data = worker.sock.recv(AT_ONCE)
                worker.inbox += data
                if len(data) < AT_ONCE:  # what comes later wakes the loop again
                    return not data
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _expire(self, worker: Worker) -> None:
        """The call's time is over.

        Its result is not there, even if the loop was busy elsewhere: asyncio looks at sockets before timers.
        """
        self._replace(worker, WorkerTimeout(f"the call took more than {worker.sent[0].timeout_s:g} s"))
        self._feed()

    def _replace(self, worker: Worker, error: WorkerTimeout) -> None:
        """The call it is busy with fails; those sent ahead go back to the queue."""
        if not worker.ready:  # the next one would die too
            return self._break("a worker died in its setup")
        self._unwatch(worker)
        worker.sock.close()
        self.workers.remove(worker)
        if worker.sent:
            finish(worker.sent.popleft(), error)
        self.queue.extendleft(reversed(worker.sent))
        worker.sent.clear()
        with contextlib.suppress(OSError):  # starting the next one reports it
            self.control.send(b"kill %d" % worker.number)
        self._start_worker()

    def _break(self, why: str) -> None:
        """No call can be served any more; the fork server ends the workers when it sees control closed."""
        self.broken = self.broken or why
        for worker in self.workers:
            self._unwatch(worker)
            worker.sock.close()
            self.queue.extend(worker.sent)
            worker.sent.clear()
        self.workers.clear()
        self.control.close()
        while self.queue:
            finish(self.queue.popleft(), WorkerError(self.broken))


def start_server(control: int, modules: list[str]) -> subprocess.Popen:
    """The fork server, with its end of the control socket."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as w; "
        f"w.serve_forks({control}, {modules!r}, {os.getpid()})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for this process, which decides what ends
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )


def finish(call: Call, outcome: Any) -> None:
    if call.future.done() or call.future.get_loop().is_closed():  # nobody waits for a cancelled call
        return
    if isinstance(outcome, (WorkerError, WorkerTimeout)):
        call.future.set_exception(outcome)
    else:
        call.future.set_result(outcome)


def pack(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def unpack(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete messages out of buffer."""
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        message = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        yield message


# In the fork server and its workers


def serve_forks(fd: int, modules: list[str], main: int) -> None:
    """Fork and kill workers as asked on the socket fd.

    End with all of them when it closes, or when the process `main` is gone.
    """
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # what a killed worker printed is not lost
    # A rule may print what the policy wrote.
    sys.stdout = SpeltOut(sys.stdout)  # type: ignore[assignment]
    sys.stderr = SpeltOut(sys.stderr)  # type: ignore[assignment]
    for module in modules:
        with contextlib.suppress(Exception):  # raises again in the worker, which reports it
            importlib.import_module(module)
    gc.freeze()
    children: dict[bytes, int] = {}  # worker's number -> its pid, which is also its process group
    with socket.socket(fileno=fd) as control:
        while os.getppid() == main:  # a process forked from main may hold control open
            if select.select([control], [], [], 1.0)[0]:
                message, fds, *_ = socket.recv_fds(control, 64, 1)
                if not message:
                    break
                verb, number = message.split()
                if verb == b"fork":
                    children[number] = fork_worker(fds[0], control)
                elif number in children:
                    os.killpg(children[number], signal.SIGKILL)
            while children and (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                end_group(dead.si_pid)
                children = {number: pid for number, pid in children.items() if pid != dead.si_pid}
    for pid in children.values():
        end_group(pid)
    os._exit(0)  # the libraries' own farewells take longer


def end_group(pid: int) -> None:
    """Kill a worker and what it started. The pid is its own until it is waited for."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def fork_worker(fd: int, control: socket.socket) -> int:
    """A worker that serves the calls of the socket fd, in a process group of its own; returns its pid."""
    server = os.getpid()
    if pid := os.fork():
        os.setpgid(pid, pid)
        os.close(fd)
        return pid
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        control.close()
        if os.getppid() == server:
            serve_calls(socket.socket(fileno=fd))
    except OSError:  # nobody listens any more
        pass
    finally:
        os._exit(0)


def serve_calls(sock: socket.socket) -> None:
    """The first message is the setup, every other one the arguments of a call."""
    function = None
    reader = sock.makefile("rb", AT_ONCE)
    while head := reader.read(LENGTH.size):
        message = reader.read(LENGTH.unpack(head)[0])
        start = time.perf_counter()
        try:
            value = None
            if function:
                value = function(*pickle.loads(message))
            else:
                function = pickle.loads(message)()
            answer = pickle.dumps((True, value, time.perf_counter() - start))
        except BaseException:  # SystemExit too is an error of this call
            answer = pickle.dumps((False, traceback_text(), time.perf_counter() - start))
        sock.sendall(pack(answer))  # before the next call begins, which may never end
