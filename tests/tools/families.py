"""Which model families are exact, measured: `python tests/tools/families.py [NAME ...] [--vllm] [--out TABLE.md]`.

Of each family a tiny random model of its own configuration class, with windows, scales and caps small enough to bind.
Packed: the largest difference, in nats and float32, of packed log-probs from one plain Hugging Face forward a sequence.
Probe, with --vllm: two steps of train.py, and the largest difference of vLLM's log-probs from the actor's.
A family that is refused stands there with the line that it gets.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from conftest import flags, launch_environment  # noqa: E402
from fakes import make_trajectory  # noqa: E402

PACKED, PROBE = 1e-5, 1e-4  # what is exact
COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
}
WINDOW = {"sliding_window": 6}
TURNS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, dict]] = {
    "Qwen3": ("Qwen3Config", {"head_dim": 32}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3, YaRN": ("Qwen3Config", {"head_dim": 32, "rope_parameters": YARN}),
    "Llama": ("LlamaConfig", {}),
    "Llama 3 (rope)": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "Mistral, window": ("MistralConfig", WINDOW),
    "Ministral, window": ("MinistralConfig", {"head_dim": 32, **WINDOW, **TURNS}),
    "Gemma": ("GemmaConfig", {"head_dim": 32}),
    "Gemma 2, window and caps": (
        "Gemma2Config",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **WINDOW},
    ),
    "Gemma 3 text, window": ("Gemma3TextConfig", {"head_dim": 32, "query_pre_attn_scalar": 32, **WINDOW, **TURNS}),
    "Phi-2": ("PhiConfig", {"num_key_value_heads": 4}),
    "Phi-3, window": ("Phi3Config", WINDOW),
    "OLMo": ("OlmoConfig", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3, window": ("Olmo3Config", {**WINDOW, **TURNS}),
    "SmolLM3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "GLM-4 (9b)": ("GlmConfig", {"head_dim": 32}),
    "GLM-4 0414": ("Glm4Config", {"head_dim": 32}),
    "Seed-OSS": ("SeedOssConfig", {"head_dim": 32, "attention_bias": True, "attention_out_bias": False}),
    "Granite 3": (
        "GraniteConfig",
        {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    ),
    "Cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "Cohere 2, window": ("Cohere2Config", {"logit_scale": 0.25, **WINDOW, **TURNS}),
    "StableLM": ("StableLmConfig", {}),
    "Nemotron": ("NemotronConfig", {}),
    "Starcoder 2, window": ("Starcoder2Config", WINDOW),
    "Arcee": ("ArceeConfig", {}),
    "ERNIE 4.5": ("Ernie4_5Config", {"head_dim": 32}),
    "EXAONE 4, window": ("Exaone4Config", {**WINDOW, **TURNS, "sliding_window_pattern": "LLLG"}),
    "HunYuan dense": ("HunYuanDenseV1Config", {"head_dim": 32}),
    "HyperCLOVA X": ("HyperCLOVAXConfig", {"head_dim": 32, "logits_scaling": 0.25}),
    "Apertus": ("ApertusConfig", {}),
    "Helium": ("HeliumConfig", {"head_dim": 32}),
    "GPT-2": ("GPT2Config", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "VaultGemma, caps": ("VaultGemmaConfig", {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **WINDOW}),
    "Phi-3, LongRoPE": (
        "Phi3Config",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 16}, "original_max_position_embeddings": 16},
    ),
    "Llama, dynamic rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 32, "num_local_experts": 4}),
    "Qwen3 MoE": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 64}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "Qwen3-Next": ("Qwen3NextConfig", {}),
    "LFM2": ("Lfm2Config", {}),
    "Falcon-H1": ("FalconH1Config", {}),
    "Mamba 2": ("Mamba2Config", {"num_heads": 8, "head_dim": 32}),
    "Granite SWA": ("GraniteSWAConfig", WINDOW),
    "BLOOM": ("BloomConfig", {}),
    "CodeGen": ("CodeGenConfig", {}),
    "Falcon": ("FalconConfig", {}),
    "GPT-J": ("GPTJConfig", {}),
    "MPT": ("MptConfig", {"d_model": 128, "n_heads": 4, "n_layers": 2}),
    "Qwen3.5 folder": ("Qwen3_5Config", {}),
    "Gemma 3 folder": ("Gemma3Config", {}),
}  # fmt: skip


def write(folder: Path, name: str) -> None:
    """The family's model, whose norms and biases are not what they begin with, and the quickstart's tokenizer."""
    import transformers

    from tasks.quickstart import make_tokenizer

    config_class, more = FAMILIES[name]
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**COMMON | {"vocab_size": len(tokenizer) + 3} | more)
    tokenizer.save_pretrained(folder)
    if hasattr(config, "vision_config"):
        config.save_pretrained(folder)  # to be refused by it; its model would be of the published size
        return
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        config.save_pretrained(folder)  # to be refused by it
        return
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() <= 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)


def packed_difference(path: str) -> float:
    """Largest difference, in nats, of packed log-probs from one plain forward a sequence; at temperature 0.7."""
    from transformers import AutoModelForCausalLM

    from batch import collate
    from model import forward, load_model
    from policy import load_tokenizer

    tokens = len(load_tokenizer(path))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ours = load_model(path, torch.float32, tokens, 0.7).eval()
    trajectories = [
        make_trajectory(prompt=n, response=(1,) * m) for n, m in ((3, 20), (1, 5), (9, 9), (2, 30), (15, 1))
    ]
    generator = torch.Generator().manual_seed(1)
    for t in trajectories:
        t.tokens = torch.randint(3, tokens, (len(t.tokens),), generator=generator).tolist()
    with torch.no_grad():
        packed, _ = forward(ours, collate(trajectories))
        largest = 0.0
        for t, of_t in zip(trajectories, packed.split([len(t.tokens) for t in trajectories])):
            logits = plain(input_ids=torch.tensor([t.tokens]), use_cache=False).logits[0, :, :tokens] / 0.7
            alone = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(t.tokens[1:])[:, None])[:, 0]
            largest = max(largest, float((of_t[1:] - alone)[t.prompt_length - 1 :].abs().max()))
    return largest


def probe_difference(folder: Path, tiny: Path) -> float | str:
    """The largest of two steps' probes, or the line with which train.py ends."""
    args = [
        *flags(tiny, "--log.default-local-dir", str(folder)),
        "--actor.path",
        str(folder),
        "--checkpoint.save-freq",
        "0",
    ]
    args += ["--sync.probe-tokens", "12", "--checkpoint.no-export-hf"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *args],
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["?"])[-1]
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return max(json.loads(line)["sync/probe_diff_max"] for line in lines)


def measure(name: str, vllm: bool, tiny: Path) -> dict:
    """A row of the table."""
    from model import check_model
    from policy import load_tokenizer

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            write(folder, name)
        except (AttributeError, TypeError, ValueError) as error:
            return {"name": name, "unknown": f"{type(error).__name__}: {error}"}
        try:
            check_model("actor.path", str(folder), len(load_tokenizer(str(folder))), 36)
        except ValueError as refusal:
            return {"name": name, "refused": str(refusal).replace(str(folder), "...")}
        row: dict = {"name": name}
        try:
            row["packed"] = packed_difference(str(folder))
        except Exception as error:  # what is neither exact nor refused is to be seen
            row["packed"] = f"{type(error).__name__}: {error}"
        if vllm:
            row["probe"] = probe_difference(folder, tiny)
        return row


def is_exact(row: dict) -> bool:
    """Or refused in a line."""
    limits = {"packed": PACKED, "probe": PROBE}
    return "refused" in row or all(
        isinstance(row[key], float) and row[key] <= most for key, most in limits.items() if key in row
    )


def make_tiny(folder: Path) -> Path:
    """The rows and the reward of the tests' tiny task."""
    from tasks.quickstart import make_row, write_rows

    write_rows(folder / "train.jsonl", [make_row(n, n + 3, "train", n) for n in range(10, 42)])
    write_rows(folder / "val.jsonl", [make_row(n, n + 3, "val", n) for n in range(42, 50)])
    (folder / "digits.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)\n"
    )
    return folder


def table(rows: list[dict]) -> list[str]:
    """The rows in Markdown: a number in nats, or the reason of a refusal."""

    def cell(row: dict, key: str) -> str:
        value = row.get(key, "")
        return f"{value:.1e}" if isinstance(value, float) else value

    exact = [row for row in rows if "refused" not in row]
    lines = ["| family | packed against alone | vLLM's probe |", "|---|---|---|"]
    lines += [f"| {row['name']} | {cell(row, 'packed')} | {cell(row, 'probe')} |" for row in exact]
    lines += ["", "| refused | because |", "|---|---|"]
    reasons = {
        row["name"]: row["refused"].partition(" is not supported: ")[2].partition(". Supported")[0]
        for row in rows
        if "refused" in row
    }
    return lines + [f"| {name} | {reason} |" for name, reason in reasons.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families; all when none is named")
    parser.add_argument("--vllm", action="store_true", help="also two steps with vLLM, some 15 s each")
    parser.add_argument("--out", type=Path, help="a file for the table, Markdown: docs/models.md has it")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        tiny = make_tiny(Path(temporary))
        for name in args.names or FAMILIES:
            rows.append(measure(name, args.vllm, tiny))
            print("ok  " if is_exact(rows[-1]) else "FAIL", json.dumps(rows[-1])[:400], flush=True)
    if args.out:
        args.out.write_text("\n".join(table(rows)) + "\n")
    return int(not all(map(is_exact, rows)))


if __name__ == "__main__":
    sys.exit(main())
