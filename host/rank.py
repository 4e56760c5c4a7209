"""A rank as a process: how it becomes one, what it does when it is told to stop, and how a failure of one ends all.

train.py needs `run(main)`; `told()`, whether this rank was told; and `told_to_stop(device)`, whether any rank was.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from host.console import printable

ROOT = Path(__file__).parent.parent
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # of a pre-empted node, and of Ctrl-C
stop = threading.Event()


class ToldToStop(Exception):  # noqa: N818 - nothing is wrong
    """The run was told to stop while it sampled: the step is given up."""


def run(main: Callable[[], None]) -> None:
    """Run `main`, then end the process.

    On failure one line for the user's mistake, a traceback for anything else, and out at once, so that no rank waits
    for this one.
    """
    end_with_launcher()
    try:
        relaunch_ranks()
        watch_for_signals()
        main()
    except SystemExit:  # tyro's, of --help and of a flag that is wrong
        raise
    except BaseException as error:
        users = is_users_mistake(error)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            time.sleep(1.0)  # was it the end of another rank that this one noticed? Then its error is the one to read
            if sibling_ended():
                os._exit(1)
            tell_torchrun()
        print(printable(f"error: {error}" if users else traceback.format_exc()), file=sys.stderr, flush=True)
        os._exit(2 if users else 1)
    sys.stdout.flush()
    os._exit(0)  # a thread that an agent left behind would hold the process, and the GPU


def is_users_mistake(error: BaseException) -> bool:
    """Whether it is a ValueError or a missing file, raised by Lockstep's own code: a file of the root or of its
    folders."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = {ROOT, *(ROOT / folder for folder in ("fast", "look", "tasks", "host"))}
    return isinstance(error, (ValueError, FileNotFoundError)) and raised_in.parent in ours


def tell_torchrun() -> None:
    """Leave the traceback for torchrun, which shows it once more, last."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise RuntimeError(printable(traceback.format_exc())) from None
    except RuntimeError as shown:
        get_error_handler().record_exception(shown)


def end_with_launcher() -> None:
    """Under accelerate or torchrun, get SIGTERM when the launcher dies: accelerate's own does not pass one on."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def relaunch_ranks() -> None:
    """On a machine without GPUs `accelerate launch --num_processes N` starts one process, silently. Become N of them.

    It leaves MASTER_ADDR but no rank in the environment; how many were asked for stands only in its command line.
    """
    if torch.cuda.is_available() or "LOCAL_RANK" in os.environ or "MASTER_ADDR" not in os.environ:
        return
    import psutil

    words = psutil.Process(os.getppid()).cmdline()
    asked = None
    for word, following in zip(words, [*words[1:], ""]):
        knob, equals, value = word.partition("=")
        if knob == "--num_processes":
            asked = value if equals else following
            break
    if not asked:
        raise ValueError(
            "accelerate starts one process on a machine without GPUs, whatever its configuration says: "
            "put --num_processes N on its command line"
        )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={asked}"]
    os.execv(sys.executable, [sys.executable, *launcher, *launched_words()])


def launched_words() -> list[str]:
    """The words of this program's own command line, `-m look.bench` among them where it runs as a module."""
    spec = sys.modules["__main__"].__spec__
    return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]] if spec else sys.argv


def watch_for_signals() -> None:
    """SIGTERM or Ctrl-C stops the run where nothing is lost; a second of its kind, or one when another rank ended, at
    once.

    A thread decides, since the main one may be inside a collective that never returns.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)  # every signal's number is written here, whatever the main thread is doing
    os.register_at_fork(after_in_child=forget_signals)  # of an agent's own: Ctrl-C reaches it too, and it is no rank

    def watch(launcher: int) -> None:
        seen = set()
        while True:
            number = os.read(reader, 1)[0]
            if number not in STOP_SIGNALS:
                continue
            bereft = os.getppid() != launcher  # then SIGTERM is the launcher's death, not a second order
            if sibling_ended() or (number in seen and not bereft):
                os._exit(128 + number)
            launcher = os.getppid()
            seen.add(number)
            stop.set()

    threading.Thread(target=watch, args=[os.getppid()], daemon=True).start()


def forget_signals() -> None:
    """In a process that was forked: it dies of a signal, and tells nobody."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def sibling_ended() -> bool:
    """Whether one of torchrun's ranks on this host is gone. One process has no siblings, nor perhaps a parent: that of
    a container's first process is none of it."""
    import psutil

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks == 1:
        return False
    try:
        siblings = psutil.Process(os.getppid()).children()
    except psutil.Error:
        return False
    alive = 0
    for sibling in siblings:
        with contextlib.suppress(psutil.Error):  # ended since
            alive += sibling.status() != psutil.STATUS_ZOMBIE
    return alive < ranks


def told() -> bool:
    """Whether this rank was told to stop."""
    return stop.is_set()


def told_to_stop(device: torch.device) -> bool:
    """Whether any rank was told to stop. A collective."""
    if dist.get_world_size() == 1:
        return stop.is_set()
    flag = torch.tensor(float(stop.is_set()), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
