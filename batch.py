"""The nouns of a step, Task -> Trajectory -> Batch, and the three ways to move them: gather, pack, collate.

Letters, the same in every file: P prompts · G sessions a prompt · L tokens of a trajectory · T tokens of a packed batch
(or the padded length in [P, G, T]) · S sequences in a batch · V vocabulary. Index t is about token t everywhere: the
log-prob at t is that of token t.
"""

import heapq
import uuid
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@dataclass
class Task:
    """A dataset row: what the policy is asked, and what its answer is judged by."""

    messages: list[dict] | str  # chat messages, or a text that is used as it is
    data_source: str
    ground_truth: Any
    extra_info: dict = field(default_factory=dict)
    agent_name: str | None = None
    index: int = 0  # row number in its split


@dataclass
class Trajectory:
    """One append-only sequence: exactly the tokens that the policy saw and sampled.

    Example: the prompt "2+3=", a sampled call of a tool, its result, and the sampled answer with its end-of-turn:

        tokens            2    +    3    =  call  [5]    5  eos
        response_mask     0    0    0    0     1    0    1    1
        rollout_logprobs  0    0    0    0  -0.2    0 -0.1 -0.0
        advantages        0    0    0    0   0.7    0  0.7  0.7
    """

    task: Task
    uid: str = ""  # of the prompt in this step
    session_id: int = 0
    index: int = 0  # of this output in its session
    tokens: list[int] = field(default_factory=list)  # [L]
    response_mask: list[int] = field(default_factory=list)  # [L] 1 where the policy sampled the token
    rollout_logprobs: list[float] = field(default_factory=list)  # [L] vLLM's, of logits / temperature
    finish_reason: str = ""  # vLLM's, of the last turn: stop | length
    weight_version: int = -1  # optimizer state that sampled it: the number of training steps done
    num_turns: int = 0
    response: str = ""  # all after the prompt as text, without special tokens
    answer: str = (
        ""  # the policy's last turn as text: what rules judge, so that a tool's result is not taken for an answer
    )
    score: float = float("nan")  # NaN: could not be scored; not the same as 0
    baseline: float = 0.0  # the reward of a greedy session of the same prompt (remax)
    score_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # the agent's own, averaged in the log
    error: str | None = None  # traceback of the reward that failed
    loss_mask: torch.Tensor | None = None  # [L] bool, response_mask less what is left out of the loss
    token_level_rewards: torch.Tensor | None = None  # [L] the score at the last sampled token, less KL when asked for
    advantages: torch.Tensor | None = None  # [L]
    old_logprobs: torch.Tensor | None = None  # [L] the actor's, before this step's updates
    ref_logprobs: torch.Tensor | None = None  # [L] the reference's

    def observe(self, tokens: list[int]) -> None:
        """Append tokens that the policy reads: prompts, tool results, separators."""
        self._append(tokens, 0, [0.0] * len(tokens))

    def act(self, tokens: list[int], logprobs: list[float]) -> None:
        """Append tokens that the policy sampled in one turn, with the log-probs it sampled them at."""
        assert len(tokens) == len(logprobs), f"{len(tokens)} tokens came with {len(logprobs)} log-probs"
        self._append(tokens, 1, logprobs)
        self.num_turns += 1

    def _append(self, tokens, mask, logprobs):
        self.tokens.extend(tokens)
        self.response_mask.extend([mask] * len(tokens))
        self.rollout_logprobs.extend(logprobs)

    @property
    def key(self) -> str:
        return f"{self.uid}_{self.session_id}_{self.index}"

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one."""
        return self.response_mask.index(1) if 1 in self.response_mask else len(self.tokens)

    @property
    def response_length(self) -> int:
        return sum(self.response_mask)

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the policy's last turn."""
        end = len(self.tokens) - self.response_mask[::-1].index(1)
        return self.tokens[end - [*self.response_mask[:end][::-1], 0].index(0) : end]


@dataclass
class Batch:
    """Trajectories end to end in one row for one forward, each attending only to itself; never padded."""

    tokens: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, from 0 at every sequence
    seq_ids: torch.Tensor  # [T] int64, 0..S-1
    cu_seqlens: torch.Tensor  # [S+1] int32, where each sequence starts, and T
    max_seqlen: int
    sampled: torch.Tensor  # [K] int64, where response_mask is 1
    response_mask: torch.Tensor  # [T] bool
    loss_mask: torch.Tensor  # [T] bool
    rollout_logprobs: torch.Tensor  # [T] float32, as are the next three
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor | None
    shared: Any = None  # prompts.Shared, where the model computes shared prompts once

    @property
    def num_seqs(self) -> int:
        return len(self.cu_seqlens) - 1


def prompt_uid(*key) -> str:
    """UUID of a prompt in a step, from what names it (run seed, step, place): the same after a restart, another one in every other step."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, repr(key)))


def rank_share(items: list, ranks: int = 1) -> tuple[int, list]:
    """The contiguous part of `items` of this rank, or of the `ranks` that share one, and where it starts: parts in rank order are the whole, in order."""
    rank, world_size = (dist.get_rank() // ranks, dist.get_world_size() // ranks) if dist.is_initialized() else (0, 1)
    first = rank * len(items) // world_size
    return first, items[first : (rank + 1) * len(items) // world_size]


def gather(items: list) -> list:
    """Every rank's list, end to end in rank order, on every rank. With `rank_share` this is submission order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, items)
    return [item for share in shares for item in share]


def group_by_prompt(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories of one uid together, both in order of first appearance."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.uid, []).append(trajectory)
    return list(groups.values())


def group_kind(group: list[Trajectory]) -> str:
    """informative: its scores differ; otherwise solved (all equal and positive) or failed (the rest)."""
    finals = {
        t.session_id: t for t in sorted(group, key=lambda t: t.index)
    }.values()  # the last output stands for its session
    scores = [t.score for t in finals if t.score == t.score]
    if scores and min(scores) != max(scores):
        return "informative"
    return "solved" if scores and scores[0] > 0 else "failed"


def pack(
    lengths: list[int], num_ranks: int, max_tokens: int | None, max_rows: int | None = None
) -> list[list[list[int]]]:
    """Spread sequences over ranks and micro-batches: `[rank][micro-batch] -> indices`.

    Every rank gets the same number of micro-batches, largest first, of at most max_tokens tokens (longest sequence first to the rank
    with the fewest, so that all take equally long), or of max_rows sequences when max_tokens is None. Some may be empty.
    ValueError when one sequence is longer than max_tokens.
    """
    if max_tokens is not None:
        if lengths and max(lengths) > max_tokens:
            raise ValueError(
                f"a trajectory has {max(lengths)} tokens, more than the {max_tokens} that a micro-batch may hold (actor.ppo_max_token_len_per_gpu)"
            )
        rounds = max(1, -(-sum(lengths) // (max_tokens * num_ranks)))
        while (ranks := _fill_ranks(lengths, num_ranks, rounds, max_tokens)) is None:
            rounds += 1
        return ranks
    num_bins = num_ranks * max(1, -(-len(lengths) // (max_rows * num_ranks)))
    bins = [list(range(i, len(lengths), num_bins)) for i in range(num_bins)]
    bins.sort(key=lambda indices: -sum(lengths[i] for i in indices))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for i, indices in enumerate(bins):  # deal largest first, back and forth: 0 1 2 2 1 0 0 1 2 ...
        lap, seat = divmod(i, num_ranks)
        ranks[seat if lap % 2 == 0 else num_ranks - 1 - seat].append(indices)
    return ranks


def _fill_ranks(lengths, num_ranks, rounds, max_tokens):
    """Each sequence, longest first, into the emptiest micro-batch of the rank with the fewest tokens that has room for it; None when none has."""
    micro_batches = [[(0, []) for _ in range(rounds)] for _ in range(num_ranks)]  # (tokens in it, indices)
    ranks = [(0, rank) for rank in range(num_ranks)]  # (tokens of it, rank), a heap
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        full = []
        while ranks:
            tokens, rank = heapq.heappop(ranks)
            held, indices = micro_batches[rank][0]
            if held + lengths[i] <= max_tokens:
                heapq.heapreplace(micro_batches[rank], (held + lengths[i], [*indices, i]))
                full.append((tokens + lengths[i], rank))
                break
            full.append((tokens, rank))
        else:
            return None
        for entry in full:
            heapq.heappush(ranks, entry)
    return [[indices for _, indices in sorted(rank, reverse=True)] for rank in micro_batches]


def token_imbalance(plans: list) -> float:
    """How many more tokens than the mean the fullest rank has, which the others wait for, as a share; over the plans of a step."""
    tokens = [
        [sum(len(mini_batch[i].tokens) for indices in rank for i in indices) for rank in plan]
        for mini_batch, plan in plans
    ]  # [update][rank]
    return sum(map(max, tokens)) * len(tokens[0]) / sum(map(sum, tokens)) - 1


def flat(lists: list[list], dtype: type) -> torch.Tensor:
    """Lists of numbers end to end, as a tensor of numpy's dtype. torch.tensor takes four times as long."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), dtype, sum(map(len, lists))))


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """To a GPU without waiting for what it is at: from pinned memory."""
    return (
        tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor.to(device)
    )


def collate(trajectories: list[Trajectory], device: torch.device | str = "cpu") -> Batch:
    """Pack trajectories end to end. A field that any of them lacks is None in the batch, except loss_mask."""
    lengths = torch.tensor([len(t.tokens) for t in trajectories])  # [S]
    seq_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T]
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])  # [S+1]
    response_mask = flat([t.response_mask for t in trajectories], np.bool_)  # [T]
    tensors = {
        "tokens": flat([t.tokens for t in trajectories], np.int64),
        "position_ids": torch.arange(len(seq_ids)) - cu_seqlens[seq_ids],
        "seq_ids": seq_ids,
        "cu_seqlens": cu_seqlens.to(torch.int32),
        "sampled": response_mask.nonzero()[:, 0],
        "response_mask": response_mask,
        "loss_mask": response_mask
        if any(t.loss_mask is None for t in trajectories)
        else torch.cat([t.loss_mask for t in trajectories]),
        "rollout_logprobs": flat([t.rollout_logprobs for t in trajectories], np.float32),
    }
    values = {name: [getattr(t, name) for t in trajectories] for name in ("old_logprobs", "ref_logprobs", "advantages")}
    tensors |= {
        name: None if any(v is None for v in parts) else torch.cat(parts).float() for name, parts in values.items()
    }
    return Batch(
        max_seqlen=int(lengths.max()),
        **{name: None if tensor is None else send(tensor, device) for name, tensor in tensors.items()},
    )
