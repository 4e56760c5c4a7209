"""Look at a run: `python -m look RUN` for where it stands, and

    python -m look RUN --step 12 --group 0 [--tokens]     a prompt group from its uid to the weight update, by token
    python -m look RUN [RUN ...] --html page.html         a page with curves and rollouts, one file, no network
    python -m look RUN --doctor                           what was wrong, in words

It reads the run's files alone, also while the run still goes on. Traces are of the first trainer.trace_groups groups of
a step.
"""

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from host.console import printable
from host.disk import whole_lines
from look.doctor import diagnose
from look.page import read_config, read_metrics, write_page

# Of the resolved configuration: what a trace can only be understood with.
RELEVANT = {
    "actor": ("path", "lr", "ppo_mini_batch_size", "ppo_epochs", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    "algorithm": ("adv_estimator", "norm_adv_by_std_in_grpo", "gamma", "use_kl_in_reward", "filter_groups"),
    "data": ("train_batch_size", "max_prompt_length", "max_response_length"),
    "loss": ("loss_mode", "loss_agg_mode", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "rollout_is", "rollout_rs"),
    "rollout": ("n", "temperature", "top_p"),
    "reward": ("name", "custom_path"),
    "trainer": ("seed",),
}
# What a line of a trace must have: each token's log-probs and other numbers, which may be null as a whole,
LOGPROBS = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
SPREADS = ("advantages", "returns", "entropy")
SIGNALS = ("token_level_rewards", *LOGPROBS, *SPREADS)
# and what the trajectory is: its names, task, lengths, sampling, judgement, and each token.
FIELDS = (
    *("uid", "session_id", "index", "row", "data_source", "sync_step", "weight_version", "consumed"),
    *("prompt", "response", "ground_truth", "finish_reason", "num_turns", "score", "score_parts", "advantage"),
    *("prompt_length", "response_length", "seq_length", "mask_sum", "loss_mask_sum"),
    *("tokens", "pieces", "response_mask", "loss_mask"),
)


def read_run(run: Path) -> tuple[list[dict], dict]:
    """The records of metrics.jsonl, less a last one that a kill cut short, and the resolved configuration.

    ValueError when the folder is no run, or a file of it is damaged.
    """
    records, config = run / "metrics.jsonl", run / "config.yaml"
    for path in (records, config):
        if not path.is_file():
            raise ValueError(f"{run} is not the folder of a run: it has no {path.name}")
    read_metrics(records)  # every line is a record
    read_config(config)  # groups of knobs
    return [record for _, record in whole_lines(records)], yaml.safe_load(config.read_text()) or {}


def traced_steps(run: Path) -> list[int]:
    return sorted(int(path.stem) for path in (run / "traces").glob("*.jsonl") if path.stem.isdigit())


def read_group(run: Path, step: int, group: int) -> list[dict]:
    """The traced trajectories of a step's group. ValueError says what is there instead."""
    path = run / "traces" / f"{step:06d}.jsonl"
    if not path.is_file():
        steps = traced_steps(run)
        there = f"there are the steps {', '.join(map(str, steps))}"
        hint = there if steps else "set trainer.trace_groups above 0 for a run to keep some"
        raise ValueError(f"no trace of step {step} in {run}: {hint}")
    groups: dict[str, list[dict]] = {}
    for _, record in whole_lines(path):
        try:
            groups.setdefault(record["uid"], []).append(read_trajectory(record))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds a line that is no traced trajectory ({error})") from error
    if not 0 <= group < len(groups):
        count = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
        raise ValueError(f"--group {group}: the trace of step {step} has {count}, from 0 on (trainer.trace_groups)")
    return list(groups.values())[group]


def read_trajectory(record: dict) -> dict:
    """A line of a trace; `more` are the names of its numbers a token besides SIGNALS, of a fork's batch.PER_TOKEN.

    KeyError or TypeError for a line that is no trajectory.
    """
    known = {name: record[name] for name in FIELDS}
    others = [name for name in record if name not in FIELDS + SIGNALS]
    more = [name for name in others if is_signal(record[name], len(record["tokens"]))]
    return known | {name: floats(record[name]) for name in (*SIGNALS, *more)} | {"more": more}


def is_signal(values: Any, length: int) -> bool:
    """Whether a field of a trace holds a number a token, null where it was not finite."""
    is_list = isinstance(values, list) and len(values) == length
    return is_list and all(x is None or isinstance(x, (int, float)) for x in values)


def floats(values: list | None) -> list[float] | None:
    """JSON has no NaN: a number that was not finite is null there."""
    return None if values is None else [math.nan if x is None else x for x in values]


def show_group(console: Console, run: Path, step: int, group: int, tokens: bool) -> None:
    """A group on the console: its knobs, its prompt, what became of each trajectory, and the update that it fed."""
    trace = read_group(run, step, group)
    records, config = read_run(run)
    first = trace[0]
    console.print(Text(f"{run}  step {step}  group {group}  uid {first['uid']}", style="bold"))
    console.print(Text(printable(f"config   {knobs_text(config)}"), style="dim"))
    task = f"row {first['row']} of {first['data_source']}, ground truth {first['ground_truth']!r}"
    console.print(Text(printable(f"prompt   {task}")))
    console.print(Text(printable(prompt_text(first["prompt"]))))
    console.print(session_table(trace))
    for t in trace:
        console.print(numbers_of(t))
        console.print(token_table(t) if tokens else Text(printable(t["response"]), style="cyan"))
    metrics = next((r for r in records if r["step"] == step), {})
    console.print(Text(update_line(metrics, first["sync_step"], {r["step"] for r in records})))


def knobs_text(config: dict) -> str:
    """group.knob=value of the knobs of RELEVANT that are set."""
    values = {f"{group}.{knob}": config.get(group, {}).get(knob) for group, knobs in RELEVANT.items() for knob in knobs}
    return "  ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def prompt_text(prompt: str | list[dict]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)


def plain_table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def session_table(trace: list[dict]) -> Table:
    """A line a trajectory: key, lengths, score, advantage, and where each update took it."""
    lengths = ("prompt", "response", "seq", "mask sum", "in loss")
    judged = ("finish", "turns", "weights", "reward", "parts", "advantage")
    table = plain_table("uid_session_output", *lengths, *judged, "update.micro-batch@rank")
    for t in trace:
        cells = [
            f"{t['uid'][:8]}…_{t['session_id']}_{t['index']}",
            str(t["prompt_length"]),
            str(t["response_length"]),
            str(t["seq_length"]),
            str(t["mask_sum"]),
            str(t["loss_mask_sum"]),
            str(t["finish_reason"]),
            str(t["num_turns"]),
            f"v{t['weight_version']}",
            form(t["score"]),
            " ".join(f"{name}={form(value)}" for name, value in t["score_parts"].items()),
            form(t["advantage"]),
            " ".join(f"{c['update']}.{c['micro_batch']}@{c['rank']}" for c in t["consumed"]) or "none: skipped",
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))  # as text, not as markup
    return table


def numbers_of(t: dict) -> Text:
    """What a trajectory's tokens add up to: scores by token, log-probs by who computed them, advantages and returns."""
    acted = [i for i, mask in enumerate(t["response_mask"]) if mask]
    lines = [f"session {t['session_id']} output {t['index']}", f"  token-level rewards   {rewards_text(t)}"]
    for name in LOGPROBS:
        if t[name]:
            total = sum(t[name][i] for i in acted)
            lines.append(f"  {name:<21} sum {form(total)}, mean {form(total / len(acted))}")
    gaps = {i: abs(t["old_logprobs"][i] - t["rollout_logprobs"][i]) for i in acted}
    gaps = {i: gap for i, gap in gaps.items() if not math.isnan(gap)}
    if gaps:
        place = max(gaps, key=gaps.__getitem__)
        mean = sum(gaps.values()) / len(gaps)
        lines.append(f"  |old - rollout|       mean {form(mean)}, largest {form(gaps[place])} at token {place}")
    for name in (*SPREADS, *t["more"]):
        if t[name]:
            lines += [f"  {name:<21} {text}" for text in spread_texts([t[name][i] for i in acted])]
    return Text(printable("\n".join(lines)))


def rewards_text(t: dict) -> str:
    """The first four tokens that have a reward, and how many more there are."""
    rewards = [f"{form(x)} at token {i}" for i, x in enumerate(t["token_level_rewards"]) if x]
    if not rewards:
        return "all 0"
    return ", ".join(rewards[:4]) + (f" and {len(rewards) - 4} more" if len(rewards) > 4 else "")


def spread_texts(values: list[float]) -> list[str]:
    """Least, greatest and mean of the sampled tokens' values, and how many are NaN."""
    known = [value for value in values if not math.isnan(value)]
    texts = []
    if known and max(known) == min(known):
        texts.append(f"{form(known[0])} on all {len(known)} tokens")
    elif known:
        texts.append(f"{form(min(known))} to {form(max(known))}, mean {form(sum(known) / len(known))}")
    if len(known) < len(values):
        texts.append(f"not a finite number on {len(values) - len(known)} tokens")
    return texts


def token_table(t: dict) -> Table:
    """A line a token. Sampled tokens bold, observed ones dim; advantages green or red."""
    signals = ("reward", "rollout", "old", "ref", "old-rollout", "advantage", "return", "entropy")
    table = plain_table("t", "id", "token", "mask", "loss", *signals)
    for name in t["more"]:
        table.add_column(Text(printable(name)))
    for i, (token, piece, mask) in enumerate(zip(t["tokens"], t["pieces"], t["response_mask"])):
        text = Text(printable(repr(piece)), style="bold" if mask else "dim")
        cells = [str(i), str(token), text, str(mask), str(t["loss_mask"][i])]
        if mask:
            value = {name: t[name][i] if t[name] else None for name in (*SIGNALS, *t["more"])}
            cells += [form(value[name]) for name in ("token_level_rewards", *LOGPROBS)]
            cells.append(form(value["old_logprobs"] - value["rollout_logprobs"]))
            cells.append(Text(form(value["advantages"]), style=shade(value["advantages"])))
            cells += [form(value[name]) for name in ("returns", "entropy", *t["more"])]
        table.add_row(*cells)
    return table


def shade(advantage: float | None) -> str:
    """A console style: green above 0, red below."""
    if not advantage:
        return ""
    return "green" if advantage > 0 else "red" if advantage < 0 else ""


def update_line(metrics: dict, sync_step: int, steps: set[int]) -> str:
    """The optimizer steps that a step's trajectories fed, and when their weights reached the sampler."""
    names = ("num_updates", "pg_loss", "kl_loss", "grad_norm", "lr", "skipped_steps")
    values = {name: metrics.get(f"actor/{name}") for name in names}
    parts = "  ".join(f"{name} {form(value)}" for name, value in values.items() if value is not None)
    if sync_step in steps:
        synced = f"the sync of step {sync_step} brought weights v{sync_step} to vLLM"
    else:
        synced = f"the sync of step {sync_step} is to bring weights v{sync_step} to vLLM; no record of it yet"
    return f"update   {parts}\nweights  {synced}"


def form(value: Any) -> str:
    """Four significant digits of a number; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return f"{value:.4g}"
    return str(value)


def summary(run: Path) -> str:
    """Where a run stands, and what else there is to look at."""
    records, config = read_run(run)
    trained = [r for r in records if "timing_s/gen" in r]
    model = config.get("actor", {}).get("path", "a model that config.yaml does not name")
    lines = [f"{run}: {len(trained)} steps of {model}"]
    for name in ("reward/mean", "response_length/mean", "actor/entropy", "actor/grad_norm", "timing_s/step"):
        values = [r[name] for r in trained if r.get(name) is not None]
        if values:
            ends = f"first {form(values[0])}  last {form(values[-1])}"
            lines.append(f"  {name:<22} {ends}  least {form(min(values))}  most {form(max(values))}")
    for name in sorted({name for r in records for name in r if is_validation(name)}):
        values = [f"{form(r[name])} after {r['step']}" for r in records if r.get(name) is not None]
        if values:
            lines.append(f"  {name:<22} " + "  ".join([values[0], values[-1]] if len(values) > 1 else values))
    steps = traced_steps(run)
    if steps:
        lines.append(f"  traced: {len(steps)} steps, {steps[0]} to {steps[-1]} (--step {steps[-1]} --tokens)")
    else:
        lines.append("  no step was traced (trainer.trace_groups)")
    return printable("\n".join(lines))


def is_validation(name: str) -> bool:
    """Whether a metric is a validation's mean@n or pass@k."""
    return name.startswith("val/") and ("/mean@" in name or "/pass@" in name) and not name.endswith("stderr")


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m look", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs_help = "folder of a run; for --html also a file of metrics"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=runs_help)
    parser.add_argument("--step", type=int, help="training step, from 0")
    parser.add_argument("--group", type=int, default=0, help="prompt group of the step's trace, from 0")
    parser.add_argument("--tokens", action="store_true", help="a line a token")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write the page there")
    parser.add_argument("--doctor", action="store_true", help="what was wrong, in words")
    args = parser.parse_args(argv)
    step_is_missing = args.step is None and (args.tokens or args.group)
    step_is_too_much = args.step is not None and (args.html or args.doctor)
    if step_is_missing or step_is_too_much:
        parser.error("--tokens and --group go with --step, and --step with neither --html nor --doctor")
    return args


def main(argv: list[str]) -> None:
    args = read_arguments(argv)
    if args.html:
        write_page(args.runs, args.html)
        print(f"{args.html}: {args.html.stat().st_size / 2**20:.1f} MB, opens in any browser")
        return
    # A line that is wider than the terminal wraps there, and loses nothing.
    width = max(shutil.get_terminal_size().columns, 200)
    console = Console(soft_wrap=True, highlight=False, width=width)
    for run in args.runs:
        if args.doctor:
            console.print(Text(printable("\n".join(diagnose(*read_run(run))))))
        elif args.step is not None:
            show_group(console, run, args.step, args.group, args.tokens)
        else:
            console.print(Text(summary(run)))
