"""A prompt that several sessions of a micro-batch share is computed once (actor.share_prompts): exact, and G - 1 of G prompts less work.

The model's row is then [prompt][prompt]...[response][response]..., and a response attends to itself and to its prompt. Everything else keeps
the row of `batch.collate`, where each trajectory has its prompt: `Shared` says which token of one row is which of the other.
"""

from dataclasses import dataclass

import torch

from batch import Trajectory, pack, send


@dataclass
class Shared:
    """The model's row of T' tokens beside the batch's of T. R responses of N prompts; attention of all to themselves, and of responses to prompts."""

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
    """Indices of the trajectories that have the same tokens before their first sampled one, in order of first appearance."""
    groups: dict[tuple, list[int]] = {}
    for i, t in enumerate(trajectories):
        groups.setdefault(tuple(t.tokens[: t.prompt_length]), []).append(i)
    return list(groups.values())


def pack_shared(trajectories: list[Trajectory], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """`batch.pack` by the tokens that the model sees: sessions of a prompt stay together as far as a micro-batch of max_tokens holds them, and no rank has to idle."""
    groups, units, sizes = prompt_groups(trajectories), [], []
    whole = [
        sum(len(trajectories[i].tokens) for i in g) - (len(g) - 1) * trajectories[g[0]].prompt_length for g in groups
    ]
    share_of_rank = -(-sum(whole) // num_ranks)
    for group, size in zip(groups, whole):
        prompt, together = trajectories[group[0]].prompt_length, -(-len(group) // -(-size // share_of_rank))  # sessions
        for place, i in enumerate(group):
            response = len(trajectories[i].tokens) - prompt
            if place == 0 or len(units[-1]) == together or sizes[-1] + response > max_tokens:
                units.append([])
                sizes.append(prompt)
            units[-1].append(i)
            sizes[-1] += response
    return [
        [[i for unit in micro_batch for i in units[unit]] for micro_batch in rank]
        for rank in pack(sizes, num_ranks, max_tokens)
    ]


def share(trajectories: list[Trajectory], device: torch.device | str = "cpu") -> Shared | None:
    """How `collate(trajectories)` gets shorter; None when no two have the same prompt."""
    groups = prompt_groups(trajectories)
    if len(groups) == len(trajectories):
        return None
    lengths = [len(t.tokens) for t in trajectories]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    prompts = [
        range(starts[g[0]], starts[g[0]] + trajectories[g[0]].prompt_length) for g in groups
    ]  # in the batch's row
    responses = [
        [range(starts[i] + len(prompt), starts[i + 1]) for i in group] for group, prompt in zip(groups, prompts)
    ]
    own = [*prompts, *(r for of_prompt in responses for r in of_prompt)]
    index = torch.cat([torch.arange(segment.start, segment.stop) for segment in own])  # [T']
    places = torch.empty(starts[-1], dtype=torch.int64)  # [T]
    places[index] = torch.arange(len(index))
    for group, prompt in zip(groups, prompts):
        for i in group[1:]:
            places[starts[i] : starts[i] + len(prompt)] = places[prompt.start : prompt.stop]

    def boundaries(sizes):
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
