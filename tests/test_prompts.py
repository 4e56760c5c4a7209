"""Prompts that are computed once for all of their sessions: the same numbers as a copy for each."""

import dataclasses
import itertools

import pytest
import torch
from test_actor import LOSS

from actor import collate_for, plan_micro_batches, share_logprobs, speed_up
from batch import Task, Trajectory, collate
from fast import attention
from fast.attention import flash_attention, use_fast_attention
from fast.prompts import pack_shared, prompt_groups, share
from model import Scores, forward, load_model, padded_attention

GROUPS = [
    (5, [3, 1, 4]),
    (1, [2]),
    (7, [6, 2]),
    (3, [(2, 2, 3)]),
]  # tokens of a prompt, and of each session's response; the last has a tool result between two turns


def sessions(num_tokens: int, seed=0) -> list[Trajectory]:
    """In an order in which groups are not together."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(4, num_tokens, (n,), generator=random).tolist()  # noqa: E731
    groups = []
    for p, (prompt, responses) in enumerate(GROUPS):
        tokens, groups = draw(prompt), [*groups, []]
        for s, response in enumerate(responses):
            t = Trajectory(Task("", "", ""), uid=str(p), session_id=s, score=1.0)
            t.observe(tokens)
            first, observed, second = response if isinstance(response, tuple) else (response, 0, 0)
            t.act(draw(first), [-1.0] * first)
            if second:
                t.observe(draw(observed))
                t.act(draw(second), [-1.0] * second)
            t.loss_mask = torch.tensor(t.response_mask, dtype=torch.bool)
            t.advantages = torch.randn(len(t.tokens), generator=random)
            groups[-1].append(t)
    return [t for turn in itertools.zip_longest(*groups) for t in turn if t]


def test_a_prompt_stands_once_and_every_token_is_found_again():
    trajectories = sessions(100)
    batch, shared = collate(trajectories), share(trajectories)
    assert shared.num_prompt_tokens == 5 + 1 + 7 + 3 and len(shared.index) == shared.num_prompt_tokens + 8 + 2 + 8 + 7
    row = batch.tokens[shared.index]
    assert torch.equal(row[shared.places], batch.tokens) and torch.equal(
        batch.position_ids[shared.index][shared.places], batch.position_ids
    )
    assert torch.equal(shared.places[shared.index], torch.arange(len(row)))
    assert not batch.response_mask[shared.index[: shared.num_prompt_tokens]].any()
    assert shared.cu_prompts.tolist() == [0, 5, 6, 13, 16] and shared.cu_responses.tolist() == [0, 8, 10, 18, 25]
    assert shared.cu_own.tolist() == [0, 5, 6, 13, 16, 19, 20, 24, 26, 32, 34, 41]
    assert (shared.longest_own, shared.longest_responses, shared.longest_prompt) == (7, 8, 7)


def test_prompts_that_differ_in_one_token_are_not_shared():
    trajectories = sessions(100)
    trajectories[0].tokens[4] += 1
    assert [0] in prompt_groups(trajectories) and share(trajectories[1:4]) is None


def test_log_probs_entropies_and_gradients_are_those_of_prompts_of_their_own(tiny, tokenizer):
    trajectories, results = sessions(len(tokenizer)), []
    for shared in (None, share(trajectories)):
        model = load_model(str(tiny / "model"), torch.float32, len(tokenizer), 0.7)
        if shared:
            use_fast_attention(model, flash=False, kernels=False)
        logprobs, entropy = forward(model, dataclasses.replace(collate(trajectories), shared=shared))
        (logprobs * torch.cat([t.advantages for t in trajectories]) + entropy).sum().backward()
        results.append([logprobs, entropy, *(p.grad for p in model.parameters())])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [13, 20, 100])
@pytest.mark.parametrize("ranks", [1, 3])
def test_micro_batches_hold_what_the_model_sees_and_keep_sessions_together(budget, ranks):
    trajectories = sessions(100)
    plan = pack_shared(trajectories, ranks, budget)
    micro_batches = [micro_batch for rank in plan for micro_batch in rank]
    assert sorted(i for micro_batch in micro_batches for i in micro_batch) == list(range(len(trajectories)))
    for micro_batch in filter(None, micro_batches):
        prompts = {(t.uid, t.prompt_length) for t in (trajectories[i] for i in micro_batch)}
        assert (
            sum(length for _, length in prompts)
            + sum(len(trajectories[i].tokens) - trajectories[i].prompt_length for i in micro_batch)
            <= budget
        )
    if (budget, ranks) == (20, 1):  # each group fits, and none is cut
        assert all(
            {t.uid for t in (trajectories[i] for i in a)}.isdisjoint({trajectories[i].uid for i in b})
            for a, b in itertools.combinations(micro_batches, 2)
        )
    with pytest.raises(ValueError, match="actor.ppo_max_token_len_per_gpu"):
        pack_shared(trajectories, ranks, 9)


def test_few_prompts_are_cut_where_ranks_would_idle():
    """2 prompts of 6 sessions on 4 ranks: 640 tokens of responses and each prompt twice, not two ranks with all."""
    trajectories = []
    for p, s in itertools.product(range(2), range(6)):
        t = Trajectory(Task("", "", ""), uid=str(p), session_id=s)
        t.observe([p + 4] * 20)
        t.act([5] * 50, [-1.0] * 50)
        trajectories.append(t)
    for ranks, expected in ((1, [12]), (2, [6, 6]), (4, [3, 3, 3, 3])):
        assert [len(indices) for rank in pack_shared(trajectories, ranks, 10_000) for indices in rank] == expected


def test_an_update_is_the_same_with_shared_prompts(actor, tokenizer):
    updates = []
    for on in (False, True):
        actor.cfg = dataclasses.replace(actor.cfg, share_prompts=on, ppo_max_token_len_per_gpu=24)
        speed_up(actor.model, actor.cfg, actor.device)
        trajectories = sessions(len(tokenizer))
        actor.start_step()
        actor.optimizer.zero_grad()
        update = actor.backward(trajectories, LOSS, keep_logprobs=True)
        updates.append(
            (
                [p.grad.to_local().clone() for p in actor.model.parameters()],
                update.sums["actor/entropy"][0],
                share_logprobs(update.computed, [len(t.tokens) for t in trajectories], "cpu"),
                actor.score(trajectories),
            )
        )
        assert len(plan_micro_batches(trajectories, actor.cfg, 24)[0]) == (2 if on else 3)
        assert (collate_for(trajectories, actor.cfg, "cpu").shared is not None) == on
    for one, other in zip(*updates):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def varlen(q, k, cu_q, cu_k, causal: bool, scale: float):
    """[H, Tq, Tk] scores of flash attention, -inf where a query does not look; grouped heads."""
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seq_q, seq_k = (torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff()) for cu in (cu_q, cu_k))
    hidden = seq_q[:, None] != seq_k[None]
    return scores.masked_fill(
        hidden | (torch.arange(len(q))[:, None] < torch.arange(len(k))[None]) if causal else hidden, -torch.inf
    )


def reference_forward(q, k, v, cu_q, cu_k, longest_q, longest_k, causal, scale, left=-1):
    assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    scores = varlen(q, k, cu_q, cu_k, causal, scale)
    v = v.repeat_interleave(q.size(1) // v.size(1), 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def reference_backward(grad, q, k, v, out, lse, cu_q, cu_k, longest_q, longest_k, causal, scale, left=-1):
    """As flash attention computes it: from `out` and `lse` as they are given, not its own (Dao 2023, arXiv:2307.08691)."""
    copies = q.size(1) // k.size(1)
    keys, values = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    p = (varlen(q, k, cu_q, cu_k, causal, scale) - lse[:, :, None]).exp()
    ds = p * (torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).T[:, :, None]) * scale
    of_heads = lambda x: x.view(len(x), k.size(1), copies, -1).sum(2)  # noqa: E731
    return (
        torch.einsum("hqk,khd->qhd", ds, keys),
        of_heads(torch.einsum("hqk,qhd->khd", ds, q)),
        of_heads(torch.einsum("hqk,qhd->khd", p, grad)),
    )


def test_attention_to_a_shared_prompt_and_its_gradients(monkeypatch):
    """The two attentions that a GPU runs, with plain torch in place of its kernels, against one attention with copies."""
    monkeypatch.setattr(attention, "flash_forward", reference_forward)
    monkeypatch.setattr(attention, "flash_backward", reference_backward)
    trajectories = sessions(100)
    batch, shared = collate(trajectories), share(trajectories)
    random = torch.Generator().manual_seed(1)
    draw = lambda heads: torch.randn(len(shared.index), heads, 8, generator=random, dtype=torch.float64)  # noqa: E731
    weights, tensors = draw(4), [draw(4), draw(2), draw(2)]
    sizes = shared.num_prompt_tokens, shared.longest_own, shared.longest_responses, shared.longest_prompt
    args = (
        tensors[0].float().requires_grad_(),
        *(x.float().requires_grad_() for x in tensors[1:]),
        shared.cu_own,
        shared.cu_responses,
        shared.cu_prompts,
        *sizes,
        0.3,
        -1,
    )
    torch.library.opcheck(flash_attention, args)  # what torch.compile is told of its shapes and gradients is so
    results = []
    for together in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        if together:
            out = flash_attention(q, k, v, shared.cu_own, shared.cu_responses, shared.cu_prompts, *sizes, 0.3, -1)[0]
        else:
            out = padded_attention(*(x[shared.places] for x in (q, k, v)), Scores(0.3, None, None), batch)[shared.index]
        (out * weights).sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
