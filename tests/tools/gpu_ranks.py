"""What must hold with several processes, measured: on GPUs (NCCL), or with --small on the CPU (gloo, tiny model).

    python tests/tools/gpu_ranks.py links gradients reference copies rollouts tensor resume kills --out DIR [--small] [--dummy SHAPE]

Each check prints JSON lines with its figures and PASS or FAIL and adds them to DIR/ranks.jsonl; exit code 1 when any failed. The
workers are this file too: `gpu_ranks.py worker WHAT ...` under torch.distributed.run, and `gpu_ranks.py trainer ...`, which is train.py
that leaves a note of the phase that each rank is in.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT_S = 300


def environment(gpus: str | None = None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES} | {
        "WANDB_MODE": "offline",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    return env | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})


def call(command: list[str], log: Path, gpus: str | None = None) -> None:
    """Run to the end, its output into `log`; RuntimeError with the end of it when it fails."""
    with open(log, "w") as file:
        done = subprocess.run(command, env=environment(gpus), stdout=file, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}\n{log.read_text()[-4000:]}")


def work(processes: int, what: str, out: Path, model: Path, *more: str) -> dict:
    """Run `worker WHAT` in that many processes; what rank 0 saved."""
    import torch

    saved = out / f"{'-'.join([what, str(processes), *(word.lstrip('-') for word in more if '/' not in word)])}.pt"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        __file__,
        "worker",
        what,
        "--model",
        str(model),
        "--save",
        str(saved),
        *more,
    ]
    start = time.time()
    call(command, saved.with_suffix(".log"))
    return torch.load(saved, weights_only=False) | {"wall_s": time.time() - start}


# The workers.


def trajectories(vocab: int, longest: int, count: int = 64) -> list:
    """Random sequences of very different lengths, with random advantages: the same in every process."""
    import torch

    from batch import Task, Trajectory

    rng, made = random.Random(0), []
    for i in range(count):
        t = Trajectory(Task("", "", ""), uid=str(i // 4), session_id=i % 4)
        t.observe([rng.randrange(vocab) for _ in range(rng.randint(2, longest // 4))])
        response = rng.randint(1, longest // 8 if rng.random() < 0.7 else longest // 2)
        t.act([rng.randrange(vocab) for _ in range(response)], [-1.0] * response)
        t.score, t.loss_mask = 1.0, torch.tensor(t.response_mask, dtype=torch.bool)
        t.advantages = torch.where(t.loss_mask, rng.gauss(0, 1), 0.0)
        made.append(t)
    return made


def worker(args) -> None:
    """gradients: one update, its whole gradients before the optimizer's step. reference: scores with the weights on the GPU and on the CPU.
    state: the sums of all bits of weights and optimizer that a checkpoint gives this many ranks. links: what the ranks can exchange."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig

    import actor as actor_module
    from actor import Actor, ActorConfig
    from fsdp import make_accelerator
    from sync_weights import bit_sum

    config = AutoConfig.from_pretrained(args.model)
    longest = min(1024, config.max_position_embeddings)
    cfg = ActorConfig(
        path=args.model,
        dtype=args.dtype,
        fsdp_size=args.fsdp_size,
        grad_clip=1e9,
        lr=1e-3,
        ppo_mini_batch_size=64,
        use_dynamic_bsz=args.dynamic,
        ppo_max_token_len_per_gpu=4 * longest,
        ppo_micro_batch_size_per_gpu=4,
    )
    accelerator = make_accelerator(cfg)
    if args.what == "links":
        result, forwards = links(accelerator), []
    else:
        actor, forwards, forward = Actor(cfg, accelerator, config.vocab_size, 1.0), [], actor_module.forward
        actor_module.forward = lambda model, batch: (forwards.append(len(batch.tokens)), forward(model, batch))[
            1
        ]  # count them
        result = {"gradients": gradients, "reference": reference, "state": state}[args.what](
            actor, trajectories(config.vocab_size, longest), args
        )
        bits, everyone = (
            {name: int(bit_sum(tensor)) for name, tensor in actor.weights(torch.float32)},
            [None] * dist.get_world_size(),
        )
        dist.all_gather_object(everyone, (bits, forwards))
        result |= {
            "bits": bits,
            "same_weights": all(b == bits for b, _ in everyone),
            "forwards": [len(f) for _, f in everyone],
            "tokens": [sum(f) for _, f in everyone],
        }
    if accelerator.is_main_process:
        torch.save(result, args.save)
    dist.barrier()
    dist.destroy_process_group()


def gradients(actor, batch: list, args) -> dict:
    import torch

    from checkpoint import CheckpointConfig, RunState, save
    from loss import LossConfig

    step, grads = actor.optimizer.step, {}

    def keep_gradients():
        for name, p in actor.model.named_parameters():
            whole = p.grad.full_tensor()
            grads[name.replace("_checkpoint_wrapped_module.", "")] = (
                whole.cpu() if actor.accelerator.is_main_process else None
            )
        step()

    actor.optimizer.step = keep_gradients
    for t, logprobs in zip(batch, actor.score(batch)):
        t.old_logprobs = logprobs
    start = time.time()
    metrics = actor.update(batch, LossConfig(loss_scale_factor=1.0), 0, 1, 0)
    seconds = time.time() - start
    if args.checkpoint:
        (Path(args.checkpoint) / "checkpoints").mkdir(parents=True, exist_ok=True)
        save(CheckpointConfig(), Path(args.checkpoint), actor, RunState(1), {})
    shard = tuple(next(actor.model.parameters()).to_local().shape)
    return {
        "grads": grads,
        "metrics": metrics,
        "logprobs": torch.cat([t.old_logprobs for t in batch]),
        "update_s": seconds,
        "shard": shard,
        "optimizer": optimizer_bits(actor),
    }


def reference(actor, batch: list, args) -> dict:
    import torch

    from actor import RefConfig, Reference

    allocated = torch.cuda.memory_allocated if torch.cuda.is_available() else lambda: 0
    result = {"actor": torch.cat(actor.score(batch))}
    for offload in (False, True):
        model = Reference(
            RefConfig(param_offload=offload), actor.cfg, actor.accelerator, actor.model.config.vocab_size, 1.0
        )
        before, start = allocated(), time.time()
        scores = torch.cat(model.score(batch))
        figures = {"scores": scores, "seconds": time.time() - start, "left_on_gpu": allocated() - before}
        held = sum(p.to_local().untyped_storage().nbytes() for p in model.model.parameters() if p.to_local().is_cuda)
        result["offloaded" if offload else "resident"] = figures | {"weights_on_gpu": held}
    return result


def state(actor, batch: list, args) -> dict:
    from checkpoint import load

    load(Path(args.checkpoint), actor)
    return {"optimizer": optimizer_bits(actor)}


def optimizer_bits(actor) -> dict[str, int]:
    from sync_weights import bit_sum

    states, names = actor.optimizer.optimizer.state, dict(actor.model.named_parameters())
    return {
        f"{name}/{key}": int(bit_sum(states[p][key].full_tensor()))
        for name, p in names.items()
        for key in ("exp_avg", "exp_avg_sq")
    }


def links(accelerator) -> dict:
    """GB/s that a rank sends in FSDP's collectives on 1 GiB."""
    import torch
    import torch.distributed as dist

    cuda, ranks, rates = torch.cuda.is_available(), dist.get_world_size(), {}
    whole = torch.randn((2**28 if cuda else 2**18) // ranks * ranks, device=accelerator.device)  # float32
    shard = whole[: len(whole) // ranks].clone()
    share = whole.nbytes * (ranks - 1) / ranks
    for name, run, moved in [
        ("all_gather", lambda: dist.all_gather_into_tensor(whole, shard), share),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(shard, whole), share),
        ("all_reduce", lambda: dist.all_reduce(whole), 2 * share),
    ]:
        for i in range(13):
            if i == 3:
                accelerator.wait_for_everyone()
                start = time.time()
            run()
            if cuda:
                torch.cuda.synchronize()
        rates[name] = moved * 10 / (time.time() - start) / 1e9
        whole.normal_()
    return {"gb_per_s": rates, "bytes": whole.nbytes}


def trainer(argv: list[str]) -> None:
    """train.py, each rank writing to PHASES/RANK which phase it enters, for the how-manieth time, and its process id."""
    from collections import Counter

    import log
    import train
    from host import rank

    begin = log.Logger.phase
    times = Counter()

    def noting(self, phase):
        times[phase] += 1
        part = Path(argv[0]) / f".{os.environ['RANK']}"
        part.write_text(json.dumps({"phase": phase, "times": times[phase], "pid": os.getpid()}))
        os.replace(part, Path(argv[0]) / os.environ["RANK"])
        begin(self, phase)

    log.Logger.phase = noting
    rank.run(lambda: train.main(argv[1:]))


# The checks. Each returns (name, figures, passed?) one or more times.


def check_gradients(setup):
    """The same batch in 1 process and in several: whole gradients, norm, log-probs; equal forwards; all ranks the same weights after the step."""
    for dtype, allowed in (("float32", 1e-5), ("bfloat16", 1e-2)):
        one = work(1, "gradients", setup.out, setup.model, "--dtype", dtype)
        for ranks, size, *dynamic in [(2, -1), (2, 1), (2, -1, "--dynamic"), *([(4, 2)] if setup.small else [])]:
            many = work(
                ranks, "gradients", setup.out, setup.model, "--dtype", dtype, "--fsdp-size", str(size), *dynamic
            )
            figures = gradient_difference(one, many)
            allowed_here = allowed * (
                3 if dynamic and dtype == "bfloat16" else 1
            )  # other shapes of micro-batches round otherwise
            passed = (
                figures["gradient"] < allowed_here
                and figures["grad_norm"] < allowed
                and figures["same_weights"]
                and len(set(many["forwards"])) == 1
            )
            yield (
                f"gradients {dtype} {ranks} ranks fsdp_size={size}{' by tokens' if dynamic else ''}",
                figures | {"allowed": allowed_here},
                passed,
            )


def gradient_difference(one: dict, many: dict) -> dict:
    """Relative differences of two workers' gradients, and what each rank ran."""
    pairs = [(g.double(), many["grads"][name].double()) for name, g in one["grads"].items()]
    norm = sum(float(a.square().sum()) for a, _ in pairs) ** 0.5
    gap = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    return {
        "gradient": gap / norm,
        "norm": norm,
        "grad_norm": abs(many["metrics"]["actor/grad_norm"] / norm - 1),
        "logprobs_max": float((one["logprobs"] - many["logprobs"]).abs().max()),
        "forwards": many["forwards"],
        "tokens": many["tokens"],
        "token_imbalance": many["metrics"]["perf/token_imbalance"],
        "same_weights": many["same_weights"],
        "shard": many["shard"],
        "update_s": [one["update_s"], many["update_s"]],
    }


def check_reference(setup):
    """The frozen reference on 1 and 2 ranks, its weights on the GPU or on the CPU: the same log-probs, and nothing left behind on the GPU."""
    for ranks in (1, 2):
        r = work(ranks, "reference", setup.out, setup.model, "--dtype", "bfloat16")
        resident, offloaded = r["resident"], r["offloaded"]
        gap, to_actor = (
            float((resident["scores"] - offloaded["scores"]).abs().max()),
            float((resident["scores"] - r["actor"]).abs().max()),
        )
        figures = {"offload_vs_resident_max": gap, "reference_vs_actor_max": to_actor} | {
            f"{kind}_{key}": r[kind][key]
            for kind in ("resident", "offloaded")
            for key in ("seconds", "weights_on_gpu", "left_on_gpu")
        }
        yield (
            f"reference {ranks} ranks",
            figures,
            gap < 1e-3 and to_actor < 1e-3 and offloaded["weights_on_gpu"] == 0 and len(set(r["forwards"])) == 1,
        )


def check_links(setup):
    """For the arithmetic of larger machines: what a rank sends a second."""
    measured = work(2, "links", setup.out, setup.model)
    yield "links 2 ranks", {"gb_per_s": measured["gb_per_s"], "bytes": measured["bytes"]}, True


def check_rollouts(setup):
    """train.py with 1 and 2 processes: the same keys, rows and prompts in every step, and one update a step for each."""
    dumps = [[read_dump(setup.run(f"rollouts-{n}", n, 2), step) for step in (0, 1)] for n in (1, 2)]
    for step in (0, 1):
        one, two = dumps[0][step], dumps[1][step]
        same = [(r["key"], r["row"], r["prompt"]) for r in one] == [(r["key"], r["row"], r["prompt"]) for r in two]
        equal = sum(a["response"] == b["response"] for a, b in zip(one, two)) / len(one)
        yield f"rollouts step {step}", {"trajectories": len(one), "same_responses": equal}, same and len(one) > 0


def check_tensor(setup):
    """One vLLM over 2 ranks: the same keys, rows and prompts as one over 1, and log-probs that the actor agrees with at every sync."""
    shape = "tiny" if setup.small else "qwen3-0.6b"  # whose key-value heads can be split in two
    flags = [*setup.dummy(shape), "--checkpoint.save-freq", "0", "--sync.verify-every", "1"]
    runs = [
        setup.run(f"tensor-{n}", n, 2, more=[*flags, "--rollout.tensor-model-parallel-size", str(n)]) for n in (1, 2)
    ]
    for step in (0, 1):
        one, two = (read_dump(run, step) for run in runs)
        same = [(r["key"], r["row"], r["prompt"]) for r in one] == [(r["key"], r["row"], r["prompt"]) for r in two]
        equal = sum(a["response"] == b["response"] for a, b in zip(one, two)) / len(one)
        gaps = [
            json.loads((run / "metrics.jsonl").read_text().splitlines()[step])["sync/probe_diff_max"] for run in runs
        ]
        yield (
            f"tensor parallel step {step}",
            {"trajectories": len(one), "same_responses": equal, "probe_diff_max": gaps},
            same and len(one) > 0,
        )


def check_resume(setup):
    """A checkpoint of 2 ranks gives 1 rank the same bits as 2, and the run goes on; and the reverse."""
    for before, after in ((2, 1), (1, 2)):
        run_dir = setup.run(f"rollouts-{before}", before, 2)
        there, here = (
            work(n, "state", setup.out, setup.model, "--checkpoint", str(run_dir / "checkpoints" / "step-000002"))
            for n in (before, after)
        )
        same = there["bits"] == here["bits"] and there["optimizer"] == here["optimizer"] and here["same_weights"]
        resumed = setup.run(f"rollouts-{before}", after, 3, again=True)
        steps = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
        went_on = [m["step"] for m in steps] == [0, 1, 2, 3] and steps[2]["rollout/weight_version"] == 2
        yield (
            f"saved by {before} ranks, resumed by {after}",
            {
                "tensors": len(there["bits"]) + len(there["optimizer"]),
                "same_bits": same,
                "reward": [m.get("reward/mean") for m in steps],
            },
            same and went_on,
        )


def check_copies(setup):
    """HSDP: what 2 ranks save that each hold a whole copy, 1 rank reads back bit by bit."""
    saved = work(2, "gradients", setup.out, setup.model, "--fsdp-size", "1", "--checkpoint", str(setup.out / "copies"))
    read = work(
        1, "state", setup.out, setup.model, "--checkpoint", str(setup.out / "copies" / "checkpoints" / "step-000001")
    )
    yield (
        "saved by 2 copies, read by 1 rank",
        {"tensors": len(read["bits"])},
        saved["same_weights"] and all(saved[key] == read[key] for key in ("bits", "optimizer")),
    )


def check_kills(setup):
    """kill -9 of the last rank in a phase of its second step: how long until nothing of the run is left."""
    import psutil

    for phase in ("gen", "update_actor"):
        folder = setup.out / f"kill-{phase}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        flags = setup.flags(f"kill-{phase}-run", 1000) + (
            ["--actor.ppo-epochs", "50"] if phase == "update_actor" else setup.long_answers
        )
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--num_processes",
            "2",
            __file__,
            "trainer",
            str(folder),
            *flags,
        ]
        with open(setup.out / f"kill-{phase}.log", "w") as file:
            launcher = psutil.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT)
        try:
            states = wait_for_phase(folder, phase, launcher)
            family = [launcher, *launcher.children(recursive=True)]
            psutil.Process(states[1]["pid"]).kill()
            start = time.time()
            _, alive = psutil.wait_procs(family, timeout=60)
            seconds = time.time() - start
        finally:
            for p in [*launcher.children(recursive=True), launcher] if launcher.is_running() else []:
                p.kill()
        figures = {
            "seconds": seconds,
            "left": len(alive),
            "exit_code": launcher.wait(),
            "phase_of_ranks": [read_state(folder / str(r)) for r in (0, 1)],
        }
        in_phase = all(s["phase"] == phase and s["times"] == 2 for s in figures["phase_of_ranks"])
        yield f"kill -9 during {phase}", figures, seconds < 15 and not alive and figures["exit_code"] != 0 and in_phase


def wait_for_phase(folder: Path, phase: str, launcher) -> list[dict]:
    """Both ranks' notes once both are in the phase for the second time, and a moment longer."""
    deadline = time.time() + TIMEOUT_S
    while time.time() < deadline and launcher.poll() is None:
        states = [read_state(folder / str(r)) for r in (0, 1)]
        if all(s and s["phase"] == phase and s["times"] == 2 for s in states):
            time.sleep(0.2)
            return states
        time.sleep(0.01)
    raise RuntimeError(f"the run ended, or did not reach its second {phase}: see {folder}.log")


def read_state(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def read_dump(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "rollouts" / f"{step:06d}.jsonl").read_text().splitlines()]


CHECKS = {
    "links": check_links,
    "gradients": check_gradients,
    "reference": check_reference,
    "rollouts": check_rollouts,
    "tensor": check_tensor,
    "resume": check_resume,
    "copies": check_copies,
    "kills": check_kills,
}


class Setup:
    """The dummy model of look.bench and the flags of a small run on it."""

    def __init__(self, args):
        from look import bench

        self.out, self.small = Path(args.out).resolve(), args.small
        self.out.mkdir(parents=True, exist_ok=True)
        prompts, answer = (32, 16), 24 if args.small else 128
        self.dummy = lambda shape: bench.dummy_flags(shape, *prompts, str(self.out))
        self.model_flags = self.dummy("tiny" if args.small else args.dummy)
        self.model = Path(self.model_flags[1])
        self.sizes = [
            "--data.max-prompt-length",
            "16",
            "--data.max-response-length",
            str(answer),
            "--actor.ppo-max-token-len-per-gpu",
            "4096",
        ]
        self.sizes += [
            "--rollout.kv-cache-memory-bytes",
            str(2**25 if args.small else 2**31),
            "--rollout.gpu-memory-utilization",
            "0.3",
            "--rollout.enforce-eager",
        ]
        self.long_answers = ["--data.max-response-length", "480" if args.small else "2000", "--rollout.ignore-eos"]

    def flags(self, name: str, steps: int) -> list[str]:
        return [
            *self.model_flags,
            *self.sizes,
            "--data.train-batch-size",
            "8",
            "--actor.ppo-mini-batch-size",
            "8",
            "--actor.lr",
            "1e-4",
            "--rollout.n",
            "4",
            "--trainer.total-training-steps",
            str(steps),
            "--checkpoint.save-freq",
            "2",
            "--checkpoint.no-export-hf",
            "--actor.dtype",
            "float32" if self.small else "bfloat16",
            "--log.default-local-dir",
            str(self.out),
            "--log.experiment-name",
            name,
        ]

    def run(self, name: str, processes: int, steps: int, again: bool = False, more: list[str] = ()) -> Path:
        """The folder of a finished run; one that is there is not done again."""
        run_dir = self.out / name
        if again or not run_dir.exists():
            command = [
                sys.executable,
                "-m",
                "accelerate.commands.launch",
                "--num_processes",
                str(processes),
                str(ROOT / "train.py"),
                *self.flags(name, steps),
                *more,
            ]
            call(command, self.out / f"{name}-{steps}.log", None if processes > 1 else "0")
        return run_dir


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--out", required=True)
    parser.add_argument("--small", action="store_true", help="the tiny model, for gloo on the CPU")
    parser.add_argument("--dummy", default="smollm2-135m", help="shape of the model on GPUs: one of look.bench's")
    args = parser.parse_args()
    setup, failed = Setup(args), 0
    for check in args.checks:
        try:
            for name, figures, passed in CHECKS[check](setup):
                failed += not passed
                report(setup.out, {"check": name, "result": "PASS" if passed else "FAIL", **figures})
        except (RuntimeError, subprocess.TimeoutExpired, AssertionError) as error:
            failed += 1
            report(setup.out, {"check": check, "result": "FAIL", "error": str(error)[-3000:]})
    return 1 if failed else 0


def report(out: Path, record: dict) -> None:
    line = json.dumps(record)
    print(line, flush=True)
    with open(out / "ranks.jsonl", "a") as file:
        file.write(line + "\n")


def main_worker(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("links", "gradients", "reference", "state"))
    for flag in ("--model", "--save", "--checkpoint"):
        parser.add_argument(flag)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fsdp-size", type=int, default=-1)
    parser.add_argument("--dynamic", action="store_true")
    worker(parser.parse_args(argv))


if __name__ == "__main__":
    modes = {"worker": main_worker, "trainer": trainer}
    sys.exit(modes[sys.argv[1]](sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in modes else main())
