"""The README's pictures, from the curves in docs/runs and from a run's page: `python -m look.pictures [--page RUN]`.

Curves are metrics.jsonl of published runs, of three seeds where the name says so; trl_arith.json is TRL's on the same
work. --page also photographs the page that `python -m look` makes of a run, in headless Chromium. Needs `pip install
matplotlib`, and selenium for --page.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

DOCS = Path(__file__).parent.parent / "docs"
BLUE, ORANGE, GREY = "#2f6fd0", "#e07b39", "#8a94a6"
SMOOTHED = 5  # steps, in the pictures of three seeds
plt.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "lockstep",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e9ef",
    "axes.edgecolor": GREY,
}


def curve(name: str) -> list[dict]:
    """The records of a published run."""
    return [json.loads(line) for line in (DOCS / "runs" / name).read_text().splitlines()]


def trls_curve() -> list[dict]:
    """TRL's steps on the sums."""
    return json.loads((DOCS / "runs" / "trl_arith.json").read_text())["curve"]


def column(records: list[dict], name: str) -> tuple[list[int], list[float]]:
    """A metric where it is known: (steps, values)."""
    rows = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in rows], [value for _, value in rows]


def finish(axes, name: str, x: str, y: str) -> None:
    """Name the axes, and write the picture."""
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, loc="lower right")
    # Without them the same curves give the same bytes.
    unsigned = {"Date": None} if name.endswith(".svg") else {"Software": None}
    axes.figure.savefig(DOCS / "pictures" / name, bbox_inches="tight", facecolor="white", metadata=unsigned, dpi=150)
    plt.close(axes.figure)


def quickstart() -> None:
    """Reward and validation of the quickstart on a CPU."""
    records = curve("quickstart_cpu.jsonl")
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    steps, rewards = column(records, "reward/mean")
    axes.plot(steps, rewards, color=BLUE, linewidth=1.2, label="reward in training")
    steps, values = column(records, "val/exact/mean@1")
    _, errors = column(records, "val/exact/mean@1/stderr")
    axes.errorbar(
        steps,
        values,
        yerr=errors,
        color=ORANGE,
        marker="o",
        markersize=4,
        linewidth=1.2,
        capsize=2,
        label="256 unseen sums (standard error)",
    )
    axes.set_ylim(0, 1.02)
    finish(axes, "quickstart.svg", "step", "share right")


def smollm2() -> None:
    """Rewards over seconds, Lockstep's and TRL's."""
    ours, theirs = curve("smollm2_arith_h200.jsonl"), trls_curve()
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    trained = [r for r in ours if "reward/mean" in r]
    seconds = list(accumulate(r["timing_s/step"] for r in trained))
    axes.plot(seconds, [r["reward/mean"] for r in trained], color=BLUE, linewidth=1.2, label="Lockstep, seed 0")
    seconds, rewards = [p["seconds"] for p in theirs], [p["reward"] for p in theirs]
    axes.plot(seconds, rewards, color=GREY, linewidth=1.2, label="TRL 1.16.0, seed 0")
    axes.set_ylim(0, 1.02)
    finish(axes, "smollm2_arith.svg", "seconds, 80 steps each", "reward")


def smoothed(values: list[float]) -> list[float]:
    """The mean of the SMOOTHED steps around each, of fewer at the ends."""
    half = SMOOTHED // 2
    return [statistics.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def by_seed(name: str) -> dict[int, list[dict]]:
    """The records of a published file, by the seed of their run."""
    records = curve(name)
    return {seed: [r for r in records if r["seed"] == seed] for seed in sorted({r["seed"] for r in records})}


def band(axes, seeds: dict[int, list[dict]], name: str, label: str) -> None:
    """The mean of the seeds, from the lowest to the highest of them shaded."""
    curves = [smoothed(column(records, name)[1]) for records in seeds.values()]
    of_step = list(zip(*curves, strict=True))
    lowest, highest = [min(v) for v in of_step], [max(v) for v in of_step]
    axes.fill_between(range(len(of_step)), lowest, highest, color=BLUE, alpha=0.3, linewidth=0)
    axes.plot([statistics.mean(v) for v in of_step], color=BLUE, linewidth=1.4, label=label)


def validations(axes, seeds: dict[int, list[dict]], source: str, label: str) -> None:
    """A point for each seed, side by side around the step that they belong to."""
    for i, records in enumerate(seeds.values()):
        steps, values = column(records, f"val/{source}/mean@1")
        _, errors = column(records, f"val/{source}/mean@1/stderr")
        places = [step + 1.6 * (i - 1) for step in steps]
        axes.errorbar(
            places,
            values,
            yerr=errors,
            color=ORANGE,
            marker="o",
            markersize=3,
            linestyle="none",
            linewidth=1,
            capsize=2,
            label=label if i == 0 else None,
        )


def arith_seeds() -> None:
    """Rewards and validations of three seeds on sums of two-digit numbers, and TRL's rewards."""
    seeds, theirs = by_seed("smollm2_arith_3_seeds_h200.jsonl"), trls_curve()
    _, axes = plt.subplots(figsize=(7.2, 3.2))
    band(axes, seeds, "reward/mean", "reward, Lockstep, mean and range of three seeds")
    axes.plot(
        [p["step"] - 1 for p in theirs],
        smoothed([p["reward"] for p in theirs]),
        color=GREY,
        linewidth=1.4,
        label=f"reward, TRL 1.16.0, seed 0, {len(theirs)} steps",
    )
    validations(axes, seeds, "exact_int", "512 unseen sums, greedy, each seed (standard error)")
    axes.set_ylim(0, 1.02)
    axes.set_title("SmolLM2-135M-Instruct, few-shot sums of two-digit numbers", fontsize=9, loc="left")
    finish(axes, "smollm2_arith_3_seeds.png", f"updates (rewards: mean of {SMOOTHED} steps)", "share right")


def chain_seeds() -> None:
    """Three seeds on chain_sum; with the entropy, since the reward rises slowly once it is low."""
    seeds = by_seed("chain_sum_3_seeds_h200.jsonl")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.2), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    band(right, seeds, "actor/entropy", "entropy, mean and range of the seeds")
    right.set(xlabel=f"updates (mean of {SMOOTHED} steps)", ylabel="nats a token", ylim=(0, None))
    right.legend(frameon=False, loc="upper right")
    band(left, seeds, "reward/mean", "reward, mean and range of the seeds")
    validations(left, seeds, "reasoning_gym/chain_sum", "256 unseen, greedy (standard error)")
    left.set(ylim=(0, 0.8), xticks=range(0, 161, 40))
    right.set_xticks(range(0, 161, 40))
    left.set_title(
        "SmolLM2-135M-Instruct, reasoning_gym's chain_sum (a + b and a - b, one or two digits), three seeds",
        fontsize=9,
        loc="left",
    )
    finish(left, "chain_sum_3_seeds.png", f"updates (reward: mean of {SMOOTHED} steps)", "reward")


def photograph(run: Path) -> None:
    """The page of a run, curves above and a traced rollout below."""
    from selenium import webdriver

    from look.page import write_page

    options = webdriver.ChromeOptions()
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--window-size=1280,1000",
    ):
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as folder:
        write_page([run], Path(folder) / "page.html")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            driver.get(f"file://{folder}/page.html")
            time.sleep(4)
            driver.save_screenshot(str(DOCS / "pictures" / "page_curves.png"))
            driver.set_window_size(1280, 700)
            driver.execute_script("document.getElementById('show-browser').click()")
            time.sleep(1)
            driver.execute_script(
                "document.querySelector('#list tbody tr').click(); window.scrollTo(0, document.body.scrollHeight)"
            )
            time.sleep(1)
            driver.save_screenshot(str(DOCS / "pictures" / "page_rollouts.png"))
        finally:
            driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m look.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, metavar="RUN", help="photograph this run's page too")
    args = parser.parse_args()
    (DOCS / "pictures").mkdir(exist_ok=True)
    quickstart()
    smollm2()
    arith_seeds()
    chain_seeds()
    if args.page:
        photograph(args.page)


if __name__ == "__main__":
    main()
