"""The rules that ship: how a response is judged.

A rule is `(task, trajectory) -> float | {"score": float, part: float, ...}`. It reads `trajectory.answer`, the text of
the policy's last turn (a tool's result is not its answer), and `task.ground_truth`. It raises where the ground truth
can't be read, and the score is NaN, not 0.
"""

import ast
import functools
import json
import logging
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from batch import Task, Trajectory

# A number: blanks, bold and currency signs around its sign, thousands separators, an exponent.
NUMBER = re.compile(
    r"([-+]?)[\s*]*\\?[$€£]?\s*([-+]?)\s*"
    r"(\d{1,3}(?:,\d{3})++(?!\d)(?:\.\d++)?+|\d++(?:\.\d++)?+(?:[eE][-+]?\d{1,3})?+|\.\d++)"
)
# What may follow a number that is only a part of something: 3/4, 3:30, 3^2, 3 * 2, 3 - 2, 1.000.000, 1,2, 3 1/2, 1 234.
GOES_ON = re.compile(r"[.,]\d|\s*(?:[-+/:^*×x]|\\times|\\cdot)\s*\d|\s\d+/\d|\s\d{3}(?!\d)")


def first_number(text: str) -> Fraction | None:
    """The number that `text` starts with, whatever words follow it."""
    text = re.sub("[−–]", "-", text).strip()[:100]
    match = NUMBER.match(text)
    if match is None or GOES_ON.match(text, match.end()):
        return None
    return Fraction((match[1] or match[2]) + match[3].replace(",", ""))


def gsm8k(task: Task, trajectory: Trajectory) -> float:
    """1 when the number after the last `####` is the answer (Cobbe et al. 2021).

    The ground truth may be a whole solution with `####`, as in gsm8k's answer column.
    """
    truth = first_number(str(task.ground_truth).rpartition("####")[2])
    if truth is None:
        raise ValueError(f"gsm8k: the ground truth of row {task.index} is not a number: {task.ground_truth!r}")
    found = [first_number(text) for text in re.findall(r"####([^\n]*)", trajectory.answer)]
    numbers = [number for number in found if number is not None]  # `#### Done` is a heading
    return float(bool(numbers) and numbers[-1] == truth)


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
    r"""What the last \boxed{} or \fbox{} holds, or the number behind a \boxed without braces.

    None when there is no box, or when the brace of the last one is never closed.
    """
    boxes = list(re.finditer(r"\\(?:boxed|fbox)\s*(?:\{|(-?\d[\d.,]*))", text))
    if not boxes:
        return None
    if boxes[-1][1]:
        return boxes[-1][1]
    start = boxes[-1].end()
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:]):  # an escaped brace, the first alternative, does not count
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return None


# In a LaTeX text without blanks and opening brackets: towers of powers, long exponents, factorials of factorials, sums
# and integrals.
INTRACTABLE = re.compile(
    r"\d\^-?\d+}*\^|\*\*|(?<!\d)\^-?\d{3}|\)\^-?[2-9]\d|\^-?\d{5}|[!)}]!|\d{5}!|binom\d{5}|\\(?:sum|prod|i*nt)"
)


def is_tractable(answer: str) -> bool:
    """Whether sympy reads and compares this answer in moments.

    What may take minutes is not tried, and scores 0 like a wrong answer: it would cost a worker, and score NaN.
    """
    depth, deepest = 0, 0  # of brackets
    for c in answer:
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        deepest = max(deepest, depth)
    compact = re.sub(r"[\s({]", "", answer)
    return len(answer) <= 500 and deepest <= 12 and not INTRACTABLE.search(compact)


@functools.lru_cache(maxsize=10000)
def parse_math(answer: str) -> list:
    """What math-verify reads in an answer; without its time-outs, alarms that only the main thread can set."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)


SYMBOLS = str.maketrans(
    {
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
)
# Pattern and replacement, for what math-verify does not read or reads as something else.
REWRITES = [
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
FONT = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:bf|it|rm|sf)|mbox)\s*\{([^{}]*)\}")
# A unit in plain letters behind a number.
UNIT = re.compile(r"(?<=\d) (?:[a-z][a-z./]+)(?: [a-z./]+)*(?:\^\{?\d\}?)?$", re.IGNORECASE)


def clean_math(text: str) -> str:
    """In the forms that math-verify reads (SYMBOLS, REWRITES), without the delimiters of a formula around it."""
    text = text.translate(SYMBOLS).strip()
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"\d*\.\d*\\(?:overline|bar)\s*\{\d{1,20}\}", repeating_decimal, text)
    text = text.strip("*$ ").rstrip(".,;\\*$ ")
    return re.sub(r"^\\[(\[]|\\[)\]]$", "", text).strip("*$ ")


def repeating_decimal(match: re.Match) -> str:
    r"""0.1\overline{6} as \frac{15}{90}: (16 - 1) / ((10 - 1) * 10), from all digits and those before the period."""
    head, _, period = re.sub(r"\\(?:overline|bar)\s*|\}", "", match[0]).partition("{")
    places = len(head.partition(".")[2])
    start = int(head.replace(".", "") or "0")
    whole = int((head + period).replace(".", ""))
    return rf"\frac{{{whole - start}}}{{{(10 ** len(period) - 1) * 10**places}}}"


def plain_math(text: str) -> str:
    """Without fonts, blanks, braces around a base, and case."""

    def bare_base(match: re.Match) -> str:
        return f"_{match[1]}" if match[1] else ""

    return re.sub(r"\s|_\{(\w+)\}", bare_base, FONT.sub(r"\1", text)).casefold()


def same_math(answer: str, truth: str) -> bool:
    """Equal as text, or as mathematics (math-verify) where that is tractable."""
    if len(answer) > 1000:
        return answer.strip() == truth.strip()
    answer, truth = clean_math(answer), clean_math(truth)
    plain_answer, plain_truth = plain_math(answer), plain_math(truth)
    if plain_answer == plain_truth or is_choice_in_full(answer, truth):
        return True
    # math-verify would take words for products of symbols, and does not see the base that a number is written in.
    words = re.fullmatch(r"[a-z]{4,}[\d,]*|yes|no", plain_truth)
    both_have_bases = all(re.fullmatch(r"[\da-f]+_\d+", text) for text in (plain_answer, plain_truth))
    if words or both_have_bases:
        return False
    if re.fullmatch(r"[-\d.,]+", truth):
        # Nor does it see a relation without a left side: "< 5" is not 5.
        if re.match(r"[<>≤≥]|\\(?:[lg]eq?|neq?)\b", answer):
            return False
        answer = UNIT.sub("", answer)  # "12 dollars" is 12
    if not is_tractable(answer):
        return False
    import math_verify

    return math_verify.verify(parse_math(truth), parse_math(answer), allow_set_relation_comp=True, timeout_seconds=None)


def is_choice_in_full(answer: str, truth: str) -> bool:
    """Whether the truth is one letter, A to E, and the answer gives it in brackets with what it stands for: (C) 12."""
    choice = re.fullmatch(r"\(?([A-E])\)?", FONT.sub(r"\1", truth))
    return choice is not None and re.match(rf"\({choice[1]}\) +[^(]+$", FONT.sub(r"\1", answer)) is not None


def math_boxed(task: Task, trajectory: Trajectory) -> float:
    r"""1 when the last \boxed{} equals the answer, by math-verify; the answer may be a whole solution with a box."""
    answer, truth = last_boxed(trajectory.answer), str(task.ground_truth)
    return float(answer is not None and same_math(answer, last_boxed(truth) or truth))


def math_dapo(task: Task, trajectory: Trajectory) -> dict:
    """1 or -1 by what the last `Answer:` says (DAPO, Yu et al. 2025); `acc` is 1 or 0."""
    answers = re.findall(r"(?i)answer\s*:[*\s]*([^\n]+)", trajectory.answer[-300:])
    correct = bool(answers) and same_math(last_boxed(answers[-1]) or answers[-1].rstrip("* "), str(task.ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


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
    tagged = last_tagged(text)
    if tagged is not None:
        return tagged.partition("=")[0]
    runs = re.findall(r"(?m)(?:^[ \t]*[-*] )?([\d+*/(). \t-]+)", text)
    for run in reversed(runs):
        if re.search(r"[\d)]\s*[-+*/]+\s*[\d(]", run):
            return run.strip(" .\t")
    return ""


def countdown(task: Task, trajectory: Trajectory) -> dict:
    """1 when the last expression makes the target and uses each number exactly once (TinyZero).

    `format` is 1 when the expression is arithmetic. ground_truth is {"target": 24, "numbers": [3, 5, 3]}, or the target
    alone with `numbers` or `nums` in extra_info.
    """
    truth = json.loads(task.ground_truth) if isinstance(task.ground_truth, str) else task.ground_truth
    puzzle = truth if isinstance(truth, dict) else {**task.extra_info, "target": truth}
    target = puzzle["target"]
    numbers = sorted(puzzle["numbers"] if "numbers" in puzzle else puzzle["nums"])
    expression = " ".join(last_expression(trajectory.answer).split())
    no_arithmetic = {"score": 0.0, "format": 0.0}
    if len(expression) > 200:
        return no_arithmetic
    used: list[int] = []
    try:
        value = evaluate(ast.parse(expression, mode="eval").body, used)
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError):
        return no_arithmetic
    return {"score": float(value == target and sorted(used) == numbers), "format": 1.0}


@functools.lru_cache
def reasoning_gym_scorer(data_source: str) -> Callable[..., float]:
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
    answer = last_tagged(text)
    if answer is None:
        answer = last_boxed(text)
    if answer is None:
        answer = text.rpartition("\n")[2]
    entry = {"answer": task.ground_truth, **task.extra_info}
    score_answer = reasoning_gym_scorer(task.data_source)
    # A tower of powers, which some of its scorers would evaluate.
    if re.search(r"\d\s*(?:\*\*|\^)[\s(]*\d+\s*(?:\*\*|\^)", answer):
        return 0.0
    try:
        return float(score_answer(answer=answer.strip(), entry=entry))
    except Exception:
        # Some raise for an answer that they can't read, which is the policy's mistake. If the row is to blame, its own
        # answer raises too, and that leaves here.
        score_answer(answer=entry["answer"], entry=entry)
        return 0.0


REWARDS: dict[str, Callable[[Task, Trajectory], float | dict]] = {
    "gsm8k": gsm8k,
    "math": math_boxed,
    "math_dapo": math_dapo,
    "countdown": countdown,
    "exact": exact,
    "exact_int": exact_int,
}
# A row's data_source -> its rule. A rule's own name, aime* and reasoning_gym/* need no entry.
DATA_SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo_reasoning": "math_dapo",
    "BytedTsinghua-SIA/DAPO-Math-17k": "math_dapo",
    "Jiayi-Pan/Countdown-Tasks-3to4": "countdown",
}
