"""Numbers of a step and of a validation, from the list of trajectories that every rank holds: pure functions.

In validation a session that failed, or that could not be scored, counts as wrong. Its trajectories are not in the list, so
the tasks and the sessions a task say how many there should have been.
"""

import math

import torch

from batch import Task, Trajectory
from host.console import one_line


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Rewards (reward/truncated: of the responses cut at the limit), lengths and tokens of a step, over all ranks; agent/NAME/mean of what the agents measured."""
    lengths = [t.response_length for t in trajectories]
    metrics = {
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths),
        "response_length/min": min(lengths),
        "response_length/clip_ratio": mean([t.finish_reason == "length" for t in trajectories]),
        "rollout/prompt_length/mean": mean([t.prompt_length for t in trajectories]),
        "rollout/num_trajectories": len(trajectories),
        "rollout/num_turns/mean": mean([t.num_turns for t in trajectories]),
        "rollout/weight_version": trajectories[0].weight_version,
        "perf/total_num_tokens": sum(len(t.tokens) for t in trajectories),
        "perf/response_tokens": sum(lengths),
    }
    if scores := [t.score for t in trajectories if t.score == t.score]:
        spread = torch.tensor(scores, dtype=torch.float64).std(correction=0)
        metrics |= {
            "reward/mean": mean(scores),
            "reward/std": spread,
            "reward/max": max(scores),
            "reward/min": min(scores),
        }
    if cut := [t.score for t in trajectories if t.finish_reason == "length" and t.score == t.score]:
        metrics["reward/truncated"] = mean(cut)
    metrics |= means("reward", [t.score_parts for t in trajectories]) | means(
        "agent", [t.metrics for t in trajectories]
    )
    return {name: float(value) for name, value in metrics.items()}


def mean(values: list) -> float:
    return math.fsum(values) / len(values)


def means(group: str, parts: list[dict[str, float]]) -> dict[str, float]:
    """GROUP/NAME/mean of every name, over those that have it."""
    names = sorted({name for part in parts for name in part})
    return {f"{group}/{name}/mean": mean([part[name] for part in parts if name in part]) for name in names}


def validation_metrics(trajectories: list[Trajectory], tasks: list[Task], n: int) -> dict[str, float]:
    """Per data source mean@n and pass@k, each with its standard error over prompts; best@n; lengths and counts. val/mean is the mean of the sources' mean@n.

    The value of a session is `acc` where its reward gives one, else the score; of several outputs the last one's. Correct is 1
    or more: rewards of 0 or 1, or of -1 or 1, are right as they are, one on another scale gives `acc`. A failed session is worth
    0, or the lowest value of its source when that is negative.
    """
    values = session_values(trajectories)
    rows: dict[str, list[list[float]]] = {}  # data source -> prompts -> their sessions' values, NaN for a failed one
    for task in tasks:
        known = values.get(task.index, {})
        rows.setdefault(task.data_source, []).append([known.get(session_id, math.nan) for session_id in range(n)])
    metrics = {"val/mean": 0.0}
    for source, prompts in rows.items():
        failed = sum(value != value for row in prompts for value in row)
        wrong = min([0.0, *(value for row in prompts for value in row if value == value)])
        prompts = [[wrong if value != value else value for value in row] for row in prompts]
        metrics |= with_stderr(f"val/{source}/mean@{n}", [mean(row) for row in prompts])
        metrics["val/mean"] += metrics[f"val/{source}/mean@{n}"] / len(rows)
        for k in sorted({2**i for i in range(n.bit_length())} | {n}):
            metrics |= with_stderr(
                f"val/{source}/pass@{k}", [pass_at_k(n, sum(value >= 1 - 1e-9 for value in row), k) for row in prompts]
            )
        if n > 1:
            metrics[f"val/{source}/best@{n}"] = mean([max(row) for row in prompts])
        lengths = [t.response_length for t in trajectories if t.task.data_source == source]
        metrics |= {f"val/{source}/response_length": mean(lengths)} if lengths else {}
        metrics |= {
            f"val/{source}/failed_sessions": failed / (n * len(prompts)),
            f"val/{source}/num_sessions": float(n * len(prompts)),
        }
    return metrics


def session_values(trajectories: list[Trajectory]) -> dict[int, dict[int, float]]:
    """Row number -> session -> the value of its last output."""
    values: dict[int, dict[int, float]] = {}
    for t in sorted(trajectories, key=lambda t: t.index):
        values.setdefault(t.task.index, {})[t.session_id] = t.score_parts.get("acc", t.score)
    return values


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n sessions, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def with_stderr(name: str, values: list[float]) -> dict[str, float]:
    """The mean of a value over prompts, and as NAME/stderr its standard error; one prompt has none."""
    center = mean(values)
    if len(values) == 1:
        return {name: center}
    variance = math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
    return {name: center, f"{name}/stderr": math.sqrt(variance / len(values))}


def dump_record(t: Trajectory) -> dict:
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


def samples(trajectories: list[Trajectory], most: int = 4) -> list[dict]:
    """A step's best and worst trajectory, and others spread evenly between them by score: dump records, best first."""
    ranked = sorted((t for t in trajectories if t.score == t.score), key=lambda t: -t.score)
    places = {round(i * (len(ranked) - 1) / max(most - 1, 1)) for i in range(most)} if ranked else ()
    return [dump_record(ranked[place]) for place in sorted(places)]


def sample_table(records: list[dict], width: int) -> str:
    """Score, advantage and the ends of prompt and response, a line each, `width` columns wide."""
    room = max((width - 20) // 2, 20)
    lines = [f"{'score':>7} {'adv':>7}  {'prompt':<{room}} response"]
    for r in records:
        prompt = r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][-1].get("content")
        advantage = "" if r["advantage"] is None else f"{r['advantage']:.2f}"
        lines.append(
            f"{r['score']:7.2f} {advantage:>7}  {one_line(prompt, room):<{room}} {one_line(r['response'], room)}"
        )
    return "\n".join(lines)
