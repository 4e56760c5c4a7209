"""Agents: coroutines that fill trajectories. A session is one call of an agent; a single turn is its five-line case.

An agent is `async (task, policy, cfg) -> Trajectory | list[Trajectory]`. `policy` belongs to the session:
`policy.encode(messages)` renders a prompt to token ids, `await policy.generate(tokens)` samples a continuation. Tokens in,
tokens out: what was sampled is never tokenized again. To add an agent, write the coroutine and put it into AGENTS.
"""
import contextlib
import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

from batch import Task, Trajectory
from data import fit, render


@dataclass(frozen=True)
class AgentConfig:
    default_agent_loop: str = "single_turn_agent"
    """Agent of the rows that name none in `agent_name`, a key of AGENTS: single_turn_agent."""


@dataclass(frozen=True)
class Reply:
    """What the policy sampled in one turn."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # stop | length


@dataclass
class Policy:
    """What an agent may ask for in its session: prompts rendered, continuations sampled with the session's own seed."""

    engine: Any  # rollout.Engine
    task: Task
    sampling: Any  # RolloutConfig | ValConfig
    seed: int
    prompts: dict = field(default_factory=dict)  # encoded prompts, shared by the sessions of a task
    turns: int = 0

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def encode(self, messages: list[dict] | str, tools: list | None = None) -> list[int]:
        """A prompt's token ids: messages through the chat template, with the assistant's turn opened; a text as it is. data.truncation decides about one that is too long."""
        key = repr((messages, tools))
        if key not in self.prompts:
            self.prompts[key] = fit(render(messages, self.tokenizer, tools), self.engine.cfg.data, self.task)
        return self.prompts[key]

    async def generate(self, tokens: list[int], max_tokens: int | None = None) -> Reply:
        """Sample a continuation of `tokens`, of at most max_tokens (data.max_response_length when not given)."""
        self.turns += 1
        return await self.engine.generate(tokens, self.sampling, max_tokens or self.engine.cfg.data.max_response_length, session_seed(self.seed, self.turns))


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
        raise ValueError(f"actor.path={path}: no tokenizer is in this folder: save the model's beside it ({', '.join(files)})")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises a dozen kinds for the same thing
        raise ValueError(f"actor.path={path}: no tokenizer loads from it ({type(error).__name__}: {str(error).splitlines()[0]}): name a Hugging Face model folder or id that has one") from error


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


AGENTS = {"single_turn_agent": single_turn_agent}


def check_agents(tasks, cfg: AgentConfig) -> None:
    """ValueError when the configuration or a row names an agent that is not there."""
    for name, where in [(cfg.default_agent_loop, "agent.default_agent_loop"), *((t.agent_name, f"row {t.index}") for t in tasks if t.agent_name)]:
        if name not in AGENTS:
            raise ValueError(f"{where} names the agent {name!r}, which is not known; known: {', '.join(AGENTS)}")
