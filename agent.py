"""Agents: coroutines that fill trajectories. A session is one call of an agent.

An agent is `async (task, policy, cfg) -> Trajectory | list[Trajectory]`. `policy` (policy.Policy) belongs to the
session: `policy.encode(messages)` renders a prompt to token ids, `await policy.generate(tokens)` samples a
continuation, `policy.encode_reply(messages)` renders what is said to the policy before its next turn. Tokens in, tokens
out: what was sampled is never tokenized again.

To add an agent, write the coroutine and put it into AGENTS. If it tells the policy of agent.tools, set its attribute
`uses_tools`, as tool_agent's: over-long prompts are then found with the tools in them. Or leave this file alone:
agent.custom_path names a file of yours.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from batch import Task, Trajectory
from host.lookup import check_bounds, may_change, unknown
from policy import Policy, Reply, decode
from tasks.chat import result_messages, with_tools
from tasks.tools import FORMATS, TOOLS, Call, load_custom, tool_schema


@dataclass(frozen=True)
class AgentConfig:
    default_agent_loop: str = "single_turn_agent"
    """Agent of the rows that name none in `agent_name`, a key of AGENTS: single_turn_agent or tool_agent."""
    custom_path: str | None = None
    """`file.py:function`, your agent for the rows that name none. The file is code: it is run, here and in the tools'
    workers. It may add to TOOLS and FORMATS."""
    tools: tuple[str, ...] = ("calculator",)
    """What tool_agent's policy may call, keys of TOOLS: calculator, python."""
    format: str = "hermes"
    """How the policy writes a call, a key of FORMATS: hermes (Qwen's too) or llama3_json."""
    max_assistant_turns: int = 5
    """Turns that the policy has in a session of tool_agent; calls in the last one are not run."""
    max_parallel_calls: int = 4
    """Calls of one turn that are run, at the same time; further ones are answered that they were not."""
    tool_timeout_s: float = may_change(10.0)
    """Seconds that a call may take; then it is killed, and the policy is told."""
    tool_workers: int = may_change(8)
    """Processes that run tools."""
    max_tool_response_length: int = 1024
    """Characters of a tool's result that the policy reads; of a longer one the middle is left out."""

    def __post_init__(self) -> None:
        check_bounds(
            "agent",
            self,
            max_assistant_turns="[1, inf)",
            max_parallel_calls="[1, inf)",
            tool_timeout_s="(0, inf)",
            tool_workers="[1, inf)",
            max_tool_response_length="[64, inf)",
        )
        if self.custom_path and self.default_agent_loop != AgentConfig.default_agent_loop:
            raise ValueError(
                f"agent.custom_path={self.custom_path!r} and agent.default_agent_loop={self.default_agent_loop!r} are "
                "both for the rows that name no agent: leave one out"
            )


Agent = Callable[[Task, Policy, AgentConfig], Coroutine[Any, Any, Trajectory | list[Trajectory]]]


async def single_turn_agent(task, policy, cfg) -> Trajectory:
    """One prompt, one sampled response."""
    trajectory = Trajectory(task)
    trajectory.observe(policy.encode(task.messages))
    reply = await policy.generate(trajectory.tokens)
    trajectory.act(reply.tokens, reply.logprobs)
    trajectory.finish_reason = reply.finish_reason
    return trajectory


async def tool_agent(task, policy, cfg) -> Trajectory:
    """The policy speaks, its calls are run, it reads their results and speaks again. Until it calls nothing, has had
    agent.max_assistant_turns, or has used its budget."""
    tools = tool_schemas(cfg)
    trajectory = Trajectory(task, metrics={"tool_calls": 0.0, "tool_errors": 0.0})
    trajectory.observe(policy.encode(task.messages, tools))
    while True:
        reply = await policy.generate(trajectory.tokens)
        trajectory.act(reply.tokens, reply.logprobs)
        trajectory.finish_reason = reply.finish_reason
        if reply.finish_reason == "length":  # cut in the middle of a turn
            return trajectory
        calls = calls_in(reply, policy, cfg)
        if not calls or trajectory.num_turns == cfg.max_assistant_turns:
            return trajectory
        results = await run_calls(calls, policy, cfg)
        trajectory.metrics["tool_calls"] += len(calls)
        trajectory.metrics["tool_errors"] += sum(not ok for _, ok in results)
        messages = result_messages([text for text, _ in results], policy.tokenizer, tools)
        observation = policy.encode_reply(messages)
        if len(observation) >= policy.budget_left(trajectory.tokens):  # not even one token could answer it
            trajectory.finish_reason = "length"
            return trajectory
        trajectory.observe(observation)


tool_agent.uses_tools = True  # type: ignore[attr-defined]


def calls_in(reply: Reply, policy: Policy, cfg: AgentConfig) -> list[Call]:
    """The calls in a turn that the policy has ended, read from its text with special tokens and all blanks."""
    said = reply.tokens[:-1]  # all but the end token
    text = decode(said, policy.tokenizer, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return FORMATS[cfg.format].parse(text)


async def run_calls(calls: list[Call], policy: Policy, cfg: AgentConfig) -> list[tuple[str, bool]]:
    """(result or error as text, did it end well?) of each call. The first agent.max_parallel_calls run, all at once."""
    results = await asyncio.gather(*map(policy.call_tool, calls[: cfg.max_parallel_calls]))
    refusal = f"error: not run, since a turn may have {cfg.max_parallel_calls} calls"
    return results + [(refusal, False) for _ in calls[cfg.max_parallel_calls :]]


AGENTS: dict[str, Agent] = {"single_turn_agent": single_turn_agent, "tool_agent": tool_agent}


def find_agent(task: Task, cfg: AgentConfig) -> Agent:
    """The agent of a row: the one it names, else the user's, else the default."""
    if task.agent_name:
        return AGENTS[task.agent_name]
    if cfg.custom_path:
        return load_custom(cfg.custom_path)
    return AGENTS[cfg.default_agent_loop]


def uses_tools(task: Task, cfg: AgentConfig) -> bool:
    """Whether a row's agent tells the policy of agent.tools."""
    return getattr(find_agent(task, cfg), "uses_tools", False)


def agent_tools(task: Task, cfg: AgentConfig) -> list[dict] | None:
    """Schemas of the tools that a row's prompt tells of; None for agents that have none."""
    return tool_schemas(cfg) if uses_tools(task, cfg) else None


def tool_schemas(cfg: AgentConfig) -> list[dict] | None:
    """Schemas of agent.tools, None when it is empty. ValueError when a tool's function gives none."""
    return [tool_schema(name) for name in cfg.tools] or None


def agent_prompt(task: Task, tokenizer, cfg: AgentConfig) -> tuple[list[dict] | str, list | None]:
    """(messages, tools) that a row's prompt is rendered from when its agent encodes it."""
    return with_tools(task.messages, agent_tools(task, cfg), tokenizer, FORMATS[cfg.format].how)


def check_agents(tasks: list[Task], cfg: AgentConfig) -> None:
    """ValueError when the configuration or a row names an agent, a tool or a format that is not there. Also when the
    user's file won't do, or a tool that is told of has no schema."""
    if cfg.custom_path:
        load_custom(cfg.custom_path)  # may add to AGENTS, TOOLS and FORMATS
    named: list[tuple[str, str, dict]] = [
        ("agent.default_agent_loop", cfg.default_agent_loop, AGENTS),
        ("agent.format", cfg.format, FORMATS),
    ]
    named += [("agent.tools", name, TOOLS) for name in cfg.tools]
    named += [(f"agent_name of row {task.index}", task.agent_name, AGENTS) for task in tasks if task.agent_name]
    for where, name, known in named:
        if name not in known:
            raise unknown(where, name, known)
    if any(uses_tools(task, cfg) for task in tasks):
        tool_schemas(cfg)
