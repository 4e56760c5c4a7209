"""The README's pictures, from the curves in docs/runs and from a run's page: `python docs/pictures.py [--page RUN]` (pip install matplotlib).

Curves are metrics.jsonl of published runs, trl_arith.json is TRL's on the same work. --page also photographs show.py's page of a run, in
headless Chromium.
"""
import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

DOCS = Path(__file__).parent
BLUE, ORANGE, GREY = "#2f6fd0", "#e07b39", "#8a94a6"
plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e9ef", "axes.edgecolor": GREY}


def curve(name: str) -> list[dict]:
    return [json.loads(line) for line in (DOCS / "runs" / name).read_text().splitlines()]


def column(records: list[dict], name: str) -> tuple[list, list]:
    rows = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in rows], [value for _, value in rows]


def finish(axes, name: str, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, loc="lower right")
    axes.figure.savefig(DOCS / "pictures" / name, bbox_inches="tight", facecolor="white", metadata={"Date": None})
    plt.close(axes.figure)


def quickstart() -> None:
    records = curve("quickstart_cpu.jsonl")
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    steps, rewards = column(records, "reward/mean")
    axes.plot(steps, rewards, color=BLUE, linewidth=1.2, label="reward in training")
    steps, values = column(records, "val/exact/mean@1")
    _, errors = column(records, "val/exact/mean@1/stderr")
    axes.errorbar(steps, values, yerr=errors, color=ORANGE, marker="o", markersize=4, linewidth=1.2, capsize=2, label="256 unseen sums (standard error)")
    axes.set_ylim(0, 1.02)
    finish(axes, "quickstart.svg", "step", "share right")


def smollm2() -> None:
    ours, theirs = curve("smollm2_arith_h200.jsonl"), json.loads((DOCS / "runs" / "trl_arith.json").read_text())["curve"]
    _, axes = plt.subplots(figsize=(6.4, 2.8))
    seconds, total = [], 0.0
    trained = [r for r in ours if "reward/mean" in r]
    for r in trained:
        total += r["timing_s/step"]
        seconds.append(total)
    axes.plot(seconds, [r["reward/mean"] for r in trained], color=BLUE, linewidth=1.2, label="Lockstep, seed 0")
    axes.plot([p["seconds"] for p in theirs], [p["reward"] for p in theirs], color=GREY, linewidth=1.2, label="TRL 1.16.0, seed 0")
    axes.set_ylim(0, 1.02)
    finish(axes, "smollm2_arith.svg", "seconds, 80 steps each", "reward")


def photograph(run: Path) -> None:
    """The page of a run, curves above and a traced rollout below."""
    sys.path.insert(0, str(DOCS.parent))
    from selenium import webdriver

    from page import write_page

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars", "--window-size=1280,1000"):
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
            driver.execute_script("document.querySelector('#list tbody tr').click(); window.scrollTo(0, document.body.scrollHeight)")
            time.sleep(1)
            driver.save_screenshot(str(DOCS / "pictures" / "page_rollouts.png"))
        finally:
            driver.quit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, metavar="RUN", help="photograph this run's page too")
    args = parser.parse_args()
    (DOCS / "pictures").mkdir(exist_ok=True)
    quickstart()
    smollm2()
    if args.page:
        photograph(args.page)
