"""Which models are exact, and what the others are told before anything loads. Families: tests/tools/families.py."""

import json
import shutil

import pytest
import torch
from conftest import flags, slow
from families import FAMILIES, PACKED, packed_difference, write
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM

import model
import train
from config import load_config
from model import LogProbs, check_arguments, check_heads, check_model, load_model, own_classes

REFUSED = {
    "Phi-3, LongRoPE": "its longrope changes within 36 tokens",
    "Llama, dynamic rope": "its dynamic rope depends on what else is in a packed row",
    "gpt-oss": "mixture of experts; its attention has sinks",
    "Qwen3 MoE": "mixture of experts",
    "Mixtral": "mixture of experts",
    "Qwen3-Next": "layers of linear_attention",
    "LFM2": "recurrent layers",
    "Falcon-H1": "recurrent layers",
    "Mamba 2": "layers of linear_attention",
    "Granite SWA": "its attention has sinks",
    **dict.fromkeys(("BLOOM", "CodeGen", "Falcon", "GPT-J", "MPT"), "its attention can't be replaced"),
    "Qwen3.5 folder": "images or sound",
    "Gemma 3 folder": "images or sound",
}
# One of each kind: windows, ropes, caps, scales, norms, biases, `packing` that is dropped.
QUICK = {"Qwen3", "Gemma 2, window and caps", "Phi-2", "OLMo 3, window", "Granite 3", "Cohere 2, window", "StableLM"}
EXACT = [name for name in FAMILIES if name not in REFUSED]


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in EXACT])
def test_packed_log_probs_are_those_of_one_forward_a_sequence(tmp_path, name):
    write(tmp_path, name)
    check_model("actor.path", str(tmp_path), 1, 36)
    assert packed_difference(str(tmp_path)) <= PACKED


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_in_one_line(tmp_path, name):
    write(tmp_path, name)
    with pytest.raises(ValueError, match=REFUSED[name]) as refusal:
        check_model("actor.path", str(tmp_path), 1, 36)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_longrope_is_exact_where_it_does_not_change(tmp_path):
    write(tmp_path, "Phi-3, LongRoPE")
    check_model("actor.path", str(tmp_path), 1, 16)


CHANGES = {
    "logit_scale": ({"logit_scale": 0.06}, "logit_scale of its config is not computed"),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping of its config is not computed"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
    "images": ({"vision_config": {}}, "images or sound"),
    "unknown": ({"model_type": "new_model"}, "its config can't be read"),
    "encoder": ({"model_type": "t5"}, "no causal language model"),
    "vocabulary": ({"vocab_size": 9}, "the tokenizer has 17 tokens, the model only 9"),
}


@pytest.fixture
def changed(tiny, tmp_path):
    """A folder of the tiny model with another config."""

    def change(**values):
        shutil.copytree(tiny / "model", tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | values))
        return tmp_path / "model"

    return change


@pytest.mark.parametrize("what", CHANGES)
def test_config_that_asks_for_more_is_refused(changed, what):
    values, says = CHANGES[what]
    with pytest.raises(ValueError, match=says):
        check_model("actor.path", str(changed(**values)), 17, 36)


def test_key_value_heads_are_dealt_out_evenly(tiny):
    with pytest.raises(ValueError, match="rollout.tensor_model_parallel_size=3 does not divide the 2 key-value heads"):
        check_heads(str(tiny / "model"), 3)


def test_a_refusal_leaves_nothing_behind(changed, tiny, tmp_path, monkeypatch):
    """Neither a run folder nor a loaded model."""
    monkeypatch.setattr(train, "make_engine", lambda *_: pytest.fail("vLLM was made"))
    monkeypatch.setattr(train, "start_log", lambda *_: pytest.fail("the run's folder was made"))
    path = str(changed(quantization_config={"quant_method": "fp8"}))
    for knob in ("--actor.path", "--ref.path"):
        with pytest.raises(ValueError, match="its weights are quantised"):
            args = flags(tiny, "--log.default-local-dir", str(tmp_path), "--loss.use-kl-loss")
            train.start(load_config([*args, knob, path]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("asked", [{"s_aux": 1.0}, {"dropout": 0.1}, {"attention_mask": 1.0}, {"new_argument": 0}])
def test_attention_that_is_asked_for_more_says_so(asked):
    mask = asked.pop("attention_mask", None)
    named = next(iter(asked), "attention_mask")
    with pytest.raises(ValueError, match=f"Module asks its attention for {named}"):
        check_arguments(torch.nn.Module(), mask, **asked)


def test_attention_is_told_harmless_things():
    assert check_arguments(torch.nn.Module(), None, dropout=0.0, position_ids=1, s_aux=None, softcap=2.0) == 2.0


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_of_a_capped_head_are_autograds(softcap):
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, dtype=torch.float64)
    targets, temperature = torch.arange(6), 0.7
    model.replace_head(head, 40, temperature, softcap)
    head.targets = targets
    hidden = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 2, dtype=torch.float64)
    given = hidden, head.weight, head.bias
    ours = torch.autograd.grad((LogProbs.apply(*given, head)[0] * weights).sum(), given)
    logits = torch.nn.functional.linear(*given)[:, :40]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    both = torch.stack([logprobs.gather(-1, targets[:, None])[:, 0], entropy], -1)
    theirs = torch.autograd.grad((both * weights).sum(), given)
    for a, b in zip(ours, theirs):  # statistics are float32
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, knob",
    [
        ("Granite 3", "logits_scaling"),
        ("Cohere", "logit_scale"),
        ("Gemma 2, window and caps", "final_logit_softcapping"),
    ],
)
def test_an_export_has_the_published_logits(tmp_path, name, knob):
    """The head takes a scale or a cap over from the model; who loads the export needs it."""
    from checkpoint import write_settings, write_weights
    from policy import load_tokenizer

    write(tmp_path / "model", name)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    ours = load_model(str(tmp_path / "model"), torch.float32, len(tokenizer), 1.0)
    write_weights(tmp_path / "hf", ours, ours.state_dict())
    write_settings(tmp_path / "hf", ours, tokenizer, "float32")
    tokens = torch.tensor([[3, 4, 5, 6]])
    of = {folder: AutoModelForCausalLM.from_pretrained(tmp_path / folder)(tokens).logits for folder in ("model", "hf")}
    assert torch.equal(of["model"], of["hf"]) and getattr(AutoConfig.from_pretrained(tmp_path / "hf"), knob)


def test_vllm_gets_a_class_of_its_own(tmp_path):
    """As its Transformers backend marks the class: bases, a method of another, one more attribute."""
    write(tmp_path, "OLMo 2")
    cls = AutoModel._model_mapping[type(AutoConfig.from_pretrained(tmp_path))]
    before = cls.__bases__, dict(vars(cls))
    marked = type("Marked", (), {})
    with own_classes(str(tmp_path)) as models:
        models.append(AutoModel.from_pretrained(tmp_path))
        cls.__bases__ += (marked,)
        cls.forward = lambda self: "vLLM's"
        cls.compiled = True
    [theirs] = models
    assert (cls.__bases__, dict(vars(cls))) == before
    assert isinstance(theirs, marked) and isinstance(theirs, cls) and theirs.forward() == "vLLM's" and theirs.compiled
    assert AttentionInterface  # what the actor builds next is transformers' own
    assert not isinstance(AutoModel.from_pretrained(tmp_path), marked)
