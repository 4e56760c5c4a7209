"""Numbers of a step and of a validation, and records, from the list of trajectories that every rank holds.

Pure functions. In validation a session that failed, or that could not be scored, counts as wrong. Its trajectories are
not in the list, so the tasks and the sessions a task say how many there should have been.

A record is what `rollouts/*.jsonl` says of a trajectory, a dictionary without tokens; samples are a few of a step's
records, for the console and wandb.
"""

import math
from typing import Any

import torch

from batch import Task, Trajectory, final_outputs
from host.console import one_line


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Rewards, lengths and tokens of a step, over all ranks; agent/NAME/mean of what the agents measured.
    reward/truncated is of the responses that were cut at the limit."""
    lengths = [t.response_length for t in trajectories]
    cut = [t for t in trajectories if t.finish_reason == "length"]
    metrics = {
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths),
        "response_length/min": min(lengths),
        "response_length/clip_ratio": len(cut) / len(trajectories),
        "rollout/prompt_length/mean": mean([t.prompt_length for t in trajectories]),
        "rollout/num_trajectories": len(trajectories),
        "rollout/num_turns/mean": mean([t.num_turns for t in trajectories]),
        "rollout/weight_version": trajectories[0].weight_version,
        "perf/total_num_tokens": sum(len(t.tokens) for t in trajectories),
        "perf/response_tokens": sum(lengths),
    }
    scores = [t.score for t in trajectories if t.scored]
    if scores:
        metrics |= {
            "reward/mean": mean(scores),
            "reward/std": float(torch.tensor(scores, dtype=torch.float64).std(correction=0)),
            "reward/max": max(scores),
            "reward/min": min(scores),
        }
    scores_of_cut = [t.score for t in cut if t.scored]
    if scores_of_cut:
        metrics["reward/truncated"] = mean(scores_of_cut)
    metrics |= means("reward", [t.score_parts for t in trajectories])
    metrics |= means("agent", [t.metrics for t in trajectories])
    return {name: float(value) for name, value in metrics.items()}


def mean(values: list) -> float:
    """Their sum, rounded once, over their number."""
    return math.fsum(values) / len(values)


def means(group: str, parts: list[dict[str, float]]) -> dict[str, float]:
    """GROUP/NAME/mean of every name, over those that have it."""
    names = sorted({name for part in parts for name in part})
    return {f"{group}/{name}/mean": mean([part[name] for part in parts if name in part]) for name in names}


def validation_metrics(trajectories: list[Trajectory], tasks: list[Task], n: int) -> dict[str, float]:
    """Per data source mean@n, pass@k, best@n, lengths and counts; val/mean is the mean of the sources' mean@n.

    mean@n and pass@k come with their standard error over prompts. The value of a session is `acc` where its reward
    gives one, else the score; of several outputs the last one's. Correct is 1 or more: rewards of 0 or 1, or of -1 or
    1, are right as they are, one on another scale gives `acc`. A failed session is worth 0, or the lowest value of its
    source when that is negative."""
    values = session_values(trajectories)
    sources: dict[str, list[list[float]]] = {}  # data source -> prompts -> their sessions' values, NaN for a failed one
    for task in tasks:
        known = values.get(task.index, {})
        row = [known.get(session_id, math.nan) for session_id in range(n)]
        sources.setdefault(task.data_source, []).append(row)
    metrics = {"val/mean": 0.0}
    for source, prompts in sources.items():
        metrics |= source_metrics(source, prompts, n)
        metrics["val/mean"] += metrics[f"val/{source}/mean@{n}"] / len(sources)
        lengths = [t.response_length for t in trajectories if t.task.data_source == source]
        if lengths:
            metrics[f"val/{source}/response_length"] = mean(lengths)
    return metrics


def source_metrics(source: str, prompts: list[list[float]], n: int) -> dict[str, float]:
    """Those of one data source, from the values of its prompts' n sessions, NaN for a failed one."""
    values = [value for row in prompts for value in row]
    num_failed = sum(math.isnan(value) for value in values)
    wrong = min([0.0, *(value for value in values if not math.isnan(value))])
    prompts = [[wrong if math.isnan(value) else value for value in row] for row in prompts]
    num_correct = [sum(value >= 1 - 1e-9 for value in row) for row in prompts]
    metrics = with_stderr(f"val/{source}/mean@{n}", [mean(row) for row in prompts])
    powers_of_two = {2**i for i in range(n.bit_length())}
    for k in sorted(powers_of_two | {n}):
        metrics |= with_stderr(f"val/{source}/pass@{k}", [pass_at_k(n, correct, k) for correct in num_correct])
    if n > 1:
        metrics[f"val/{source}/best@{n}"] = mean([max(row) for row in prompts])
    metrics[f"val/{source}/failed_sessions"] = num_failed / len(values)
    metrics[f"val/{source}/num_sessions"] = float(len(values))
    return metrics


def session_values(trajectories: list[Trajectory]) -> dict[int, dict[int, float]]:
    """Row number -> session -> the value of its last output."""
    rows: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        rows.setdefault(trajectory.task.index, []).append(trajectory)
    return {
        row: {t.session_id: t.score_parts.get("acc", t.score) for t in final_outputs(group)}
        for row, group in rows.items()
    }


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n sessions, drawn without replacement, hold a correct one (Chen et al. 2021). 1 - C(n -
    correct, k) / C(n, k)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def with_stderr(name: str, values: list[float]) -> dict[str, float]:
    """The mean of a value over prompts, and as NAME/stderr its standard error; one prompt has none."""
    center = mean(values)
    if len(values) == 1:
        return {name: center}
    variance = math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
    return {name: center, f"{name}/stderr": math.sqrt(variance / len(values))}


def dump_record(t: Trajectory) -> dict[str, Any]:
    """What `rollouts/*.jsonl` says of a trajectory; its advantage is that of the first sampled token."""
    advantage = None if t.advantages is None else float(t.advantages[t.prompt_length])
    return {
        "key": t.key,
        "row": t.task.index,
        "data_source": t.task.data_source,
        "prompt": t.task.messages,
        "response": t.response,
        "ground_truth": t.task.ground_truth,
        "score": t.score,
        "score_parts": t.score_parts,
        "advantage": advantage,
        "finish_reason": t.finish_reason,
        "prompt_length": t.prompt_length,
        "response_length": t.response_length,
        "num_turns": t.num_turns,
        "weight_version": t.weight_version,
        "error": t.error,
    }


def samples(trajectories: list[Trajectory], most: int = 4) -> list[dict[str, Any]]:
    """Records of a step's best and worst trajectory and of others spread evenly between them by score, best first."""
    ranked = sorted((t for t in trajectories if t.scored), key=lambda t: t.score, reverse=True)
    if not ranked:
        return []
    places = {round(i * (len(ranked) - 1) / max(most - 1, 1)) for i in range(most)}
    return [dump_record(ranked[place]) for place in sorted(places)]


def sample_table(records: list[dict[str, Any]], width: int) -> str:
    """Score, advantage and the ends of prompt and response, a line each, `width` columns wide."""
    room = max((width - 20) // 2, 20)
    lines = [f"{'score':>7} {'adv':>7}  {'prompt':<{room}} response"]
    for r in records:
        prompt = r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][-1].get("content")
        advantage = "" if r["advantage"] is None else f"{r['advantage']:.2f}"
        texts = f"{one_line(prompt, room):<{room}} {one_line(r['response'], room)}"
        lines.append(f"{r['score']:7.2f} {advantage:>7}  {texts}")
    return "\n".join(lines)
