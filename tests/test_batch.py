import random
import uuid
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from fakes import make_trajectory

import batch
from batch import (
    PER_TOKEN,
    Task,
    Trajectory,
    ceil_div,
    collate,
    final_outputs,
    gather,
    group_by_prompt,
    pack,
    prompt_uid,
    rank_share,
    teaches,
)


def test_observe_and_act_write_the_docstrings_example():
    t = Trajectory(Task("2+3=", "test", "5"))
    t.observe([2, 11, 3, 12])
    t.act([13], [-0.2])
    t.observe([14])
    t.act([5, 1], [-0.1, -0.0])
    assert t.tokens == [2, 11, 3, 12, 13, 14, 5, 1]
    assert t.response_mask == [0, 0, 0, 0, 1, 0, 1, 1]
    assert t.rollout_logprobs == [0, 0, 0, 0, -0.2, 0, -0.1, 0]
    assert (t.num_turns, t.prompt_length, t.response_length) == (2, 4, 3)


def test_act_wants_a_logprob_for_every_token():
    with pytest.raises(AssertionError, match="2 tokens came with 1 log-probs"):
        Trajectory(Task("", "test", "")).act([1, 2], [-0.1])


def test_a_trajectory_that_never_acted_is_all_prompt():
    t = make_trajectory(prompt=4, response=())
    assert (t.prompt_length, t.response_length) == (4, 0)


def test_trajectories_share_no_lists():
    a, b = Trajectory(Task("", "test", "")), Trajectory(Task("", "test", ""))
    a.observe([1])
    assert b.tokens == b.response_mask == b.rollout_logprobs == []


def test_key_names_prompt_session_and_output():
    assert make_trajectory(uid="u", session_id=3, index=2).key == "u_3_2"


def test_prompt_uid_is_the_same_after_a_restart():
    assert prompt_uid(0, 7, 3) == "00d027bc-b49f-5187-b8d8-9db8e5117924"  # written down: another process computed it
    assert str(uuid.UUID(prompt_uid(0, 7, 3))) == prompt_uid(0, 7, 3)


def test_prompt_uids_differ_in_every_part_and_do_not_run_together():
    keys = [(seed, step, place) for seed in range(3) for step in range(12) for place in range(12)]
    assert len({prompt_uid(*key) for key in keys}) == len(keys)  # (1, 11) is not (11, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("size", [0, 1, 8, 10, 13])
def test_rank_shares_are_the_whole_in_order_and_even(monkeypatch, world_size, size):
    items, shares = list(range(size)), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        first, share = rank_share(items)
        assert first == sum(len(s) for s in shares), "where the share starts"
        shares.append(share)
    assert sum(shares, []) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_without_processes_the_share_is_everything_and_gather_changes_nothing(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert rank_share(["x", "y"]) == (0, ["x", "y"])
    assert gather(["x", "y"]) == ["x", "y"]


def test_gather_puts_shares_end_to_end_in_rank_order(monkeypatch):
    def all_gather_object(out, mine):
        out[:] = [mine, ["c"], [], ["d", "e"]]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    assert gather(["a", "b"]) == ["a", "b", "c", "d", "e"]


def test_groups_and_their_members_are_in_order_of_first_appearance():
    uids = ["b", "a", "b", "c", "a", "b"]
    groups = group_by_prompt([make_trajectory(uid=uid, session_id=i) for i, uid in enumerate(uids)])
    assert [[t.session_id for t in group] for group in groups] == [[0, 2, 5], [1, 4], [3]]


def test_the_last_output_of_each_session_stands_for_it():
    outputs = [(1, 0), (0, 2), (1, 1), (0, 0), (2, 0), (0, 1)]  # session, index
    group = [make_trajectory(session_id=session_id, index=index) for session_id, index in outputs]
    assert [(t.session_id, t.index) for t in final_outputs(group)] == [(1, 1), (0, 2), (2, 0)]


@pytest.mark.parametrize(
    "scores, yes", [([], False), ([1.0], False), ([0.9] * 3, False), ([0.0, -0.0], False), ([0.9, 0.9, 1.0], True)]
)
def test_a_group_teaches_when_its_scores_differ(scores, yes):
    assert teaches(scores) == yes


def test_a_trajectory_is_scored_when_its_score_is_a_number():
    assert make_trajectory(score=0.0).scored and not make_trajectory(score=float("nan")).scored
    assert not Trajectory(Task("", "test", "")).scored


def test_last_turn_is_what_the_policy_sampled_last():
    t = make_trajectory(prompt=2, response=(1, 1, 0, 1, 1, 1, 0))
    assert t.last_turn == [103, 104, 105]
    assert make_trajectory(prompt=2, response=(1, 1)).last_turn == [100, 101]


def test_ceil_div_rounds_up():
    assert [ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]


def random_packings():
    """Seeded cases of pack's arguments, small and large, most of them awkward."""
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.randint(1, rng.choice([8, 300, 2048])) for _ in range(rng.choice([0, 1, 2, 7, 33, 128]))]
        num_ranks = rng.choice([1, 2, 3, 8])
        if rng.random() < 0.3:
            yield lengths, num_ranks, None, rng.randint(1, 9)
        else:
            yield lengths, num_ranks, max(lengths, default=1) + rng.choice([0, 1, 50, 4096]), None


def test_pack_holds_its_promises_on_random_lengths():
    for lengths, num_ranks, max_tokens, max_rows in random_packings():
        case = f"pack({lengths}, {num_ranks}, {max_tokens}, {max_rows})"
        plan = pack(lengths, num_ranks, max_tokens, max_rows)
        assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(range(len(lengths))), (
            f"not every index exactly once: {case}"
        )
        assert len(plan) == num_ranks and len({len(rank) for rank in plan}) == 1, (
            f"ranks run different numbers of forwards: {case}"
        )
        assert len(plan[0]) >= 1, f"no forward at all: {case}"
        for micro_batch in (m for rank in plan for m in rank):
            if max_tokens is None:
                assert len(micro_batch) <= max_rows, f"too many rows: {case}"
            else:
                assert sum(lengths[i] for i in micro_batch) <= max_tokens, f"over the budget: {case}"


def test_pack_uses_no_more_forwards_than_needed():
    assert [len(rank) for rank in pack([10] * 16, 2, 40)] == [2, 2]  # 4 x 10 fill a micro-batch exactly
    assert [len(rank) for rank in pack([10] * 16, 2, None, 4)] == [2, 2]
    assert [len(rank) for rank in pack([10] * 17, 2, None, 4)] == [3, 3]
    # 18 tokens would fit into two of 10, three of 6 do not.
    assert [len(rank) for rank in pack([6, 6, 6], 1, 10)] == [3]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_pack_balances_ranks_in_every_round(num_ranks):
    """Ranks wait for each other in every forward: the slowest rank of each round counts."""
    for seed in range(10):
        rng = random.Random(seed)
        lengths = [rng.randint(64, 2048) for _ in range(512)]
        plan = pack(lengths, num_ranks, 16384)
        tokens = [[sum(lengths[i] for i in micro_batch) for micro_batch in rank] for rank in plan]  # [rank][round]
        waited_for = sum(max(one_round) for one_round in zip(*tokens))
        assert waited_for * num_ranks <= 1.01 * sum(lengths), (
            f"seed {seed}: {1 - sum(lengths) / (waited_for * num_ranks):.1%} of the time is spent waiting"
        )


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_seqs", [64, 128, 512])
@pytest.mark.parametrize("max_tokens", [2048, 16384])
def test_pack_gives_every_rank_as_many_tokens(num_ranks, num_seqs, max_tokens):
    """Within 5 % of the mean, for even and for long-tailed lengths, also where one long trajectory fills a micro-batch
    alone.
    """
    for seed in range(20):
        rng = random.Random(seed)
        even = [rng.randint(64, 2048) for _ in range(num_seqs)]
        tailed = [min(2048, 64 + int(rng.expovariate(1 / 300))) for _ in range(num_seqs)]
        for lengths in (even, tailed):
            tokens = [
                sum(lengths[i] for indices in rank for i in indices) for rank in pack(lengths, num_ranks, max_tokens)
            ]
            assert max(tokens) * num_ranks <= 1.05 * sum(tokens), f"seed {seed}: {tokens}"


def test_pack_deals_back_and_forth():
    """The largest micro-batches first, and no rank always before the other: 4 + 1 against 3 + 2 tokens."""
    assert pack([1, 2, 3, 4], 2, None, 1) == [[[3], [0]], [[2], [1]]]


def test_pack_is_a_function_of_its_arguments():
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(100)]  # with many ties
    assert pack(lengths, 4, 200) == pack(list(lengths), 4, 200)


@pytest.mark.parametrize("lengths", [[11], [3, 11, 3]])
def test_pack_names_the_knob_when_a_trajectory_is_longer_than_the_budget(lengths):
    assert pack([10, 10], 1, 10)
    with pytest.raises(ValueError, match=r"has 11 tokens, more than the 10 .*actor\.ppo_max_token_len_per_gpu"):
        pack(lengths, 1, 10)


def test_collate_puts_sequences_end_to_end():
    a = make_trajectory(
        prompt=2, response=(1, 0, 1), rollout=[-0.1, 0, -0.3], old=[1, 2, 3], ref=[4, 5, 6], advantages=[7, 8, 9]
    )
    b = make_trajectory(prompt=1, response=(1,), rollout=[-0.4], old=[10], ref=[11], advantages=[12])
    a.loss_mask, b.loss_mask = torch.tensor([0, 0, 1, 0, 0], dtype=torch.bool), torch.tensor([0, 1], dtype=torch.bool)
    batch = collate([a, b])
    assert batch.tokens.tolist() == [10, 11, 100, 101, 102, 10, 100]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.seq_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert (batch.max_seqlen, batch.num_seqs) == (5, 2)
    assert batch.response_mask.tolist() == [False, False, True, False, True, False, True]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, False, True]
    assert batch.rollout_logprobs.tolist() == torch.tensor([0, 0, -0.1, 0, -0.3, 0, -0.4]).tolist()
    assert batch.old_logprobs.tolist() == [0, 0, 1, 2, 3, 0, 10]
    assert batch.ref_logprobs.tolist() == [0, 0, 4, 5, 6, 0, 11]
    assert batch.advantages.tolist() == [0, 0, 7, 8, 9, 0, 12]
    assert (batch.tokens.dtype, batch.position_ids.dtype, batch.seq_ids.dtype, batch.cu_seqlens.dtype) == (
        torch.int64,
        torch.int64,
        torch.int64,
        torch.int32,
    )
    assert {batch.response_mask.dtype, batch.loss_mask.dtype} == {torch.bool}
    assert {
        batch.rollout_logprobs.dtype,
        batch.old_logprobs.dtype,
        batch.ref_logprobs.dtype,
        batch.advantages.dtype,
    } == {torch.float32}


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "advantages"])
def test_collate_leaves_a_field_out_when_one_trajectory_lacks_it(name):
    fields = {"old_logprobs", "ref_logprobs", "advantages"}
    trajectories = [make_trajectory(old=[1, 2, 3], ref=[1, 2, 3], advantages=[1, 2, 3]) for _ in range(3)]
    setattr(trajectories[1], name, None)
    batch = collate(trajectories)
    assert {field for field in fields if getattr(batch, field) is None} == {name}


def test_collate_fills_what_a_fork_adds(monkeypatch):
    """A name in PER_TOKEN and a field of both Trajectory and Batch: nothing else."""

    @dataclass
    class ForksBatch(batch.Batch):
        surprises: torch.Tensor | None = None

    monkeypatch.setattr(batch, "Batch", ForksBatch)
    monkeypatch.setattr(batch, "PER_TOKEN", (*PER_TOKEN, "surprises"))
    a, b = make_trajectory(prompt=1, response=(1,)), make_trajectory(prompt=1, response=(1,))
    a.surprises, b.surprises = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.0, 2.0])
    assert collate([a, b]).surprises.tolist() == [0, 1, 0, 2]


def test_collate_without_a_loss_mask_takes_the_response_mask():
    batch = collate([make_trajectory(response=(1, 0, 1)), make_trajectory(response=(1,))])
    assert (
        batch.loss_mask.tolist()
        == batch.response_mask.tolist()
        == [False, False, False, True, False, True, False, False, False, True]
    )


def test_collate_can_be_cut_apart_again():
    rng = random.Random(1)
    for _ in range(50):
        bits = [[rng.randint(0, 1) for _ in range(rng.randint(0, 9))] for _ in range(rng.randint(1, 6))]
        trajectories = [
            make_trajectory(prompt=rng.randint(1, 5), response=b, advantages=[rng.random() for _ in b]) for b in bits
        ]
        batch = collate(trajectories)
        for s, t in enumerate(trajectories):
            start, end = batch.cu_seqlens[s], batch.cu_seqlens[s + 1]
            assert batch.tokens[start:end].tolist() == t.tokens
            assert batch.position_ids[start:end].tolist() == list(range(len(t.tokens)))
            assert set(batch.seq_ids[start:end].tolist()) == {s}
            assert batch.response_mask[start:end].int().tolist() == t.response_mask
            assert torch.equal(batch.advantages[start:end], t.advantages)
        assert batch.cu_seqlens[-1] == len(batch.tokens) and batch.max_seqlen == max(
            len(t.tokens) for t in trajectories
        )
