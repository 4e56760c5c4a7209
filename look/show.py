"""Look at a run: `python -m look RUN` for where it stands, and

    python -m look RUN --step 12 --group 0 [--tokens]     one prompt group from its uid to the weight update, token by token
    python -m look RUN [RUN ...] --html page.html         a page with curves and rollouts, one file, no network
    python -m look RUN --doctor                           what was wrong, in words

It reads the run's files alone, while the run goes on as well. Traces are of the first trainer.trace_groups groups of a step.
"""

import argparse
import math
import shutil
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from host.console import printable
from host.disk import whole_lines
from look.doctor import diagnose
from look.page import read_config, read_metrics, write_page

RELEVANT = (  # of the resolved configuration: what a trace can only be understood with
    "actor.path",
    "actor.lr",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.use_dynamic_bsz",
    "actor.ppo_max_token_len_per_gpu",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.gamma",
    "algorithm.use_kl_in_reward",
    "algorithm.filter_groups",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "loss.loss_mode",
    "loss.loss_agg_mode",
    "loss.use_kl_loss",
    "loss.kl_loss_coef",
    "loss.kl_loss_type",
    "loss.rollout_is",
    "loss.rollout_rs",
    "rollout.n",
    "rollout.temperature",
    "rollout.top_p",
    "reward.name",
    "reward.custom_path",
    "trainer.seed",
)
LISTS = (
    "token_level_rewards",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "returns",
    "entropy",
)  # [L], numbers
FIELDS = LISTS + (
    "uid",
    "session_id",
    "index",
    "row",
    "data_source",
    "prompt",
    "response",
    "ground_truth",
    "prompt_length",
    "response_length",
    "seq_length",
    "mask_sum",
    "loss_mask_sum",
    "finish_reason",
    "num_turns",
    "weight_version",
    "sync_step",
    "score",
    "score_parts",
    "advantage",
    "consumed",
    "tokens",
    "pieces",
    "response_mask",
    "loss_mask",
)


def read_run(run: Path) -> tuple[list[dict], dict]:
    """The records of metrics.jsonl, less a last one that a kill cut short, and the resolved configuration. ValueError when the folder is no run, or a file of it is damaged."""
    path = run / "metrics.jsonl"
    if not path.is_file() or not (run / "config.yaml").is_file():
        raise ValueError(
            f"{run} is not the folder of a run: it has no {'config.yaml' if path.is_file() else 'metrics.jsonl'}"
        )
    read_metrics(path)  # every line is a record
    read_config(run / "config.yaml")  # groups of knobs
    return [record for _, record in whole_lines(path)], yaml.safe_load((run / "config.yaml").read_text()) or {}


def read_group(run: Path, step: int, group: int) -> list[dict]:
    """The traced trajectories of a step's group. ValueError says what is there instead."""
    path = run / "traces" / f"{step:06d}.jsonl"
    if not path.is_file():
        steps = sorted(int(p.stem) for p in (run / "traces").glob("*.jsonl") if p.stem.isdigit())
        raise ValueError(
            f"no trace of step {step} in {run}: "
            + (
                f"there are the steps {', '.join(map(str, steps))}"
                if steps
                else "set trainer.trace_groups above 0 for a run to keep some"
            )
        )
    groups: dict[str, list[dict]] = {}
    for _, record in whole_lines(path):
        try:
            groups.setdefault(record["uid"], []).append(
                {name: known(record[name]) if name in LISTS else record[name] for name in FIELDS}
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds a line that is no traced trajectory ({error})") from error
    if not 0 <= group < len(groups):
        raise ValueError(
            f"--group {group}: the trace of step {step} has {len(groups)} group{'s' * (len(groups) != 1)}, from 0 on (trainer.trace_groups)"
        )
    return list(groups.values())[group]


def known(values: list | None) -> list | None:
    """JSON has no NaN: a number that was not finite is null there."""
    return None if values is None else [math.nan if x is None else x for x in values]


def show_group(console: Console, run: Path, step: int, group: int, tokens: bool) -> None:
    trace, (records, config) = read_group(run, step, group), read_run(run)
    metrics = next((r for r in records if r["step"] == step), {})
    first = trace[0]
    console.print(Text(f"{run}  step {step}  group {group}  uid {first['uid']}", style="bold"))
    knobs = [(name, config.get(name.split(".")[0], {}).get(name.split(".")[1])) for name in RELEVANT]
    console.print(
        Text(
            printable("config   " + "  ".join(f"{name}={value}" for name, value in knobs if value is not None)),
            style="dim",
        )
    )
    prompt = (
        first["prompt"]
        if isinstance(first["prompt"], str)
        else "\n".join(f"{m['role']}: {m.get('content')}" for m in first["prompt"])
    )
    console.print(
        Text(
            printable(f"prompt   row {first['row']} of {first['data_source']}, ground truth {first['ground_truth']!r}")
        )
    )
    console.print(Text(printable(prompt)))
    console.print(session_table(trace))
    for t in trace:
        console.print(numbers_of(t))
        if tokens:
            console.print(token_table(t))
        else:
            console.print(Text(printable(t["response"]), style="cyan"))
    console.print(Text(update_line(metrics, first["sync_step"], {r["step"] for r in records})))


def session_table(trace: list[dict]) -> Table:
    """A line a trajectory: key, lengths, score, advantage, and where each update took it."""
    columns = [
        "uid_session_output",
        "prompt",
        "response",
        "seq",
        "mask sum",
        "in loss",
        "finish",
        "turns",
        "weights",
        "reward",
        "parts",
        "advantage",
        "update.micro-batch@rank",
    ]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for t in trace:
        where = " ".join(f"{c['update']}.{c['micro_batch']}@{c['rank']}" for c in t["consumed"]) or "none: skipped"
        parts = " ".join(f"{name}={form(value)}" for name, value in t["score_parts"].items())
        numbers = [
            t["prompt_length"],
            t["response_length"],
            t["seq_length"],
            t["mask_sum"],
            t["loss_mask_sum"],
            t["finish_reason"],
            t["num_turns"],
            f"v{t['weight_version']}",
        ]
        key = f"{t['uid'][:8]}…_{t['session_id']}_{t['index']}"
        table.add_row(
            *(
                Text(printable(cell))
                for cell in (key, *map(str, numbers), form(t["score"]), parts, form(t["advantage"]), where)
            )
        )  # text, not markup
    return table


def numbers_of(t: dict) -> Text:
    """What a trajectory's tokens add up to: scores by token, log-probs by who computed them, advantages and returns."""
    acted = [i for i, m in enumerate(t["response_mask"]) if m]
    lines = [f"session {t['session_id']} output {t['index']}"]
    scores = {i: x for i, x in enumerate(t["token_level_rewards"]) if x}
    shown = ", ".join(f"{form(x)} at token {i}" for i, x in list(scores.items())[:4]) + (
        f" and {len(scores) - 4} more" if len(scores) > 4 else ""
    )
    lines.append(f"  token-level rewards   {shown or 'all 0'}")
    for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs"):
        if t[name]:
            lines.append(
                f"  {name:<21} sum {form(sum(t[name][i] for i in acted))}, mean {form(sum(t[name][i] for i in acted) / len(acted))}"
            )
    gaps = {i: gap for i in acted if not math.isnan(gap := abs(t["old_logprobs"][i] - t["rollout_logprobs"][i]))}
    if gaps:
        lines.append(
            f"  |old - rollout|       mean {form(sum(gaps.values()) / len(gaps))}, largest {form(max(gaps.values()))} at token {max(gaps, key=gaps.get)}"
        )
    for name in ("advantages", "returns", "entropy"):
        values = [t[name][i] for i in acted if not math.isnan(t[name][i])] if t[name] else []
        if values:
            same = max(values) == min(values)
            lines.append(
                f"  {name:<21} "
                + (
                    f"{form(values[0])} on all {len(values)} tokens"
                    if same
                    else f"{form(min(values))} to {form(max(values))}, mean {form(sum(values) / len(values))}"
                )
            )
        if t[name] and len(values) < len(acted):
            lines.append(f"  {name:<21} not a finite number on {len(acted) - len(values)} tokens")
    return Text("\n".join(lines))


def token_table(t: dict) -> Table:
    """A line a token. Sampled tokens bold, observed ones dim; advantages green or red."""
    table = Table(
        "t",
        "id",
        "token",
        "mask",
        "loss",
        "reward",
        "rollout",
        "old",
        "ref",
        "old-rollout",
        "advantage",
        "return",
        "entropy",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for i, (token, piece, mask) in enumerate(zip(t["tokens"], t["pieces"], t["response_mask"])):
        cells = [
            str(i),
            str(token),
            Text(printable(repr(piece)), style="bold" if mask else "dim"),
            str(mask),
            str(t["loss_mask"][i]),
        ]
        if mask:
            old, rollout, advantage = t["old_logprobs"][i], t["rollout_logprobs"][i], t["advantages"][i]
            shade = "green" if (advantage or 0) > 0 else "red" if (advantage or 0) < 0 else ""
            cells += [
                form(t["token_level_rewards"][i]),
                form(rollout),
                form(old),
                form(t["ref_logprobs"] and t["ref_logprobs"][i]),
                form(old - rollout),
            ]
            cells += [Text(form(advantage), style=shade), form(t["returns"][i]), form(t["entropy"] and t["entropy"][i])]
        table.add_row(*cells)
    return table


def update_line(metrics: dict, sync_step: int, steps: set[int]) -> str:
    """The optimizer steps that a step's trajectories fed, and when their weights reached the sampler."""
    parts = [
        f"{name.removeprefix('actor/')} {form(metrics[name])}"
        for name in (
            "actor/num_updates",
            "actor/pg_loss",
            "actor/kl_loss",
            "actor/grad_norm",
            "actor/lr",
            "actor/skipped_steps",
        )
        if metrics.get(name) is not None
    ]
    synced = (
        f"the sync of step {sync_step} brought weights v{sync_step} to vLLM"
        if sync_step in steps
        else f"the sync of step {sync_step} is to bring weights v{sync_step} to vLLM; no record of it yet"
    )
    return f"update   {'  '.join(parts)}\nweights  {synced}"


def form(value) -> str:
    return (
        ""
        if value is None
        else f"{value:.4g}"
        if isinstance(value, (int, float)) and math.isfinite(value)
        else str(value)
    )


def summary(run: Path) -> str:
    """Where a run stands, and what else there is to look at."""
    records, config = read_run(run)
    trained = [r for r in records if "timing_s/gen" in r]
    lines = [
        f"{run}: {len(trained)} steps of {config.get('actor', {}).get('path', 'a model that config.yaml does not name')}"
    ]
    for name in ("reward/mean", "response_length/mean", "actor/entropy", "actor/grad_norm", "timing_s/step"):
        values = [r[name] for r in trained if r.get(name) is not None]
        if values:
            lines.append(
                f"  {name:<22} first {form(values[0])}  last {form(values[-1])}  least {form(min(values))}  most {form(max(values))}"
            )
    for name in sorted({name for r in records for name in r if name.startswith("val/")}):
        values = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        if len(values) and ("/mean@" in name or "/pass@" in name) and not name.endswith("stderr"):
            lines.append(
                f"  {name:<22} "
                + "  ".join(
                    f"{form(value)} after {step}"
                    for step, value in ([values[0], values[-1]] if len(values) > 1 else values)
                )
            )
    traces = sorted(int(p.stem) for p in (run / "traces").glob("*.jsonl") if p.stem.isdigit())
    lines.append(
        f"  traced: {len(traces)} steps, {traces[0]} to {traces[-1]} (--step {traces[-1]} --tokens)"
        if traces
        else "  no step was traced (trainer.trace_groups)"
    )
    return printable("\n".join(lines))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="show.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; for --html also a file of metrics"
    )
    parser.add_argument("--step", type=int, help="training step, from 0")
    parser.add_argument("--group", type=int, default=0, help="prompt group of the step's trace, from 0")
    parser.add_argument("--tokens", action="store_true", help="a line a token")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write the page there")
    parser.add_argument("--doctor", action="store_true", help="what was wrong, in words")
    args = parser.parse_args(argv)
    if args.step is None and (args.tokens or args.group) or args.step is not None and (args.html or args.doctor):
        parser.error("--tokens and --group go with --step, and --step with neither --html nor --doctor")
    console = Console(
        soft_wrap=True, highlight=False, width=max(shutil.get_terminal_size().columns, 200)
    )  # a narrow terminal wraps, and loses nothing
    if args.html:
        write_page(args.runs, args.html)
        return print(f"{args.html}: {args.html.stat().st_size / 2**20:.1f} MB, opens in any browser")
    for run in args.runs:
        if args.doctor:
            console.print(Text(printable("\n".join(diagnose(*read_run(run))))))
        elif args.step is not None:
            show_group(console, run, args.step, args.group, args.tokens)
        else:
            console.print(Text(summary(run)))
