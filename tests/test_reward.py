import json
import math
import time
from threading import Thread

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batch import Task, Trajectory
from reward import DATA_SOURCES, REWARDS, RewardConfig, check_failures, load_reward, score

SPECIAL = ["<eos>"]
CHARS = [chr(c) for c in range(32, 127)]


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character, and <eos>."""
    model = Tokenizer(models.WordLevel({t: i for i, t in enumerate(SPECIAL + CHARS)}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


def sampled(tokenizer, prompt, response, task=None):
    trajectory = Trajectory(task or Task(prompt, "exact", response))
    trajectory.observe(tokenizer.encode(prompt))
    tokens = [*tokenizer.encode(response), tokenizer.eos_token_id]
    trajectory.act(tokens, [0.0] * len(tokens))
    return trajectory


def judge(rule, response, truth, extra_info=None):
    """Score of a response by a built-in rule, and its parts."""
    task = Task("", rule, truth, extra_info or {})
    result = REWARDS[rule](task, Trajectory(task, response=response))
    return result["score"] if isinstance(result, dict) else result


GSM8K = [
    ("so it is\n#### 72", "72", 1, "the plain form"),
    ("####72", "72", 1, "a missing blank"),
    ("#### 1,234", "1234", 1, "a thousands separator"),
    ("#### 1234", "1,234", 1, "a thousands separator in the ground truth"),
    ("#### $18", "18", 1, "a dollar sign"),
    (r"#### \$18", "18", 1, "a LaTeX dollar sign"),
    ("#### $ 1,000,000.00.", "1000000", 1, "all of it together"),
    ("#### 72.", "72", 1, "a trailing period"),
    ("#### 72.0", "72", 1, "the same number"),
    ("#### -5", "-5", 1, "a negative number"),
    ("#### −5", "-5", 1, "a unicode minus"),
    ("#### -$5", "-5", 1, "a sign before the dollar"),
    ("#### 5", "-5", 0, "a lost sign"),
    ("#### 72 apples", "72", 1, "a unit behind it"),
    ("#### 72<|end|>", "72", 1, "text glued to it"),
    ("#### 10\nwait\n#### 72", "72", 1, "the last one counts"),
    ("#### 72\nwait\n#### 10", "72", 0, "only the last one counts"),
    ("#### 72\n#### Done", "72", 1, "a heading is no answer"),
    ("the answer is 72", "72", 0, "no marker"),
    ("", "72", 0, "an empty response"),
    ("####", "72", 0, "a marker with nothing behind it"),
    ("#### 720", "72", 0, "a longer number"),
    ("#### 7", "72", 0, "a shorter number"),
    ("#### 72.5", "72", 0, "not an integer"),
    ("#### 3/4", "3", 0, "a fraction is not its numerator"),
    ("#### 34/5", "3", 0, "nor is it its first digit"),
    ("#### 3.14/2", "3", 0, "nor its integer part"),
    ("#### 3:30", "3", 0, "nor is a time its hour"),
    ("#### .5", "0.5", 1, "no leading zero"),
    ("#### 1e3", "1000", 1, "scientific notation"),
    ("#### 72", "She has 70+2=<<70+2=72>>72.\n#### 72", 1, "gsm8k's whole answer column as the ground truth"),
    ("#### 72", 72, 1, "a number as the ground truth"),
    ("#### " + "9" * 9000, "72", 0, "more digits than int() reads"),
    ("#### 1e999999999", "72", 0, "a number too large to build"),
]
MATH = [
    (r"so \boxed{72}", "72", 1, "the plain form"),
    (r"\boxed{ 72 }", "72", 1, "blanks"),
    (r"\boxed{72.}", "72", 1, "a trailing period"),
    (r"\boxed{$72$}", "72", 1, "dollars inside the box"),
    (r"\boxed{\$72}", "72", 1, "money"),
    (r"\boxed{1,234}", "1234", 1, "a thousands separator"),
    (r"\boxed{1{,}234}", "1234", 1, "a LaTeX thousands separator"),
    (r"\boxed{1\,234}", "1234", 1, "a thin space"),
    (r"\boxed{72\%}", "72", 1, "percent"),
    (r"\boxed{72^\circ}", "72", 1, "degrees"),
    (r"\boxed{72\text{ cm}}", "72", 1, "a unit as text"),
    (r"\boxed{72 \text{ square feet}}", "72", 1, "a unit of two words"),
    (r"\boxed{12 dollars}", "12", 1, "a unit in plain letters"),
    (r"\boxed{13 dollars}", "12", 0, "a unit does not make it right"),
    (r"\boxed{−5}", "-5", 1, "a unicode minus"),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1, "a decimal for a fraction"),
    (r"\boxed{\dfrac12}", r"\frac{1}{2}", 1, "shorthand"),
    (r"\boxed{1/2}", r"\frac{1}{2}", 1, "a slash"),
    (r"\boxed{0.33}", r"\frac{1}{3}", 0, "rounded"),
    (r"\boxed{2\frac{1}{2}}", r"\frac{5}{2}", 1, "a mixed number"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1, "an equal root"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1, "an equal polynomial"),
    (r"\boxed{x^2+2x}", "(x+1)^2", 0, "another polynomial"),
    (r"\boxed{x = 3}", "3", 1, "an assignment"),
    (r"\boxed{(1, 2)}", "(1,2)", 1, "a tuple"),
    (r"\boxed{(2, 1)}", "(1,2)", 0, "a tuple in another order"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1, "a set has no order"),
    (r"\boxed{(1, 2]}", "(1,2]", 1, "an interval"),
    (r"\boxed{[1, 2]}", "(1,2]", 0, "another interval"),
    (r"\boxed{\text{Tuesday}}", "Tuesday", 1, "a word as text"),
    (r"\boxed{never}", "nerve", 0, "a word is no product of letters"),
    (r"\boxed{\text{(C)}}", "C", 1, "a letter of a choice"),
    (r"\boxed{1}, no, \boxed{2}", "2", 1, "the last box counts"),
    (r"\boxed{2}, no, \boxed{1}", "2", 0, "only the last box counts"),
    (r"\boxed{2}, no, \boxed{1", "2", 0, "a truncated box is no answer, and the one before is not the last"),
    (r"\boxed{\frac{1}{2", r"\frac{1}{2}", 0, "a truncated box"),
    (r"\fbox{2}", "2", 1, "the other box"),
    ("the answer is 2", "2", 0, "no box"),
    ("", "2", 0, "an empty response"),
    (r"\boxed{}", "2", 0, "an empty box"),
    (r"\boxed{\frac{}", "2", 0, "what can't be parsed"),
    (r"\boxed{\left\{ 1 \right.}", r"\left\{1 \right.", 1, "an escaped brace closes no box and opens none"),
    (r"\boxed{72}", r"We see that it is $\boxed{72}$.", 1, "a whole solution as the ground truth"),
    (r"\boxed{72}", 72, 1, "a number as the ground truth"),
    (r"\boxed{9^{9^{9}}}", "2", 0, "a tower: sympy would not come back"),
    (r"\boxed{9^9^9}", "2", 0, "a tower without braces"),
    (r"\boxed{9^{-{9}^{9}}}", "2", 0, "a tower in more braces"),
    (r"\boxed{2^{3}\cdot 3^{2}}", "72", 1, "no tower"),
    (r"\boxed{" + "(" * 40 + "2" + ")" * 40 + "}", "2", 0, "brackets that take math-verify's parser minutes"),
    (r"\boxed{(a+b+c+d)^{50}}", "(a+b)^{50}", 0, "an expansion that takes minutes"),
    (r"\boxed{10!!!}", "2", 0, "a factorial of a factorial"),
    (r"\boxed{(x+y)^{999}}", "x^{999}+y^{999}", 0, "a power that takes minutes to expand"),
    (r"\boxed{\sum_{k=1}^{100000}\frac{1}{k}}", "3", 0, "a sum that takes minutes"),
    (r"\boxed{2^{2^{10}}}", "2^{2^{10}}", 1, "a tower that is the same text"),
    (r"\boxed{2^{2015}-1}", "2^{2015} - 1", 1, "a large but harmless power"),
    (r"\boxed{" + "1+" * 5000 + "1}", "2", 0, "too long to be an answer"),
]
MATH_DAPO = [
    ("Answer: 34", "34", 1, "the plain form"),
    ("Answer:34", "34", 1, "no blank"),
    ("**Answer:** 34", "34", 1, "bold"),
    ("**Answer: 34**", "34", 1, "all bold"),
    ("Answer: $34$", "34", 1, "dollars"),
    (r"Answer: \boxed{34}", "34", 1, "a box"),
    ("Answer: 34.", "34", 1, "a trailing period"),
    ("answer : 34", "34", 1, "another case"),
    ("Answer: 1\nno\nAnswer: 34", "34", 1, "the last one counts"),
    ("Answer: 34\nno\nAnswer: 1", "34", -1, "only the last one counts"),
    (r"\boxed{34}", "34", -1, "the form is part of the task"),
    ("34", "34", -1, "no marker"),
    ("", "34", -1, "an empty response"),
    ("Answer:", "34", -1, "nothing behind it"),
    ("Answer: 34" + " and so on" * 40, "34", -1, "too far from the end, as in DAPO"),
    ("Answer: 35", "34", -1, "wrong"),
]
PUZZLE = {"target": 24, "numbers": [3, 5, 3]}
COUNTDOWN = [
    ("<answer>(3 + 5) * 3</answer>", PUZZLE, 1, "the plain form"),
    ("<answer>(3+5)*3 = 24</answer>", PUZZLE, 1, "with its result"),
    ("<answer>\n(3 + 5)\n* 3\n</answer>", PUZZLE, 1, "over several lines"),
    ("<answer>(3 + 5) × 3</answer>", PUZZLE, 1, "a times sign"),
    ("<answer>3*3</answer> no, <answer>(3+5)*3</answer>", PUZZLE, 1, "the last one counts"),
    ("<answer>(3+5)*3</answer> no, <answer>3*3</answer>", PUZZLE, 0, "only the last one counts"),
    ("<answer>3 * 5 + 3</answer>", PUZZLE, 0, "another value"),
    ("<answer>24</answer>", PUZZLE, 0, "the target is no expression of the numbers"),
    ("<answer>3 * 8</answer>", PUZZLE, 0, "a number that was not given"),
    ("<answer>(3 + 5) * 3 * 3 / 3</answer>", PUZZLE, 0, "a number used too often"),
    ("<answer>5 * 5 - 1</answer>", {"target": 24, "numbers": [5, 5, 1, 2]}, 0, "a number not used: TinyZero asks for all of them"),
    ("<answer>8 / (3 - 8 / 3)</answer>", {"target": 24, "numbers": [8, 3, 8, 3]}, 1, "exact through thirds"),
    ("<answer>-3 + 30 - 3</answer>", {"target": 24, "numbers": [3, 3, 30]}, 1, "a leading minus"),
    ("<answer>3 / (5 - 5)</answer>", {"target": 24, "numbers": [3, 5, 5]}, 0, "a division by zero"),
    ("<answer>55**36**7**19</answer>", {"target": 1, "numbers": [55, 36, 7, 19]}, 0, "a tower of powers: returns at once"),
    ("<answer>3 // 5 + 24</answer>", {"target": 24, "numbers": [3, 5, 24]}, 0, "an operator that is not asked for"),
    ("<answer>__import__('os').getpid()</answer>", PUZZLE, 0, "code"),
    ("<answer>True + 23</answer>", {"target": 24, "numbers": [1, 23]}, 0, "True is not 1"),
    ("<answer>24.0</answer>", {"target": 24, "numbers": [24]}, 0, "a float"),
    ("<answer>" + "(" * 5000 + "</answer>", PUZZLE, 0, "brackets without end"),
    ("<answer>" + "-" * 5000 + "24</answer>", {"target": 24, "numbers": [24]}, 0, "signs without end"),
    ("<answer>" + "-" * 400 + "24</answer>", {"target": 24, "numbers": [24]}, 0, "longer than an answer may be"),
    ("<answer></answer>", PUZZLE, 0, "an empty answer"),
    ("</answer>(3+5)*3<answer>", PUZZLE, 1, "tags the wrong way round: the last line counts"),
    ("I try 3*5.\nSo (3 + 5) * 3 = 24.", PUZZLE, 1, "no tags: the last arithmetic"),
    ("- (3 + 5) * 3 = 24", PUZZLE, 1, "an item of a list, not a minus"),
    ("<answer>(3+5)*3", PUZZLE, 1, "the tag is not closed"),
    ("I don't know", PUZZLE, 0, "no arithmetic"),
    ("", PUZZLE, 0, "an empty response"),
    ("<answer>(3+5)*3</answer>", json.dumps(PUZZLE), 1, "the ground truth as JSON"),
]
EXACT = [
    ("yes", "yes", 1, "the same"),
    (" yes\n", "yes", 1, "blanks around it"),
    ("Yes", "yes", 0, "another case"),
    ("yes it is", "yes", 0, "more than the answer"),
    ("5", 5, 1, "a number as the ground truth"),
]
EXACT_INT = [
    (" 140\n5 + 5 = 10", "140", 1, "the first one counts"),
    ("it is 140.", "140", 1, "text around it"),
    ("-7", "-7", 1, "a negative number"),
    ("−7", "-7", 1, "a unicode minus"),
    ("7", "-7", 0, "a lost sign"),
    ("0140", "140", 1, "leading zeros"),
    ("0", "0", 1, "zero"),
    ("1400", "140", 0, "a longer number"),
    ("140.5", "140", 0, "not an integer"),
    ("5 140", "140", 0, "not the first"),
    ("", "140", 0, "an empty response"),
    ("9" * 9000, "140", 0, "more digits than int() reads"),
    ("140", 140, 1, "a number as the ground truth"),
]
TABLES = {"gsm8k": GSM8K, "math": MATH, "math_dapo": MATH_DAPO, "countdown": COUNTDOWN, "exact": EXACT, "exact_int": EXACT_INT}
ROWS = [pytest.param(rule, *row[:3], id=f"{rule}-{row[3]}") for rule, rows in TABLES.items() for row in rows]


@pytest.mark.parametrize("rule, response, truth, expected", ROWS)
def test_rule(rule, response, truth, expected):
    start = time.perf_counter()
    assert judge(rule, response, truth) == expected
    assert time.perf_counter() - start < 10


def test_parts():
    task = Task("", "math_dapo", "34")
    assert REWARDS["math_dapo"](task, Trajectory(task, response="Answer: 1")) == {"score": -1.0, "acc": 0.0}
    task = Task("", "countdown", PUZZLE)
    assert REWARDS["countdown"](task, Trajectory(task, response="<answer>3*5*3</answer>")) == {"score": 0.0, "format": 1.0}
    assert REWARDS["countdown"](task, Trajectory(task, response="<answer>?</answer>")) == {"score": 0.0, "format": 0.0}


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


# Which rule


@pytest.mark.parametrize(
    "data_source, rule",
    [*DATA_SOURCES.items(), *((name, name) for name in REWARDS), ("aime2024", "math_dapo"), ("aime_25", "math_dapo")],
)
def test_rule_by_data_source(data_source, rule):
    responses = {"gsm8k": "#### 7", "math": r"\boxed{7}", "math_dapo": "Answer: 7", "countdown": "<answer>3+4</answer>", "exact": "7", "exact_int": "It's 7"}
    fn = load_reward(RewardConfig(), {data_source, "exact"})
    for name, response in responses.items():
        task = Task("", data_source, {"target": 7, "numbers": [3, 4]} if rule == "countdown" else "7")
        result = fn(task, Trajectory(task, response=response))
        value = result["score"] if isinstance(result, dict) else result
        assert value == 1 or name != rule
    assert load_reward(RewardConfig(name=rule), ["no such"]) is REWARDS[rule], "reward.name goes before data_source"


@pytest.mark.parametrize(
    "cfg, sources, says",
    [
        ({"name": "gsm8"}, [], ["reward.name='gsm8'", "did you mean 'gsm8k'", "countdown"]),
        ({}, ["exact", "opena/gsm8k"], ["'opena/gsm8k'", "did you mean 'openai/gsm8k'", "reward.name", "data.default_data_source", "lighteval/MATH"]),
        ({}, ["zzz"], ["'zzz'", "known: gsm8k"]),
    ],
)
def test_unknown_names(cfg, sources, says):
    with pytest.raises(ValueError) as e:
        load_reward(RewardConfig(**cfg), sources)
    for part in says:
        assert part in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "knobs, says",
    [
        ({"name": "exact", "custom_path": "a.py"}, "reward.name='exact' and reward.custom_path='a.py'"),
        ({"max_failed_fraction": 1.5}, "reward.max_failed_fraction=1.5"),
        ({"max_failed_fraction": -0.1}, "reward.max_failed_fraction=-0.1"),
    ],
)
def test_bad_knobs(knobs, says):
    with pytest.raises(ValueError, match=says):
        RewardConfig(**knobs)


# A user's own

VERL_FILE = '''
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
'''


@pytest.fixture
def custom_file(tmp_path):
    (tmp_path / "mine.py").write_text(VERL_FILE)
    return str(tmp_path / "mine.py")


def test_custom_function(custom_file, tokenizer):
    tasks = [Task("1+1=", "anything", "2", {"floor": -0.5})] * 2
    right, wrong = trajectories = [sampled(tokenizer, "1+1=", text, task) for text, task in zip("23", tasks)]
    score(trajectories, load_reward(RewardConfig(custom_path=custom_file), ["anything"]), tokenizer, RewardConfig())
    assert (right.score, wrong.score) == (1.0, -0.5)
    assert right.score_parts == {"acc": 1.0} and wrong.score_parts == {"acc": 0.0}, "parts are numbers; texts are left out"


def test_custom_async_function(custom_file, tokenizer):
    trajectory = sampled(tokenizer, "1", "234")
    score([trajectory], load_reward(RewardConfig(custom_path=custom_file + ":slowly")), tokenizer, RewardConfig())
    assert trajectory.score == 3.0 and trajectory.error is None


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
    ],
)
def test_custom_file_that_does_not_work(tmp_path, text, suffix, says):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as e:
        load_reward(RewardConfig(custom_path=f"{path}{suffix}"))
    for part in ["reward.custom_path", str(path), *says]:
        assert part in str(e.value)


def test_custom_file_of_another_kind(tmp_path):
    (tmp_path / "mine.txt").write_text(VERL_FILE)
    with pytest.raises(ValueError, match="reward.custom_path.*no Python file"):
        load_reward(RewardConfig(custom_path=str(tmp_path / "mine.txt")))


# Scoring


def test_score_decodes_the_response_only(tokenizer):
    trajectory = sampled(tokenizer, "1+1=", "2")
    trajectory.observe(tokenizer.encode(" [ok] "))  # a tool's result belongs to what a rule may read
    trajectory.act(tokenizer.encode("3"), [0.0])
    seen = []
    score([trajectory], lambda task, t: seen.append((task, t.response)) or 0.5, tokenizer, RewardConfig())
    assert seen == [(trajectory.task, "2 [ok] 3")], "from the first sampled token on, without special tokens"
    assert (trajectory.response, trajectory.score, trajectory.score_parts, trajectory.error) == ("2 [ok] 3", 0.5, {}, None)


def test_a_trajectory_without_a_response(tokenizer):
    trajectory = Trajectory(Task("", "exact", ""))
    trajectory.observe(tokenizer.encode("1+1="))
    score([trajectory], load_reward(RewardConfig(), ["exact"]), tokenizer, RewardConfig())
    assert trajectory.response == "" and trajectory.score == 1
    score([], REWARDS["exact"], tokenizer, RewardConfig())


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
def test_results_that_are_numbers(tokenizer, result, expected):
    trajectory = sampled(tokenizer, "1", "2")
    score([trajectory], lambda task, t: result, tokenizer, RewardConfig())
    assert type(trajectory.score) is float and trajectory.score == expected
    assert trajectory.score_parts == ({"format": 1.0} if isinstance(result, dict) else {})
    assert check_failures([trajectory], RewardConfig(max_failed_fraction=0)) == {"reward/error": 0.0}


@pytest.mark.parametrize("result", [None, "1", [1.0], (1.0, 2.0), {}, {"acc": 1.0}, {"score": None}, math.nan, math.inf, np.zeros(2), object()])
def test_results_that_are_not(tokenizer, result):
    trajectory = sampled(tokenizer, "1", "2")
    score([trajectory], lambda task, t: result, tokenizer, RewardConfig())
    assert math.isnan(trajectory.score) and trajectory.score_parts == {}
    assert "finite number" in trajectory.error


def fails_on(*bad):
    def rule(task, trajectory):
        if trajectory.response in bad:
            raise ZeroDivisionError(f"on {trajectory.response}")
        return {"score": 1.0, "part": 2.0}

    return rule


def test_a_rule_that_raises_is_nan_and_the_others_are_scored(tokenizer):
    trajectories = [sampled(tokenizer, "1", text) for text in "abcd"]
    score(trajectories, fails_on("b", "c"), tokenizer, RewardConfig())
    assert [t.score for t in trajectories if t.error is None] == [1.0, 1.0]
    assert math.isnan(trajectories[1].score) and "ZeroDivisionError: on b" in trajectories[1].error and "in rule" in trajectories[1].error
    assert check_failures(trajectories, RewardConfig(max_failed_fraction=0.5)) == {"reward/error": 2.0}, "the share itself is allowed"
    with pytest.raises(RuntimeError) as e:
        check_failures(trajectories, RewardConfig(max_failed_fraction=0.49))
    assert "2 of 4" in str(e.value) and "reward.max_failed_fraction=0.49" in str(e.value)
    assert "ZeroDivisionError: on b" in str(e.value) and "on c" not in str(e.value), "the first traceback only"


def test_scoring_again_forgets_the_error(tokenizer):
    trajectory = sampled(tokenizer, "1", "b")
    score([trajectory], fails_on("b"), tokenizer, RewardConfig())
    score([trajectory], fails_on(), tokenizer, RewardConfig())
    assert trajectory.error is None and trajectory.score == 1.0 and trajectory.score_parts == {"part": 2.0}


def test_no_trajectories_no_failure():
    assert check_failures([], RewardConfig(max_failed_fraction=0)) == {"reward/error": 0.0}


def test_throughput():
    task = Task("", "gsm8k", "72")
    trajectory = Trajectory(task, response="a few words of reasoning " * 40 + "\n#### 72")
    start = time.perf_counter()
    assert all(REWARDS["gsm8k"](task, trajectory) == 1 for _ in range(10_000))
    assert time.perf_counter() - start < 6  # takes under 1 on an idle machine
