"""Stand-ins that the unit tests share: what they need of a run, made by hand."""

from itertools import groupby

import torch

from batch import Task, Trajectory


def make_trajectory(
    prompt=3,
    response=(1, 1, 1),
    score=1.0,
    uid="a",
    session_id=0,
    index=0,
    rollout=None,
    old=None,
    ref=None,
    advantages=None,
) -> Trajectory:
    """A trajectory of `prompt` observed tokens, then one token a bit of the mask `response`; the last four arguments
    hold a number a token of the response.
    """
    t = Trajectory(Task("1+1=", "test", "2"), uid=uid, session_id=session_id, index=index, score=score)
    t.observe(list(range(10, 10 + prompt)))
    for bit, turn in groupby(range(len(response)), key=lambda i: response[i]):
        places = list(turn)
        tokens = [100 + i for i in places]
        if bit:
            t.act(tokens, [-0.5 if rollout is None else rollout[i] for i in places])
        else:
            t.observe(tokens)
    for name, values in [("old_logprobs", old), ("ref_logprobs", ref), ("advantages", advantages)]:
        if values is not None:
            setattr(t, name, torch.cat([torch.zeros(prompt), torch.as_tensor(values, dtype=torch.float32)]))  # [L]
    return t
