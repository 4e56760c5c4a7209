"""What a session may ask of the policy that samples it: prompts as tokens, continuations with seeds of its own, tools called."""

import contextlib
import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batch import Task
from data import fit, render
from tasks.chat import encode_reply, with_tools
from tasks.tools import FORMATS, Call


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
