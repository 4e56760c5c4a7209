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

import model
from fast import decoding, sampling
from fast.engine import capture_sizes
from fast.sampling import sample_tokens, uniform

INTERPRETED = """
import sys
sys.path[:0] = [{root!r}]
import torch
import model
from fast import attention, decoding, kernels, sampling

torch.manual_seed(0)
close = lambda ours, theirs, **kwargs: torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, **kwargs)

for rows, vocab, num_tokens in [(5, 5000, 4500), (2, 4096, 4096), (3, 160, 160)]:  # the vocabulary's last block full and not, alone and not
    logits, targets = torch.randn(rows, vocab) * 3, torch.randint(0, num_tokens, (rows,))
    logits[0, 1 : num_tokens - 1] = -torch.inf  # a whole block of no probability
    for temperature in (torch.tensor(0.7), torch.linspace(0, 2, rows)):
        for ours, theirs in zip(kernels.block_statistics(logits, temperature, num_tokens), model.block_statistics(logits, temperature, num_tokens)):
            if theirs.abs().max() < 1e20:
                close(ours, theirs)
    order, table = torch.randperm(rows), torch.rand(rows) + 0.5
    for ours, theirs in zip(kernels.block_statistics(logits, table, num_tokens, order), kernels.block_statistics(logits, table[order], num_tokens)):
        assert torch.equal(ours, theirs), "a table of temperatures, and where in it a row's is"
    for statistics in (kernels.block_statistics, model.block_statistics):  # what is no number is not lost in a largest of others
        assert all(x[0, 0].isnan() for x in statistics(logits.index_fill(1, torch.tensor([2]), torch.nan), torch.tensor(1.0), num_tokens)[1:])
    logits = torch.randn(rows, vocab) * 3
    of_rows = model.Rows(targets, logits.logsumexp(-1), torch.randn(rows), torch.randn(rows), torch.randn(rows))
    expected = model.logit_gradient(logits, of_rows, torch.tensor(0.7), num_tokens)
    ours = kernels.logit_gradient(logits, of_rows, torch.tensor(0.7), num_tokens)
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
    decoding.decode_attention(wide[:, 1], query, view, table, lengths, 0.3, decoding.find_shared(query, view, table, lengths))
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
    query, cache = torch.randn(22, heads, size), torch.randn(900, kv_heads, 16, 2 * size)
    shared = decoding.find_shared(query, cache, table, lengths)
    assert shared[0].tolist() == [48] * 11 + [0] + [32] * 4 + [0] + [37 * 16] * 2 + [0] * 3, "tokens read once for several sequences"
    assert shared[1].tolist() == [8] + [0] * 7 + [3] + [0] * 3 + [4] + [0] * 4 + [2] + [0] * 4, "and who reads them"
    for layer in range(2):  # the second finds what the first has left in the room for what is read
        out, cache = torch.empty(22, heads, size), torch.randn(900, kv_heads, 16, 2 * size)
        decoding.decode_attention(out, query, cache, table, lengths, 0.3, shared)
        for s, length in enumerate(lengths.tolist()):
            k, v = cache[table[s].long()].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1).split(size, -1)
            expected = torch.einsum("hn,nhd->hd", (torch.einsum("hd,nhd->hn", query[s], k) * 0.3).softmax(-1), v) if length else torch.zeros(heads, size)
            close(out[s], expected)

def both(logits, *args):
    "What torch samples, and what the kernels do."
    theirs = sampling.sample_tokens(logits, *args)
    ours = sampling.sample_tokens(logits, *args, kernels=kernels)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs] == [torch.int64, torch.float32] and ours[0].shape == ours[1].shape == (len(logits),)
    assert ((ours[0] >= 0) & (ours[0] < logits.size(1))).all()
    return theirs, ours

for rows, vocab, dtype in [(150, 5000, torch.float32), (40, 2 * model.BLOCK, torch.bfloat16), (30, 160, torch.float32), (12, 40000, torch.float32), (3, 1, torch.float32)]:
    logits = (torch.randn(rows, vocab + 3) * 2).to(dtype)[:, :vocab]  # rows further apart than they are long
    logits[0, : vocab // 2], logits[1, 1:] = -torch.inf, -torch.inf  # half of no probability, and all but one
    logits[2 :: 5, vocab // 2] = logits[2 :: 5, vocab // 3] = logits.max() + 1  # the likeliest twice
    temperature = torch.where(torch.arange(rows + 9) % 3 == 0, 0.0, torch.linspace(0.3, 1.7, rows + 9))
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (rows + 9,)), torch.randint(0, 600, (rows + 20,))
    where, at = torch.randperm(rows + 9)[:rows].to(torch.int32), torch.randperm(rows + 20)[:rows]
    for args in [(temperature[:rows], seeds[:rows], positions[:rows]), (temperature, seeds, positions, where, at)]:
        theirs, ours = both(logits, *args)
        assert torch.equal(ours[0], theirs[0])
        close(ours[1], theirs[1])
        assert ours[1].isfinite().all() and ours[0][1] == 0 and (vocab == 1 or ours[0][0] >= vocab // 2)
    greedy = args[0][args[3].long()] == 0
    assert torch.equal(ours[0][greedy], logits.float().argmax(-1)[greedy]), "the first of equals"

for temperature in (0.0, 1.0):
    logits = torch.zeros(4, 5000)
    logits[0], logits[1, 7], logits[2] = -torch.inf, torch.nan, torch.nan
    theirs, ours = both(logits, torch.full((4,), temperature), torch.arange(4), torch.arange(4))
    assert not ours[1][:3].isfinite().any() and ours[1][3].isfinite()

logits = torch.full((600, 3 * model.BLOCK), -200.0)  # but a few tokens of which have a probability, a block without any between them
some = torch.tensor([3, 700, 2 * model.BLOCK + 5, 3 * model.BLOCK - 1])
logits[:, some] = torch.tensor([0.0, 1.0, -3.0, 0.5])
tokens, logprobs = both(logits, torch.ones(600), torch.arange(600), torch.zeros(600, dtype=torch.int64))[1]
assert torch.isin(tokens, some).all() and len(tokens.unique()) == 4
"""


@pytest.mark.slow
def test_triton_kernels_compute_what_torch_does():
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("vocab", [1, 160, 4096, 151936, 2**29])
def test_a_chunk_of_logits_has_rows_and_no_more_than_a_kernels_grid(vocab):
    rows = model.rows_at_once(vocab)
    assert 1 <= rows < 2**16 and (rows == 1 or rows * vocab <= 2**28)


def naive(hidden, weight, bias, targets, temperature, num_tokens):
    """[K, 2]: log-probs and entropies, by autograd's own log_softmax."""
    logprobs = (F.linear(hidden, weight, bias)[:, :num_tokens] / temperature).log_softmax(-1)
    return torch.stack([logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)], -1)


@pytest.mark.parametrize("vocab, num_tokens", [(160, 160), (160, 131), (5000, 4500)])
@pytest.mark.parametrize("bias", [False, True])
def test_head_gives_log_probs_entropies_and_gradients(monkeypatch, vocab, num_tokens, bias):
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", 3 * vocab)  # of 10 rows: three chunks and one left
    torch.manual_seed(0)
    linear, hidden = torch.nn.Linear(24, vocab, bias=bias), torch.randn(1, 10, 24, requires_grad=True)
    plain, leaves = torch.nn.functional.linear, [hidden, *linear.parameters()]
    weights, targets = torch.randn(10, 2), torch.randint(0, num_tokens, (10,))
    expected = naive(hidden[0], linear.weight, linear.bias, targets, 0.7, num_tokens)
    expected_grads = torch.autograd.grad((expected * weights).sum(), leaves)
    model.replace_head(linear, num_tokens, 0.7)
    linear.targets = targets
    out = linear(hidden)
    assert out.shape == (1, 10, 2) and F.linear is plain
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad((out[0] * weights).sum(), leaves), expected_grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_older_sampler_of_vllm_stays_as_it_is():
    """That of its other model runner, for mixtures of experts and the like."""
    other = SimpleNamespace()
    sampling.lean_sampler(other)
    assert type(other) is SimpleNamespace


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
            tokens, logprobs = sample_tokens(
                logits.expand(2000, -1),
                torch.full((2000,), temperature),
                torch.randint(0, 2**62, (2000,)),
                torch.full((2000,), position),
            )
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
    for numbers in (
        uniform(seeds, positions * 0),
        uniform(seeds * 0 + 12345, positions),
        (uniform(seeds, positions) + uniform(seeds + 1, positions)) % 1,
    ):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers.numpy(), 16, (0, 1))[0]
        assert ((counts - 2500) ** 2 / 2500).sum() < 45, "15 degrees of freedom: one in 10,000"


class TheirSampler:
    """What `lean_sampler` needs of vLLM's: the requests' parameters, and the way to sample that it leaves to vLLM."""

    def __init__(self, **states):
        rows = {
            "top_k": np.full(4, 50),
            "top_p": np.ones(4),
            "min_p": np.zeros(4),
            "num_logprobs": np.zeros(4),
            **states,
        }
        tables = {name: SimpleNamespace(np=rows[name]) for name in ("top_k", "top_p", "min_p")}
        self.sampling_states = SimpleNamespace(
            vocab_size=50, max_num_reqs=4, num_logprobs=rows["num_logprobs"], **tables
        )
        self.sampling_states.temperature, self.sampling_states.seeds = (
            SimpleNamespace(gpu=torch.full((4,), -1.0)),
            SimpleNamespace(gpu=torch.zeros(4, dtype=torch.int64)),
        )
        self.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu="prompts"))
        self.copies = 0

    def add_request(self, row, prompt_len, top_p):
        self.sampling_states.top_p.np[row] = top_p

    def apply_staged_writes(self):
        self.copies += 1
        self.sampling_states.temperature.gpu = torch.full((4,), float(self.copies))

    def __call__(self, logits, input_batch):
        return "vLLM's"


def requests_1_and_2(prefilling=False):
    return SimpleNamespace(
        idx_mapping_np=np.array([1, 2]),
        idx_mapping="rows",
        expanded_idx_mapping=torch.tensor([1, 2]),
        num_reqs=2,
        positions=torch.arange(9),
        logits_indices=torch.tensor([4, 0]),
        is_prefilling_np=np.array([False, prefilling]),
        seq_lens="lengths",
        cu_num_logits="logits",
    )


@pytest.mark.parametrize(
    "states, rows, ours",
    [
        ({}, 2, True),
        ({"top_k": np.array([50, 9, 50, 50])}, 2, False),
        ({"top_p": np.array([1, 1, 0.9, 1])}, 2, False),
        ({"min_p": np.array([0, 0, 0.1, 0])}, 2, False),
        ({"top_p": np.array([0.9, 1, 1, 1])}, 2, True),
        ({"num_logprobs": np.array([0, 3, 0, 0])}, 2, False),
        ({}, 3, False),
    ],
)
def test_vllm_samples_what_is_cut_or_has_more_to_tell(monkeypatch, states, rows, ours):
    """Of requests 1 and 2, whatever the others ask for; and where rows are no requests."""
    monkeypatch.setattr(sampling, "sample_tokens", lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
    lean = TheirSampler(**states)
    sampling.lean_sampler(lean)
    lean.apply_staged_writes()
    if ours:
        with pytest.raises(ZeroDivisionError):
            lean(torch.zeros(rows, 50), requests_1_and_2())
    else:
        assert lean(torch.zeros(rows, 50), requests_1_and_2()) == "vLLM's"


def test_lean_sampler_looks_at_a_request_when_it_comes():
    """vLLM's tables are copied in turns that have a new one, and no others; a place may be another request's later."""
    lean = TheirSampler()
    sampling.lean_sampler(lean)
    for _ in range(3):
        lean.apply_staged_writes()
    assert lean.copies == 1 and lean.tables[0].tolist() == [1.0] * 4
    for turns, (row, top_p, ours) in enumerate([(0, 0.9, True), (2, 0.9, False), (2, 1, True)]):
        lean.add_request(row, 7, top_p)
        lean.apply_staged_writes()
        lean.apply_staged_writes()
        assert lean.copies == turns + 2 and lean.tables[0].tolist() == [turns + 2.0] * 4
        assert (lean(torch.zeros(2, 50), requests_1_and_2()) != "vLLM's") == ours


@pytest.mark.parametrize("prefilling", [False, True])
def test_lean_sampler_hands_back_what_vllms_would(monkeypatch, prefilling):
    """A token a request, sampled with its own parameters and at its own position, and its log-prob; vLLM finds out which prompts are not done yet."""
    import vllm.v1.worker.gpu.input_batch as theirs

    calls = []
    monkeypatch.setattr(
        theirs, "get_num_sampled_and_rejected", lambda ones, *args: calls.append(args) or (ones.zero_(), "rejected")
    )
    lean = TheirSampler()
    sampling.lean_sampler(lean)
    lean.apply_staged_writes()
    lean.tables = torch.tensor([9.0, 0.0, 0.7, 9.0]), torch.tensor([7, 8, 9, 10])
    torch.manual_seed(0)
    logits = torch.randn(2, 50)
    for _ in range(2):
        out = lean(logits, requests_1_and_2(prefilling))
        tokens, logprobs = sample_tokens(logits, torch.tensor([0.0, 0.7]), torch.tensor([8, 9]), torch.tensor([4, 0]))
        assert torch.equal(out.sampled_token_ids, tokens[:, None]) and torch.equal(
            out.logprobs_tensors.logprob_token_ids, tokens[:, None]
        )
        assert torch.equal(
            out.logprobs_tensors.logprobs, logprobs[:, None]
        ) and out.logprobs_tensors.selected_token_ranks.tolist() == [0, 0]
        assert out.num_sampled.dtype == torch.int32 and out.num_sampled.tolist() == ([0, 0] if prefilling else [1, 1])
        assert out.num_rejected == "rejected" if prefilling else out.num_rejected.tolist() == [0, 0]
    assert calls == [("lengths", "logits", "rows", "prompts")] * 2 * prefilling and lean.ones.tolist() == [1] * 4


class TheirAttention:
    """vLLM's FlashAttentionImpl, as far as what replaces it looks."""

    sliding_window, alibi_slopes, logits_soft_cap, sinks, kv_cache_dtype, attn_type = (
        (-1, -1),
        None,
        0,
        None,
        "auto",
        "decoder",
    )
    head_size, num_heads, num_kv_heads, scale = 128, 16, 8, 0.5

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        return "vLLM's"


LENGTHS = [9] * 128
DECODING = SimpleNamespace(
    max_query_len=1, use_cascade=False, causal=True, num_actual_tokens=128, block_table="table", seq_lens=LENGTHS
)


@pytest.mark.parametrize(
    "impl, metadata",
    [
        ({}, {}),
        ({"sliding_window": (511, 0)}, {}),
        ({"alibi_slopes": [1.0]}, {}),
        ({"logits_soft_cap": 30.0}, {}),
        ({"sinks": [1.0]}, {}),
        ({"kv_cache_dtype": "fp8"}, {}),
        ({"attn_type": "encoder"}, {}),
        ({"head_size": 80}, {}),
        ({"num_heads": 136}, {}),
        ({}, {"max_query_len": 2}),
        ({}, {"use_cascade": True}),
        ({}, {"causal": False}),
        ({}, {"num_actual_tokens": 127}),
        ({}, {"seq_lens": LENGTHS[1:]}),
        ({}, None),
    ],
)
def test_decode_kernel_serves_what_it_knows_and_nothing_else(monkeypatch, impl, metadata):
    attention = type("FlashAttentionImpl", (TheirAttention,), {"forward": TheirAttention.forward})
    calls, plans = [], []
    monkeypatch.setitem(
        sys.modules, "vllm.v1.attention.backends.flash_attn", SimpleNamespace(FlashAttentionImpl=attention)
    )
    monkeypatch.setattr(decoding, "decode_attention", lambda *args: calls.append(args))
    monkeypatch.setattr(decoding, "find_shared", lambda *args: plans.append(args) or (len(plans), "led", args[0]))
    for _ in range(2):  # a second engine of the process finds it done
        decoding.use_decode_kernel()
    layer, output, query = attention(), torch.zeros(130, 16, 128), torch.ones(130, 16, 128)
    vars(layer).update(impl)
    given = None if metadata is None else SimpleNamespace(**{**vars(DECODING), **metadata})
    answer = layer.forward(None, query, None, None, "cache", given, output)
    if impl or metadata or metadata is None:
        assert answer == "vLLM's" and not calls
    else:
        assert (
            answer is output
            and len(calls) == 1
            and calls[0][2:] == ("cache", "table", LENGTHS, 0.5, (1, "led", calls[0][1]))
        )
        assert (
            [len(x) for x in calls[0][:2]] == [128, 128]
            and calls[0][0].data_ptr() == output.data_ptr()
            and calls[0][1].data_ptr() == query.data_ptr()
        )
        layer.forward(
            None, query, None, None, "another cache", given, output
        )  # the next layer of the same forward pass
        layer.forward(
            None, query, None, None, "cache", SimpleNamespace(**{**vars(DECODING), **metadata}), output
        )  # the first of the next
        assert [call[-1][0] for call in calls] == [1, 1, 2], "found once a forward pass"
        layer.forward(
            None, query[:, :8], None, None, "cache", given, output
        )  # one of fewer heads, which vLLM may count to the same group
        assert calls[-1][-1][0] == 3
        assert len(plans[0][0]) == 128 and plans[0][1:] == ("cache", "table", LENGTHS)


@pytest.mark.parametrize("most", [1, 5, 100, 256, 512, 700, 1024])
def test_graphs_are_captured_up_to_the_largest_batch_and_close_enough(most):
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    assert all(larger - smaller <= max(smaller / 2, 8) for smaller, larger in zip(sizes, sizes[1:])) and len(sizes) < 30
