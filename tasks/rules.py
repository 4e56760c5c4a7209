"""The rules that ship: how a response is judged.

A rule is `(task, trajectory) -> float | {"score": float, part: float, ...}`. It reads `trajectory.answer`, the text of the policy's
last turn (a tool's result is not its answer), and `task.ground_truth`. Where the ground truth can't be read it raises: NaN, not 0.
"""

import ast
import functools
import itertools
import json
import logging
import operator
import re
from fractions import Fraction

from batch import Task, Trajectory

# Blanks, bold and currency signs around the sign; thousands separators; an exponent.
NUMBER = re.compile(
    r"([-+]?)[\s*]*\\?[$€£]?\s*([-+]?)\s*(\d{1,3}(?:,\d{3})++(?!\d)(?:\.\d++)?+|\d++(?:\.\d++)?+(?:[eE][-+]?\d{1,3})?+|\.\d++)"
)
# What makes it only a part: 3/4, 3:30, 3^2, 3 * 2, 3 - 2, 1.000.000, 1,2, 3 1/2, 1 234
GOES_ON = re.compile(r"[.,]\d|\s*(?:[-+/:^*×x]|\\times|\\cdot)\s*\d|\s\d+/\d|\s\d{3}(?!\d)")


def first_number(text: str) -> Fraction | None:
    """The number that `text` starts with, whatever words follow it."""
    text = re.sub("[−–]", "-", text).strip()[:100]
    match = NUMBER.match(text)
    if match is None or GOES_ON.match(text, match.end()):
        return None
    return Fraction((match[1] or match[2]) + match[3].replace(",", ""))


def gsm8k(task: Task, trajectory: Trajectory) -> float:
    """1 when the number after the last `####` is the answer (Cobbe et al. 2021), which may be a whole solution with `####`."""
    truth = first_number(str(task.ground_truth).rpartition("####")[2])
    if truth is None:
        raise ValueError(f"gsm8k: the ground truth of row {task.index} is not a number: {task.ground_truth!r}")
    numbers = [first_number(text) for text in re.findall(r"####([^\n]*)", trajectory.answer)]
    return float(next((n for n in reversed(numbers) if n is not None), None) == truth)


def exact(task: Task, trajectory: Trajectory) -> float:
    """1 when the response is the answer, blanks around it aside."""
    return float(trajectory.answer.strip() == str(task.ground_truth).strip())


def exact_int(task: Task, trajectory: Trajectory) -> float:
    """1 when the first number in the response is the answer, an integer."""
    match = re.search(
        r"-?(?:\d{1,3}(?:,\d{3})++(?!\d)|\d{1,100}+)(?:\.\d{1,100}+)?", trajectory.answer.replace("−", "-")
    )
    return float(match is not None and Fraction(match[0].replace(",", "")) == int(task.ground_truth))


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} or \fbox{} holds, or the number behind \boxed; None when there is none or its brace is never closed."""
    boxes = list(re.finditer(r"\\(?:boxed|fbox)\s*(?:\{|(-?\d[\d.,]*))", text))
    if not boxes or boxes[-1][1]:
        return boxes[-1][1] if boxes else None
    start, depth = boxes[-1].end(), 1
    for brace in re.finditer(r"\\.|[{}]", text[start:]):  # an escaped brace is no brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return None


# in a LaTeX text without blanks and opening brackets: towers, long exponents, factorials of factorials, sums and integrals
INTRACTABLE = re.compile(
    r"\d\^-?\d+}*\^|\*\*|(?<!\d)\^-?\d{3}|\)\^-?[2-9]\d|\^-?\d{5}|[!)}]!|\d{5}!|binom\d{5}|\\(?:sum|prod|i*nt)"
)


def is_tractable(answer: str) -> bool:
    """Whether sympy reads and compares it in moments. What may take minutes is not tried: it is no answer (0), and would cost a worker (NaN)."""
    depths = itertools.accumulate((c in "([{") - (c in ")]}") for c in answer)
    return len(answer) <= 500 and max(depths, default=0) <= 12 and not INTRACTABLE.search(re.sub(r"[\s({]", "", answer))


@functools.lru_cache(maxsize=10000)
def parse_math(answer: str) -> list:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)  # its time-outs are alarms: main thread only


SYMBOLS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "π": r"\pi ",
    "°": r"^\circ",
    "²": "^2",
    "³": "^3",
    "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
}
REWRITES = [  # what math-verify does not read, or reads as something else
    (r"\\[$,!]|[€£]", ""),  # money, thin spaces
    (r"(?<!\\)\\[ ;:]|\s+", " "),
    (r"\\degree\b", r"^\\circ"),
    (r"\\varnothing\b", r"\\emptyset"),
    (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"(?<=\d)\s*x\s*10(?=\^)", r"\\times 10"),
    (r"(?<![\w.,])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)", r"\1\\times 10^{\2}"),
    (r"^(-?\d+) (?:and )?(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),  # a mixed number, not 31/2
]
REWRITES = [(re.compile(pattern), by) for pattern, by in REWRITES]
FONT = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:bf|it|rm|sf)|mbox)\s*\{([^{}]*)\}")
UNIT = re.compile(r"(?<=\d) (?:[a-z][a-z./]+)(?: [a-z./]+)*(?:\^\{?\d\}?)?$", re.IGNORECASE)  # in plain letters


def clean_math(text: str) -> str:
    text = text.translate(str.maketrans(SYMBOLS)).strip()
    for pattern, by in REWRITES:
        text = pattern.sub(by, text)
    text = re.sub(r"\d*\.\d*\\(?:overline|bar)\s*\{\d{1,20}\}", repeating_decimal, text)
    return re.sub(r"^\\[(\[]|\\[)\]]$", "", text.strip("*$ ").rstrip(".,;\\*$ ")).strip("*$ ")


def repeating_decimal(match: re.Match) -> str:
    r"""0.1\overline{6} as \frac{15}{90}."""
    head, _, period = re.sub(r"\\(?:overline|bar)\s*|\}", "", match[0]).partition("{")
    places = len(head.partition(".")[2])
    start, whole = head.replace(".", "") or "0", (head + period).replace(".", "")
    return rf"\frac{{{int(whole) - int(start)}}}{{{(10 ** len(period) - 1) * 10**places}}}"


def plain_math(text: str) -> str:
    """Without fonts, blanks, braces around a base, and case."""
    return re.sub(r"\s|_\{(\w+)\}", lambda m: m[1] and "_" + m[1] or "", FONT.sub(r"\1", text)).casefold()


def same_math(answer: str, truth: str) -> bool:
    """Equal as text, or as mathematics (math-verify) where that is tractable."""
    if len(answer) > 1000:
        return answer.strip() == truth.strip()
    answer, truth = clean_math(answer), clean_math(truth)
    plain_answer, plain_truth = plain_math(answer), plain_math(truth)
    if plain_answer == plain_truth:
        return True
    choice = re.fullmatch(r"\(?([A-E])\)?", FONT.sub(r"\1", truth))
    if choice and re.match(rf"\({choice[1]}\) +[^(]+$", FONT.sub(r"\1", answer)):  # with what it says: (C) 12
        return True
    if re.fullmatch(
        r"[a-z]{4,}[\d,]*|yes|no", plain_truth
    ):  # words: math-verify would take them for a product of symbols
        return False
    if all(re.fullmatch(r"[\da-f]+_\d+", s) for s in (plain_answer, plain_truth)):  # it does not see the base
        return False
    if re.fullmatch(r"[-\d.,]+", truth):
        if re.match(r"[<>≤≥]|\\(?:[lg]eq?|neq?)\b", answer):  # nor a relation without a left side
            return False
        answer = UNIT.sub("", answer)  # "12 dollars" is 12
    if not is_tractable(answer):
        return False
    import math_verify

    return math_verify.verify(parse_math(truth), parse_math(answer), allow_set_relation_comp=True, timeout_seconds=None)


def math_boxed(task: Task, trajectory: Trajectory) -> float:
    r"""1 when the last \boxed{} equals the answer, by math-verify; the answer may be a whole solution with a box."""
    answer, truth = last_boxed(trajectory.answer), str(task.ground_truth)
    return float(answer is not None and same_math(answer, last_boxed(truth) or truth))


def math_dapo(task: Task, trajectory: Trajectory) -> dict:
    """1 or -1 by what the last `Answer:` says (DAPO, Yu et al. 2025); `acc` is 1 or 0."""
    answers = re.findall(r"(?i)answer\s*:[*\s]*([^\n]+)", trajectory.answer[-300:])
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


def last_tagged(text: str) -> str | None:
    """What the last <answer></answer> holds."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    return inside if closed and opened else None


def last_expression(text: str) -> str:
    """What the last <answer></answer> holds, else the last arithmetic in the text; without an `= result` behind it."""
    text = re.sub(r"\\(?:times|cdot)\b", "*", text.translate(str.maketrans("×·÷−–", "**/--"))).replace(r"\div", "/")
    if (tagged := last_tagged(text)) is not None:
        return tagged.partition("=")[0]
    runs = re.findall(r"(?m)(?:^[ \t]*[-*] )?([\d+*/(). \t-]+)", text)
    return next((run for run in reversed(runs) if re.search(r"[\d)]\s*[-+*/]+\s*[\d(]", run)), "").strip(" .\t")


def countdown(task: Task, trajectory: Trajectory) -> dict:
    """1 when the last expression makes the target and uses each number exactly once (TinyZero); `format` is 1 when it is arithmetic.

    ground_truth is {"target": 24, "numbers": [3, 5, 3]}, or the target alone with `numbers` or `nums` in extra_info.
    """
    truth = json.loads(task.ground_truth) if isinstance(task.ground_truth, str) else task.ground_truth
    puzzle = truth if isinstance(truth, dict) else {**task.extra_info, "target": truth}
    target, numbers = puzzle["target"], sorted(puzzle["numbers"] if "numbers" in puzzle else puzzle["nums"])
    expression, used = " ".join(last_expression(trajectory.answer).split()), []
    try:
        value = evaluate(ast.parse(expression if len(expression) <= 200 else "", mode="eval").body, used)
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError):
        return {"score": 0.0, "format": 0.0}
    return {"score": float(value == target and sorted(used) == numbers), "format": 1.0}


@functools.lru_cache
def reasoning_gym_scorer(data_source: str):
    """score_answer(answer, entry) of the data set that `reasoning_gym/<name>` names. ValueError when there is none."""
    try:
        import reasoning_gym
    except ImportError as e:
        raise ValueError(f"data_source {data_source!r} needs a package: pip install reasoning-gym ({e})") from e
    try:
        return reasoning_gym.get_score_answer_fn(data_source.removeprefix("reasoning_gym/"))
    except (ValueError, AssertionError) as e:  # no such name, or one that has no settings by default
        raise ValueError(f"data_source {data_source!r}: {e}") from e


def reasoning_gym(task: Task, trajectory: Trajectory) -> float:
    r"""Reasoning Gym's own score of the last <answer></answer>, else of the last \boxed{}, else of the last line."""
    text = trajectory.answer.strip()
    answer = next(
        found for found in (last_tagged(text), last_boxed(text), text.rpartition("\n")[2]) if found is not None
    )
    entry, score_answer = {"answer": task.ground_truth, **task.extra_info}, reasoning_gym_scorer(task.data_source)
    if re.search(
        r"\d\s*(?:\*\*|\^)[\s(]*\d+\s*(?:\*\*|\^)", answer
    ):  # a tower of powers, which some of its scorers would evaluate
        return 0.0
    try:
        return float(score_answer(answer=answer.strip(), entry=entry))
    except Exception:  # some raise for an answer that they can't read, which is the policy's mistake;
        score_answer(answer=entry["answer"], entry=entry)  # this one raises too when the row is to blame
        return 0.0


REWARDS = {
    "gsm8k": gsm8k,
    "math": math_boxed,
    "math_dapo": math_dapo,
    "countdown": countdown,
    "exact": exact,
    "exact_int": exact_int,
}
DATA_SOURCES = {  # rows' data_source -> rule; a rule's own name, aime* and reasoning_gym/* need no entry
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo_reasoning": "math_dapo",
    "BytedTsinghua-SIA/DAPO-Math-17k": "math_dapo",
    "Jiayi-Pan/Countdown-Tasks-3to4": "countdown",
}
