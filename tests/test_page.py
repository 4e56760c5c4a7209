"""The page of a run: what is in the file, and what a browser makes of it."""

import base64
import gzip
import json
import math
import random
import re
import shutil
import time

import pytest

from batch import Task, Trajectory
from host.disk import to_json
from look.page import write_page
from metrics import dump_record

HOSTILE = "</script><img src=http://example.invalid/x.png onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x00\x1b[2J\u202e&amp;<b>bold</b>"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>\nuser\n<tool_response>\n42\n</tool_response>\nassistant\nThe answer is 42.'
WORDS = [
    "the",
    "sum",
    "of",
    "two",
    "and",
    "three",
    "is",
    "five",
    "so",
    "carry",
    "one",
    "over",
    "then",
    "add",
    "again",
    "wait",
    "check",
    "that",
    "digit",
]


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(to_json(record) + "\n" for record in records))


def rollout(rng, step, group, session, length=24):
    """A record of a dump, by the function that writes a run's."""
    task = Task(
        [{"role": "system", "content": "Answer."}, {"role": "user", "content": f"what is {group}+{step}?"}],
        "sums" if group % 2 else "products",
        str(group + step),
        index=group,
    )
    t = Trajectory(
        task,
        uid=f"{step:04d}-{group:04d}",
        session_id=session,
        finish_reason="length" if session == 3 else "stop",
        weight_version=step,
        score=float(session % 2),
        score_parts={"format": 1.0},
    )
    t.observe([1, 2, 3, 4])
    t.act([5] * (length + session), [-0.5] * (length + session))
    t.response = " ".join(rng.choices(WORDS, k=length)) + f" = {group + step}"
    return dump_record(t) | {"advantage": session % 2 - 0.5}


def trace(record, pieces, mask):
    """A record of traces/, as long as its pieces; the prompt is what comes before the first 1 of the mask."""
    rng, length, prompt = random.Random(record["key"]), len(pieces), mask.index(1)
    sampler = [-rng.random() * 3 if m else 0.0 for m in mask]
    return record | {
        "uid": record["key"].rsplit("_", 2)[0],
        "session_id": 0,
        "index": 0,
        "prompt_length": prompt,
        "response_length": sum(mask),
        "seq_length": length,
        "mask_sum": sum(mask),
        "sync_step": 0,
        "consumed": [{"update": 0, "micro_batch": 1, "rank": 0}],
        "tokens": list(range(100, 100 + length)),
        "pieces": pieces,
        "response_mask": mask,
        "loss_mask": mask,
        "token_level_rewards": [0.0] * (length - 1) + [1.0],
        "rollout_logprobs": sampler,
        "old_logprobs": [x + rng.gauss(0, 0.02) * m for x, m in zip(sampler, mask)],
        "ref_logprobs": None,
        "advantages": [record["advantage"] * m for m in mask],
        "returns": [record["advantage"] * m for m in mask],
        "entropy": [rng.random() * m for m in mask],
    }


def metrics(step, steps, speed=1.0):
    """A record of metrics.jsonl, with a KL that is not finite in step 1."""
    done = 1 - math.exp(-speed * 4 * step / steps)
    m = {
        "reward/mean": done,
        "reward/std": 0.3,
        "reward/min": 0,
        "reward/max": 1,
        "reward/format/mean": 0.9,
        "reward/frac_zero_std": done / 2,
        "reward/kl": 0.01 * done,
        "response_length/mean": 200 - 90 * done,
        "response_length/max": 400,
        "response_length/clip_ratio": 0.2 - 0.1 * done,
        "actor/entropy": 1.2 - done,
        "actor/ppo_kl": math.nan if step == 1 else 0.001 * done,
        "actor/kl_loss": 0.02 * done,
        "actor/pg_loss": 0.01 * math.sin(step),
        "actor/loss": 0.01 * math.sin(step),
        "actor/grad_norm": 0.5 + 0.2 * math.cos(step),
        "actor/pg_clipfrac": 0.01,
        "actor/lr": 1e-6,
        "rollout/groups_informative": 5,
        "rollout/groups_solved": 2,
        "rollout/groups_failed": 1,
        "rollout/groups_lost": 0,
        "correction/k3": 1e-4,
        "correction/prob_diff_mean": 0.002,
        "correction/prob_diff_max": 0.1,
        "correction/ess": 0.997,
        "agent/tool_calls/mean": done,
        "perf/throughput": 1000 + 10 * step,
        "perf/gen_tokens_per_s": 4000,
        "perf/train_tokens_per_s": 2500,
        "perf/memory_gb/gen": 60,
        "perf/memory_gb/update_actor": 71,
        "timing_s/sync": 0.4,
        "timing_s/gen": 5.0 - 2 * done,
        "timing_s/gen/max": 4.9,
        "timing_s/idle": 0.3,
        "timing_s/sleep": 0.2,
        "timing_s/old_log_prob": 1.0,
        "timing_s/ref": 0.9,
        "timing_s/adv": 0.01,
        "timing_s/update_actor": 3.0,
        "timing_s/step": 11.0 - 2 * done,
    }
    return {
        "step": step,
        **({} if step == steps else m),
        **(validation(done) if step % 10 == 0 or step == steps else {}),
    }


def validation(done):
    return {"val/mean": done / 2} | {
        f"val/{source}/{name}": value
        for source in ("sums", "products")
        for name, value in [("mean@4", done / 2), ("mean@4/stderr", 0.03), ("pass@4", done), ("pass@4/stderr", 0.02)]
    }


def make_run(folder, steps=12, groups=4, speed=1.0, lr=1e-6):
    """A run's folder: training dumps of `groups` times 4, validations, failures, and traces of the first two rollouts of steps 0 and 1."""
    rng = random.Random(folder.name)
    write_lines(folder / "metrics.jsonl", [metrics(step, steps, speed) for step in range(steps + 1)])
    (folder / "config.yaml").write_text(
        f"# commit 0123456789abcdef0123\nactor:\n  lr: {lr}\n  path: some/model\nloss:\n  betas: [0.9, 0.99]\n"
    )
    for step in range(steps):
        records = [rollout(rng, step, group, session) for group in range(groups) for session in range(4)]
        if step == 0:
            records[0]["response"], records[0]["prompt"][1]["content"], records[0]["finish_reason"] = (
                HOSTILE,
                HOSTILE,
                "<i>stop</i>",
            )
            records[1]["score"], records[1]["response"] = None, CALL
            records[2]["error"] = "Traceback:\nKeyError: 'x'"
        write_lines(folder / "rollouts" / f"{step:06d}.jsonl", records)
        if step < 2:
            pieces = [
                "<user>",
                "what",
                "?\n",
                " think",
                " of",
                "<call>",
                "6*7",
                "</call>",
                "<result>",
                "42",
                "</result>",
                " so",
                " it",
                " is",
                " 42",
                ".",
                HOSTILE,
            ]
            write_lines(
                folder / "traces" / f"{step:06d}.jsonl",
                [trace(record, pieces, [0] * 3 + [1] * 5 + [0] * 3 + [1] * 6) for record in records[:2]],
            )
    for step in (0, 10):
        write_lines(
            folder / "rollouts" / f"val-{step:06d}.jsonl",
            [
                rollout(rng, step, group, 0) | {"advantage": None, "response": f"validated {group}"}
                for group in range(6)
            ],
        )
    write_lines(
        folder / "rollouts" / "000002.failed.jsonl",
        [
            {"row": 7, "place": 1, "error": f"Traceback:\nValueError: {HOSTILE}"},
            {"row": 8, "place": 2, "error": "late"},
        ],
    )
    return folder


# ---- the file


def chunks(page):
    """{id: bytes} of the chunks of a page."""
    found = re.findall(
        r'<script type="application/octet-stream" id="(\w+)">([A-Za-z0-9+/=]*)</script>\n', page.read_text()
    )
    return {name: gzip.decompress(base64.b64decode(coded)) for name, coded in found}


def index(page):
    return json.loads(chunks(page)["index"], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_files_are_in_the_page_byte_for_byte_and_the_index_names_them(tmp_path):
    run, page = make_run(tmp_path / "a", steps=3), tmp_path / "page.html"
    write_page([run], page)
    found, (about,) = chunks(page), index(page)
    assert [(d["name"], d["step"], d["val"]) for d in about["dumps"]] == [
        ("000000", 0, False),
        ("000001", 1, False),
        ("000002", 2, False),
        ("val-000000", 0, True),
        ("val-000010", 10, True),
    ]
    for dump in about["dumps"]:
        assert found[dump["rollouts"]] == (run / "rollouts" / f"{dump['name']}.jsonl").read_bytes()
    assert found[about["dumps"][2]["failed"]] == (run / "rollouts" / "000002.failed.jsonl").read_bytes()
    traces = (run / "traces" / "000001.jsonl").read_bytes().splitlines(keepends=True)
    assert [found[chunk] for chunk in about["dumps"][1]["traces"].values()] == traces and list(
        about["dumps"][1]["traces"]
    ) == [json.loads(line)["key"] for line in traces]
    assert about["commit"] == "0123456789abcdef0123" and about["knobs"] == {
        "actor.lr": "1e-06",
        "actor.path": "some/model",
        "loss.betas": "[0.9, 0.99]",
    }
    assert "example.invalid" not in page.read_text() and not list(tmp_path.glob("*.part"))


def test_numbers_of_metrics_with_null_for_what_is_not_finite(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 0, "a": 1, "b": null, "text": "x"}\n{"step": 4, "a": NaN}\n')
    write_page([tmp_path / "m.jsonl"], tmp_path / "page.html")
    (about,) = index(tmp_path / "page.html")
    assert (
        about["name"] == "m"
        and about["metrics"] == {"a": [[0, 4], [1, None]], "b": [[0], [None]]}
        and about["dumps"] == []
    )


def test_last_line_that_a_kill_cut_short_is_left_out_and_no_other(tmp_path):
    run, page = make_run(tmp_path / "a", steps=3), tmp_path / "page.html"
    for name in ("metrics.jsonl", "traces/000000.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"step": 3, "key": "x", "rew')
    write_page([run], page)
    (about,) = index(page)
    assert about["metrics"]["reward/mean"][0] == [0, 1, 2] and len(about["dumps"][0]["traces"]) == 2
    with open(run / "metrics.jsonl", "a") as file:
        file.write("\n")
    before = page.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5, is not JSON"):
        write_page([run], page)
    assert page.read_bytes() == before and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("kept", ["metrics.jsonl", "rollouts", "traces"])
def test_any_one_kind_of_file_is_enough(tmp_path, kept):
    run = make_run(tmp_path / "a", steps=2)
    for path in run.iterdir():
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_page([run], tmp_path / "page.html")
    (about,) = index(tmp_path / "page.html")
    assert (
        bool(about["metrics"]) == (kept == "metrics.jsonl")
        and bool(about["dumps"]) == (kept != "metrics.jsonl")
        and about["config"] is None
    )


def test_what_is_no_run_is_said(tmp_path):
    run = make_run(tmp_path / "a", steps=1)
    (tmp_path / "none").mkdir()
    (tmp_path / "list.jsonl").write_text("[1]\n")
    for runs, words in [
        ([tmp_path / "none"], "none is no run's folder"),
        ([tmp_path / "gone"], "there is no run .*gone"),
        ([run, run], "named twice"),
        ([tmp_path / "list.jsonl"], "line 1, is no metrics record"),
    ]:
        with pytest.raises(ValueError, match=words):
            write_page(runs, tmp_path / "page.html")
    for out, words in [
        (tmp_path / "gone" / "page.html", "--html .* there is no folder"),
        (tmp_path, "--html .* that is a folder"),
    ]:
        with pytest.raises(ValueError, match=words):
            write_page([run], out)
    (run / "config.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"config\.yaml is no run's configuration"):
        write_page([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_runs_of_one_name_are_told_apart(tmp_path):
    write_page([make_run(tmp_path / x / "run", steps=1) for x in "ab"], tmp_path / "page.html")
    assert [about["name"] for about in index(tmp_path / "page.html")] == ["a/run", "b/run"]


# ---- in a browser


class Browser:
    def __init__(self, driver):
        self.driver = driver

    def open(self, page):
        self.driver.get(page.as_uri())
        self.wait("document.body.dataset.ready === 'yes'")

    def js(self, code):
        return self.driver.execute_script(f"return {code}")

    def wait(self, condition):
        deadline = time.monotonic() + 60
        while not self.js(condition):
            assert time.monotonic() < deadline, (
                f"{condition} is not so after a minute; the console: {self.driver.get_log('browser')}"
            )
            time.sleep(0.03)

    def set(self, name, value):
        """As if typed or chosen by the reader."""
        self.driver.execute_script(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'))",
            name,
            value,
        )

    def click(self, name):
        self.driver.execute_script("document.getElementById(arguments[0]).click()", name)

    def step(self, step):
        self.set("step", step)
        self.wait(f"view.dump.step === {step} && view.record !== null")

    def column(self, number):
        return self.js(
            f"[...document.querySelectorAll('#list tbody tr')].map((row) => row.cells[{number}].textContent)"
        )

    def complaints(self):
        """Errors on the console, and what was asked of anything but the file itself."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [e["message"] for e in self.driver.get_log("browser")] + [
            url for url in asked if not url.startswith(("file:", "data:", "blob:"))
        ]


@pytest.fixture(scope="module")
def chromium():
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "window-size=1280,900",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium):
    """The test fails when the page had an error, or asked the network for anything."""
    browser = Browser(chromium)
    browser.complaints()
    yield browser
    assert (
        browser.complaints() == []
        and browser.js("document.getElementById('alert').hidden")
        and "owned" not in chromium.title
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """one.html with a run, two.html with it and another."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [make_run(folder / "slow"), make_run(folder / "fast", speed=3.0, lr=3e-6)]
    (folder / "slow" / "traces" / "000020.jsonl").write_text(
        (folder / "slow" / "traces" / "000001.jsonl").read_text()
    )  # a step that was traced and not dumped
    write_page(runs[:1], folder / "one.html")
    write_page(runs, folder / "two.html")
    return folder


PANELS = [
    "reward",
    "validation: mean of the sources",
    "validation: products",
    "validation: sums",
    "parts of the score",
    "response length, tokens",
    "clip ratio: responses cut at the limit",
    "entropy",
    "KL",
    "loss",
    "gradient norm",
    "fractions",
    "groups",
    "sampler against actor",
    "effective sample size",
    "agent",
    "tokens a second",
    "seconds a phase",
    "memory, GiB",
    "any metric",
]


def plot(title):
    return f"document.querySelector('[data-title=\"{title}\"] .plot')"


def test_every_panel_draws_its_curves(browser, pages):
    browser.open(pages / "one.html")
    assert browser.js("[...document.querySelectorAll('.panel')].map((panel) => panel.dataset.title)") == PANELS
    assert all(
        browser.js(
            "[...document.querySelectorAll('.plot')].map((plot) => [...plot.querySelectorAll('svg .scatterlayer path.js-line, svg .scatterlayer path.js-fill')].some((path) => path.getAttribute('d')?.length > 20))"
        )
    )
    assert browser.js(
        "[...document.querySelector('.modebar').querySelectorAll('.modebar-btn')].map((button) => button.dataset.title)"
    ) == ["Download plot as a PNG", "Reset axes"]  # none that shares, no logo
    assert browser.js("document.getElementById('runs').rows[1].innerText.split('\\t').map((cell) => cell.trim())") == [
        "slow",
        "12",
        "0 → 0.4908 mean",
        "0 → 0.9744",
        "0123456789ab",
    ]
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")


def test_errors_bands_and_phases_are_what_was_logged(browser, pages):
    browser.open(pages / "one.html")
    bars = browser.js(f"{plot('validation: sums')}.data.map((line) => [line.name, line.error_y.array])")
    assert bars == [["mean@4", [0.03] * 3], ["pass@4", [0.02] * 3]]
    low, high = (browser.js(f"{plot('reward')}.data.map((line) => line.y)")[i] for i in (0, 1))
    assert all(b - a == pytest.approx(0.6, abs=1e-6) for a, b in zip(low, high))
    stack = dict(browser.js(f"{plot('seconds a phase')}.data.map((area) => [area.name, area.y[0]])"))
    assert stack.pop("rest") == pytest.approx(11 - sum(stack.values())) and list(stack) == [
        "sync",
        "gen",
        "sleep",
        "old_log_prob",
        "ref",
        "adv",
        "update_actor",
    ]
    assert browser.js(f"{plot('KL')}.data[0].y.slice(0, 3)")[1] is None


def test_smoothing_and_logarithm(browser, pages):
    browser.open(pages / "one.html")
    entropy = f"{plot('entropy')}.data.at(-1).y"
    y = browser.js(entropy)
    browser.set("smooth", 0.5)
    browser.wait(f"Math.abs({entropy}[1] - {(0.5 * y[0] + y[1]) / 1.5}) < 1e-5 && {entropy}[0] === {y[0]}")
    browser.driver.execute_script("document.querySelector('[data-title=entropy] .log').click()")
    assert (
        browser.js(f"{plot('entropy')}._fullLayout.yaxis.type") == "log"
        and browser.js(f"{plot('KL')}._fullLayout.yaxis.type") == "linear"
    )
    browser.set(
        "metric",
        browser.js(
            "[...document.getElementById('metric').options].findIndex((option) => option.text === 'perf/throughput')"
        ),
    )
    assert browser.js(f"{plot('any metric')}.data.at(-1).customdata[3]") == 1030


def test_two_runs_overlay_in_two_colours(browser, pages):
    browser.open(pages / "two.html")
    lines = browser.js(f"{plot('entropy')}.data.map((line) => [line.name, line.line.color])")
    assert [name for name, _ in lines] == ["slow", "fast"] and len({color for _, color in lines}) == 2
    swatches = browser.js(
        "[...document.querySelectorAll('.swatch')].map((swatch) => getComputedStyle(swatch).backgroundColor)"
    )
    assert swatches == ["rgb({}, {}, {})".format(*bytes.fromhex(color[1:])) for _, color in lines]
    assert browser.js("document.querySelector('#knobs table').innerText.trim().split(/\\s+/)") == [
        "knob",
        "slow",
        "fast",
        "actor.lr",
        "1e-06",
        "3e-06",
    ]
    browser.driver.execute_script("document.querySelectorAll('#runs input')[0].click()")
    assert browser.js(f"{plot('entropy')}.data.map((line) => line.name)") == ["fast"]
    browser.driver.execute_script(
        "const select = document.querySelector('.chosen'); select.value = 1; select.dispatchEvent(new Event('change'))"
    )
    assert browser.js(f"{plot('seconds a phase')}.data[0].meta") == 1 and browser.js(
        f"{plot('seconds a phase')}.data.find((area) => area.name === 'gen').y[1]"
    ) == pytest.approx(5 - 2 * (1 - math.exp(-1)))
    browser.set("run", 1)
    browser.wait("view.run === 1 && view.dump === runs[1].dumps[0]")


def test_steps_groups_and_validations(browser, pages):
    browser.open(pages / "one.html")
    browser.click("show-browser")
    browser.click("next")
    browser.wait("view.dump.step === 1 && view.record !== null")
    assert "what is 0+1?" in browser.js("document.getElementById('detail').innerText")
    browser.driver.execute_script(
        "for (const key of ['ArrowRight', 'ArrowRight', 'ArrowLeft']) document.dispatchEvent(new KeyboardEvent('keydown', {key}))"
    )
    browser.wait("view.dump.step === 2 && view.record !== null")
    browser.driver.execute_script("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}))")
    assert (
        browser.js("view.record.place") == 1
        and browser.js("document.querySelector('#list tr.on td').textContent") == "0"
    )
    browser.set("slider", 7)
    browser.wait("view.dump.step === 7 && view.record !== null")
    browser.set("group", "2")  # counted as `python -m look RUN --group` counts
    assert browser.column(0) == ["2"] * 4 and "what is 2+7?" in browser.js(
        "document.getElementById('detail').innerText"
    )
    browser.set("kind", "val")
    browser.wait("view.dump.name === 'val-000010' && view.record !== null")
    assert browser.column(5) == [f"validated {i}" for i in range(6)] and browser.column(2) == ["–"] * 6
    browser.driver.execute_script(f"{plot('entropy')}.emit('plotly_click', {{points: [{{data: {{meta: 0}}, x: 5}}]}})")
    browser.wait("view.dump.name === '000005' && view.record !== null")


def test_step_that_was_asked_for_last_is_shown_though_another_takes_longer(browser, pages):
    browser.open(pages / "one.html")
    browser.driver.execute_script(
        "const read = readDump; readDump = async (dump) => { if (dump.step === 1) await new Promise((done) => setTimeout(done, 300)); return read(dump); }; loadDump(1).then(() => { window.late = true; }); loadDump(2);"
    )
    browser.wait("window.late && view.record !== null")
    assert browser.js("view.dump.step") == 2 and browser.js("+document.getElementById('step').value") == 2


def test_filters_sort_and_search(browser, pages):
    browser.open(pages / "one.html")
    browser.step(3)
    browser.set("least", "0.5")
    assert browser.column(1) == ["1"] * 8
    browser.set("finish", "length")
    assert browser.column(4) == ["length"] * 4
    browser.set("source", "sums")
    assert browser.column(0) == ["1", "3"]
    browser.step(4)
    assert browser.column(0) == ["1", "3"]  # filters stay while steps change
    browser.click("reset")
    assert len(browser.column(0)) == 16
    browser.set("sort", "response_length")
    assert browser.column(3) == [str(n) for n in (27, 26, 25, 24) for _ in range(4)]
    browser.click("order")
    assert browser.column(3)[:4] == ["24"] * 4
    browser.set("sort", "advantage")
    assert browser.column(2)[0] == "-0.5"
    browser.set("text", "WHAT IS 2+4")
    assert browser.column(0) == ["2"] * 4
    browser.set("text", " = 7")
    assert browser.column(0) == ["3"] * 4
    browser.click("everywhere")
    browser.wait("document.getElementById('found').dataset.done !== undefined")
    assert browser.js("[...document.querySelectorAll('#found button')].map((button) => button.textContent)") == [
        "close",
        *(f"step {step}: 4" for step in (4, 5, 6, 7)),
    ]
    browser.driver.execute_script("document.querySelectorAll('#found button')[3].click()")
    browser.wait("view.dump.step === 6")
    assert browser.column(0) == ["1"] * 4 and browser.js("view.record.response").endswith(" = 7")
    browser.set("text", "not there")
    assert browser.column(0) == [] and "no rollout matches" in browser.js("document.getElementById('detail').innerText")


def test_scores_that_are_none_come_last(browser, pages):
    browser.open(pages / "one.html")
    browser.set("sort", "score")
    assert browser.column(1)[-1] == "–"
    browser.click("order")
    assert browser.column(1)[-1] == "–" and browser.column(1)[0] == "0"
    browser.set("least", "-5")
    assert "–" not in browser.column(1)


def test_tokens_are_shaded_by_what_is_chosen(browser, pages):
    browser.open(pages / "one.html")
    browser.step(1)
    shades = "[...document.querySelectorAll('[data-token]')].map((token) => getComputedStyle(token).backgroundColor)"
    seen = []
    for quantity in browser.js("Object.keys(QUANTITIES)"):
        browser.set("shade", quantity)
        seen.append(browser.js(shades))
        given = {seen[-1][i] for i in (0, 1, 2, 8, 9, 10)}
        assert given == {"rgba(0, 0, 0, 0)"} and (len(set(seen[-1])) > 1) == (quantity != "nothing"), quantity
    assert len(set(map(str, seen))) == len(seen) == 5 and len(set(seen[0])) == 2 and len(set(seen[1])) > 8
    assert browser.js(
        "[...document.querySelectorAll('#response details')].map((fold) => [fold.open, fold.querySelectorAll('[data-token]').length])"
    ) == [[False, 3], [False, 3]]
    browser.driver.execute_script(
        "document.querySelector('[data-token=\"3\"]').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    tip = browser.js("document.getElementById('tip').innerText")
    assert '3: " think"' in tip and "103" in tip and "-0.5" in tip and re.search(r"reference\s+–", tip)
    assert "update 0, micro-batch 1, rank 0" in browser.js("document.getElementById('facts').innerText")


def test_signal_of_a_fork_is_in_a_tokens_tip_under_its_own_name(browser, pages, tmp_path):
    run = make_run(tmp_path / "fork", steps=2)
    path = run / "traces" / "000001.jsonl"
    traces = [json.loads(line) for line in path.read_text().splitlines()]
    for t in traces:
        t["<b>surprise"] = [None] * t["prompt_length"] + [0.125] * (t["seq_length"] - t["prompt_length"])
    write_lines(path, traces)
    write_page([run], tmp_path / "page.html")
    for page, told in ((tmp_path / "page.html", True), (pages / "one.html", False)):
        browser.open(page)
        browser.step(1)
        browser.driver.execute_script(
            "document.querySelector('[data-token=\"3\"]').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
        )
        names = browser.js("[...document.querySelectorAll('#tip th')].map((name) => name.innerText)")
        assert names[-1] == ("<b>surprise" if told else "entropy")
        assert ("0.125" in browser.js("document.getElementById('tip').innerText")) == told


def test_advantages_of_the_two_signs_have_two_colours_of_one_strength(browser, pages):
    browser.open(pages / "one.html")
    browser.step(1)
    token = "getComputedStyle(document.querySelector('[data-token=\"3\"]')).backgroundColor"
    browser.set("shade", "advantage")
    below = browser.js(token)
    browser.driver.execute_script("document.querySelectorAll('#list tbody tr')[1].click()")
    browser.wait("view.trace !== null && view.trace.key === view.records[1].key")
    above = browser.js(token)
    assert above != below and above.split()[-1] == below.split()[-1] == "0.7)"


def test_tool_turns_are_folded(browser, pages):
    browser.open(pages / "one.html")
    folded = f"foldedTools({json.dumps(CALL)}).map((piece) => piece.nodeType ? piece.querySelector('summary').textContent : piece)"
    assert browser.js(folded) == [
        "",
        'call: {"name": "calculator", "arguments": {"expression": "6*7"}}',
        "\nuser\n",
        "result: 42",
        "\nassistant\nThe answer is 42.",
    ]
    assert browser.js("foldedTools('a <tool_call>{').length") == 3  # one that was cut off


def test_rollouts_of_a_step_that_was_only_traced(browser, pages):
    browser.open(pages / "one.html")
    browser.step(20)
    assert (
        browser.column(1) == ["0", "1"]
        and browser.column(2) == ["-0.5", "0.5"]
        and browser.column(5)[0].startswith("think of<call>6*7</call><result>42</result> so it is 42.")
    )


def test_failures_are_shown(browser, pages):
    browser.open(pages / "one.html")
    browser.click("show-browser")
    browser.step(2)
    browser.wait("document.getElementById('failed').innerText === '2 failed sessions'")
    browser.driver.execute_script("document.getElementById('failures').open = true")
    assert "ValueError: </script>" in browser.js("document.getElementById('failures').innerText")
    browser.step(3)
    browser.wait("document.getElementById('failed').innerText === ''")


def test_what_a_model_wrote_is_text_whatever_it_is(browser, pages):
    browser.open(pages / "one.html")
    assert (
        "</script><img src=http://example.invalid/x.png onerror" in browser.column(5)[0]
        and browser.column(4)[0] == "<i>stop</i>"
    )
    shown = browser.js("document.getElementById('detail').innerText")
    assert shown.count("&amp;<b>bold</b>") == 2 and "[U+0000][U+001B][2J[U+202E]" in shown
    assert browser.js("document.querySelectorAll('main img, main script, main b, main i, body > img').length") == 0
    browser.driver.execute_script(
        "document.body.insertAdjacentHTML('beforeend', arguments[0])",
        "<img src='data:,x' onerror=\"document.title = 'owned'\">",
    )  # were it markup: the policy of the page
    time.sleep(0.3)
    assert browser.js("document.title") == "slow · Lockstep"
    refused = browser.complaints()
    assert refused and all("Content Security Policy" in complaint for complaint in refused)


def test_files_of_metrics_and_empty_runs(browser, pages, tmp_path):
    (tmp_path / "only.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n{"step": 1, "reward/mean": null}\n')
    write_page([tmp_path / "only.jsonl"], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser.js("[...document.querySelectorAll('.panel')].map((panel) => panel.dataset.title)") == [
        "reward",
        "any metric",
    ] and browser.js("document.getElementById('show-browser').hidden")
    (pages / "bare" / "rollouts").mkdir(parents=True)
    (pages / "bare" / "rollouts" / "000004.jsonl").write_text(
        '{"key": "a_0_0", "response": "x"}\n{"key": "a_1_0", "resp'
    )
    write_page([pages / "bare"], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert (
        browser.column(5) == ["x"]
        and browser.js("document.getElementById('show-curves').hidden")
        and "1 lines of this step could not be read" in browser.js("document.getElementById('count').innerText")
    )


@pytest.mark.slow
def test_fifty_thousand_rollouts(browser, tmp_path):
    run, rng = tmp_path / "long", random.Random(0)
    write_lines(run / "metrics.jsonl", [metrics(step, 100) for step in range(101)])
    for step in range(100):
        write_lines(
            run / "rollouts" / f"{step:06d}.jsonl",
            [rollout(rng, step, group, session, 60) for group in range(125) for session in range(4)],
        )
    write_page([run], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.click("show-browser")
    browser.step(73)
    assert browser.js("view.shown.length") == 500 and len(browser.column(0)) == 200
    browser.click("more")
    assert len(browser.column(0)) == 400
    for step in range(6):
        browser.step(step)
    assert browser.js("cache.size") == 5
    browser.set("text", "what is 124+99?")
    browser.click("everywhere")
    browser.wait("document.getElementById('found').dataset.done !== undefined")
    assert browser.js("document.querySelectorAll('#found button')[1].textContent") == "step 99: 4"
