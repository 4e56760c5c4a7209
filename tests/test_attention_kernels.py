"""The backward of packed attention in Triton's interpreter, against autograd of plain attention with an explicit mask."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from fast import attention_kernels

INTERPRETED = """
import sys
sys.path[:0] = [{root!r}]
import torch
from fast import attention_kernels

torch.manual_seed(0)
boundaries = lambda sizes: torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)

def check(own, prompts, responses, heads, kv_heads, size, tiles, spread=False):
    "own: lengths of sequences; or lengths of prompts, and of each prompt's responses."
    if prompts:
        own = [*prompts, *sum(responses, [])]
    tokens, n = sum(own), sum(prompts)
    mask, at = torch.zeros(tokens, tokens, dtype=torch.bool), 0
    for length in own:
        mask[at : at + length, at : at + length] = torch.ones(length, length, dtype=torch.bool).tril()
        at += length
    first, at = 0, n
    for prompt, lengths in zip(prompts, responses):
        mask[at : at + sum(lengths), first : first + prompt] = True
        first, at = first + prompt, at + sum(lengths)
    q, k, v, grad = (torch.randn(tokens, h, size) for h in (heads, kv_heads, kv_heads, heads))
    for x in (q, k, v):
        x.requires_grad_()
    group = heads // kv_heads
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * 0.3
    scores = scores.masked_fill(~mask, -torch.inf)
    out, lse = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1)), scores.logsumexp(-1)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    if spread:  # as the model has them: heads before tokens in memory, and numbers between
        q, k, out, grad = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, out, grad))
        v, lse = torch.cat([v, v + torch.nan], 1)[:, :kv_heads], torch.cat([lse, lse + torch.nan], 1)[:, :tokens]
    given = [x.detach() for x in (grad, q, k, v, out, lse)]
    if prompts:
        of_prompts = [sum(lengths) for lengths in responses]
        sizes = boundaries(own), boundaries(of_prompts), boundaries(prompts), n
    else:
        sizes = *[boundaries(own)] * 3, 0
    ours = attention_kernels.flash_backward(*given, *sizes, 0.3, tiles)
    for name, one, other in zip(("dq", "dk", "dv"), ours, expected):
        assert one.is_contiguous() and one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text: f"{{name}} of {{own}}, {{prompts}}, {{responses}}, {{heads}}, {{kv_heads}}: {{text}}")

def tiles(m, n, m2, n2):
    return dict(queries=(m, n, 4, 2, None), keys=(m2, n2, 4, 2))

small, other, uneven, large = tiles(32, 16, 16, 32), tiles(64, 32, 32, 16), tiles(64, 32, 32, 64), tiles(128, 64, 64, 128)
check([1], [], [], 1, 1, 16, small)
check([33], [], [], 2, 1, 16, small)
check([130], [], [], 2, 1, 32, large)
for heads, kv_heads, given in [(1, 1, other), (4, 2, uneven), (3, 1, large)]:  # groups of 1, 2 and 3
    check([1, 5, 64, 65, 130], [], [], heads, kv_heads, 16, given, spread=heads == 4)
for heads, kv_heads, given in [(2, 2, small), (2, 1, other), (6, 2, uneven)]:
    check([], [3, 70], [[30, 1, 65], [40, 7]], heads, kv_heads, 16, given, spread=heads == 6)
check([], [64], [[64]], 2, 1, 16, small)
check([], [3, 70, 16], [[5], [64, 33, 1], [32, 32]], 4, 2, 16, small)
check([], [1, 2, 40], [[1], [90], [2, 3]], 6, 2, 16, other)
check([1] * 130 + [20, 3], [], [], 1, 1, 16, small)  # more sequences than are looked up at a time
"""


def test_backward_gives_what_autograd_does():
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "served, change",
    [
        (True, {}),
        (True, {"heads": 1024, "kv_heads": 16}),
        (False, {"is_cuda": False}),
        (False, {"dtype": torch.float32}),
        (False, {"dtype": torch.float16}),
        (False, {"size": 64}),
        (False, {"size": 256}),
        (False, {"heads": 130, "kv_heads": 2}),
        (False, {"capability": (10, 0)}),
        (False, {"capability": (8, 0)}),
        (False, {"tokens": 2**22}),
        (False, {"num_seqs": 2**16}),
    ],
)
def test_backward_serves_what_it_was_written_for(monkeypatch, served, change):
    """And leaves the rest to FlashAttention 2."""
    given = SimpleNamespace(
        **(
            {
                "is_cuda": True,
                "dtype": torch.bfloat16,
                "size": 128,
                "heads": 16,
                "kv_heads": 8,
                "capability": (9, 0),
                "tokens": 20000,
                "num_seqs": 40,
            }
            | change
        )
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given.capability)
    q, k = (
        SimpleNamespace(
            is_cuda=given.is_cuda, dtype=given.dtype, device="cuda", size=(given.tokens, heads, given.size).__getitem__
        )
        for heads in (given.heads, given.kv_heads)
    )
    assert attention_kernels.serves(q, k, given.num_seqs) == served
