"""look/memory.py: its formulas against what autograd saves and what is alive, its sums against an H200, and look/advice.py against the sums."""

import functools
import re
import types
import weakref
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from config import load_config
from look import bench, memory
from look.advice import NUMBERS, change, value_of
from look.memory import GIB, Estimate, Shape, check_memory, estimate, peak, report
from model import head_forward, replace_head

H200 = int(139.8 * GIB)
FAMILIES = {  # beside bench's: Qwen2.5-0.5B, Llama-3.2-1B, Llama-3-8B
    "qwen2.5-0.5b": ("qwen2", 151936, 896, 24, 14, 2, 64, 4864, True, 494_032_768),
    "llama-3.2-1b": ("llama", 128256, 2048, 16, 32, 8, 64, 8192, True, 1_235_814_400),
    "llama-3-8b": ("llama", 128256, 4096, 32, 32, 8, 128, 14336, False, 8_030_261_248),
    "narrow": ("llama", 1000, 1024, 2, 16, 8, 64, 1024, True, None),  # an MLP that is not the largest part of its layer
}
PUBLISHED = {"qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096, "smollm2-135m": 134_515_008} | {
    name: values[-1] for name, values in FAMILIES.items() if values[-1]
}


def config_of(shape: str, layers: int | None = None, vocab: int | None = None):
    if shape in bench.SHAPES:
        config = bench.make_config(shape)
    else:
        kind, rows, hidden, depth, heads, kv_heads, size, mlp, tied, _ = FAMILIES[shape]
        config = AutoConfig.for_model(
            kind,
            vocab_size=rows,
            hidden_size=hidden,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=size,
            intermediate_size=mlp,
            tie_word_embeddings=tied,
        )
    config.num_hidden_layers, config.vocab_size = layers or config.num_hidden_layers, vocab or config.vocab_size
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


EAGER = [
    "--actor.no-use-torch-compile",
    "--actor.ppo-max-token-len-per-gpu",
    "32768",
]  # what a meta device can run, and the formulas without fusion are of
CHECKPOINTED = [
    "--actor.enable-gradient-checkpointing",
    "--actor.no-share-prompts",
    "--actor.log-prob-max-token-len-per-gpu",
    "None",
]


def configured(name: str, *flags: str):
    base = EAGER + CHECKPOINTED * (name == "bench_qwen3_0_6b")
    return load_config(
        ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--data.train-files", "x.jsonl", *base, *flags]
    )


class FlashAttention(torch.autograd.Function):
    """Keeps what the varlen kernel of the GPU keeps, and computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.size(1), q.size(0), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors[:3])


AttentionInterface.register(
    "kept",
    lambda module, q, k, v, mask, **_: (FlashAttention.apply(*(x[0].transpose(0, 1) for x in (q, k, v)))[None], None),
)


class Alive(TorchDispatchMode):
    """The most bytes of all tensors that are alive at once, less those in `known`."""

    def __init__(self, known=()):
        super().__init__()
        self.storages, self.now, self.most = dict.fromkeys(t.untyped_storage()._cdata for t in known), 0, 0

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]:
            if storage._cdata not in self.storages:
                forget = functools.partial(self.free, storage._cdata, storage.nbytes())
                self.storages[storage._cdata] = weakref.ref(storage, forget)
                self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return out

    def free(self, key, size, _):
        del self.storages[key]
        self.now -= size


def make_model(shape: str, layers: int, device: str, checkpointed: bool = False):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(shape, layers, vocab=1000), dtype=torch.bfloat16, attn_implementation="kept"
        ).eval()
    model.lm_head.forward = types.MethodType(
        lambda self, hidden: hidden.float().sum(-1), model.lm_head
    )  # the head is looked at alone
    if checkpointed:
        model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
    return model


def run_body(model, tokens: int, device: str):
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    return model(
        input_ids=ids,
        position_ids=ids.clone(),
        attention_mask=None,
        use_cache=False,
        logits_to_keep=torch.zeros(1, dtype=torch.int64, device=device),
    ).logits


def saved_bytes(model, tokens: int, device: str) -> float:
    """Bytes a token of the storages that a forward keeps for the backward, parameters left out."""
    own, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def keep(t):
        saved[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run_body(model, tokens, device)
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own) / tokens


def body_of(shape: str, layers: int, tokens: int, **actor_knobs) -> Estimate:
    """The estimate of a model without a head to speak of, with one micro-batch of so many tokens."""
    cfg = configured(
        "bench_qwen3_0_6b",
        "--actor.ppo-max-token-len-per-gpu",
        str(tokens),
        "--data.train-batch-size",
        "65536",
        "--actor.ppo-mini-batch-size",
        "65536",
    )
    return Estimate(
        replace(cfg, actor=replace(cfg.actor, **actor_knobs)),
        Shape.of(config_of(shape, layers, vocab=1000)),
        1,
        1,
        H200,
    )


@pytest.mark.parametrize("shape", PUBLISHED)
def test_parameters_are_those_that_were_published(shape):
    assert Shape.of(config_of(shape)).params == PUBLISHED[shape]


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "smollm2-135m", "qwen2.5-0.5b"])
def test_a_layer_saves_what_the_formula_says(shape):
    one, two = (saved_bytes(make_model(shape, n, "cpu"), 64, "cpu") for n in (1, 2))
    formula = Shape.of(config_of(shape))
    assert formula.saved(2, compiled=False) == pytest.approx(two - one, rel=1e-3)
    assert formula.ends(2) == pytest.approx(2 * one - two, rel=0.02)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-4b", "smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "narrow"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_most_that_is_alive_in_a_backward_of_the_layers(shape, checkpointed):
    tokens, layers = 2**20, 3
    model = make_model(shape, layers, "meta", checkpointed)
    with Alive(model.parameters()) as alive:
        run_body(model, tokens, "meta").sum().backward()
    in_layer = body_of(shape, layers, tokens, enable_gradient_checkpointing=checkpointed).updating()[1]
    assert in_layer["activations"] + in_layer["layer at work"] == pytest.approx(alive.most, rel=0.03)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-4b", "smollm2-135m", "llama-3.2-1b"])
def test_most_that_is_alive_in_a_forward_without_gradient(shape):
    tokens, model = 2**20, make_model(shape, 2, "meta")
    with Alive(model.parameters()) as alive, torch.no_grad():
        run_body(model, tokens, "meta")
    assert body_of(shape, 2, tokens).scoring(Shape.of(config_of(shape, 2, vocab=1000)))[
        "layer at work"
    ] == pytest.approx(alive.most, rel=0.03)


@pytest.mark.parametrize("num_tokens", [151936, 100000])
def test_most_that_is_alive_in_the_head(num_tokens):
    """Four chunks of the real size, whose tokens were all sampled, with what the kernels of a GPU make."""

    def as_kernel(logits, temperature, num_tokens):
        return torch.empty(len(logits), -(-num_tokens // 2048), 3, device="meta").unbind(-1)

    now = Estimate(
        configured("bench_qwen3_0_6b", "--data.max-prompt-length", "512", "--actor.ppo-max-token-len-per-gpu", "7064"),
        Shape.of(config_of("qwen3-0.6b")),
        num_tokens,
        1,
        H200,
    )
    tokens, sampled, rows, several = now.micro_batch(7064, 64, 151936)
    assert (tokens, sampled, rows, several) == (7064, 7064, 2**28 // 151936, True)
    head = torch.nn.Linear(1024, 151936, bias=False, device="meta", dtype=torch.bfloat16)
    replace_head(head, num_tokens, 1.0)
    head.ops = types.SimpleNamespace(block_statistics=as_kernel, logit_gradient=lambda logits, *_: logits)
    head.targets = torch.zeros(sampled, dtype=torch.int64, device="meta")
    hidden = torch.zeros(1, sampled, 1024, dtype=torch.bfloat16, device="meta")
    with Alive([head.weight]) as forward, torch.no_grad():
        head_forward(head, hidden)
    assert now.scoring(now.shape)["LM head"] - 2 * 1024 * (tokens + sampled) == pytest.approx(forward.most, rel=0.02)
    with Alive([head.weight, hidden]) as backward:
        head_forward(head, hidden.requires_grad_()).sum().backward()
    in_head = now.updating()[0]
    whole = in_head["gradients"] - 4 * (now.shape.params + 151936 * 1024)  # without those of earlier micro-batches
    assert whole + in_head["LM head"] == pytest.approx(backward.most, rel=0.02)


WIDE = (
    "--actor.use-torch-compile",
    "--actor.no-enable-gradient-checkpointing",
    "--actor.ppo-max-token-len-per-gpu",
    "20480",
    "--actor.log-prob-max-token-len-per-gpu",
    "65536",
)
SHARED, WHOLE = ("--actor.share-prompts",), ("--actor.ppo-max-token-len-per-gpu", "65536")
HELD = [  # a configuration, the model and its vocabulary; GiB in use on an H200 at the fullest moment of each phase, without what torch's allocator held beside (2026-11-30)
    (
        ("bench_qwen3_0_6b", *WIDE),
        "qwen3-0.6b",
        {"sync": 64.38, "gen": 64.35, "old_log_prob": 10.48, "update_actor": 36.78},
    ),
    (
        ("bench_qwen3_0_6b", *WIDE, *SHARED),
        "qwen3-0.6b",
        {"sync": 64.39, "gen": 64.35, "old_log_prob": 10.48, "update_actor": 32.72},
    ),
    (
        ("bench_qwen3_0_6b", *WIDE, *SHARED, "--actor.ppo-max-token-len-per-gpu", "16384"),
        "qwen3-1.7b",
        {"gen": 76.77, "old_log_prob": 26.07, "update_actor": 55.47},
    ),
    (
        ("bench_qwen3_0_6b", *WIDE, *SHARED, "--actor.ppo-max-token-len-per-gpu", "8192"),
        "qwen3-4b",
        {"gen": 102.8, "old_log_prob": 57.41},
    ),  # update 86.4: two groups of 4,224 tokens do not fit into 8,192
    (
        ("smollm2_arith", *WIDE, *WHOLE, "--data.max-prompt-length", "53"),
        "smollm2-135m",
        {"sync": 7.73, "gen": 7.62, "update_actor": 18.76},
    ),
    (
        ("smollm2_arith", *WIDE, *WHOLE, *SHARED, "--data.max-prompt-length", "53"),
        "smollm2-135m",
        {"sync": 7.71, "gen": 7.6, "update_actor": 7.41},
    ),
]


@pytest.mark.parametrize("flags, shape, held", HELD)
def test_estimates_are_near_what_an_h200_held(flags, shape, held):
    table = estimate(configured(*flags), config_of(shape), bench.SHAPES[shape][1], 1, H200)
    for phase, gib in held.items():
        assert sum(size for part, size in table[phase].items() if part != "fragmentation") / GIB == pytest.approx(
            gib, rel=0.15
        ), phase


BASE = (
    "bench_qwen3_0_6b",
    "--loss.use-kl-loss",
    "--actor.no-enable-gradient-checkpointing",
    "--actor.reshard-after-forward",
    "False",
    "--actor.fsdp-size",
    "2",
)
LESS = {  # knob: (value that needs less, phases in which)
    "actor.ppo_max_token_len_per_gpu": (16384, {"old_log_prob", "ref", "update_actor"}),
    "actor.enable_gradient_checkpointing": (True, {"update_actor"}),
    "actor.reshard_after_forward": (True, {"sync", "gen", "old_log_prob", "ref", "update_actor"}),
    "actor.fsdp_size": (-1, {"sync", "gen", "old_log_prob", "ref", "update_actor"}),
    "actor.dtype": ("bfloat16", {"sync", "gen", "old_log_prob", "ref", "update_actor"}),
    "ref.param_offload": (True, {"sync", "gen", "old_log_prob", "ref", "update_actor"}),
    "rollout.gpu_memory_utilization": (0.3, {"sync", "gen"}),
    "rollout.kv_cache_memory_bytes": (2**30, {"sync", "gen"}),
    "data.train_batch_size": (64, set()),
}


@pytest.mark.parametrize("name", LESS)
def test_each_knob_saves_where_it_should_and_costs_nowhere(name):
    cfg, shape = configured(*BASE), Shape.of(config_of("qwen3-0.6b"))
    cfg = (
        change(cfg, "actor.dtype", "float32")
        if name == "actor.dtype"
        else change(cfg, "data.train_batch_size", 128)
        if "data" in name
        else cfg
    )
    before, after = (Estimate(c, shape, 151936, 4, H200).phases() for c in (cfg, change(cfg, name, LESS[name][0])))
    change_of = {phase: sum(after[phase].values()) - sum(before[phase].values()) for phase in before}
    assert {phase for phase, more in change_of.items() if more < 0} == LESS[name][1] and not any(
        more > 0 for more in change_of.values()
    )


def test_micro_batches_hold_no_more_than_the_step_has_and_the_first_finds_no_gradients():
    """4 prompts x 8 sessions x 640 tokens on 2 ranks: 10,240 tokens each, in one micro-batch or in two."""
    cfg, shape = (
        configured("bench_qwen3_0_6b", "--data.train-batch-size", "4", "--actor.ppo-mini-batch-size", "4"),
        Shape.of(config_of("qwen3-0.6b")),
    )
    one, two = (
        Estimate(change(cfg, "actor.ppo_max_token_len_per_gpu", budget), shape, 151936, 2, H200)
        for budget in (32768, 5120)
    )
    assert one.micro_batch(32768, 4, 151936) == (10240, 8192, 1766, False) and two.micro_batch(5120, 4, 151936) == (
        5120,
        5120,
        1766,
        True,
    )
    more = two.updating()[0]["gradients"] - one.updating()[0]["gradients"]
    assert more == 4 * (shape.params + 151936 * 1024) / 2
    rows = Estimate(
        change(change(cfg, "actor.use_dynamic_bsz", False), "actor.ppo_micro_batch_size_per_gpu", 3),
        shape,
        151936,
        2,
        H200,
    )
    assert rows.micro_batch(32768, 4, 151936)[0] == 3 * 640


def test_with_few_tokens_the_end_of_the_backward_is_its_fullest_moment():
    flags = (
        "--data.max-response-length",
        "1",
        "--actor.no-use-dynamic-bsz",
        "--actor.ppo-micro-batch-size-per-gpu",
        "1",
        "--rollout.n",
        "2",
    )
    cfg, shape = configured("bench_qwen3_0_6b", *flags), Shape.of(config_of("qwen3-0.6b"))
    held = Estimate(cfg, shape, 151936, 1, H200).phases()["update_actor"]
    assert (
        "activations" not in held and held["gradients"] == 4 * shape.params + 12 * 151936 * 1024
    )  # all in float32; the head's also twice whole in bfloat16 and twice in float32


def test_several_gpus_have_nccls_buffers_and_share_vllms_weights():
    cfg, shape = configured("smollm2_arith"), Shape.of(config_of("smollm2-135m"))
    one, two = (Estimate(change(cfg, "rollout.tensor_model_parallel_size", n), shape, 49152, n, H200) for n in (1, 2))
    assert one.vllm_needs() - two.vllm_needs() == PUBLISHED["smollm2-135m"]  # half of it in bfloat16
    assert two.phases()["gen"]["CUDA context"] - one.phases()["gen"]["CUDA context"] == pytest.approx(
        memory.NCCL, abs=2
    )
    assert two.phases()["gen"]["vLLM awake"] == pytest.approx(4 * GIB + two.vllm_needs(), abs=1)


def test_vllm_that_does_not_sleep_is_in_every_phase():
    table = Estimate(
        configured(*BASE, "--rollout.no-free-cache-engine"), Shape.of(config_of("qwen3-0.6b")), 151936, 4, H200
    ).phases()
    assert [parts["vLLM awake"] for parts in table.values()] == [round(0.4 * H200)] * 5 and not any(
        "vLLM asleep" in parts for parts in table.values()
    )


def test_the_reference_may_be_another_model():
    cfg = configured(*BASE)
    small, large = (
        estimate(cfg, config_of("qwen3-0.6b"), 151936, 4, H200, ref) for ref in (None, config_of("qwen3-4b"))
    )
    assert (
        small["ref"]["reference"] == PUBLISHED["qwen3-0.6b"]
        and large["ref"]["reference"] == large["gen"]["reference"] == PUBLISHED["qwen3-4b"]
    )
    assert (
        large["ref"]["layer at work"] > small["ref"]["layer at work"]
        and large["ref"]["gathered weights"] > small["ref"]["gathered weights"]
    )
    assert large["old_log_prob"] == small["old_log_prob"] | {"reference": PUBLISHED["qwen3-4b"]}


def test_report_has_a_column_a_phase_and_their_sums():
    lines = report(
        {"gen": {"vLLM awake": 3 * GIB, "fp32 weights": GIB // 2}, "update_actor": {"fp32 weights": GIB // 2}}, 8 * GIB
    ).splitlines()
    assert [line.split() for line in lines] == [
        ["GiB", "on", "a", "GPU", "gen", "update_actor"],
        ["vLLM", "awake", "3.00"],
        ["fp32", "weights", "0.50", "0.50"],
        ["of", "8.0", "3.50", "0.50"],
    ]


def test_on_a_cpu_no_limit_is_known(capsys):
    check_memory(
        configured("bench_qwen3_0_6b", "--actor.ppo-max-token-len-per-gpu", "100000000"),
        config_of("qwen3-0.6b"),
        151936,
        1,
    )
    assert capsys.readouterr() == ("", "")


def test_what_cannot_fit_is_refused_with_its_largest_parts_and_what_would_fit():
    cfg = configured(
        "bench_qwen3_0_6b", "--actor.ppo-max-token-len-per-gpu", "65536", "--actor.no-enable-gradient-checkpointing"
    )
    with pytest.raises(ValueError) as error:
        check_memory(cfg, config_of("qwen3-0.6b"), 151936, 1, int(79.1 * GIB))
    text = str(error.value)
    assert re.match(
        r"update_actor would need 146\.\d GiB of the 79\.1 free: the largest parts are activations 12\d\.\d \(actor\.ppo_max_token_len_per_gpu=65536\), Adam moments 4\.4 ",
        text,
    )
    assert re.search(
        r"; turn on actor\.enable_gradient_checkpointing, or lower actor\.ppo_max_token_len_per_gpu to 32256$", text
    )


def test_on_a_gpu_what_counts_is_what_others_leave_of_it(monkeypatch):
    """The estimate has this process's own context in it, which is already on the card when it is asked."""
    cfg, config = configured("bench_qwen3_0_6b"), config_of("qwen3-0.6b")
    need = peak(estimate(cfg, config, 151936, 1, 80 * GIB))[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (need - memory.CONTEXT, 80 * GIB))
    check_memory(cfg, config, 151936, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (need - memory.CONTEXT - GIB, 80 * GIB))
    with pytest.raises(ValueError, match=f"sync would need {need / GIB:.1f} GiB of the {need / GIB - 1:.1f} free"):
        check_memory(cfg, config, 151936, 1)


def test_a_larger_reference_is_looked_up_under_its_path(tmp_path):
    config_of("qwen3-4b").save_pretrained(tmp_path)
    check_memory(configured("bench_qwen3_0_6b", "--loss.use-kl-loss"), config_of("qwen3-0.6b"), 151936, 1, 24 * GIB)
    with pytest.raises(ValueError, match="; turn on ref.param_offload"):
        check_memory(
            configured("bench_qwen3_0_6b", "--loss.use-kl-loss", "--ref.path", str(tmp_path)),
            config_of("qwen3-0.6b"),
            151936,
            1,
            24 * GIB,
        )


def refused(*args) -> str | None:
    try:
        return check_memory(*args)
    except ValueError as error:
        return str(error)


REFUSED = [  # a configuration, the model, processes, GiB of the card, what has to be among the advice
    (
        ("bench_qwen3_0_6b", "--actor.ppo-max-token-len-per-gpu", "65536", "--actor.no-enable-gradient-checkpointing"),
        "qwen3-0.6b",
        1,
        79.1,
        "actor.ppo_max_token_len_per_gpu",
    ),
    (("qwen3_4b_fsdp",), "qwen3-4b", 1, 89.1, "rollout.gpu_memory_utilization"),
    (("qwen3_4b_fsdp",), "qwen3-4b", 1, 79.1, "GPUs"),
    (
        ("qwen3_4b_fsdp", "--rollout.no-free-cache-engine", "--rollout.gpu-memory-utilization", "0.3"),
        "qwen3-4b",
        2,
        57.0,
        "rollout.free_cache_engine",
    ),
    (
        ("qwen3_4b_fsdp", "--actor.fsdp-size", "1", "--rollout.gpu-memory-utilization", "0.4"),
        "qwen3-4b",
        4,
        79.1,
        "actor.fsdp_size",
    ),
    (
        ("qwen3_4b_fsdp", "--ref.no-param-offload", "--rollout.gpu-memory-utilization", "0.3"),
        "qwen3-4b",
        1,
        88.0,
        "ref.param_offload",
    ),
    (
        ("smollm2_arith", "--actor.no-use-dynamic-bsz", "--actor.ppo-micro-batch-size-per-gpu", "256"),
        "smollm2-135m",
        1,
        23.6,
        "actor.ppo_micro_batch_size_per_gpu",
    ),
    (
        ("smollm2_arith", "--rollout.kv-cache-memory-bytes", str(40 * GIB)),
        "smollm2-135m",
        1,
        40.0,
        "rollout.kv_cache_memory_bytes",
    ),
    (
        ("bench_qwen3_0_6b", "--actor.log-prob-max-token-len-per-gpu", "1000000", "--rollout.n", "64"),
        "qwen3-0.6b",
        1,
        32.0,
        "actor.log_prob_max_token_len_per_gpu",
    ),
]


@pytest.mark.parametrize("config, shape, processes, gib, wanted", REFUSED)
def test_advice_is_true(config, shape, processes, gib, wanted):
    """What it advises passes, and of a number the next larger value that it could have given does not."""
    cfg, model_config, num_tokens = configured(*config), config_of(shape), bench.SHAPES[shape][1]

    def refusal(cfg, processes=processes):
        return refused(cfg, model_config, num_tokens, processes, int(gib * GIB))

    parts, _, advised = refusal(cfg).rpartition("; ")
    advised = advised.split(", or ")
    assert (
        wanted in ("GPUs", "rollout.free_cache_engine", "ref.param_offload")
        or f"({wanted}={value_of(cfg, wanted)})" in parts
    )
    assert any(wanted in text for text in advised), advised
    for text in advised:
        if found := re.fullmatch(r"lower (\S+) to (\S+)", text):
            name, value = found[1], type(value_of(cfg, found[1]))(found[2])
            assert refusal(change(cfg, name, value)) is None and refusal(change(cfg, name, value + NUMBERS[name]))
        elif found := re.fullmatch(r"turn on (\S+)", text):
            assert refusal(change(cfg, found[1], True)) is None
        elif text.startswith("set"):
            assert text == "set actor.fsdp_size=-1" and refusal(change(cfg, "actor.fsdp_size", -1)) is None
        else:
            gpus = int(re.match(r"use (\d+) GPUs", text)[1])
            assert refusal(change(cfg, "actor.fsdp_size", -1), gpus) is None and refusal(
                change(cfg, "actor.fsdp_size", -1), gpus // 2
            )


def test_nothing_is_advised_that_would_be_refused_for_another_reason():
    """A budget below one sequence; a share of the GPU that is too small for vLLM."""
    cfg = configured(
        "bench_qwen3_0_6b",
        "--data.max-response-length",
        "32640",
        "--actor.ppo-max-token-len-per-gpu",
        "65536",
        "--actor.no-enable-gradient-checkpointing",
    )
    assert refused(cfg, config_of("qwen3-0.6b"), 151936, 1, 60 * GIB).endswith(
        "; turn on actor.enable_gradient_checkpointing"
    )
    assert "gpu_memory_utilization to" not in refused(
        configured("qwen3_4b_fsdp", "--rollout.max-num-seqs", "4096"), config_of("qwen3-4b"), 151936, 2, 43 * GIB
    )


def test_when_no_knob_is_enough_alone_they_are_tried_together():
    flags = (
        "--actor.no-enable-gradient-checkpointing",
        "--rollout.no-free-cache-engine",
        "--data.train-batch-size",
        "64",
        "--rollout.gpu-memory-utilization",
        "0.5",
    )
    cfg, config = configured("bench_qwen3_0_6b", *flags), config_of("qwen3-0.6b")
    with pytest.raises(
        ValueError,
        match="; turn on actor.enable_gradient_checkpointing and turn on actor.reshard_after_forward and turn on rollout.free_cache_engine$",
    ):
        check_memory(cfg, config, 151936, 1, 24 * GIB)
    for name in ("actor.enable_gradient_checkpointing", "actor.reshard_after_forward", "rollout.free_cache_engine"):
        cfg = change(cfg, name, True)
    check_memory(cfg, config, 151936, 1, 24 * GIB)
    with pytest.raises(ValueError, match="; no knob alone is enough: use larger GPUs or a smaller model$"):
        check_memory(cfg, config_of("qwen3-4b"), 151936, 1, 24 * GIB)


LONG = ("--data.max-response-length", "32640", "--actor.ppo-max-token-len-per-gpu", "32768")
SHORT = [
    (
        ("--rollout.gpu-memory-utilization", "0.1"),
        24,
        r"gpu_memory_utilization=0\.1 gives vLLM 2\.4 GiB; it needs 3\.0 beside its KV cache, and 0\.1 for one sequence of 640 tokens: raise it above 0\.13",
    ),
    (
        ("--rollout.gpu-memory-utilization", "0.2", *LONG),
        24,
        r"it needs 3\.0 beside its KV cache, and 3\.5 for one sequence of 32768 tokens: raise it above 0\.27",
    ),
    (
        ("--rollout.kv-cache-memory-bytes", str(70 << 20)),
        80,
        r"kv_cache_memory_bytes=73400319 holds less than one sequence of 640 tokens: raise it to 73400320 at least",
    ),
]


@pytest.mark.parametrize("flags, gib, message", SHORT)
def test_vllm_that_cannot_hold_one_sequence_is_refused(flags, gib, message):
    cfg = configured("bench_qwen3_0_6b", *flags)
    if cfg.rollout.kv_cache_memory_bytes:
        check_memory(
            cfg, config_of("qwen3-0.6b"), 151936, 1, gib * GIB
        )  # 640 tokens x 28 layers x 8 heads x 128 x keys and values x 2 bytes
        cfg = change(cfg, "rollout.kv_cache_memory_bytes", cfg.rollout.kv_cache_memory_bytes - 1)
    with pytest.raises(ValueError, match=message):
        check_memory(cfg, config_of("qwen3-0.6b"), 151936, 1, gib * GIB)


def test_moments_that_are_offloaded_are_there_for_the_update_only():
    cfg = configured("bench_qwen3_0_6b", "--actor.optimizer-offload")
    table = estimate(cfg, config_of("qwen3-0.6b"), 151936, 1, H200)
    assert {phase: parts["Adam moments"] > 0 for phase, parts in table.items()} == {
        "sync": False,
        "gen": False,
        "old_log_prob": False,
        "update_actor": True,
    }


def test_a_gpu_run_prints_the_table_first(monkeypatch, tmp_path, capsys):
    config_of("smollm2-135m").save_pretrained(tmp_path)
    cfg = configured("smollm2_arith", "--actor.path", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 * GIB, H200))
    memory.preflight(cfg, 49152, 1)
    assert (
        "100.5 GiB are free" in (said := capsys.readouterr().out) and "Adam moments" in said and "update_actor" in said
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * GIB, H200))
    with pytest.raises(ValueError, match="would need"):
        memory.preflight(cfg, 49152, 1)
