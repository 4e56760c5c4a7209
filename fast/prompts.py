"""A prompt that several sessions of a micro-batch share is computed once (actor.share_prompts).

Exact, and G - 1 of G prompts less work. The model's row is then [prompt][prompt]...[response][response]..., and a
response attends to itself and to its prompt. Everything else keeps the row of `batch.collate`, where each trajectory
has its prompt: `Shared` says which token of one row is which of the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from batch import Trajectory, ceil_div, pack, send


@dataclass
class Shared:
    """The model's row of T' tokens beside the batch's of T, with R responses to N prompts.

    Two attentions: of all prompts and responses to themselves, and of responses to their prompts.
    """

    index: torch.Tensor  # [T'] where each token of the model's row stands in the batch's
    places: torch.Tensor  # [T] and the reverse
    cu_own: torch.Tensor  # [N+R+1] int32, where each prompt and each response starts in the model's row
    cu_responses: torch.Tensor  # [N+1] int32, where the responses of each prompt start, counted from the first response
    cu_prompts: torch.Tensor  # [N+1] int32
    num_prompt_tokens: int
    longest_own: int
    longest_responses: int  # of a prompt's responses together
    longest_prompt: int


def prompt_groups(trajectories: list[Trajectory]) -> list[list[int]]:
    """Indices of trajectories whose tokens before the first sampled one are the same, in order of first appearance."""
    groups: dict[tuple, list[int]] = {}
    for i, t in enumerate(trajectories):
        groups.setdefault(tuple(t.tokens[: t.prompt_length]), []).append(i)
    return list(groups.values())


def pack_shared(trajectories: list[Trajectory], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """`batch.pack` by the tokens that the model sees.

    Sessions of a prompt stay together, in units that `pack` keeps whole, as far as a micro-batch of max_tokens holds
    them and no rank has to idle.
    """
    groups = prompt_groups(trajectories)
    num_tokens = [tokens_seen(trajectories, group) for group in groups]
    share_of_rank = ceil_div(sum(num_tokens), num_ranks)
    units: list[list[int]] = []  # indices of trajectories
    sizes: list[int] = []  # tokens of each unit
    for group, total in zip(groups, num_tokens):
        prompt = trajectories[group[0]].prompt_length
        parts = ceil_div(total, share_of_rank)
        together = ceil_div(len(group), parts)  # sessions of a unit at most
        for place, i in enumerate(group):
            response = len(trajectories[i].tokens) - prompt
            if place == 0 or len(units[-1]) == together or sizes[-1] + response > max_tokens:
                units.append([])
                sizes.append(prompt)
            units[-1].append(i)
            sizes[-1] += response
    plan = pack(sizes, num_ranks, max_tokens)
    return [[[i for unit in micro_batch for i in units[unit]] for micro_batch in rank] for rank in plan]


def tokens_seen(trajectories: list[Trajectory], group: list[int]) -> int:
    """Tokens that the model sees of the sessions of one prompt: the prompt, and each response."""
    repeated = (len(group) - 1) * trajectories[group[0]].prompt_length
    return sum(len(trajectories[i].tokens) for i in group) - repeated


def share(trajectories: list[Trajectory], device: torch.device | str = "cpu") -> Shared | None:
    """How `collate(trajectories)` gets shorter; None when no two have the same prompt."""
    groups = prompt_groups(trajectories)
    if len(groups) == len(trajectories):
        return None
    starts = torch.tensor([0, *(len(t.tokens) for t in trajectories)]).cumsum(0).tolist()
    # Ranges of the batch's row: the first copy of each prompt, and the responses to it.
    prompts: list[range] = []
    responses: list[list[range]] = []
    for group in groups:
        length = trajectories[group[0]].prompt_length
        prompts.append(range(starts[group[0]], starts[group[0]] + length))
        responses.append([range(starts[i] + length, starts[i + 1]) for i in group])
    own = [*prompts, *(response for of_prompt in responses for response in of_prompt)]
    index = torch.cat([torch.arange(segment.start, segment.stop) for segment in own])  # [T']
    places = torch.empty(starts[-1], dtype=torch.int64)  # [T]
    places[index] = torch.arange(len(index))
    for group, prompt in zip(groups, prompts):
        for i in group[1:]:  # the other copies of a prompt are found where the first is
            places[starts[i] : starts[i] + len(prompt)] = places[prompt.start : prompt.stop]

    def boundaries(sizes: Iterable[int]) -> torch.Tensor:
        return send(torch.tensor([0, *sizes]).cumsum(0).to(torch.int32), device)

    of_prompts = [sum(map(len, of_prompt)) for of_prompt in responses]
    return Shared(
        index=send(index, device),
        places=send(places, device),
        cu_own=boundaries(map(len, own)),
        cu_responses=boundaries(of_prompts),
        cu_prompts=boundaries(map(len, prompts)),
        num_prompt_tokens=sum(map(len, prompts)),
        longest_own=max(map(len, own)),
        longest_responses=max(of_prompts),
        longest_prompt=max(map(len, prompts)),
    )
