"""The nouns of a step, Task -> Trajectory -> Batch, and the three ways to move them: gather, pack, collate.

Letters, the same in every file: P prompts · G sessions a prompt · L tokens of a trajectory · T tokens of a packed batch
(or the padded length in [P, G, T]) · S sequences in a batch · V vocabulary. Index t is about token t everywhere: the
log-prob at t is that of token t.
"""

import heapq
import math
import uuid
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# The per-token float tensors of a trajectory, each [L]. A fork that adds one adds a field to Trajectory and its name
# here: look/ then traces, shows and replays it. If a loss reads it, a field of the same name in Batch as well: collate
# fills it.
PER_TOKEN = ("token_level_rewards", "old_logprobs", "ref_logprobs", "advantages")


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
        advantages        0    0    0    0   0.7    0  0.7  0.7"""

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
    # The policy's last turn as text: what rules judge, so that no tool's result is taken for an answer.
    answer: str = ""
    score: float = math.nan  # NaN: could not be scored; not the same as 0
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

    def _append(self, tokens: list[int], mask: int, logprobs: list[float]) -> None:
        self.tokens.extend(tokens)
        self.response_mask.extend([mask] * len(tokens))
        self.rollout_logprobs.extend(logprobs)

    @property
    def key(self) -> str:
        return f"{self.uid}_{self.session_id}_{self.index}"

    @property
    def scored(self) -> bool:
        """Whether the score is a number. NaN stands for: could not be scored."""
        return not math.isnan(self.score)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one; all when none was sampled."""
        return self.response_mask.index(1) if 1 in self.response_mask else len(self.tokens)

    @property
    def response_length(self) -> int:
        """Sampled tokens."""
        return sum(self.response_mask)

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the policy's last turn. ValueError when it never acted."""
        observed_after = self.response_mask[::-1].index(1)
        end = len(self.tokens) - observed_after
        start = end
        while start > 0 and self.response_mask[start - 1] == 1:
            start -= 1
        return self.tokens[start:end]


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
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    shared: Any = None  # fast.prompts.Shared, where the model computes shared prompts once

    @property
    def num_seqs(self) -> int:
        return len(self.cu_seqlens) - 1


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def prompt_uid(*key: Any) -> str:
    """UUID of a prompt in a step, from what names it (run seed, step, place). The same after a restart, another one in
    every other step."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, repr(key)))


def rank_share(items: list, ranks: int = 1) -> tuple[int, list]:
    """Where this rank's contiguous part of `items` starts, and the part; `ranks` neighbours share one. The parts in
    rank order are the whole, in order."""
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank() // ranks, dist.get_world_size() // ranks
    first = rank * len(items) // world_size
    return first, items[first : (rank + 1) * len(items) // world_size]


def gather(items: list) -> list:
    """Every rank's list, end to end in rank order, on every rank. With `rank_share` this is submission order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return items
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, items)
    return [item for share in shares for item in share]


def group_by_prompt(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories of one uid together, both in order of first appearance."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.uid, []).append(trajectory)
    return list(groups.values())


def final_outputs(group: list[Trajectory]) -> list[Trajectory]:
    """Of each session of a prompt the output with the largest index: it stands for the session. Sessions stand in the
    order of their first outputs in the group."""
    finals: dict[int, Trajectory] = {}
    for trajectory in sorted(group, key=lambda t: t.index):
        finals[trajectory.session_id] = trajectory
    return list(finals.values())


def teaches(scores: list[float]) -> bool:
    """Whether a group's scores differ. When all are equal there is nothing to compare, and nothing to learn."""
    return any(score != scores[0] for score in scores)


def group_kind(group: list[Trajectory]) -> str:
    """informative: its scores differ; otherwise solved (all equal and positive) or failed (the rest)."""
    scores = [t.score for t in final_outputs(group) if t.scored]
    if teaches(scores):
        return "informative"
    return "solved" if scores and scores[0] > 0 else "failed"


Plan = list[list[list[int]]]  # [rank][micro-batch] -> indices of sequences


def pack(lengths: list[int], num_ranks: int, max_tokens: int | None, max_rows: int | None = None) -> Plan:
    """Spread sequences over ranks and micro-batches: `[rank][micro-batch] -> indices`.

    Every rank gets the same number of micro-batches, largest first, of at most max_tokens tokens (longest sequence
    first to the rank with the fewest, so that all take equally long), or of max_rows sequences when max_tokens is None.
    Some may be empty. ValueError when one sequence is longer than max_tokens."""
    if max_tokens is None:
        assert max_rows is not None
        return _pack_rows(lengths, num_ranks, max_rows)
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a trajectory has {longest} tokens, more than the {max_tokens} that a micro-batch may hold "
            "(actor.ppo_max_token_len_per_gpu)"
        )
    rounds = max(1, ceil_div(sum(lengths), max_tokens * num_ranks))
    plan = _fill_ranks(lengths, num_ranks, rounds, max_tokens)
    while plan is None:
        rounds += 1
        plan = _fill_ranks(lengths, num_ranks, rounds, max_tokens)
    return plan


def _pack_rows(lengths: list[int], num_ranks: int, max_rows: int) -> Plan:
    """Micro-batches of at most max_rows sequences, dealt largest first, back and forth: ranks 0 1 2 2 1 0 0 1 ..."""
    num_bins = num_ranks * max(1, ceil_div(len(lengths), max_rows * num_ranks))
    bins = [list(range(i, len(lengths), num_bins)) for i in range(num_bins)]
    bins.sort(key=lambda indices: sum(lengths[i] for i in indices), reverse=True)
    plan: Plan = [[] for _ in range(num_ranks)]
    for i, indices in enumerate(bins):
        lap, seat = divmod(i, num_ranks)
        is_forth = lap % 2 == 0
        plan[seat if is_forth else num_ranks - 1 - seat].append(indices)
    return plan


def _fill_ranks(lengths: list[int], num_ranks: int, rounds: int, max_tokens: int) -> Plan | None:
    """A plan of `rounds` micro-batches a rank, None when not all sequences fit. Each sequence, longest first, goes to
    the rank with the fewest tokens whose emptiest micro-batch has room for it."""
    # [rank]: a heap of (tokens in the micro-batch, indices), the emptiest on top
    micro_batches: list[list[tuple[int, list[int]]]] = [[(0, []) for _ in range(rounds)] for _ in range(num_ranks)]
    ranks = [(0, rank) for rank in range(num_ranks)]  # a heap of (tokens of the rank, rank), the fewest on top
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        tried = []
        placed = False
        while ranks and not placed:
            tokens, rank = heapq.heappop(ranks)
            held, indices = micro_batches[rank][0]
            if held + lengths[i] <= max_tokens:
                heapq.heapreplace(micro_batches[rank], (held + lengths[i], [*indices, i]))
                tokens += lengths[i]
                placed = True
            tried.append((tokens, rank))
        if not placed:
            return None
        for entry in tried:
            heapq.heappush(ranks, entry)
    return [[indices for _, indices in sorted(of_rank, reverse=True)] for of_rank in micro_batches]


def token_imbalance(plans: list[tuple[list[Trajectory], Plan]]) -> float:
    """How many more tokens than the mean the fullest rank has, as a share; the others wait for it. Over the updates of
    a step, of each its mini-batch and its plan."""
    waited_for, total = 0, 0
    for mini_batch, plan in plans:
        tokens = [sum(len(mini_batch[i].tokens) for indices in rank for i in indices) for rank in plan]  # [rank]
        waited_for += max(tokens)
        total += sum(tokens)
        num_ranks = len(plan)
    return waited_for * num_ranks / total - 1


def flat(lists: list[list], dtype: type) -> torch.Tensor:
    """Lists of numbers end to end, as a tensor of numpy's dtype. torch.tensor takes four times as long."""
    count = sum(len(numbers) for numbers in lists)
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), dtype, count))


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy to the device; to a GPU asynchronously, from pinned memory."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def collate(trajectories: list[Trajectory], device: torch.device | str = "cpu") -> Batch:
    """Pack trajectories end to end. A tensor that any of them lacks is None in the batch. loss_mask alone is never
    None: without one it is the response_mask."""
    lengths = torch.tensor([len(t.tokens) for t in trajectories])  # [S]
    seq_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T]
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])  # [S+1]
    response_mask = flat([t.response_mask for t in trajectories], np.bool_)  # [T]
    loss_mask = _end_to_end([t.loss_mask for t in trajectories])
    tensors = {
        "tokens": flat([t.tokens for t in trajectories], np.int64),
        "position_ids": torch.arange(len(seq_ids)) - cu_seqlens[seq_ids],
        "seq_ids": seq_ids,
        "cu_seqlens": cu_seqlens.to(torch.int32),
        "sampled": response_mask.nonzero()[:, 0],
        "response_mask": response_mask,
        "loss_mask": response_mask if loss_mask is None else loss_mask,
        "rollout_logprobs": flat([t.rollout_logprobs for t in trajectories], np.float32),
    }
    names = {of_batch.name for of_batch in fields(Batch)}
    for name in [name for name in PER_TOKEN if name in names]:
        values = _end_to_end([getattr(t, name) for t in trajectories])
        if values is not None:
            tensors[name] = values.float()
    on_device = {name: send(tensor, device) for name, tensor in tensors.items()}
    return Batch(max_seqlen=int(lengths.max()), **on_device)


def _end_to_end(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    """[T] of one [L] a trajectory; None when one is missing."""
    return None if any(tensor is None for tensor in tensors) else torch.cat(tensors)
