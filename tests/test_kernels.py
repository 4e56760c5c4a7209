"""The Triton kernels in Triton's interpreter, against the same in torch and plain attention; what they serve: the LM head, and sampling."""
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import decoding
import head
from decoding import sample_tokens, uniform

INTERPRETED = """
import sys
sys.path[:0] = [{root!r}]
import torch
import attention, decoding, head, kernels

torch.manual_seed(0)
close = lambda ours, theirs, **kwargs: torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, **kwargs)

for rows, vocab, num_tokens in [(5, 5000, 4500), (2, 4096, 4096), (3, 160, 160)]:  # the vocabulary's last block full and not, alone and not
    logits, targets = torch.randn(rows, vocab) * 3, torch.randint(0, num_tokens, (rows,))
    logits[0, 1 : num_tokens - 1] = -torch.inf  # a whole block of no probability
    for temperature in (torch.tensor(0.7), torch.linspace(0, 2, rows)):
        for ours, theirs in zip(kernels.block_statistics(logits, temperature, num_tokens), head.block_statistics(logits, temperature, num_tokens)):
            if theirs.abs().max() < 1e20:
                close(ours, theirs)
    for statistics in (kernels.block_statistics, head.block_statistics):  # what is no number is not lost in a largest of others
        assert all(x[0, 0].isnan() for x in statistics(logits.index_fill(1, torch.tensor([2]), torch.nan), torch.tensor(1.0), num_tokens)[1:])
    logits = torch.randn(rows, vocab) * 3
    of_rows = logits.logsumexp(-1), torch.randn(rows), torch.randn(rows), torch.randn(rows), torch.tensor(0.7)
    expected = head.logit_gradient(logits, targets, *of_rows, num_tokens)
    ours = kernels.logit_gradient(logits, targets, *of_rows, num_tokens)
    close(ours, expected)
    assert ours is logits, "written in place"

for heads, size in [(3, 20), (4, 16)]:
    out, seen, lse, seen_lse = torch.randn(7, heads, size), torch.randn(7, heads, size), torch.randn(heads, 10)[:, 3:], torch.randn(heads, 7)
    expected = out.clone(), lse.clone()
    attention.merge(*expected, seen, seen_lse)
    kernels.merge(out, lse, seen, seen_lse)
    close(out, expected[0]), close(lse, expected[1])

for heads, kv_heads, size, layout in [(4, 2, 16, "HND"), (6, 2, 16, "NHD"), (1, 1, 32, "HND"), (40, 2, 16, "NHD")]:  # groups of 2, 3, 1 and 20
    lengths = torch.tensor([70, 0, 16, 1, 64], dtype=torch.int32)  # of a cache of 16 slots a block, and tiles of 64
    query, cache, table = torch.randn(5, heads, size + 4)[..., :size].contiguous(), torch.randn(40, kv_heads, 16, 2 * size), torch.randint(0, 40, (5, 6), dtype=torch.int32)
    view = cache if layout == "HND" else cache.transpose(1, 2).contiguous().transpose(1, 2)  # as vLLM may keep it: the same by another stride
    wide = torch.full((5, 3, heads, size), 7.0)
    kernels.decode_attention(wide[:, 1], query, view, table, lengths, 0.3)
    for s, length in enumerate(lengths.tolist()):
        k, v = cache[table[s].long()].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1).split(size, -1)  # [length, heads, size]
        expected = torch.einsum("hn,nhd->hd", (torch.einsum("hd,nhd->hn", query[s], k) * 0.3).softmax(-1), v) if length else torch.zeros(heads, size)
        close(wide[s, 1], expected)
    assert (wide[:, 0] == 7).all() and (wide[:, 2] == 7).all(), "nothing beside the output"

lengths = torch.tensor([70] * 11 + [33, 40, 40, 40, 40, 0, 600, 620, 16, 50, 50], dtype=torch.int32)
table = torch.randint(0, 900, (22, 40), dtype=torch.int32)
table[:11, :3] = table[0, :3]  # a prompt of three blocks, whose sessions are more than are read together
table[12:17, :2] = table[12, :2]  # of two, and a place without a sequence behind it
table[17:19, :37] = table[17, :37]  # a long one, that only one of the two has filled all blocks of but one
table[19:22, 0] = table[19, 0]  # a block that the first of three has not yet written past
for heads, kv_heads, size in [(4, 2, 16), (6, 2, 16), (9, 1, 32)]:
    query, cache, out, made = torch.randn(22, heads, size), torch.randn(900, kv_heads, 16, 2 * size), torch.empty(22, heads, size), []
    empty, torch.empty = torch.empty, lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1]
    kernels.decode_attention(out, query, cache, table, lengths, 0.3)
    torch.empty = empty
    assert made[0].tolist() == [48] * 11 + [0] + [32] * 4 + [0] + [37 * 16] * 2 + [0] * 3, "tokens read once for several sequences"
    for s, length in enumerate(lengths.tolist()):
        k, v = cache[table[s].long()].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1).split(size, -1)
        expected = torch.einsum("hn,nhd->hd", (torch.einsum("hd,nhd->hn", query[s], k) * 0.3).softmax(-1), v) if length else torch.zeros(heads, size)
        close(out[s], expected)

logits = torch.randn(40, 5000)
args = torch.ones(40), torch.arange(40), torch.arange(40) * 3
expected = decoding.sample_tokens(logits, *args)
decoding.kernels_for = lambda tensor: kernels
ours = decoding.sample_tokens(logits, *args)
assert torch.equal(ours[0], expected[0])
close(ours[1], expected[1])
"""


def test_triton_kernels_compute_what_torch_does():
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    done = subprocess.run([sys.executable, "-c", INTERPRETED.format(root=str(ROOT))], capture_output=True, text=True, timeout=300, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("vocab", [1, 160, 4096, 151936, 2**29])
def test_a_chunk_of_logits_has_rows_and_no_more_than_a_kernels_grid(vocab):
    rows = head.rows_at_once(vocab)
    assert 1 <= rows < 2**16 and (rows == 1 or rows * vocab <= 2**28)


def naive(hidden, weight, bias, targets, temperature, num_tokens):
    """[K, 2]: log-probs and entropies, by autograd's own log_softmax."""
    logprobs = (F.linear(hidden, weight, bias)[:, :num_tokens] / temperature).log_softmax(-1)
    return torch.stack([logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)], -1)


@pytest.mark.parametrize("vocab, num_tokens", [(160, 160), (160, 131), (5000, 4500)])
@pytest.mark.parametrize("bias", [False, True])
def test_head_gives_log_probs_entropies_and_gradients(monkeypatch, vocab, num_tokens, bias):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 3 * vocab)  # of 10 rows: three chunks and one left
    torch.manual_seed(0)
    linear, hidden = torch.nn.Linear(24, vocab, bias=bias), torch.randn(1, 10, 24, requires_grad=True)
    plain, leaves = torch.nn.functional.linear, [hidden, *linear.parameters()]
    weights, targets = torch.randn(10, 2), torch.randint(0, num_tokens, (10,))
    expected = naive(hidden[0], linear.weight, linear.bias, targets, 0.7, num_tokens)
    expected_grads = torch.autograd.grad((expected * weights).sum(), leaves)
    head.replace_head(linear, num_tokens, 0.7)
    linear.targets = targets
    out = linear(hidden)
    assert out.shape == (1, 10, 2) and F.linear is plain
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad((out[0] * weights).sum(), leaves), expected_grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_older_sampler_of_vllm_stays_as_it_is():
    """That of its other model runner, for mixtures of experts and the like."""
    other = SimpleNamespace()
    decoding.lean_sampler(other)
    assert type(other) is SimpleNamespace


@pytest.mark.parametrize("ranks, compiled", [(1, True), (2, False)])
def test_ranks_of_one_engine_sample_without_what_compilation_may_tune(monkeypatch, ranks, compiled):
    given, lean, compile_ = [], TheirSampler(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: "compiled" if args == (decoding.choose_token,) else compile_(*args, **kwargs))
    monkeypatch.setattr(decoding, "sample_tokens", lambda *args: given.append(args[-1]) or 1 / 0)
    decoding.lean_sampler(lean, ranks)
    lean.sampling_states.temperature = lean.sampling_states.seeds = SimpleNamespace(gpu=torch.zeros(4))
    with pytest.raises(ZeroDivisionError):
        lean(torch.zeros(2, 50), SimpleNamespace(idx_mapping_np=np.array([1, 2]), expanded_idx_mapping=torch.tensor([1, 2]), positions=torch.zeros(9), logits_indices=torch.tensor([0, 1])))
    assert given == ["compiled" if compiled else decoding.choose_token]


def test_logits_that_are_no_numbers_give_no_token_out_of_range():
    """And a log-prob that `rollout.check_output` names."""
    logits = torch.zeros(3, 5000)
    logits[0], logits[1, 7] = -torch.inf, torch.nan
    tokens, logprobs = sample_tokens(logits, torch.ones(3), torch.arange(3), torch.arange(3))
    assert ((tokens >= 0) & (tokens < 5000)).all() and not logprobs[:2].isfinite().any() and logprobs[2].isfinite()


def test_sampled_tokens_follow_their_probabilities():
    """A chi-square of 100,000 draws, some of a temperature of their own; tokens without probability never come."""
    torch.manual_seed(0)
    logits = torch.randn(1, 5000) * 2
    logits[0, 4000:4500] = -torch.inf
    for temperature in (1.0, 0.7):
        p, counts = (logits[0] / temperature).softmax(-1), torch.zeros(5000)
        for position in range(25):
            tokens, logprobs = sample_tokens(logits.expand(2000, -1), torch.full((2000,), temperature), torch.randint(0, 2**62, (2000,)), torch.full((2000,), position))
            counts += torch.bincount(tokens, minlength=5000)
            torch.testing.assert_close(logprobs, p.log()[tokens], rtol=1e-5, atol=1e-5)
        often = p * 50000 > 5
        chi_square = float(((counts - p * 50000) ** 2 / (p * 50000))[often].sum())
        assert abs(chi_square - int(often.sum())) < 5 * (2 * int(often.sum())) ** 0.5
        assert counts[4000:4500].sum() == 0


def test_a_token_follows_from_its_logits_seed_and_position_alone():
    torch.manual_seed(0)
    logits, seeds, positions = torch.randn(64, 3000), torch.randint(0, 2**62, (64,)), torch.randint(0, 600, (64,))
    tokens, logprobs = sample_tokens(logits, torch.ones(64), seeds, positions)
    order = torch.randperm(64)[:20]
    again = sample_tokens(logits[order], torch.ones(20), seeds[order], positions[order])
    assert torch.equal(again[0], tokens[order]) and torch.equal(again[1], logprobs[order])
    for changed in ((seeds + 1, positions), (seeds, positions + 1)):
        assert (sample_tokens(logits, torch.ones(64), *changed)[0] != tokens).sum() > 50


def test_temperature_0_takes_the_likeliest_token():
    torch.manual_seed(0)
    logits, temperature = torch.randn(6, 5000), torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0, 0.0])
    tokens, logprobs = sample_tokens(logits, temperature, torch.arange(6), torch.arange(6))
    greedy = temperature == 0
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    torch.testing.assert_close(logprobs[greedy], logits.log_softmax(-1).amax(-1)[greedy])


def test_random_numbers_are_even_and_unrelated():
    """Of neighbouring seeds and positions too: 16 bins of each, and of sums of two."""
    seeds, positions = torch.arange(40000), torch.arange(40000)
    for numbers in (uniform(seeds, positions * 0), uniform(seeds * 0 + 12345, positions), (uniform(seeds, positions) + uniform(seeds + 1, positions)) % 1):
        assert 0 <= numbers.min() and numbers.max() < 1
        counts = np.histogram(numbers.numpy(), 16, (0, 1))[0]
        assert ((counts - 2500) ** 2 / 2500).sum() < 45, "15 degrees of freedom: one in 10,000"


class TheirSampler:
    """What `lean_sampler` needs of vLLM's: the requests' parameters, and the way to sample that it leaves to vLLM."""

    def __init__(self, **states):
        rows = {"top_k": np.full(4, 50), "top_p": np.ones(4), "min_p": np.zeros(4), "num_logprobs": np.zeros(4), **states}
        self.sampling_states = SimpleNamespace(vocab_size=50, num_logprobs=rows["num_logprobs"], **{name: SimpleNamespace(np=rows[name]) for name in ("top_k", "top_p", "min_p")})

    def __call__(self, logits, input_batch):
        return "vLLM's"


@pytest.mark.parametrize("states, rows, ours", [({}, 2, True), ({"top_k": np.array([50, 9, 50, 50])}, 2, False), ({"top_p": np.array([1, 1, 0.9, 1])}, 2, False), ({"min_p": np.array([0, 0, 0.1, 0])}, 2, False),
                                                ({"top_p": np.array([0.9, 1, 1, 1])}, 2, True), ({"num_logprobs": np.array([0, 3, 0, 0])}, 2, False), ({}, 3, False)])  # fmt: skip
def test_vllm_samples_what_is_cut_or_has_more_to_tell(monkeypatch, states, rows, ours):
    """Of requests 1 and 2, whatever the others ask for; and where rows are no requests."""
    monkeypatch.setattr(decoding, "sample_tokens", lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
    lean = TheirSampler(**states)
    decoding.lean_sampler(lean)
    lean.sampling_states.temperature = lean.sampling_states.seeds = SimpleNamespace(gpu=torch.zeros(4))
    batch = SimpleNamespace(idx_mapping_np=np.array([1, 2]), expanded_idx_mapping=torch.tensor([1, 2]), positions=torch.zeros(9), logits_indices=torch.tensor([0, 1]))
    if ours:
        with pytest.raises(ZeroDivisionError):
            lean(torch.zeros(rows, 50), batch)
    else:
        assert lean(torch.zeros(rows, 50), batch) == "vLLM's"


class TheirAttention:
    """vLLM's FlashAttentionImpl, as far as what replaces it looks."""

    sliding_window, alibi_slopes, logits_soft_cap, sinks, kv_cache_dtype, attn_type, head_size, num_kv_heads, scale = (-1, -1), None, 0, None, "auto", "decoder", 128, 8, 0.5

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        return "vLLM's"


LENGTHS = [9] * 128
DECODING = SimpleNamespace(max_query_len=1, use_cascade=False, causal=True, num_actual_tokens=128, block_table="table", seq_lens=LENGTHS)


@pytest.mark.parametrize("impl, metadata", [
    ({}, {}), ({"sliding_window": (511, 0)}, {}), ({"alibi_slopes": [1.0]}, {}), ({"logits_soft_cap": 30.0}, {}), ({"sinks": [1.0]}, {}), ({"kv_cache_dtype": "fp8"}, {}),
    ({"attn_type": "encoder"}, {}), ({"head_size": 80}, {}), ({}, {"max_query_len": 2}), ({}, {"use_cascade": True}), ({}, {"causal": False}), ({}, {"num_actual_tokens": 127}), ({}, {"seq_lens": LENGTHS[1:]}), ({}, None),
])  # fmt: skip
def test_decode_kernel_serves_what_it_knows_and_nothing_else(monkeypatch, impl, metadata):
    attention = type("FlashAttentionImpl", (TheirAttention,), {"forward": TheirAttention.forward})
    calls = []
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.flash_attn", SimpleNamespace(FlashAttentionImpl=attention))
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(decode_attention=lambda *args: calls.append(args)))
    for _ in range(2):  # a second engine of the process finds it done
        decoding.use_decode_kernel()
    layer, output, query = attention(), torch.zeros(130, 16, 128), torch.ones(130, 16, 128)
    vars(layer).update(impl)
    given = None if metadata is None else SimpleNamespace(**{**vars(DECODING), **metadata})
    answer = layer.forward(None, query, None, None, "cache", given, output)
    if impl or metadata or metadata is None:
        assert answer == "vLLM's" and not calls
    else:
        assert answer is output and len(calls) == 1 and calls[0][2:] == ("cache", "table", LENGTHS, 0.5)
        assert [len(x) for x in calls[0][:2]] == [128, 128] and calls[0][0].data_ptr() == output.data_ptr() and calls[0][1].data_ptr() == query.data_ptr()


@pytest.mark.parametrize("most", [1, 5, 100, 256, 512, 700, 1024])
def test_graphs_are_captured_up_to_the_largest_batch_and_close_enough(most):
    sizes = decoding.capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert all(larger - smaller <= max(smaller / 2, 8) for smaller, larger in zip(sizes, sizes[1:])) and len(sizes) < 30
