"""Where a step's time goes: the seconds of each phase against the least that the hardware needs for it.

`python -m look.bench --config configs/bench_qwen3_0_6b.yaml --dummy-weights qwen3-0.6b`, under `accelerate launch` for several GPUs. It
runs train.py's own loop for a few steps and reads its metrics; every flag of train.py works here too. --dummy-weights needs no
download: random weights of a published shape, random prompts of exactly data.max_prompt_length tokens, a cheap reward.
"""

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from host import rank

STARTED = psutil.Process().create_time()
SHAPES = {  # model type, vocabulary, hidden, layers, query heads, key-value heads, their size, MLP, tied head
    "qwen3-0.6b": ("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, True),
    "qwen3-1.7b": ("qwen3", 151936, 2048, 28, 16, 8, 128, 6144, True),
    "qwen3-4b": ("qwen3", 151936, 2560, 36, 32, 8, 128, 9728, True),
    "smollm2-135m": ("llama", 49152, 576, 30, 9, 3, 64, 1536, True),
    "tiny": ("qwen3", 128, 64, 2, 2, 2, 32, 128, True),
}
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return sum(map(ord, solution_str[:64])) % 10 / 10\n"
QUIET = "--checkpoint.resume never --checkpoint.save-freq 0 --checkpoint.no-export-hf --log.rollout-dump-freq 0 --sync.verify-every 0".split()
PARTS = (
    "load_data",
    "make_accelerator",
    "Engine",
    "Actor",
    "Reference",
    "sync_weights",
)  # of train.py: what happens before the first step


def make_config(shape: str):
    from transformers import AutoConfig

    kind, vocab, hidden, layers, heads, kv_heads, size, mlp, tied = SHAPES[shape]
    return AutoConfig.for_model(
        kind,
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        rope_theta=1e6,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
        architectures=[{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]],
    )


def write_dummy(folder: Path, shape: str, prompts: tuple[int, int]) -> None:
    """`folder` with model/ (config, random bf16 weights, a tokenizer of the whole vocabulary), `prompts` = (how many, how long) rows and a reward."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config, vocab = make_config(shape), SHAPES[shape][1]
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    block = (
        torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02
    ).bfloat16()  # a prime, so that no two rows of a weight are equal
    draw = lambda s: (
        torch.ones(s).bfloat16() if len(s) == 1 else block.repeat(-(-s.numel() // len(block)))[: s.numel()].view(s)
    )  # noqa: E731
    (folder / "model").mkdir(parents=True)
    config.save_pretrained(folder / "model")
    save_file(
        {name: draw(s) for name, s in shapes.items()}, folder / "model" / "model.safetensors", metadata={"format": "pt"}
    )
    special = ["<pad>", "<eos>", "<unk>"]
    backend = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(special + [f"t{i}" for i in range(3, vocab)])}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [
        {
            "prompt": " ".join(f"t{rng.randrange(3, vocab)}" for _ in range(prompts[1])),
            "data_source": "dummy",
            "answer": "",
        }
        for _ in range(prompts[0])
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(REWARD)


def dummy_flags(shape: str, rows: int, length: int, where: str) -> list[str]:
    """train.py's flags for the dummy, which one process of each host writes and the others wait for."""
    folder = Path(where) / f"{shape}-{rows}x{length}-{os.uname().nodename}"
    if not folder.exists() and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with tempfile.TemporaryDirectory(dir=where) as temporary:
            write_dummy(Path(temporary) / "dummy", shape, (rows, length))
            os.rename(Path(temporary) / "dummy", folder)
    while not folder.exists():
        time.sleep(0.2)
    return [
        "--actor.path",
        f"{folder}/model",
        "--data.train-files",
        f"{folder}/prompts.jsonl",
        "--reward.custom-path",
        f"{folder}/score.py",
        "--reward.name",
        "None",
    ]


class Work:
    """The least a GPU has to do in each phase of a step, from the model's shape and the step's lengths, for sequences of equal length."""

    def __init__(self, cfg, metrics: dict, world_size: int):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(cfg.actor.path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings().weight.numel()
        self.params = sum(p.numel() for p in model.parameters())
        self.body = self.params - head * (
            1 if config.tie_word_embeddings else 2
        )  # an input embedding is looked up, not multiplied
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.seqs, self.world_size, self.cfg = metrics["rollout/num_trajectories"], world_size, cfg
        self.prompt, self.response = metrics["rollout/prompt_length/mean"], metrics["response_length/mean"]
        self.longest, self.tokens = metrics["response_length/max"], metrics["perf/total_num_tokens"]
        self.products = (
            2 * self.body * self.tokens + 2 * head * self.seqs * self.response
        )  # FLOP of a forward; the head sees sampled tokens only
        self.attention = (
            2
            * config.num_hidden_layers
            * config.num_attention_heads
            * size
            * self.tokens
            * (self.prompt + self.response)
        )  # causal: half of QK and of PV
        self.bytes = torch.finfo(getattr(torch, cfg.actor.dtype)).bits // 8
        self.weights, self.kv = (
            (self.body + head) * self.bytes,
            2 * config.num_hidden_layers * config.num_key_value_heads * size * self.bytes,
        )  # bytes; bytes a token

    def flops(self, phase: str) -> float:
        """A backward is two forwards. That activations are computed again with gradient checkpointing is no necessary work."""
        return (
            {"old_log_prob": 1, "ref": 1, "update_actor": 3 * self.cfg.actor.ppo_epochs}.get(phase, 0)
            * (self.products + self.attention)
            / self.world_size
        )

    def bytes_moved(self, phase: str) -> float:
        """gen: weights once a decode step, keys and values of every sequence. sync: fp32 masters read, then written, read and written in vLLM's type."""
        if phase != "gen":
            return self.params * (4 / self.world_size + 3 * self.bytes) if phase == "sync" else 0.0
        tp = self.cfg.rollout.tensor_model_parallel_size
        steps = max(self.longest, self.seqs * tp / self.world_size * self.response / self.cfg.rollout.max_num_seqs)
        return (
            steps * self.weights / tp
            + self.seqs / self.world_size * self.response * (self.prompt + self.response / 2) * self.kv
        )


def measure(records: list[dict], work: Work, args) -> dict:
    """{phase: figures} over the measured steps. Rates are a GPU's; a floor is the time that the phase's work takes at the rates given on the command line."""
    phases, step = {}, statistics.median(r["timing_s/step"] for r in records)
    for name in sorted(
        {n for r in records for n in r if n.startswith("timing_s/")}, key=lambda n: -max(r.get(n, 0.0) for r in records)
    ):
        phase, seconds = name.removeprefix("timing_s/"), sorted(r[name] for r in records if name in r)
        now, flops, moved = statistics.median(seconds), work.flops(phase), work.bytes_moved(phase)
        tokens = {
            "gen": work.seqs * work.response,
            "step": work.tokens,
            "old_log_prob": work.tokens,
            "ref": work.tokens,
            "update_actor": work.tokens,
        }.get(phase, 0) / work.world_size
        figures = {
            "seconds": now,
            "min": seconds[0],
            "max": seconds[-1],
            "share": now / step,
            "tokens_per_s": tokens / now,
        }
        if flops or moved:
            floor = flops / args.matmul_tflops / 1e12 + moved / args.bandwidth_tbs / 1e12
            figures |= {
                "mfu": flops / now / args.peak_tflops / 1e12,
                "tb_per_s": moved / now / 1e12,
                "floor": floor,
                "ratio": now / floor,
            }
        memory = [r[f"perf/memory_gb/{phase}"] for r in records if f"perf/memory_gb/{phase}" in r]
        phases[phase] = figures | ({"memory_gb": max(memory)} if memory else {})
    floor = sum(f.get("floor", 0.0) for f in phases.values())
    phases["step"] |= {"floor": floor, "ratio": step / floor}
    return phases


def table(phases: dict, startup: dict[str, float], world_size: int) -> str:
    rows = [
        f"{'phase':<18}{'seconds':>9}{'min - max':>17}{'share':>7}{'tokens/s/GPU':>14}{'MFU | TB/s':>12}{'floor s':>10}{'x floor':>9}{'GiB':>7}"
    ]
    for phase, f in phases.items():
        rate = f"{f['mfu']:.1%}" if f.get("mfu") else f"{f['tb_per_s']:.3f}" if f.get("tb_per_s") else ""
        floor, tokens = (
            f"{f['floor']:>10.3f}{f['ratio']:>9.1f}" if "floor" in f else " " * 19,
            f"{f['tokens_per_s']:,.0f}" if f["tokens_per_s"] else "",
        )
        rows.append(
            f"{phase:<18}{f['seconds']:>9.3f}{f['min']:>9.3f} -{f['max']:>6.3f}{f['share']:>7.1%}{tokens:>14}{rate:>12}{floor}{f.get('memory_gb', ''):>7.4}"
        )
    return "\n".join(
        [
            *rows,
            f"{world_size} process(es); start-up, s: "
            + ", ".join(f"{part} {seconds:.1f}" for part, seconds in startup.items()),
        ]
    )


def time_parts(train) -> dict[str, float]:
    """Wrap what train.py calls before its first step; the seconds of each first call, filled in as they happen."""
    spent: dict[str, float] = {}

    def timed(name, part, *args, **kwargs):
        start = time.time()
        result = part(*args, **kwargs)
        spent.setdefault(name, time.time() - start)
        return result

    vars(train).update({name: functools.partial(timed, name, getattr(train, name)) for name in PARTS})
    return spent


def parse(argv: list[str]):
    """bench.py's own flags, and the rest, which are train.py's."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=3, help="steps to measure, after one that warms up")
    parser.add_argument(
        "--dummy-weights",
        choices=SHAPES,
        help="random weights and prompts of this shape, in place of actor.path and data.train_files",
    )
    parser.add_argument("--dummy-dir", default=tempfile.gettempdir(), help="where dummies are kept for the next time")
    parser.add_argument("--json", metavar="OUT", help="also write all figures to this file")
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="what MFU is a share of: dense bf16 of an H100 or H200"
    )
    parser.add_argument(
        "--matmul-tflops", type=float, default=790.0, help="what a large bf16 product reaches, for the floors"
    )
    parser.add_argument(
        "--bandwidth-tbs", type=float, default=4.3, help="TB/s that a large copy reaches, for the floors"
    )
    args, flags = parser.parse_known_args(argv)
    for knob, value in vars(args).items():
        if isinstance(value, (int, float)) and not 0 < value < float("inf"):
            raise ValueError(f"--{knob.replace('_', '-')} {value} must be above 0")
    return args, flags


def run(args, flags: list[str]) -> None:
    """Measure; rank 0 prints the table."""
    import train
    from config import load_config

    world_size, startup = int(os.environ.get("WORLD_SIZE", 1)), {"imports": time.time() - STARTED}
    ends = ["--data.val-files", "--trainer.total-training-steps", str(args.steps + 1), "--log.default-local-dir"]
    with tempfile.TemporaryDirectory() as folder:
        if args.dummy_weights:
            sizes = load_config(
                [*flags, "--actor.path", "dummy", "--data.train-files", "dummy", "--reward.custom-path", "None"]
            ).data
            flags = [
                *flags,
                *dummy_flags(args.dummy_weights, 4 * sizes.train_batch_size, sizes.max_prompt_length, args.dummy_dir),
            ]
        startup["dummy weights"] = time.time() - STARTED - sum(startup.values())
        cfg = load_config([*QUIET, *flags, *ends, folder])  # of two flags the later counts
        spent = time_parts(train)
        train.train(cfg)
        if int(os.environ["RANK"]):
            return
        records = [json.loads(line) for line in (cfg.run_dir / "metrics.jsonl").read_text().splitlines()][
            1 : args.steps + 1
        ]
    report = {
        "world_size": world_size,
        "steps": len(records),
        "startup": startup | spent,
        "phases": measure(records, Work(cfg, records[-1], world_size), args),
        "metrics": records,
    }
    print(table(report["phases"], report["startup"], world_size))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    rank.run(lambda: run(*parse(sys.argv[1:])))
