"""What a run keeps of its trajectories, as JSON lines: all of them as text (rollouts/), and of some prompt groups every token with
every number that belongs to it, from the prompt to the update that used it (traces/). And a few of them as a table for the eye."""

from collections.abc import Iterator

import torch

from advantage import returns_to_go
from batch import Trajectory, gather, group_by_prompt
from metrics import dump_record

DIGITS = 7  # significant digits of a float in a trace, which float32 has


def trace_records(trajectories: list[Trajectory], num_groups: int, actor, tokenizer, gamma: float) -> Iterator[dict]:
    """The first num_groups prompt groups of a step that was just trained on, a record a trajectory. `gather_entropies` comes first.

    Lists are [L], about the token at the same place: `pieces` its text, `returns` the discounted sum of token_level_rewards from it on.
    `consumed` names each optimizer step of the training step, its micro-batch and the rank; `sync_step` the training step whose sync
    brings the updated weights to vLLM.
    """
    for t in (t for group in group_by_prompt(trajectories)[:num_groups] for t in group):
        record = dump_record(t) | {
            "uid": t.uid,
            "session_id": t.session_id,
            "index": t.index,
            "seq_length": len(t.tokens),
            "mask_sum": sum(t.response_mask),
            "loss_mask_sum": int(t.loss_mask.sum()),
            "consumed": consumed(t, actor.plans),
            "sync_step": actor.version,
            "tokens": t.tokens,
            "pieces": pieces(t.tokens, tokenizer),
            "response_mask": t.response_mask,
            "loss_mask": t.loss_mask.int().tolist(),
        }
        floats = {
            name: getattr(t, name)
            for name in ("token_level_rewards", "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
        }
        floats |= {"returns": returns(t, gamma), "entropy": actor.entropies.get(t.key)}
        yield record | {name: rounded(values) for name, values in floats.items()}


def gather_entropies(trajectories: list[Trajectory], num_groups: int, actor) -> None:
    """Give rank 0 the traced groups' entropies, of which each rank knows those that it computed. A collective."""
    traced = {t.key for group in group_by_prompt(trajectories)[:num_groups] for t in group}
    for share in gather([{key: values.cpu() for key, values in actor.entropies.items() if key in traced}]):
        actor.entropies |= share


def pieces(tokens: list[int], tokenizer) -> list[str]:
    """The text of each token as it stands in its sequence. A character of several tokens belongs to the one that completes it."""
    texts, start, read, known = [], 0, 0, {}
    for i, token in enumerate(tokens):
        window = (*tokens[start:read], token)
        if i > read or window not in known:
            before, now = tokenizer.decode(tokens[start:read]), tokenizer.decode(tokens[start : i + 1])
            known[window] = "" if now.endswith("\ufffd") else now[len(before) :]
        texts.append(known[window])
        if texts[-1] or i - read >= 8:  # no character has that many tokens: this one is no text
            start, read = read, i + 1
    return texts


def consumed(t: Trajectory, plans: list) -> list[dict]:
    """Where each optimizer step took a trajectory: `[{"update", "micro_batch", "rank"}]`, all from 0."""
    places = []
    for update, (mini_batch, plan) in enumerate(plans):
        index = next((i for i, other in enumerate(mini_batch) if other is t), None)
        for rank, micro_batches in enumerate(plan):
            places += [
                {"update": update, "micro_batch": number, "rank": rank}
                for number, indices in enumerate(micro_batches)
                if index in indices
            ]
    return places


def returns(t: Trajectory, gamma: float) -> list[float]:
    """[L] what follows each sampled token, itself included; observations neither earn nor discount. 0 before the first sampled token."""
    values = returns_to_go(t.token_level_rewards[t.prompt_length :], t.loss_mask[t.prompt_length :], gamma)
    return [0.0] * t.prompt_length + values.tolist()


def rounded(values) -> list[float] | None:
    if values is None:
        return None
    return [float(f"{x:.{DIGITS}g}") for x in (values.tolist() if isinstance(values, torch.Tensor) else values)]
