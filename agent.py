"""Agents: coroutines that fill trajectories, and the tools that they call. A session is one call of an agent.

An agent is `async (task, policy, cfg) -> Trajectory | list[Trajectory]`. `policy` belongs to the session: `policy.encode(messages)`
renders a prompt to token ids, `await policy.generate(tokens)` samples a continuation, `policy.encode_reply(messages)` renders what
is said to the policy before its next turn. Tokens in, tokens out: what was sampled is never tokenized again.

To add an agent, write the coroutine and put it into AGENTS. Or leave this file alone: agent.custom_path names a file of yours.
"""

import asyncio
import math
from dataclasses import dataclass

from batch import Task, Trajectory
from host.lookup import unknown
from policy import decode
from tasks.chat import result_messages, with_tools
from tasks.tools import FORMATS, TOOLS, load_custom, tool_schema


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
