"""What a policy may call: tools, how it writes calls of them, and the workers that run them.

A tool is a typed function with a docstring (Google's style: `Args:`), from which its JSON schema is made; put it into
TOOLS. It may return text or anything that JSON has. It may also raise: the policy reads the message. `async def` tools,
for what only waits, run in the engine's event loop; plain ones in worker processes, which are killed when they take too
long. FORMATS has the ways to write a call.
"""

import ast
import asyncio
import functools
import inspect
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from host.lookup import load_function
from host.workers import WorkerDied, WorkerError, WorkerPool, WorkerTimeout
from tasks.sandbox import python


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it; error says why what it wrote is no call."""

    name: str = ""
    arguments: dict = field(default_factory=dict)
    error: str = ""


def to_call(text: str, key: str) -> Call:
    """The call that a JSON text is; its arguments stand under `key`, as an object or as the JSON text of one."""
    try:
        said = json.loads(text, strict=False)
        name = said["name"]
        arguments = said.get(key, {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("its parts have other types")
        return Call(name, arguments)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        form = f'{{"name": "...", "{key}": {{...}}}}'
        return Call(error=f"a call must be JSON like {form}, and this is not ({type(e).__name__}: {e})")


def parse_hermes(text: str) -> list[Call]:
    """Every <tool_call>, also one that is not closed; not those in the reasoning."""
    spoken = text[text.find("</think>") + 1 :]
    found = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", spoken, re.DOTALL)
    return [to_call(said, "arguments") for said in found]


def parse_llama3_json(text: str) -> list[Call]:
    """A turn that is JSON objects with a name, maybe with semicolons between them."""
    calls: list[Call] = []
    text = text.replace("<|python_tag|>", "").strip()
    while text.startswith("{") and re.match(r'\{\s*"(name|type|parameters)"', text):
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(text)
        except (ValueError, RecursionError):
            return [*calls, to_call(text, "parameters")]  # a call whose error says what is wrong
        calls.append(to_call(text[:end], "parameters"))
        text = text[end:].lstrip("; \n")
    return calls


@dataclass(frozen=True)
class Format:
    """A way to write calls."""

    parse: Callable[[str], list[Call]]  # the text of a turn -> its calls
    how: str  # what to tell a policy whose chat template doesn't say it


FORMATS = {
    "hermes": Format(
        parse_hermes, 'To call one, write <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>.'
    ),
    "llama3_json": Format(
        parse_llama3_json, 'To call one, answer with nothing but {"name": "...", "parameters": {...}}.'
    ),
}


TOO_LARGE = "a number gets too large"


def bounded(number: Fraction) -> Fraction:
    """The number. ValueError when its numerator or denominator has more than 2000 bits."""
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > 2000:
        raise ValueError(TOO_LARGE)
    return number


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent: exact for a whole exponent, else by floats. ValueError when it is complex or gets too large."""
    if exponent.denominator > 1:
        result = float(base) ** float(exponent)
        if isinstance(result, complex):
            raise ValueError(f"{base} has no real power {exponent}")
        return Fraction(repr(result))
    if abs(base) == 1:  # of any exponent only matters whether it is even
        return base ** int(exponent % 2)
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base and size * abs(exponent) > 4000:  # known before it is computed
        raise ValueError(TOO_LARGE)
    return base ** int(exponent)


OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(node: ast.AST) -> Fraction:
    """The exact value of an expression: 0.1 is 1/10. ValueError when it is not arithmetic or gets too large."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return bounded(OPERATORS[type(op)](evaluate(left), evaluate(right)))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            if abs(value) == float("inf"):
                raise ValueError(TOO_LARGE)
            return bounded(Fraction(repr(value)))
    raise ValueError("only numbers, + - * / // % ** and brackets are known")


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: numbers, + - * / // % ** and brackets, as in (1 + 2.5) * 3
    """
    if len(expression) > 500:
        raise ValueError(f"the expression has {len(expression)} characters, more than 500")
    try:
        number = evaluate(ast.parse(expression.strip(), mode="eval").body)
        return str(number) if number.denominator == 1 else f"{float(number):.12g}"
    except (SyntaxError, MemoryError, RecursionError) as e:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from e
    except ZeroDivisionError as e:
        raise ValueError("division by zero") from e
    except OverflowError as e:
        raise ValueError(TOO_LARGE) from e


TOOLS: dict[str, Callable] = {"calculator": calculator, "python": python}
JSON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def tool_schema(name: str) -> dict:
    """What a prompt says of a tool: name, description, parameters. ValueError when the function doesn't say enough."""
    try:
        return function_schema(TOOLS[name])
    except Exception as e:  # whatever the library's parser raises: no docstring, no type, ...
        raise ValueError(f"agent.tools: the function of {name!r} gives no JSON schema: {e}") from e


@functools.cache
def function_schema(function: Callable) -> dict:
    """A function's JSON schema as chat templates want it, from its signature and its docstring."""
    from transformers.utils import get_json_schema

    schema = get_json_schema(function)["function"]
    return {"type": "function", "function": {k: v for k, v in schema.items() if k != "return"}}


def check_arguments(name: str, arguments: dict) -> None:
    """TypeError when a tool can't be called with these arguments."""
    inspect.signature(TOOLS[name]).bind(**arguments)
    properties = tool_schema(name)["function"]["parameters"]["properties"]
    for key, value in arguments.items():
        said = properties.get(key, {})
        kind = said.get("type")
        if not isinstance(kind, str):  # of several types, or the function takes any key
            continue
        absent = value is None and said.get("nullable")
        if not absent and not isinstance(value, JSON_TYPES.get(kind, object)):
            raise TypeError(f"{key} must be of type {kind}, not {value!r:.50}")


def result_text(result: Any, most: int) -> str:
    """A result as text of at most `most` characters; of a longer one the middle is left out, visibly."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    text = text.encode("utf8", "replace").decode()  # without lone surrogates: a tokenizer can't encode them
    if len(text) <= most:
        return text
    mark = f"[... of {len(text)} characters ...]"
    head = (most - len(mark)) // 2
    tail = most - len(mark) - head
    return text[:head] + mark + text[len(text) - tail :]


def error_text(error: BaseException) -> str:
    """What the policy reads of an error; a ValueError's message says enough without its name."""
    return f"error: {error}" if isinstance(error, ValueError) else f"error: {type(error).__name__}: {error}"


def serve_tools(custom_path: str | None, most: int) -> Callable:
    """A worker's setup: the function that runs a tool and returns (text, whether it ended well)."""
    if custom_path:
        load_custom(custom_path)  # the file may put tools into TOOLS

    def run(name: str, arguments: dict) -> tuple[str, bool]:
        try:
            return result_text(TOOLS[name](**arguments), most), True
        except (Exception, SystemExit, KeyboardInterrupt) as e:
            return error_text(e), False

    return run


class Toolbox:
    """Runs the tools of agent.tools, each call under agent.tool_timeout_s. The workers start with the first call."""

    def __init__(self, cfg: Any):
        """cfg is an agent.AgentConfig."""
        self.cfg = cfg
        self.pool: WorkerPool | None = None

    async def call(self, call: Call) -> tuple[str, bool]:
        """(result as text, True), or (what went wrong, False).

        Whatever the policy wrote or a tool does ends as text. But WorkerError when no worker can be had: that is no
        fault of the policy's.
        """
        text, ok = await self._call(call)
        return result_text(text, self.cfg.max_tool_response_length), ok

    async def _call(self, call: Call) -> tuple[str, bool]:
        if call.error:
            return f"error: {call.error}", False
        if call.name not in self.cfg.tools:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self.cfg.tools)}", False
        try:
            check_arguments(call.name, call.arguments)
            return await self._run(call)
        except WorkerDied:
            return f"error: {call.name} ended its process", False
        except (WorkerTimeout, TimeoutError):
            return f"error: {call.name} took more than {self.cfg.tool_timeout_s:g} s and was stopped", False
        except WorkerError:
            raise
        except Exception as e:
            return error_text(e), False

    async def _run(self, call: Call) -> tuple[str, bool]:
        tool = TOOLS[call.name]
        if inspect.iscoroutinefunction(tool):
            result = await asyncio.wait_for(tool(**call.arguments), self.cfg.tool_timeout_s)
            return result_text(result, self.cfg.max_tool_response_length), True
        if self.pool is None:
            self.pool = self._start_workers()
        return await self.pool.call(call.name, call.arguments, timeout_s=self.cfg.tool_timeout_s)

    def _start_workers(self) -> WorkerPool:
        # Plain values, not self.cfg: to unpickle that, a worker would import agent.py, and torch with it. A user's file
        # imports agent.py anyway; then it is loaded once, before the workers are forked.
        setup = functools.partial(serve_tools, self.cfg.custom_path, self.cfg.max_tool_response_length)
        preload = ["agent"] if self.cfg.custom_path else []
        return WorkerPool(setup, self.cfg.tool_workers, preload)

    def close(self) -> None:
        if self.pool:
            self.pool.close()


@functools.cache
def load_custom(custom_path: str) -> Callable:
    """The agent of a user's file. ValueError says what is wrong with it."""
    path, _, function = custom_path.rpartition(":")
    blame = f"agent.custom_path={custom_path!r}"
    if not path:
        raise ValueError(f"{blame} must be file.py:function")
    agent = load_function(path, function, blame)
    if not inspect.iscoroutinefunction(agent):
        raise ValueError(f"{blame}: {path!r} has no `async def {function}(task, policy, cfg)`")
    try:
        inspect.signature(agent).bind(None, None, None)
    except TypeError as e:
        raise ValueError(f"{blame}: {function} must take task, policy and cfg: {e}") from e
    return agent
