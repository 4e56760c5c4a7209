import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from host.workers import WorkerDied, WorkerError, WorkerPool, WorkerTimeout

# In the workers


def make(log=None):
    if log:
        note(log, "setup")
    return partial(serve, log)


def serve(log, what, *args):
    if log:
        note(log, what)
    return {
        "echo": lambda x: x,
        "pid": os.getpid,
        "nap": lambda: time.sleep(0.02) or os.getpid(),
        "sleep": lambda s: time.sleep(s) or s,
        "spin": spin,
        "regex": lambda: re.match(r"(a+)+b", "a" * 60),  # in C, for centuries, without a look at signals
        "power": lambda: 9**9**9,
        "raise": lambda: 1 // 0,
        "deep": lambda: [serve(None, "deeper")],
        "deeper": lambda: [serve(None, "deep")],
        "huge": lambda: {}[tuple(range(10**6))],
        "exit": lambda: sys.exit(3),
        "interrupt": lambda: signal.raise_signal(signal.SIGINT),
        "lambda": lambda: lambda: 0,
        "die": lambda: os._exit(3),
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "child": lambda: (subprocess.Popen(["sleep", "1000"]).pid, time.sleep(1000)),
    }.get(what, lambda: what)(*args)


def spin():
    while True:
        pass


def note(path, text):
    with open(path, "a") as file:
        file.write(f"{text} {os.getpid()}\n")


def bad_setup(log, how):
    note(log, "setup")
    if how == "raise":
        raise OSError("no such judge")
    os._exit(5)


class Unreadable:
    """Comes out of a pickle as an exception."""

    def __reduce__(self):
        return int, ("no number",)


# In this process


@pytest.fixture
def pool():
    pool = WorkerPool(make, 2)
    yield pool
    pool.close()


def run(pool, *calls, timeout_s=20.0):
    """Outcomes of calls made at once, in order, errors included; each on the shared clock of a new event loop."""

    async def gather():
        return await asyncio.gather(*(pool.call(*call, timeout_s=timeout_s) for call in calls), return_exceptions=True)

    return asyncio.run(gather())


def is_alive(pid):
    """Runs or sleeps; a zombie that only waits for a foreign parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(done, seconds=60.0):
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    return done()


def descendants(pid):
    """Processes below pid, zombies included."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(child)]
    return found


def test_results_come_in_the_order_of_the_calls(pool):
    calls = [("echo", i) if i % 7 else ("sleep", 0.01 * (i % 3)) for i in range(300)]
    assert run(pool, *calls) == [i if i % 7 else 0.01 * (i % 3) for i in range(300)]


def test_all_workers_work_and_stay(pool):
    pids = set(run(pool, *[("nap",)] * 80))
    assert len(pids) == 2 and os.getpid() not in pids
    assert set(run(pool, *[("nap",)] * 80)) == pids, "a second event loop finds the same processes"


def test_large_messages(pool):
    texts = [chr(65 + i) * 3_000_000 for i in range(12)]
    assert run(pool, *(("echo", text) for text in texts)) == texts


@pytest.mark.parametrize(
    "call, says",
    [
        (("raise",), "ZeroDivisionError"),
        (("exit",), "SystemExit: 3"),
        (("interrupt",), "KeyboardInterrupt"),
        (("lambda",), "pickle"),
        (("echo", lambda: 0), "pickle"),
        (("echo", Unreadable()), "ValueError: invalid literal"),
        (("echo",), "TypeError"),
    ],
)
def test_what_raises_fails_its_call_only(pool, call, says):
    before, (one, error, two), after = (
        run(pool, ("pid",)),
        run(pool, ("echo", 1), call, ("echo", 2)),
        run(pool, *[("nap",)] * 40),
    )
    assert type(error) is WorkerError and says in str(error)
    assert (one, two) == (1, 2) and before[0] in after, "and the worker stays"


def test_an_error_is_the_workers_traceback(pool):
    assert 'in <lambda>\n    "raise": lambda: 1 // 0' in str(run(pool, ("raise",))[0])


@pytest.mark.parametrize("what, says", [("deep", "lines left out ...]\n"), ("huge", "characters left out ...]")])
def test_a_long_traceback_comes_without_its_middle(pool, what, says):
    text = str(run(pool, (what,))[0])
    assert (
        text.startswith("Traceback (most recent call last):\n  File ")
        and says in text
        and text.count("\n") < 50
        and len(text) < 10_000
    )
    assert text.rstrip().rpartition("\n")[2].startswith(
        {"deep": "RecursionError: maximum recursion depth", "huge": "KeyError: (0, 1, 2, 3,"}[what]
    ) and text.endswith("\n")


@pytest.mark.parametrize("what", [("sleep", 1000), ("spin",), ("regex",), ("power",)])
def test_a_call_that_hangs(pool, what):
    old = set(run(pool, *[("nap",)] * 80))
    calls = [("echo", i) for i in range(100)]
    outcomes = run(pool, *calls[:5], what, *calls[5:], timeout_s=3.0)
    error = outcomes.pop(5)
    assert type(error) is WorkerTimeout and "3 s" in str(error)
    assert outcomes == list(range(100)), "nothing of the queue is lost"
    new = set(run(pool, *[("nap",)] * 80))
    assert len(new) == 2 and len(new & old) == 1, "one worker was replaced"
    assert wait_until(lambda: len(descendants(pool.server.pid)) == 2), (
        "and what was killed is no zombie: two workers are left"
    )


@pytest.mark.parametrize("what", ["die", "crash"])
def test_a_call_that_takes_its_worker_down(pool, what):
    outcomes = run(pool, *[("echo", 1)] * 20, (what,), *[("echo", 2)] * 20, (what,), *[("echo", 3)] * 20)
    errors = [outcomes.pop(41), outcomes.pop(20)]
    assert [type(e) for e in errors] == [WorkerDied, WorkerDied] and "died" in str(errors[0])
    assert isinstance(errors[0], WorkerTimeout), "whoever handles time-outs need not know about it"
    assert outcomes == [1] * 20 + [2] * 20 + [3] * 20


def test_no_call_runs_twice(tmp_path):
    pool = WorkerPool(partial(make, tmp_path / "log"), 2)
    outcomes = run(
        pool,
        *[(i,) for i in range(40)],
        ("spin",),
        *[(i,) for i in range(40, 80)],
        ("die",),
        *[(i,) for i in range(80, 120)],
        timeout_s=3.0,
    )
    pool.close()
    assert [o for o in outcomes if not isinstance(o, Exception)] == list(range(120))
    ran = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(name for name in ran if name != "setup") == sorted([*map(str, range(120)), "spin", "die"])
    assert 2 <= ran.count("setup") <= 4, "once in each worker"


def test_of_the_calls_that_a_worker_holds_none_is_lost_nor_blamed_nor_run_twice(tmp_path):
    pool = WorkerPool(partial(make, tmp_path / "log"), 2)
    held = watch(pool)
    run(pool, *[("warm",)] * 500)
    outcomes = run(
        pool,
        *[(i,) for i in range(40)],
        ("spin",),
        *[(i,) for i in range(40, 300)],
        ("die",),
        *[(i,) for i in range(300, 400)],
        timeout_s=3.0,
    )
    pool.close()
    assert (
        type(outcomes.pop(301)) is WorkerDied
        and type(outcomes.pop(40)) is WorkerTimeout
        and outcomes == list(range(400))
    )
    ran = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(name for name in ran if name not in ("setup", "nap", "warm")) == sorted(
        [*map(str, range(400)), "spin", "die"]
    )
    assert max(held) > 16, "and it held many"


def test_quick_calls_go_in_few_writes_and_slow_ones_wait_for_a_free_worker():
    pool = WorkerPool(make, 2)
    held = watch(pool)
    run(pool, *[("echo", 1)] * 600)  # to know their pace
    held.clear()
    run(pool, *[("echo", 1)] * 600)
    assert len(held) < 75 and 16 < max(held) <= 128
    run(pool, *[("nap",)] * 40)
    held.clear()
    run(pool, *[("nap",)] * 40)
    assert max(held) <= 8
    pool.close()


def watch(pool):
    """How many calls a worker holds at each write to one, from now on, when all have started."""
    while not all(worker.ready for worker in pool.workers):
        run(pool, ("nap",))
    held, write = [], pool._write
    pool._write = lambda worker: held.append(len(worker.sent)) or write(worker)
    return held


def test_calls_start_in_order(tmp_path):
    pool = WorkerPool(partial(make, tmp_path / "log"), 1)
    run(pool, *[(i,) for i in range(50)], ("spin",), *[(i,) for i in range(50, 99)], timeout_s=3.0)
    pool.close()
    ran = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert ran == ["setup", *map(str, range(50)), "spin", "setup", *map(str, range(50, 99))], (
        "also those that a killed worker held"
    )


def test_the_deadline_counts_from_the_calls_own_start():
    pool = WorkerPool(make, 1)
    assert run(pool, *[("sleep", 0.4)] * 8, timeout_s=3.0) == [0.4] * 8, "3.2 s in all, on one worker"
    pool.close()


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_loop_that_was_busy_elsewhere_finds_the_result(pool, size):
    async def busy():
        await pool.call("echo", 0, timeout_s=20)
        calls = [asyncio.ensure_future(pool.call("echo", str(i) * size, timeout_s=2.0)) for i in range(6)]
        await asyncio.sleep(0)
        time.sleep(3.0)  # an engine's step
        return await asyncio.gather(*calls)

    assert asyncio.run(busy()) == [str(i) * size for i in range(6)], "though their deadlines have passed"


def test_calls_reach_workers_before_a_loop_is_busy_elsewhere(tmp_path):
    """One that a worker is free for, and the first of many: others wait for the loop, to be sent together."""
    pool = WorkerPool(partial(make, tmp_path / "log"), 1)

    async def busy(*names, most, turns=1):
        (tmp_path / "log").write_text("")
        calls = [asyncio.ensure_future(pool.call(name, timeout_s=20)) for name in names]
        for _ in range(turns):
            await asyncio.sleep(0)
        # An engine's step.
        ran = []
        wait_until(lambda: ran.append((tmp_path / "log").read_text().split()[::2]) or len(ran[-1]) >= most, 10)
        ran = ran[-1]
        await asyncio.gather(*calls)
        return ran

    run(pool, *[("warm",)] * 500)
    assert asyncio.run(busy("one", most=1)) == ["one"]
    ran = asyncio.run(busy(*range(100), most=17))
    assert len(ran) > 16 and ran == list(map(str, range(len(ran))))
    assert len(asyncio.run(busy(*range(20), most=9, turns=2))) > 8, (
        "the loop's next turn sends the others, whose number is no reason to wait"
    )
    pool.close()


def test_the_loop_runs_on_while_a_worker_hangs(pool):
    async def watch():
        await pool.call("echo", 0, timeout_s=20)
        hanging, ticks = [asyncio.ensure_future(pool.call("regex", timeout_s=2)) for _ in range(2)], 0
        while not all(call.done() for call in hanging):
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, [type(call.exception()) for call in hanging]

    ticks, errors = asyncio.run(watch())
    assert ticks > 20 and errors == [WorkerTimeout] * 2  # 200 on an idle machine


def test_a_call_that_nobody_waits_for_keeps_its_deadline():
    pool = WorkerPool(make, 1)

    async def give_up():
        await pool.call("echo", 0, timeout_s=20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.call("spin", timeout_s=1.0), 0.1)
        return await pool.call("echo", 1, timeout_s=20)

    assert asyncio.run(give_up()) == 1
    assert run(pool, ("echo", 2)) == [2]
    pool.close()


def test_a_hang_left_by_one_loop_is_ended_in_the_next():
    pool = WorkerPool(make, 1)
    asyncio.run(start_and_leave(pool))
    assert run(pool, ("echo", 2), timeout_s=20.0) == [2]
    pool.close()


async def start_and_leave(pool):
    await pool.call("echo", 0, timeout_s=20)
    asyncio.ensure_future(pool.call("spin", timeout_s=1.0))
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("how, says", [("raise", "OSError: no such judge"), ("exit", "died in its setup")])
def test_a_setup_that_fails(tmp_path, how, says):
    pool = WorkerPool(partial(bad_setup, tmp_path / "log", how), 2)
    outcomes = run(pool, *[("echo", 1)] * 5) + run(pool, ("echo", 1))
    assert all(type(o) is WorkerError and says in str(o) for o in outcomes)
    time.sleep(0.5)
    assert len((tmp_path / "log").read_text().splitlines()) <= 2, "it is not tried again and again"
    pool.close()


def test_close_ends_everything(pool):
    others = set(descendants(os.getpid())) - {pool.server.pid, *descendants(pool.server.pid)}  # of other tests

    async def hang():
        await pool.call("echo", 0, timeout_s=20)
        calls = [asyncio.ensure_future(pool.call(what, timeout_s=1000)) for what in ("regex", "child", "pid")]
        await asyncio.sleep(0)
        end = time.monotonic() + 20
        while len(descendants(pool.server.pid)) < 3 and time.monotonic() < end:  # two workers, and one's own child
            await asyncio.sleep(0.05)
        pids = [pool.server.pid, *descendants(pool.server.pid)]
        assert len(pids) == 4
        pool.close()
        return pids, await asyncio.gather(*calls, return_exceptions=True)

    pids, outcomes = asyncio.run(hang())
    assert all(type(o) is WorkerError and "closed" in str(o) for o in outcomes)
    assert wait_until(lambda: not any(map(is_alive, pids))) and set(descendants(os.getpid())) <= others
    assert "closed" in str(run(pool, ("echo", 1))[0])
    pool.close()


SCRIPT = """
import asyncio, sys
from test_workers import WorkerPool, descendants, make, os
print("main", flush=True)
async def hang():
    await pool.call("echo", 0, timeout_s=100)
    calls = [asyncio.ensure_future(pool.call(what, timeout_s=1000)) for what in ("regex", "spin")]
    await asyncio.sleep(0.5)
    print(pool.server.pid, *descendants(pool.server.pid), flush=True)
    await asyncio.gather(*calls)
pool = WorkerPool(make, 2)
asyncio.run(hang())
"""


@pytest.fixture
def hanging(tmp_path):
    """A process whose two workers hang, one in C and one in Python, the pid of its fork server, and theirs."""
    (tmp_path / "script.py").write_text(SCRIPT)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here.parent}:{here}"}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert process.stdout.readline() == "main\n"
    server, *workers = map(
        int, process.stdout.readline().split()
    )  # a worker that imports the script would print "main" before
    assert len(workers) == 2 and all(map(is_alive, workers))
    yield process, server, workers
    process.kill()
    process.communicate()


def test_workers_do_not_outlive_a_killed_process(hanging):
    process, server, workers = hanging
    process.kill()
    assert wait_until(lambda: not any(map(is_alive, [server, *workers])))


def test_workers_do_not_outlive_a_killed_fork_server(hanging):
    process, server, workers = hanging
    os.kill(server, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_alive, workers)))
    assert "WorkerDied" in process.communicate(timeout=20)[1], "and their calls fail"


def test_a_killed_fork_server_is_an_error_of_every_call(pool):
    workers = set(run(pool, *[("nap",)] * 80))
    pool.server.kill()
    pool.server.wait()
    assert wait_until(lambda: not any(map(is_alive, workers)))
    outcomes = [outcome for _ in range(2) for outcome in run(pool, *[("nap",)] * 20)]
    assert all(isinstance(o, (WorkerDied, WorkerError)) for o in outcomes) and "is gone" in str(outcomes[-1])


def test_ctrl_c_is_for_the_main_process(hanging):
    process, server, workers = hanging
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    errors = process.communicate(timeout=20)[1]
    assert (
        errors.count("Traceback") <= 2 and errors.rstrip().endswith("KeyboardInterrupt") and "serve_calls" not in errors
    )
    assert wait_until(lambda: not any(map(is_alive, [server, *workers])))
