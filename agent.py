"""Agents: coroutines that fill trajectories, and the tools that they call. A session is one call of an agent.

An agent is `async (task, policy, cfg) -> Trajectory | list[Trajectory]`. `policy` belongs to the session: `policy.encode(messages)`
renders a prompt to token ids, `await policy.generate(tokens)` samples a continuation, `policy.encode_reply(messages)` renders what
is said to the policy before its next turn. Tokens in, tokens out: what was sampled is never tokenized again.

To add an agent, write the coroutine and put it into AGENTS. Or leave this file alone: agent.custom_path names a file of yours.
"""

import asyncio
import contextlib
import hashlib
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batch import Task, Trajectory
from data import fit, render
from host.lookup import unknown
from tasks.chat import encode_reply, result_messages, with_tools
from tasks.tools import FORMATS, TOOLS, Call, load_custom, tool_schema


@dataclass(frozen=True)
class AgentConfig:
    default_agent_loop: str = "single_turn_agent"
    """Agent of the rows that name none in `agent_name`, a key of AGENTS: single_turn_agent or tool_agent."""
    custom_path: str | None = None
    """`file.py:function`, your agent for the rows that name none. The file is code: it is run, here and in the tools' workers. It may add to TOOLS and FORMATS."""
    tools: tuple[str, ...] = ("calculator",)
    """What tool_agent's policy may call, keys of TOOLS: calculator, python."""
    format: str = "hermes"
    """How the policy writes a call, a key of FORMATS: hermes (Qwen's too) or llama3_json."""
    max_assistant_turns: int = 5
    """Turns that the policy has in a session of tool_agent; calls in the last one are not run."""
    max_parallel_calls: int = 4
    """Calls of one turn that are run, at the same time; further ones are answered that they were not."""
    tool_timeout_s: float = 10.0
    """Seconds that a call may take; then it is killed, and the policy is told."""
    tool_workers: int = 8
    """Processes that run tools."""
    max_tool_response_length: int = 1024
    """Characters of a tool's result that the policy reads; of a longer one the middle is left out."""

    def __post_init__(self):
        for knob, least in (
            ("max_assistant_turns", 1),
            ("max_parallel_calls", 1),
            ("tool_workers", 1),
            ("max_tool_response_length", 64),
        ):
            if getattr(self, knob) < least:
                raise ValueError(f"agent.{knob}={getattr(self, knob)} must be at least {least}")
        if not 0 < self.tool_timeout_s < math.inf:
            raise ValueError(f"agent.tool_timeout_s={self.tool_timeout_s} must be a number above 0")
        if self.custom_path and self.default_agent_loop != AgentConfig.default_agent_loop:
            raise ValueError(
                f"agent.custom_path={self.custom_path!r} and agent.default_agent_loop={self.default_agent_loop!r} are both for the rows that name no agent: leave one out"
            )


class PromptTooLong(ValueError):
    """A prompt is longer than data.max_prompt_length, and data.truncation is error."""


class BudgetUsed(RuntimeError):
    """No token of data.max_response_length is left to a trajectory. An agent asks `policy.budget_left` first."""


@dataclass(frozen=True)
class Reply:
    """What the policy sampled in one turn."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # stop | length


@dataclass
class Policy:
    """What an agent may ask for in its session: prompts rendered, continuations sampled with the session's own seeds, tools called."""

    engine: Any  # engine.Engine
    task: Task
    sampling: Any  # RolloutConfig | ValConfig
    seed: int
    encoded: dict = field(default_factory=dict)  # texts to tokens, shared by the sessions of a task
    prompts: list = field(default_factory=list)  # what this session has encoded
    calls: Counter = field(default_factory=Counter)  # of generate, by its tokens

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def encode(self, messages: list[dict] | str, tools: list | None = None) -> list[int]:
        """A prompt's token ids: messages through the chat template, with the assistant's turn opened; a text as it is, unless there are tools. data.truncation decides about one that is too long."""
        key = repr((messages, tools))
        if key not in self.encoded:
            told, known = with_tools(messages, tools, self.tokenizer, FORMATS[self.engine.cfg.agent.format].how)
            tokens = render(told, self.tokenizer, known)
            try:
                self.encoded[key] = fit(tokens, self.engine.cfg.data, self.task)
            except ValueError as e:
                raise PromptTooLong(str(e)) from e
        self.prompts.append(self.encoded[key])
        return list(self.encoded[key])  # the agent's own: other sessions share the original

    def encode_reply(self, messages: list[dict]) -> list[int]:
        """What the chat template writes between the end token that the policy has sampled and its next turn: separators, `messages`, the opened turn."""
        key = repr(messages)
        if key not in self.encoded:
            ends = {self.tokenizer.eos_token_id, *self.engine.stop_token_ids} - {None}
            self.encoded[key] = encode_reply(
                messages, self.tokenizer, self.tokenizer.convert_ids_to_tokens(sorted(ends))
            )
        return list(self.encoded[key])

    def prompt_of(self, tokens: list[int]) -> list[int]:
        """The longest prompt of this session that `tokens` begin with; all of them when there is none."""
        return max((p for p in self.prompts if tokens[: len(p)] == p), key=len, default=tokens)

    def budget_left(self, tokens: list[int]) -> int:
        """How many more tokens, sampled or read, may follow: data.max_response_length is shared by all that comes after the prompt."""
        data = self.engine.cfg.data
        return min(
            data.max_response_length - len(tokens) + len(self.prompt_of(tokens)),
            data.max_prompt_length + data.max_response_length - len(tokens),
        )

    async def generate(self, tokens: list[int], max_tokens: int | None = None) -> Reply:
        """Sample a continuation of `tokens`, of at most max_tokens and what the budget has left. Calls may run at the same time, from the same tokens too."""
        left, prompt = self.budget_left(tokens), len(self.prompt_of(tokens))
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        if left < 1:
            raise BudgetUsed(
                f"{len(tokens) - prompt} tokens follow the prompt of {prompt}: nothing is left of data.max_response_length={self.engine.cfg.data.max_response_length}"
            )
        self.calls[tuple(tokens)] += 1
        first = self.prompts[0] if self.prompts and tokens[: len(self.prompts[0])] == self.prompts[0] else []
        seed = session_seed(
            self.seed, self.calls[tuple(tokens)], *tokens[len(first) :]
        )  # by what it continues, not by when: branches take turns in any order
        return await self.engine.generate(list(tokens), self.sampling, min(left, max_tokens or left), seed)

    async def call_tool(self, call: Call) -> tuple[str, bool]:
        """(a tool's result as text, True), or (what went wrong, False)."""
        return await self.engine.tools.call(call)


def decode(tokens: list[int], tokenizer, skip_special_tokens: bool = True, **kwargs) -> str:
    """Their text. As an array: of a list, transformers looks at every element's type."""
    return tokenizer.decode(np.array(tokens), skip_special_tokens=skip_special_tokens, **kwargs)


def session_seed(*key) -> int:
    """A sampling seed from what names the session: 63 bits of a hash, so that no two share one, whatever rank or batch they are in."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def load_tokenizer(path: str):
    """The model's tokenizer. ValueError when the folder or id has none."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not os.path.isdir(path) and (path.startswith((".", "/")) or path.count("/") > 1):
        raise ValueError(f"actor.path={path}: there is no such folder")
    if os.path.isdir(path) and not any(os.path.exists(os.path.join(path, name)) for name in files):
        raise ValueError(
            f"actor.path={path}: no tokenizer is in this folder: save the model's beside it ({', '.join(files)})"
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises a dozen kinds for the same thing
        raise ValueError(
            f"actor.path={path}: no tokenizer loads from it ({type(error).__name__}: {str(error).splitlines()[0]}): name a Hugging Face model folder or id that has one"
        ) from error


def stop_token_ids(path: str, tokenizer) -> list[int]:
    """Ends of turn: the tokenizer's, and those that the model's generation_config lists. (Its sampling settings are not used.)"""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):  # a model need not have one
        listed = GenerationConfig.from_pretrained(path).eos_token_id
        ids |= set(listed) if isinstance(listed, list) else {listed}
    return sorted(ids - {None})


async def single_turn_agent(task, policy, cfg) -> Trajectory:
    """One prompt, one sampled response."""
    trajectory = Trajectory(task)
    trajectory.observe(policy.encode(task.messages))
    reply = await policy.generate(trajectory.tokens)
    trajectory.act(reply.tokens, reply.logprobs)
    trajectory.finish_reason = reply.finish_reason
    return trajectory


async def tool_agent(task, policy, cfg) -> Trajectory:
    """The policy speaks, its calls are run, it reads their results and speaks again: until it calls nothing, has had its turns, or used its budget."""
    trajectory, tools = Trajectory(task, metrics={"tool_calls": 0.0, "tool_errors": 0.0}), tool_schemas(cfg)
    trajectory.observe(policy.encode(task.messages, tools))
    while True:
        reply = await policy.generate(trajectory.tokens)
        trajectory.act(reply.tokens, reply.logprobs)
        trajectory.finish_reason = reply.finish_reason
        if reply.finish_reason == "length":  # in the midst of a turn
            return trajectory
        calls = FORMATS[cfg.format].parse(
            decode(reply.tokens[:-1], policy.tokenizer, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        if not calls or trajectory.num_turns == cfg.max_assistant_turns:
            return trajectory
        results = await asyncio.gather(*map(policy.call_tool, calls[: cfg.max_parallel_calls]))
        results += [(f"error: not run, since a turn may have {cfg.max_parallel_calls} calls", False)] * (
            len(calls) - len(results)
        )
        trajectory.metrics["tool_calls"] += len(calls)
        trajectory.metrics["tool_errors"] += sum(not ok for _, ok in results)
        observation = policy.encode_reply(result_messages([text for text, _ in results], policy.tokenizer, tools))
        if len(observation) >= policy.budget_left(trajectory.tokens):  # not even one token could answer it
            trajectory.finish_reason = "length"
            return trajectory
        trajectory.observe(observation)


AGENTS = {"single_turn_agent": single_turn_agent, "tool_agent": tool_agent}


def find_agent(task: Task, cfg: AgentConfig):
    """The agent of a row: the one it names, else the user's, else the default."""
    return (
        load_custom(cfg.custom_path)
        if cfg.custom_path and not task.agent_name
        else AGENTS[task.agent_name or cfg.default_agent_loop]
    )


def agent_tools(task: Task, cfg: AgentConfig) -> list[dict] | None:
    """Schemas of the tools that a row's prompt tells of; None for agents that have none."""
    return tool_schemas(cfg) if find_agent(task, cfg) is tool_agent else None


def tool_schemas(cfg: AgentConfig) -> list[dict] | None:
    return [tool_schema(name) for name in cfg.tools] or None


def agent_prompt(task: Task, tokenizer, cfg: AgentConfig) -> tuple:
    """(messages, tools) that a row's prompt is rendered from when its agent encodes it."""
    return with_tools(task.messages, agent_tools(task, cfg), tokenizer, FORMATS[cfg.format].how)


def check_agents(tasks, cfg: AgentConfig) -> None:
    """ValueError when the configuration or a row names an agent, a tool or a format that is not there, or the user's file won't do."""
    if cfg.custom_path:
        load_custom(cfg.custom_path)
    named = [
        ("agent.default_agent_loop", cfg.default_agent_loop, AGENTS),
        ("agent.format", cfg.format, FORMATS),
        *(("agent.tools", name, TOOLS) for name in cfg.tools),
    ]
    for where, name, known in named + [
        (f"agent_name of row {t.index}", t.agent_name, AGENTS) for t in tasks if t.agent_name
    ]:
        if name not in known:
            raise unknown(where, name, known)
    if any(find_agent(t, cfg) is tool_agent for t in tasks):
        tool_schemas(cfg)
