"""What a run keeps of some prompt groups: every token with every number that belongs to it (traces/, JSON lines).

A record goes from the prompt to the update that used it. What is kept of all trajectories, as text, is in metrics.py.
"""

from collections.abc import Iterator
from typing import Any

import torch

from advantage import returns_to_go
from batch import PER_TOKEN, Trajectory, gather, group_by_prompt
from metrics import dump_record

DIGITS = 7  # significant digits of a float in a trace, which float32 has
LONGEST_CHARACTER = 8  # tokens: no character has more


def trace_records(trajectories: list[Trajectory], num_groups: int, actor, tokenizer, gamma: float) -> Iterator[dict]:
    """A record of each trajectory in the first num_groups prompt groups of a step that was just trained on.

    Lists are [L], about the token at the same place: `pieces` its text, `returns` the discounted sum of
    token_level_rewards from it on. `consumed` names each optimizer step of the training step, its micro-batch and the
    rank; `sync_step` the training step whose sync brings the updated weights to vLLM. `gather_entropies` comes first.
    """
    for group in group_by_prompt(trajectories)[:num_groups]:
        for t in group:
            yield trace_record(t, actor, tokenizer, gamma)


def trace_record(t: Trajectory, actor, tokenizer, gamma: float) -> dict[str, Any]:
    """All that is known of one trajectory; see `trace_records`."""
    record = dump_record(t) | {
        "uid": t.uid,
        "session_id": t.session_id,
        "index": t.index,
        "seq_length": len(t.tokens),
        "mask_sum": sum(t.response_mask),
        "loss_mask_sum": int(t.loss_mask.sum()),
        "consumed": consumed(t, actor.updates),
        "sync_step": actor.version,
        "tokens": t.tokens,
        "pieces": pieces(t.tokens, tokenizer),
        "response_mask": t.response_mask,
        "loss_mask": t.loss_mask.int().tolist(),
    }
    floats = {name: getattr(t, name) for name in ("rollout_logprobs", *PER_TOKEN)}
    floats["returns"] = returns(t, gamma)
    floats["entropy"] = actor.entropies.get(t.key)
    return record | {name: rounded(values) for name, values in floats.items()}


def gather_entropies(trajectories: list[Trajectory], num_groups: int, actor) -> None:
    """Give rank 0 the traced groups' entropies, of which each rank knows those that it computed. A collective."""
    traced = {t.key for group in group_by_prompt(trajectories)[:num_groups] for t in group}
    own = {key: values.cpu() for key, values in actor.entropies.items() if key in traced}
    for share in gather([own]):
        actor.entropies |= share


def pieces(tokens: list[int], tokenizer) -> list[str]:
    """The text of each token as it stands in its sequence.

    A character of several tokens belongs to the one that completes it.
    """
    texts: list[str] = []
    known: dict[tuple[int, ...], str] = {}  # the text of a token after the tokens of the piece before it
    start = 0  # of the piece before, which a tokenizer may need to see: some write a space between two words
    read = 0  # where the piece that is read now begins
    for i, token in enumerate(tokens):
        window = (*tokens[start:read], token)
        if i > read or window not in known:
            before = tokenizer.decode(tokens[start:read])
            now = tokenizer.decode(tokens[start : i + 1])
            incomplete = now.endswith("\ufffd")
            known[window] = "" if incomplete else now[len(before) :]
        texts.append(known[window])
        is_no_text = i - read >= LONGEST_CHARACTER
        if texts[-1] or is_no_text:
            start = read
            read = i + 1
    return texts


def consumed(t: Trajectory, updates: list) -> list[dict[str, int]]:
    """Where each optimizer step (actor.Update) took a trajectory: `[{"update", "micro_batch", "rank"}]`, all from 0."""
    places = []
    for number, update in enumerate(updates):
        index = next((i for i, other in enumerate(update.mini_batch) if other is t), None)
        for rank, micro_batches in enumerate(update.plan):
            for micro_batch, indices in enumerate(micro_batches):
                if index in indices:
                    places.append({"update": number, "micro_batch": micro_batch, "rank": rank})
    return places


def returns(t: Trajectory, gamma: float) -> list[float]:
    """[L] What follows each sampled token, itself included; 0 before the first one.

    Observations neither earn nor discount.
    """
    rewards = t.token_level_rewards[t.prompt_length :]
    values = returns_to_go(rewards, t.loss_mask[t.prompt_length :], gamma)
    return [0.0] * t.prompt_length + values.tolist()


def rounded(values: torch.Tensor | list[float] | None) -> list[float] | None:
    """To DIGITS significant digits."""
    if values is None:
        return None
    numbers = values.tolist() if isinstance(values, torch.Tensor) else values
    return [float(f"{number:.{DIGITS}g}") for number in numbers]
