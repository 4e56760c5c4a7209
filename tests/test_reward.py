import asyncio
import math
import os
import sys
import time
from threading import Thread

import numpy as np
import pytest
import reward_table
import torch

from batch import Task, Trajectory
from reward import RewardConfig, Scorer, check_failures, load_judge, load_reward, score_and_parts, too_many_failed
from tasks.rules import DATA_SOURCES, REWARDS

SHIPPED = ("gsm8k", "math", "math_dapo", "countdown", "exact", "exact_int")  # a fork's own rule has tests of its own


def make(answer, task, response=None):
    """A trajectory of two turns' worth of text: response is everything after the prompt, answer the last turn."""
    return Trajectory(task, response=answer if response is None else response, answer=answer)


def judge(rule, answer, truth, extra_info=None):
    """Score of an answer by a built-in rule."""
    task = Task("", rule, truth, extra_info or {})
    return score_and_parts(REWARDS[rule](task, make(answer, task)))[0]


TABLES = {
    "gsm8k": reward_table.GSM8K,
    "math": reward_table.MATH,
    "math_dapo": reward_table.MATH_DAPO,
    "countdown": reward_table.COUNTDOWN,
}
TABLES |= {"exact": reward_table.EXACT, "exact_int": reward_table.EXACT_INT}
ROWS = [pytest.param(rule, *row[:3], id=f"{rule}-{row[3]}") for rule, rows in TABLES.items() for row in rows]
ROWS += [
    pytest.param("math", rf"So it is $\boxed{{{inside}}}$.", truth, expected, id=f"math-{why}")
    for inside, truth, expected, why in reward_table.BOXED
]


@pytest.mark.parametrize("rule, response, truth, expected", ROWS)
def test_rule(rule, response, truth, expected):
    start = time.process_time()
    assert judge(rule, response, truth) == expected
    assert time.process_time() - start < 5, "far from reward.timeout_s"


@pytest.mark.parametrize("rule", SHIPPED)
def test_a_rule_judges_the_last_turn_only(rule):
    """A tool's result that holds the answer earns nothing."""
    right, wrong = {
        "gsm8k": ("#### 7", "#### 8"),
        "math": (r"\boxed{7}", r"\boxed{8}"),
        "math_dapo": ("Answer: 7", "Answer: 8"),
        "countdown": ("<answer>3+4</answer>", "<answer>3*4</answer>"),
        "exact": ("7", "8"),
        "exact_int": ("7", "8"),
    }[rule]
    task = Task("", rule, {"target": 7, "numbers": [3, 4]} if rule == "countdown" else "7")
    for answer, expected in ((right, 1), (wrong, -1 if rule == "math_dapo" else 0)):
        assert (
            score_and_parts(REWARDS[rule](task, make(answer, task, response=f"{right} {wrong} {right}")))[0] == expected
        )


def test_parts():
    task = Task("", "math_dapo", "34")
    assert REWARDS["math_dapo"](task, make("Answer: 1", task)) == {"score": -1.0, "acc": 0.0}
    task = Task("", "countdown", {"target": 24, "numbers": [3, 5, 3]})
    assert REWARDS["countdown"](task, make("<answer>3*5*3</answer>", task)) == {"score": 0.0, "format": 1.0}
    assert REWARDS["countdown"](task, make("<answer>?</answer>", task)) == {"score": 0.0, "format": 0.0}


@pytest.mark.parametrize("column", ["numbers", "nums"])
def test_countdown_numbers_in_extra_info(column):
    assert judge("countdown", "<answer>(3+5)*3</answer>", 24, {column: [3, 5, 3]}) == 1


def test_math_outside_the_main_thread():
    """math-verify's own time-outs are alarms, which raise there."""
    scores = []
    thread = Thread(target=lambda: scores.append(judge("math", r"\boxed{\frac{2}{4}}", "0.5")))
    thread.start()
    thread.join()
    assert scores == [1]


@pytest.mark.parametrize("rule, truth", [("gsm8k", "seventy"), ("exact_int", "seventy"), ("countdown", {"target": 24})])
def test_a_ground_truth_that_can_not_be_read_is_an_error_not_a_zero(rule, truth):
    with pytest.raises((ValueError, KeyError)):
        judge(rule, "#### 70", truth)


# Reasoning Gym


def gym_row(name, seed=3):
    import reasoning_gym

    entry = reasoning_gym.create_dataset(name, size=1, seed=seed)[0]
    return Task(entry["question"], f"reasoning_gym/{name}", entry["answer"], entry)


def gym_score(task, answer):
    return score_and_parts(load_reward(RewardConfig(), [task.data_source])(task, make(answer, task)))[0]


@pytest.mark.parametrize(
    "form, expected",
    [
        ("<answer>292</answer>", 1),
        ("<answer>\n292\n</answer> so 291", 1),
        ("<answer>1</answer> no, <answer>292</answer>", 1),
        ("<answer>292</answer> no, <answer>1</answer>", 0),
        (r"\boxed{1}, <answer>292</answer>", 1),
        (r"it is \boxed{292}, surely", 1),
        ("I count.\n\n292\n", 1),
        ("292", 1),
        ("292\nor not", 0),
        ("<answer>293</answer>", 0),
        ("", 0),
    ],
)
def test_reasoning_gym_finds_the_answer(form, expected):
    task = gym_row("leg_counting")
    score = gym_score(task, form.replace("292", str(task.ground_truth)))
    assert score == 1 if expected else score < 0.1, "its scorers give 0.01 for a wrong answer"


def test_reasoning_gym_scores_by_its_own_rule():
    task = gym_row("countdown")
    numbers = task.extra_info["metadata"]["numbers"]
    assert gym_score(task, f"<answer>{task.ground_truth}</answer>") == 1
    assert gym_score(task, f"<answer>({task.ground_truth})</answer>") == 1, "not by comparing texts"
    assert gym_score(task, f"<answer>{' + '.join(map(str, numbers))}</answer>") < 1
    start = time.process_time()
    assert gym_score(task, "<answer>55**36**7**19</answer>") == 0 and time.process_time() - start < 5


def test_reasoning_gym_a_bad_answer_is_the_policys_and_a_bad_row_is_not():
    task = gym_row("prime_factorization")
    assert gym_score(task, "<answer>garbage</answer>") == 0, "its scorer raises for that"
    with pytest.raises(ValueError, match="no number"):
        gym_score(
            Task("", task.data_source, "no number", {**task.extra_info, "answer": "no number"}),
            "<answer>garbage</answer>",
        )


def test_reasoning_gym_is_checked_at_start(monkeypatch):
    with pytest.raises(ValueError, match="reasoning_gym/leg_count'.*not registered"):
        load_reward(RewardConfig(), ["reasoning_gym/leg_count"])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not installed
    with pytest.raises(ValueError, match="reasoning_gym/sudoku'.*pip install reasoning-gym"):
        load_reward(RewardConfig(), ["reasoning_gym/sudoku"])


# Which rule


@pytest.mark.parametrize(
    "data_source, rule",
    [*DATA_SOURCES.items(), *((name, name) for name in SHIPPED), ("aime2024", "math_dapo"), ("aime_25", "math_dapo")],
)
def test_rule_by_data_source(data_source, rule):
    responses = {
        "gsm8k": "#### 7",
        "math": r"\boxed{7}",
        "math_dapo": "Answer: 7",
        "countdown": "<answer>3+4</answer>",
        "exact": "7",
        "exact_int": "It's 7",
    }
    fn = load_reward(RewardConfig(), {data_source, "exact"})
    for name, response in responses.items():
        task = Task("", data_source, {"target": 7, "numbers": [3, 4]} if rule == "countdown" else "7")
        result = fn(task, make(response, task))
        value = result["score"] if isinstance(result, dict) else result
        assert value == 1 or name != rule
    assert load_reward(RewardConfig(name=rule), ["no such"]) is REWARDS[rule], "reward.name goes before data_source"


@pytest.mark.parametrize(
    "cfg, sources, says",
    [
        ({"name": "gsm8"}, [], ["reward.name='gsm8'", "did you mean gsm8k", "countdown"]),
        (
            {},
            ["exact", "opena/gsm8k"],
            ["'opena/gsm8k'", "did you mean openai/gsm8k", "reward.name", "data.default_data_source", "lighteval/MATH"],
        ),
        ({}, ["zzz"], ["'zzz'", "known: gsm8k"]),
    ],
)
def test_unknown_names(cfg, sources, says):
    with pytest.raises(ValueError) as e:
        Scorer(RewardConfig(**cfg), sources)
    for part in says:
        assert part in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "knobs, says",
    [
        ({"name": "exact", "custom_path": "a.py"}, "reward.name='exact' and reward.custom_path='a.py'"),
        ({"max_failed_fraction": 1.5}, "reward.max_failed_fraction=1.5"),
        ({"max_failed_fraction": -0.1}, "reward.max_failed_fraction=-0.1"),
        ({"max_failed_fraction": math.nan}, "reward.max_failed_fraction=nan"),
        ({"num_workers": 0}, "reward.num_workers=0"),
        ({"timeout_s": 0.0}, "reward.timeout_s=0.0"),
        ({"timeout_s": math.inf}, "reward.timeout_s=inf"),
        ({"timeout_s": math.nan}, "reward.timeout_s=nan"),
    ],
)
def test_bad_knobs(knobs, says):
    with pytest.raises(ValueError, match=says):
        RewardConfig(**knobs)


def test_defaults():
    assert 1 <= RewardConfig().num_workers <= min(4, os.cpu_count()) and RewardConfig().timeout_s == 10.0


# A user's own

VERL_FILE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth
    return {"score": 1.0 if right else extra_info["floor"], "acc": right, "pred": solution_str, "source": data_source}

async def slowly(data_source, solution_str, ground_truth, extra_info, **kwargs):
    import asyncio
    await asyncio.sleep(0)
    return len(solution_str)

def short(solution_str):
    return 1.0

compute = 5
"""


@pytest.fixture
def custom_file(tmp_path):
    (tmp_path / "mine.py").write_text(VERL_FILE)
    return str(tmp_path / "mine.py")


def test_custom_function(custom_file):
    tasks = [Task("1+1=", "anything", "2", {"floor": -0.5})] * 2
    right, wrong = trajectories = [make("", task, response=text) for text, task in zip("23", tasks)]
    score(RewardConfig(custom_path=custom_file), trajectories, ["anything"])
    assert (right.score, wrong.score) == (1.0, -0.5), "compute_score gets the whole response"
    assert right.score_parts == {"acc": 1.0} and wrong.score_parts == {"acc": 0.0}, (
        "parts are numbers; texts are left out"
    )


def test_custom_async_function(custom_file):
    trajectory = make("", Task("", "any", ""), response="234")
    score(RewardConfig(custom_path=custom_file + ":slowly"), [trajectory])
    assert trajectory.score == 3.0 and trajectory.error is None


VERL_FILES = {
    # a copy of verl's dispatcher, its rules beside it and imported late
    "reward_score/__init__.py": """
def default_compute_score(data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, concurrent_semaphore=None, memory_limit_mb=None, **kwargs):
    if data_source in ["openai/gsm8k"]:
        from . import gsm8k

        res = gsm8k.compute_score(solution_str, ground_truth)
    elif data_source in ["math_dapo"]:
        from .math_dapo import compute_score

        res = compute_score(solution_str, ground_truth)
    else:
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    if isinstance(res, dict):
        return res
    elif isinstance(res, int | float | bool):
        return float(res)
    else:
        return float(res[0])
""",
    "reward_score/gsm8k.py": """
import re

def extract_solution(solution_str, method="strict"):
    assert method in ["strict", "flexible"]
    solutions = re.findall("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    return solutions[-1].replace(",", "").replace("$", "") if solutions else None

def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    answer = extract_solution(solution_str=solution_str, method=method)
    return 0 if answer is None else score if answer == ground_truth else format_score
""",
    "reward_score/math_dapo.py": """
def compute_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index=None):
    pred = solution_str[-300:].rpartition("Answer:")[2].strip()
    correct = pred == ground_truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
""",
    # a single file with a helper next to it, as a recipe has it, and a class that needs its module to be known
    "recipe/my_reward.py": """
from __future__ import annotations
from dataclasses import dataclass
from helper import extract

@dataclass
class Result:
    score: float

async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict, **kwargs) -> bool:
    return Result(extract(solution_str) == ground_truth).score
""",
    "recipe/helper.py": "def extract(text):\n    return text.rpartition('####')[2].strip()\n",
}


@pytest.mark.parametrize(
    "path, data_source, expected, parts",
    [
        ("reward_score/__init__.py:default_compute_score", "openai/gsm8k", [1.0, 0.0, 0.0], {}),
        ("reward_score/__init__.py:default_compute_score", "math_dapo", [-1.0, -1.0, 1.0], {"acc": 1.0}),
        ("recipe/my_reward.py", "any", [1.0, 0.0, 0.0], {}),
    ],
)
def test_verls_files_load_unchanged(tmp_path, monkeypatch, path, data_source, expected, parts):
    for name, text in VERL_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    trajectories = [
        make("", Task("", data_source, "7"), response=text) for text in ("so\n#### 7", "so\n#### 8", "Answer: 7")
    ]
    score(RewardConfig(custom_path=path), trajectories, [data_source])
    assert [t.error for t in trajectories] == [None] * 3
    assert [t.score for t in trajectories] == expected and trajectories[2].score_parts == parts


def test_a_users_file_hides_no_library(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from . import tabnanny as own\nimport tabnanny\n" + VERL_FILE + "\nassert own.HERE and tabnanny.check\n"
    )
    (tmp_path / "tabnanny.py").write_text(
        "HERE = True"
    )  # as the user may call a file without a thought of the standard library's
    load_reward(RewardConfig(custom_path=str(tmp_path / "mine.py")))


@pytest.mark.parametrize(
    "text, suffix, says",
    [
        (None, "", ["no Python file"]),
        ("x = 1", "", ["no function 'compute_score'"]),
        (VERL_FILE, ":gone", ["no function 'gone'"]),
        (VERL_FILE, ":compute", ["no function 'compute'"]),
        (VERL_FILE, ":short", ["must take data_source, solution_str, ground_truth and extra_info"]),
        ("import no_such_module", "", ["ModuleNotFoundError", "no_such_module"]),
        ("def compute_score(:", "", ["SyntaxError"]),
        ("raise SystemExit(3)", "", ["SystemExit"]),
    ],
)
def test_custom_file_that_does_not_work(tmp_path, text, suffix, says):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    for use in (load_reward, Scorer):
        with pytest.raises(ValueError) as e:
            use(RewardConfig(custom_path=f"{path}{suffix}"))
        for part in ["reward.custom_path", str(path), *says]:
            assert part in str(e.value)


def test_custom_file_of_another_kind(tmp_path):
    (tmp_path / "mine.txt").write_text(VERL_FILE)
    with pytest.raises(ValueError, match="reward.custom_path.*no Python file"):
        load_reward(RewardConfig(custom_path=str(tmp_path / "mine.txt")))


# What a rule may return


@pytest.mark.parametrize(
    "result, expected",
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.25), 0.25),
        ({"score": np.float64(0.5), "format": True, "pred": "x", "none": None}, 0.5),
    ],
)
def test_results_that_are_numbers(result, expected):
    value, parts = score_and_parts(result)
    assert type(value) is float and value == expected
    assert parts == ({"format": 1.0} if isinstance(result, dict) else {})


@pytest.mark.parametrize(
    "result",
    [None, "1", [1.0], (1.0, 2.0), {}, {"acc": 1.0}, {"score": None}, math.nan, math.inf, np.zeros(2), object()],
)
def test_results_that_are_not(result):
    with pytest.raises(TypeError, match="finite number"):
        score_and_parts(result)


# Scoring in workers

JUDGE = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "die":
        os._exit(1)
    if solution_str == "raise":
        raise ZeroDivisionError(f"on row {extra_info['row']}")
    return {"none": None, "score": None} if solution_str == "none" else {"score": len(solution_str), "part": 2}
"""


@pytest.fixture
def judge_file(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    return str(tmp_path / "judge.py")


def test_scorer(judge_file):
    texts = ["ab", "raise", "hang", "abc", "die", "none", "", "abcd"]
    trajectories = [make("", Task("", "any", "", {"row": i}, index=i), response=text) for i, text in enumerate(texts)]
    score(RewardConfig(custom_path=judge_file, num_workers=2, timeout_s=4.0), trajectories)
    assert [t.score for t in trajectories if t.error is None] == [2, 3, 0, 4]
    assert all(math.isnan(t.score) and t.score_parts == {} for t in trajectories if t.error)
    assert all(t.score_parts == {"part": 2.0} for t in trajectories if not t.error)
    raised, late, died, none = (trajectories[i].error for i in (1, 2, 4, 5))
    assert "ZeroDivisionError: on row 1" in raised and "in compute_score" in raised
    assert late.startswith("TimeoutError") and "row 2" in late and "reward.timeout_s=4" in late
    assert "worker died" in died and "finite number" in none
    metrics = check_failures(trajectories, RewardConfig(max_failed_fraction=0.5))
    assert metrics == {"reward/error": 3.0, "reward/timeout": 1.0}, "the share itself is allowed"
    with pytest.raises(RuntimeError) as e:
        check_failures(trajectories, RewardConfig(max_failed_fraction=0.49))
    for part in ("4 of 8", "reward.max_failed_fraction=0.49", "ZeroDivisionError: on row 1"):
        assert part in str(e.value)
    assert "TimeoutError" not in str(e.value), "the first traceback only"


def test_scoring_again_forgets_the_error():
    task = Task("", "gsm8k", "no number")
    trajectory = make("#### 7", task)
    score(RewardConfig(), [trajectory], ["gsm8k"])
    assert "row 0 is not a number" in trajectory.error and math.isnan(trajectory.score)
    task.ground_truth = "7"
    score(RewardConfig(), [trajectory], ["gsm8k"])
    assert trajectory.error is None and trajectory.score == 1.0


def test_a_rule_sees_the_task_and_the_trajectory_but_not_the_logprobs():
    trajectory = make("a", Task("1+1=", "exact", "a", {"x": 1}), response="tool a")
    trajectory.observe([1, 2])
    trajectory.act([3, 4], [-1.0, -2.0])
    seen = []

    def spy(task, t):
        seen.append((task, t))
        return 1.0

    REWARDS["spy"] = spy
    try:
        judge_it = load_judge(RewardConfig(name="spy"), [])
    finally:
        del REWARDS["spy"]
    sent = []

    class Pool:  # in this process
        async def call(self, *args, timeout_s):
            sent.append(args)
            return judge_it(*args)

    scorer = Scorer.__new__(Scorer)
    scorer.cfg, scorer.pool = RewardConfig(), Pool()
    asyncio.run(scorer.score(trajectory))
    ((task, t),) = seen
    assert task == trajectory.task and t.task is task
    assert (t.response, t.answer, t.tokens, t.response_mask) == ("tool a", "a", [1, 2, 3, 4], [0, 0, 1, 1])
    assert t.rollout_logprobs == [] and trajectory.rollout_logprobs == [0.0, 0.0, -1.0, -2.0]


def test_many_scores_under_every_rule():
    """Distinct answers, all at once, over two event loops."""
    tasks = [
        Task("", data_source, str(i))
        for i in range(100)
        for data_source in ("openai/gsm8k", "lighteval/MATH", "aime2024", "exact")
    ]
    forms = {"openai/gsm8k": "#### {}", "lighteval/MATH": r"\boxed{{{}}}", "aime2024": "Answer: {}", "exact": "{}"}
    trajectories = [
        make(forms[task.data_source].format(int(task.ground_truth) + (i % 3 == 0)), task)
        for i, task in enumerate(tasks)
    ]
    scorer = Scorer(RewardConfig(num_workers=2), {task.data_source for task in tasks})
    for half in (trajectories[:200], trajectories[200:]):
        asyncio.run(score_all(scorer, half))
    scorer.close()
    wrong = [-1.0 if t.task.data_source == "aime2024" else 0.0 for t in trajectories]
    assert [t.score for t in trajectories] == [wrong[i] if i % 3 == 0 else 1.0 for i in range(400)]
    assert all(("acc" in t.score_parts) == (t.task.data_source == "aime2024") for t in trajectories)


async def score_all(scorer, trajectories):
    await asyncio.gather(*map(scorer.score, trajectories))


def score(cfg, trajectories, data_sources=()):
    """What a rollout does with the trajectories of a step."""
    scorer = Scorer(cfg, data_sources)
    try:
        asyncio.run(score_all(scorer, trajectories))
    finally:
        scorer.close()


@pytest.mark.parametrize(
    "failed, expected, share, stop",
    [
        (0, 0, 0, False),
        (0, 10, 0, False),
        (1, 10, 0, True),
        (1, 10, 0.1, False),
        (2, 10, 0.1, True),
        (29, 100, 0.29, False),
        (10, 10, 1, False),
    ],
)
def test_too_many_failed(failed, expected, share, stop):
    assert too_many_failed(failed, expected, RewardConfig(max_failed_fraction=share)) is stop


def test_no_trajectories_no_failure():
    assert check_failures([], RewardConfig(max_failed_fraction=0)) == {"reward/error": 0.0, "reward/timeout": 0.0}
