"""Processes that run calls of one function, each call under a deadline: one that hangs is killed with its worker, and takes no other with it.

    this process --control--> fork server --fork--> workers, each with a socket to this process

The fork server is a fresh Python that imports the function's module: no CUDA context, no threads and no __main__ of this process, so
it may start at any time, and a killed worker's replacement is a fork of it, there in milliseconds. It runs no call, so it never hangs,
sees this process end however it ends, and takes the workers along; were it killed itself, the kernel would kill them (PR_SET_PDEATHSIG).
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

from host.console import SpeltOut, traceback_text

AHEAD_S = 0.02  # of work, at the mean pace of late, that a worker may hold, so that it need not wait for this process, which may be busy elsewhere
SENT_AHEAD = 8, 128  # so many calls at least, at most
TOGETHER = 32  # calls in the queue that wait for no others to be sent with
AT_ONCE = 1 << 16  # bytes of a read: memory for many more costs more than the read
LENGTH = struct.Struct("!Q")  # before every message: a pickle


class WorkerError(RuntimeError):
    """The call raised in the worker; the message is its traceback. Or no worker can be had, and the message says why."""


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
        """setup, which pickle must know by name, runs once in each worker and returns the function; preload names modules to fork with."""
        self.setup, self.queue, self.workers, self.num_started = pack(pickle.dumps(setup)), deque(), [], 0
        self.loop, self.broken, self.pace = (
            None,
            None,
            AHEAD_S / SENT_AHEAD[0],
        )  # pace: seconds that a call takes, of late
        modules = [getattr(setup, "func", setup).__module__, *preload]
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as w; w.serve_forks({theirs.fileno()}, {modules!r}, {os.getpid()})"
            # a session of its own: Ctrl-C in the terminal is for this process, which decides what ends
            own = dict(stdin=subprocess.DEVNULL, start_new_session=True, env={"OMP_NUM_THREADS": "1", **os.environ})
            self.server = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], **own)
        for _ in range(num_workers):
            self._start_worker()

    async def call(self, *args, timeout_s: float):
        """function(*args) from a worker; WorkerError, WorkerTimeout or WorkerDied. The deadline counts from when a worker begins with it."""
        self._watch_from(asyncio.get_running_loop())
        if self.broken:
            raise WorkerError(self.broken)
        try:
            message = pack(pickle.dumps(args))
        except Exception as e:
            raise WorkerError(traceback_text()) from e
        call = Call(self.loop.create_future(), message, timeout_s)
        self.queue.append(call)
        if len(self.queue) % TOGETHER == 0 or (
            len(self.queue) == 1 and any(w.ready and not w.sent for w in self.workers)
        ):
            self._feed()
        elif len(self.queue) == 1:  # with those that come in the same turn of the loop
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
        most = (
            min(max(int(AHEAD_S / self.pace), SENT_AHEAD[0]), SENT_AHEAD[1]) if len(ready) == len(self.workers) else 1
        )  # who starts up may be free before
        share = lambda: min(most, 1 + len(self.queue) // len(self.workers))  # noqa: E731
        ready = [worker for worker in ready if 2 * len(worker.sent) <= share()]  # not a write for every answer
        while self.queue and ready:
            worker = min(ready, key=lambda w: len(w.sent))
            if len(worker.sent) >= share():
                break
            call = self.queue.popleft()
            if call.future.done():  # cancelled
                continue
            worker.sent.append(call)
            worker.outbox += call.message
            if len(worker.sent) == 1:
                self._set_deadline(worker)
        for worker in [w for w in ready if w.outbox]:
            self._write(worker)

    def _set_deadline(self, worker: Worker) -> None:
        if worker.timer:
            worker.timer.cancel()
        worker.timer = self.loop.call_later(worker.sent[0].timeout_s, self._expire, worker) if worker.sent else None

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
        data, ended = None, False
        try:
            while data is None or len(data) == AT_ONCE:  # what comes later wakes the loop again
                data = worker.sock.recv(AT_ONCE)
                worker.inbox += data
            ended = not data
        except OSError as e:
            ended = not isinstance(e, BlockingIOError)
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

    def _expire(self, worker: Worker) -> None:
        """Its result is not there, though the loop may have been busy elsewhere: asyncio looks at sockets before it looks at timers."""
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


def finish(call: Call, outcome) -> None:
    if not call.future.done() and not call.future.get_loop().is_closed():  # nobody waits for a cancelled call
        call.future.set_exception(outcome) if isinstance(
            outcome, (WorkerError, WorkerTimeout)
        ) else call.future.set_result(outcome)


def pack(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def unpack(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete messages out of buffer."""
    while len(buffer) >= LENGTH.size and len(buffer) >= (end := LENGTH.size + LENGTH.unpack_from(buffer)[0]):
        message = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        yield message


# In the fork server and its workers


def serve_forks(fd: int, modules: list[str], main: int) -> None:
    """Fork and kill workers as asked on the socket fd; end with all of them when it closes, or when the process `main` is gone."""
    sys.stdout.reconfigure(line_buffering=True)  # what a killed worker printed is not lost
    sys.stdout, sys.stderr = SpeltOut(sys.stdout), SpeltOut(sys.stderr)  # a rule may print what the policy wrote
    for module in modules:
        with contextlib.suppress(Exception):  # raises again in the worker, which reports it
            importlib.import_module(module)
    gc.freeze()
    children = {}  # worker's number -> its pid, which is also its process group
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
    function, reader = None, sock.makefile("rb", AT_ONCE)
    while head := reader.read(LENGTH.size):
        message, start = reader.read(LENGTH.unpack(head)[0]), time.perf_counter()
        try:
            if function:
                value = function(*pickle.loads(message))
            else:
                function, value = pickle.loads(message)(), None
            answer = pickle.dumps((True, value, time.perf_counter() - start))
        except BaseException:  # SystemExit too is an error of this call
            answer = pickle.dumps((False, traceback_text(), time.perf_counter() - start))
        sock.sendall(pack(answer))  # before the next call begins, which may never end
