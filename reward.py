"""Rules that score a response, and what happens when one fails.

A rule is `(task, trajectory) -> float | {"score": float, part: float, ...}`. It reads `trajectory.response` (the response as
text, without special tokens) and `task.ground_truth`; parts go to the metrics. A rule that raises could not tell: the score
is NaN, not 0. To add one, put it into REWARDS, and the data_source of the rows that it is for into DATA_SOURCES.
"""
import ast
import asyncio
import difflib
import functools
import importlib.util
import inspect
import itertools
import json
import logging
import math
import operator
import os
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from batch import Task, Trajectory

Rule = Callable[[Task, Trajectory], float | dict]


@dataclass(frozen=True)
class RewardConfig:
    name: str | None = None
    """gsm8k, math, math_dapo, countdown, exact or exact_int for every row; not set: by each row's data_source."""
    custom_path: str | None = None
    """`file.py` or `file.py:function` for every row: compute_score(data_source, solution_str, ground_truth, extra_info) as in
    verl, sync or async, returning a number or a dict with `score`."""
    max_failed_fraction: float = 0.1
    """Stop when more than this share of a step's trajectories could not be scored."""

    def __post_init__(self):
        if self.name and self.custom_path:
            raise ValueError(f"reward.name={self.name!r} and reward.custom_path={self.custom_path!r} are both set: leave one out")
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"reward.max_failed_fraction={self.max_failed_fraction} must be between 0 and 1")


def score(trajectories: list[Trajectory], reward_fn: Rule, tokenizer, cfg: RewardConfig) -> None:
    """Fill response, score and score_parts of every trajectory; where the rule raises, score is NaN and error its traceback."""
    responses = [t.tokens[t.prompt_length :] for t in trajectories]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True) if responses else []
    for trajectory, text in zip(trajectories, texts):
        trajectory.response, trajectory.error = text, None
        try:
            trajectory.score, trajectory.score_parts = score_and_parts(reward_fn(trajectory.task, trajectory))
        except (Exception, SystemExit):
            trajectory.score, trajectory.score_parts, trajectory.error = math.nan, {}, traceback.format_exc()


def score_and_parts(result) -> tuple[float, dict[str, float]]:
    """What a rule returned, as numbers. Parts that are no numbers (verl's rules return texts beside the score) are left out."""
    parts = {k: as_number(v) for k, v in (result if isinstance(result, dict) else {"score": result}).items()}
    value = parts.pop("score", None)
    if value is None or not math.isfinite(value):
        raise TypeError(f"a reward must return a finite number, or a dict with one as 'score', not {result!r}")
    return value, {k: v for k, v in parts.items() if v is not None}


def as_number(value) -> float | None:
    """bool, int, float, and scalars of numpy and torch; None for anything else."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float)) else None


def check_failures(trajectories: list[Trajectory], cfg: RewardConfig) -> dict[str, float]:
    """Metrics of a whole step's failed scores, of all ranks; RuntimeError with the first traceback when there are too many."""
    errors = [t.error for t in trajectories if t.error]
    if errors and len(errors) / len(trajectories) > cfg.max_failed_fraction:
        failed = f"{len(errors)} of {len(trajectories)} trajectories could not be scored"
        raise RuntimeError(f"{failed}, more than reward.max_failed_fraction={cfg.max_failed_fraction}; the first:\n{errors[0]}")
    return {"reward/error": float(len(errors))}


def load_reward(cfg: RewardConfig, data_sources: Iterable[str] = ()) -> Rule:
    """The rule that cfg asks for. ValueError when it is not there, or when one of the rows' data_sources has no rule."""
    if cfg.custom_path:
        return load_custom(cfg.custom_path)
    if cfg.name:
        if cfg.name not in REWARDS:
            raise ValueError(f"reward.name={cfg.name!r} is not known{known(cfg.name, REWARDS)}")
        return REWARDS[cfg.name]
    rules = {data_source: REWARDS[rule_name(data_source)] for data_source in sorted(set(data_sources))}
    return lambda task, trajectory: rules[task.data_source](task, trajectory)


def rule_name(data_source: str) -> str:
    if data_source in REWARDS:
        return data_source
    if data_source.startswith("aime"):  # aime24, aime2025, aime_2024, ...
        return "math_dapo"
    if data_source not in DATA_SOURCES:
        hint = "set reward.name or reward.custom_path, or data.default_data_source for rows without a data_source"
        raise ValueError(f"no reward is known for data_source {data_source!r}: {hint}{known(data_source, [*REWARDS, *DATA_SOURCES])}")
    return DATA_SOURCES[data_source]


def known(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return (f"; did you mean {near[0]!r}?" if near else ";") + f" known: {', '.join(names)}"


def load_custom(custom_path: str) -> Rule:
    """compute_score of a user's file, called as verl calls it."""
    path, _, function = custom_path.rpartition(":") if re.search(r"\.py:\w+$", custom_path) else (custom_path, "", "")
    function, blame = function or "compute_score", f"reward.custom_path={custom_path!r}"
    spec = importlib.util.spec_from_file_location("custom_reward", path) if os.path.isfile(path) else None
    if spec is None:
        raise ValueError(f"{blame}: there is no Python file {path!r} (looked from {os.getcwd()})")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise ValueError(f"{blame}: importing it fails with {type(e).__name__}: {e}") from e
    compute_score = getattr(module, function, None)
    if not callable(compute_score):
        raise ValueError(f"{blame}: {path!r} has no function {function!r}")
    try:
        inspect.signature(compute_score).bind(data_source="", solution_str="", ground_truth="", extra_info={})
    except TypeError as e:
        raise ValueError(f"{blame}: {function} must take data_source, solution_str, ground_truth and extra_info as keywords: {e}") from e

    def custom(task: Task, trajectory: Trajectory) -> float | dict:
        row = dict(data_source=task.data_source, ground_truth=task.ground_truth, extra_info=task.extra_info)
        result = compute_score(solution_str=trajectory.response, **row)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return custom


# blanks and dollar signs around the sign, thousands separators, an exponent; not the start of 3/4, 3:30, 3^2 or 3*2
NUMBER = re.compile(r"([-+]?)\s*\\?\$?\s*([-+]?)\s*(\d[\d,]*+(?:\.\d++)?+(?:[eE][-+]?\d{1,3})?+|\.\d++)(?!\s*[/:^*]\s*\d)")


def first_number(text: str) -> Fraction | None:
    """The number that `text` starts with, whatever follows it."""
    match = NUMBER.match(text.replace("−", "-").strip()[:100])
    return match and Fraction((match[1] or match[2]) + match[3].replace(",", ""))


def gsm8k(task: Task, trajectory: Trajectory) -> float:
    """1 when the number after the last `####` is the answer (Cobbe et al. 2021), which may be a whole solution with `####`."""
    truth = first_number(str(task.ground_truth).rpartition("####")[2])
    if truth is None:
        raise ValueError(f"gsm8k: the ground truth of row {task.index} is not a number: {task.ground_truth!r}")
    numbers = [first_number(text) for text in re.findall(r"####([^\n]*)", trajectory.response)]
    return float(next((n for n in reversed(numbers) if n is not None), None) == truth)


def exact(task: Task, trajectory: Trajectory) -> float:
    """1 when the response is the answer, blanks around it aside."""
    return float(trajectory.response.strip() == str(task.ground_truth).strip())


def exact_int(task: Task, trajectory: Trajectory) -> float:
    """1 when the first number in the response is the answer, an integer."""
    match = re.search(r"-?\d{1,100}+(?:\.\d{1,100}+)?", trajectory.response.replace("−", "-"))
    return float(match is not None and Fraction(match[0]) == int(task.ground_truth))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} or \fbox{} holds; None when there is none or its brace is never closed."""
    start, depth = max((m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)), default=len(text)), 1
    for brace in re.finditer(r"\\.|[{}]", text[start:]):  # an escaped brace is no brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return None


# in a LaTeX text without blanks and opening brackets: towers, long exponents, factorials of factorials, sums and integrals
INTRACTABLE = re.compile(r"\d\^-?\d+}*\^|\*\*|(?<!\d)\^-?\d{3}|\)\^-?[2-9]\d|\^-?\d{5}|[!)}]!|\d{5}!|binom\d{5}|\\(?:sum|prod|i*nt)")


def is_tractable(answer: str) -> bool:
    """Whether sympy reads and compares it in moments. Nothing can stop it in this process, so what may take minutes is not tried."""
    depths = itertools.accumulate((c in "([{") - (c in ")]}") for c in answer)
    return len(answer) <= 500 and max(depths, default=0) <= 12 and not INTRACTABLE.search(re.sub(r"[\s({]", "", answer))


@functools.lru_cache(maxsize=10000)
def parse_math(answer: str) -> list:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)  # its time-outs are alarms: main thread only


def same_math(answer: str, truth: str) -> bool:
    """Equal as text, or as mathematics (math-verify) where that is tractable."""
    answer, truth = (re.sub(r"\\[$,!]|\s+(?=\s)", "", s.replace("−", "-")).strip().rstrip(".").strip("$ ") for s in (answer, truth))
    plain_answer, plain_truth = (re.sub(r"\\text\s*\{([^{}]*)\}|\s", r"\1", s).casefold() for s in (answer, truth))
    if plain_answer == plain_truth:
        return True
    if re.fullmatch(r"[a-z]{4,}", plain_truth):  # a word: math-verify would take it for a product of symbols
        return False
    if re.fullmatch(r"[-\d.,]+", truth):  # a bare number: "12 dollars" is 12
        answer = re.sub(r"(?<=\d) [a-z]{2,}(?: [a-z]+)*$", "", answer, flags=re.IGNORECASE)
    if not is_tractable(answer):
        return False
    import math_verify

    return math_verify.verify(parse_math(truth), parse_math(answer), timeout_seconds=None)


def math_boxed(task: Task, trajectory: Trajectory) -> float:
    r"""1 when the last \boxed{} equals the answer, by math-verify; the answer may be a whole solution with a box."""
    answer, truth = last_boxed(trajectory.response), str(task.ground_truth)
    return float(answer is not None and same_math(answer, last_boxed(truth) or truth))


def math_dapo(task: Task, trajectory: Trajectory) -> dict:
    """1 or -1 by what the last `Answer:` says (DAPO, Yu et al. 2025); `acc` is 1 or 0."""
    answers = re.findall(r"(?i)answer\s*:[* \t]*([^\n]+)", trajectory.response[-300:])
    correct = bool(answers) and same_math(last_boxed(answers[-1]) or answers[-1].rstrip("* "), str(task.ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(node: ast.AST, numbers: list[int]) -> Fraction:
    """Value of + - * / over integers, which are appended to numbers; ValueError for anything else, powers included."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left, numbers), evaluate(right, numbers))
        case ast.UnaryOp(ast.USub(), operand):
            return -evaluate(operand, numbers)
        case ast.Constant(value) if type(value) is int:
            numbers.append(value)
            return Fraction(value)
    raise ValueError("not an expression of + - * / and integers")


def last_expression(text: str) -> str:
    """What the last <answer></answer> holds, else the last arithmetic in the text; without an `= result` behind it."""
    text = text.translate(str.maketrans("×·÷−", "**/-"))
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    if closed and opened:
        return inside.partition("=")[0]
    runs = re.findall(r"(?m)(?:^[ \t]*[-*] )?([\d+*/(). \t-]+)", text)
    return next((run for run in reversed(runs) if re.search(r"[\d)]\s*[-+*/]+\s*[\d(]", run)), "").strip(" .\t")


def countdown(task: Task, trajectory: Trajectory) -> dict:
    """1 when the last expression makes the target and uses each number exactly once (TinyZero); `format` is 1 when it is arithmetic.

    ground_truth is {"target": 24, "numbers": [3, 5, 3]}, or the target alone with `numbers` or `nums` in extra_info.
    """
    truth = json.loads(task.ground_truth) if isinstance(task.ground_truth, str) else task.ground_truth
    puzzle = truth if isinstance(truth, dict) else {**task.extra_info, "target": truth}
    target, numbers = puzzle["target"], sorted(puzzle["numbers"] if "numbers" in puzzle else puzzle["nums"])
    expression, used = " ".join(last_expression(trajectory.response).split()), []
    try:
        value = evaluate(ast.parse(expression if len(expression) <= 200 else "", mode="eval").body, used)
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError):
        return {"score": 0.0, "format": 0.0}
    return {"score": float(value == target and sorted(used) == numbers), "format": 1.0}


REWARDS = {"gsm8k": gsm8k, "math": math_boxed, "math_dapo": math_dapo, "countdown": countdown, "exact": exact, "exact_int": exact_int}
DATA_SOURCES = {  # rows' data_source -> rule; a rule's own name and aime* need no entry
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo_reasoning": "math_dapo",
    "BytedTsinghua-SIA/DAPO-Math-17k": "math_dapo",
    "Jiayi-Pan/Countdown-Tasks-3to4": "countdown",
}
