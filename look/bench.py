"""Where a step's time goes: the seconds of each phase against the least that the hardware needs for it.

`python -m look.bench --config configs/bench_qwen3_0_6b.yaml --dummy-weights qwen3-0.6b`, and for several GPUs
`accelerate launch --num_processes N -m look.bench ...`. It runs train.py's own loop for a few steps and reads its
metrics; every flag of train.py works here too. --dummy-weights needs no download: random weights of a published shape,
random prompts of exactly data.max_prompt_length tokens, a cheap reward.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from batch import ceil_div
from host import rank
from model import meta_model

STARTED = psutil.Process().create_time()
SHAPES = {  # model type, vocabulary, hidden, layers, query heads, key-value heads, their size, MLP, tied head
    "qwen3-0.6b": ("qwen3", 151936, 1024, 28, 16, 8, 128, 3072, True),
    "qwen3-1.7b": ("qwen3", 151936, 2048, 28, 16, 8, 128, 6144, True),
    "qwen3-4b": ("qwen3", 151936, 2560, 36, 32, 8, 128, 9728, True),
    "smollm2-135m": ("llama", 49152, 576, 30, 9, 3, 64, 1536, True),
    "tiny": ("qwen3", 128, 64, 2, 2, 2, 32, 128, True),
}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str[:64])) % 10 / 10
"""
QUIET = [  # nothing but the steps themselves, unless a flag asks for it
    *("--checkpoint.resume", "never"),
    *("--checkpoint.save-freq", "0"),
    "--checkpoint.no-export-hf",
    *("--log.rollout-dump-freq", "0"),
    *("--sync.verify-every", "0"),
]
# Names in train.py of what happens before the first step's sampling.
PARTS = ("load_data", "make_accelerator", "make_engine", "Actor", "Reference", "sync_weights")
BLOCK = 1_000_003  # random numbers that dummy weights repeat; a prime, so that no two rows of a weight are equal


def make_config(shape: str) -> Any:
    """The Hugging Face config of one of SHAPES."""
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
        architectures=[ARCHITECTURES[kind]],
    )


def write_dummy(folder: Path, shape: str, prompts: tuple[int, int]) -> None:
    """`folder` with model/, prompts.jsonl and score.py, the reward; `prompts` = (how many, how long)."""
    (folder / "model").mkdir(parents=True)
    write_model(folder / "model", shape)
    vocab = SHAPES[shape][1]
    write_tokenizer(folder / "model", vocab)
    number, length = prompts
    rng = random.Random(0)
    with open(folder / "prompts.jsonl", "w") as file:
        for _ in range(number):
            prompt = " ".join(f"t{rng.randrange(3, vocab)}" for _ in range(length))
            file.write(json.dumps({"prompt": prompt, "data_source": "dummy", "answer": ""}) + "\n")
    (folder / "score.py").write_text(REWARD)


def write_model(folder: Path, shape: str) -> None:
    """Config and random bfloat16 weights; norms are 1."""
    from safetensors.torch import save_file

    config = make_config(shape)
    config.save_pretrained(folder)
    block = (torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def draw(size: torch.Size) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size).bfloat16()
        repeats = ceil_div(size.numel(), BLOCK)
        return block.repeat(repeats)[: size.numel()].view(size)

    weights = {name: draw(p.shape) for name, p in meta_model(config).named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Of a whole vocabulary: three special tokens, then the words t3, t4, ..., with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>"] + [f"t{i}" for i in range(3, vocab)]
    ids = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)


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
        *("--actor.path", f"{folder}/model"),
        *("--data.train-files", f"{folder}/prompts.jsonl"),
        *("--reward.custom-path", f"{folder}/score.py"),
        *("--reward.name", "None"),
    ]


class Work:
    """The least a GPU has to do in each phase, from the model's shape and the step's lengths, for equal sequences."""

    def __init__(self, cfg, metrics: dict[str, float], world_size: int):
        from transformers import AutoConfig

        self.cfg = cfg
        self.world_size = world_size
        self.seqs = metrics["rollout/num_trajectories"]
        self.prompt = metrics["rollout/prompt_length/mean"]
        self.response = metrics["response_length/mean"]
        self.longest = metrics["response_length/max"]
        self.tokens = metrics["perf/total_num_tokens"]

        config = AutoConfig.from_pretrained(cfg.actor.path)
        model = meta_model(config)
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        head = model.get_output_embeddings().weight.numel()
        self.params = sum(p.numel() for p in model.parameters())
        # An input embedding is looked up, not multiplied.
        body = self.params - head * (1 if config.tie_word_embeddings else 2)
        # FLOP of a forward's products; the head sees sampled tokens only.
        self.products = 2 * body * self.tokens + 2 * head * self.seqs * self.response
        # Of its attention, which is causal: half of QK and of PV.
        self.attention = 2 * layers * heads * size * self.tokens * (self.prompt + self.response)
        self.bytes = torch.finfo(getattr(torch, cfg.actor.dtype)).bits // 8
        self.weights = (body + head) * self.bytes
        self.kv = 2 * layers * config.num_key_value_heads * size * self.bytes  # bytes a token

    def flops(self, phase: str) -> float:
        """A backward is two forwards. Activations that gradient checkpointing computes again are no necessary work."""
        scores = int(self.cfg.old_logprobs_from == "actor")  # else the phase only masks
        forwards = {"old_log_prob": scores, "ref": 1, "update_actor": 3 * self.cfg.actor.ppo_epochs}.get(phase, 0)
        return forwards * (self.products + self.attention) / self.world_size

    def bytes_moved(self, phase: str) -> float:
        """gen: weights once a decode step, keys and values of every sequence.

        sync: float32 masters read, then written, read and written in vLLM's type.
        """
        if phase == "sync":
            return self.params * (4 / self.world_size + 3 * self.bytes)
        if phase != "gen":
            return 0.0
        tensor_parallel = self.cfg.rollout.tensor_model_parallel_size
        seqs = self.seqs / self.world_size
        in_waves = self.seqs * tensor_parallel / self.world_size * self.response / self.cfg.rollout.max_num_seqs
        steps = max(self.longest, in_waves)
        cache = seqs * self.response * (self.prompt + self.response / 2) * self.kv
        return steps * self.weights / tensor_parallel + cache

    def tokens_in(self, phase: str) -> float:
        """Tokens of a phase, a GPU's; 0 for phases that are not of tokens."""
        if phase == "gen":
            return self.seqs * self.response / self.world_size
        return self.tokens / self.world_size if phase in ("step", "old_log_prob", "ref", "update_actor") else 0.0


def measure(records: list[dict], work: Work, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """{phase: figures} over the measured steps, the longest phase first; without those that most steps do not record,
    since they take under a millisecond or are not due.

    Rates are a GPU's; a floor is the time that the phase's work takes at the rates given on the command line.
    """
    step = statistics.median(record["timing_s/step"] for record in records)
    names = {name for record in records for name in record if name.startswith("timing_s/")}
    names = {name for name in names if sum(name in record for record in records) > len(records) / 2}
    longest_first = sorted(names, key=lambda name: -max(record.get(name, 0.0) for record in records))
    order = [name.removeprefix("timing_s/") for name in longest_first]
    phases = {phase: measure_phase(phase, step, records, work, args) for phase in order}
    floor = sum(figures.get("floor", 0.0) for figures in phases.values())
    phases["step"] |= {"floor": floor, "ratio": step / floor}
    return phases


def measure_phase(
    phase: str, step: float, records: list[dict], work: Work, args: argparse.Namespace
) -> dict[str, float]:
    """The figures of a phase, of a step that took `step` seconds."""
    seconds = sorted(record[f"timing_s/{phase}"] for record in records if f"timing_s/{phase}" in record)
    now = statistics.median(seconds)
    figures = {"seconds": now, "min": seconds[0], "max": seconds[-1], "share": now / step}
    figures["tokens_per_s"] = work.tokens_in(phase) / now
    flops, moved = work.flops(phase), work.bytes_moved(phase)
    if flops or moved:
        figures["mfu"] = flops / now / args.peak_tflops / 1e12
        figures["tb_per_s"] = moved / now / 1e12
        figures["floor"] = flops / args.matmul_tflops / 1e12 + moved / args.bandwidth_tbs / 1e12
        figures["ratio"] = now / figures["floor"]
    memory = [record[f"perf/memory_gb/{phase}"] for record in records if f"perf/memory_gb/{phase}" in record]
    if memory:
        figures["memory_gb"] = max(memory)
    return figures


def table(phases: dict[str, dict[str, float]], startup: dict[str, float], world_size: int) -> str:
    """The figures, a line a phase, and what the start took."""
    lines = [
        f"{'phase':<18}{'seconds':>9}{'min - max':>17}{'share':>7}{'tokens/s/GPU':>14}{'MFU | TB/s':>12}"
        f"{'floor s':>10}{'x floor':>9}{'GiB':>7}"
    ]
    for phase, f in phases.items():
        tokens = f"{f['tokens_per_s']:,.0f}" if f["tokens_per_s"] else ""
        rate = ""
        if f.get("mfu"):
            rate = f"{f['mfu']:.1%}"
        elif f.get("tb_per_s"):
            rate = f"{f['tb_per_s']:.3f}"
        floor = f"{f['floor']:>10.3f}{f['ratio']:>9.1f}" if "floor" in f else " " * 19
        memory = f"{f['memory_gb']:>7.4}" if "memory_gb" in f else " " * 7
        seconds = f"{f['seconds']:>9.3f}{f['min']:>9.3f} -{f['max']:>6.3f}"
        lines.append(f"{phase:<18}{seconds}{f['share']:>7.1%}{tokens:>14}{rate:>12}{floor}{memory}")
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in startup.items())
    lines.append(f"{world_size} process(es); start-up, s: {parts}")
    return "\n".join(lines)


def time_parts(train) -> dict[str, float]:
    """Wrap PARTS of train.py; the seconds of each one's first call, filled in as they happen."""
    spent: dict[str, float] = {}

    def timed(name: str, part, *args, **kwargs) -> Any:
        start = time.time()
        result = part(*args, **kwargs)
        spent.setdefault(name, time.time() - start)
        return result

    for name in PARTS:
        setattr(train, name, functools.partial(timed, name, getattr(train, name)))
    return spent


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """look.bench's own flags, and the rest, which are train.py's."""
    parser = argparse.ArgumentParser(
        prog="python -m look.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("--steps", type=int, default=3, help="steps to measure, after one that warms up")
    dummy = "random weights and prompts of this shape, in place of actor.path and data.train_files"
    option("--dummy-weights", choices=SHAPES, help=dummy)
    option("--dummy-dir", default=tempfile.gettempdir(), help="where dummies are kept for the next time")
    option("--json", metavar="OUT", help="also write all figures to this file")
    peak = "what MFU is a share of: dense bf16 of an H100 or H200"
    option("--peak-tflops", type=float, default=989.0, help=peak)
    matmul = "what a large bf16 product reaches, for the floors"
    option("--matmul-tflops", type=float, default=790.0, help=matmul)
    bandwidth = "TB/s that a large copy reaches, for the floors"
    option("--bandwidth-tbs", type=float, default=4.3, help=bandwidth)
    args, flags = parser.parse_known_args(argv)
    for knob, value in vars(args).items():
        if isinstance(value, (int, float)) and not 0 < value < float("inf"):
            raise ValueError(f"--{knob.replace('_', '-')} {value} must be above 0")
    return args, flags


def with_dummy(args: argparse.Namespace, flags: list[str]) -> list[str]:
    """The flags with those of the dummy of the configured sizes."""
    from config import load_config

    stand_ins = ["--actor.path", "dummy", "--data.train-files", "dummy", "--reward.custom-path", "None"]
    sizes = load_config([*flags, *stand_ins]).data
    rows = 4 * sizes.train_batch_size
    return [*flags, *dummy_flags(args.dummy_weights, rows, sizes.max_prompt_length, args.dummy_dir)]


def run(args: argparse.Namespace, flags: list[str]) -> None:
    """Measure; rank 0 prints the table."""
    import train
    from config import load_config

    startup = {"imports": time.time() - STARTED}
    if args.dummy_weights:
        flags = with_dummy(args, flags)
    startup["dummy weights"] = time.time() - STARTED - startup["imports"]
    with tempfile.TemporaryDirectory() as folder:
        ends = [
            "--data.val-files",  # none
            *("--trainer.total-training-steps", str(args.steps + 1)),
            *("--log.default-local-dir", folder),
        ]
        cfg = load_config([*QUIET, *flags, *ends])  # of two flags the later counts
        spent = time_parts(train)
        training = train.start(cfg)
        with contextlib.suppress(rank.ToldToStop):
            train.train(training)
        train.finish(training)
        if int(os.environ["RANK"]):
            return
        lines = (cfg.run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1 : args.steps + 1]
    if not records:
        raise ValueError("the run was told to stop before a step was measured")
    world_size = int(os.environ["WORLD_SIZE"])
    phases = measure(records, Work(cfg, records[-1], world_size), args)
    startup |= spent
    print(table(phases, startup, world_size))
    if args.json:
        sizes = {"world_size": world_size, "steps": len(records)}
        report = sizes | {"startup": startup, "phases": phases, "metrics": records}
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    rank.run(lambda: run(*parse(sys.argv[1:])))
