"""What a session may ask of the policy: prompts as tokens, continuations with seeds of its own, calls of tools."""

import contextlib
import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from batch import Task
from data import fit, render
from tasks.chat import encode_reply, with_tools
from tasks.tools import FORMATS, Call, Toolbox


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


class Generates(Protocol):
    """What a Policy needs of an engine: engine.Engine, or a scripted one in a test."""

    cfg: Any  # config.Config, of which data and agent are read
    tokenizer: Any
    tools: Toolbox
    stop_token_ids: list[int]

    async def generate(self, tokens: list[int], sampling: Any, max_tokens: int, seed: int) -> Reply:
        """Sample a continuation of `tokens`, of at most max_tokens; `sampling` is a RolloutConfig or a ValConfig."""


@dataclass
class Policy:
    """What an agent may ask for in its session. Prompts are rendered, continuations are sampled with the session's own
    seeds, tools are called."""

    engine: Generates
    task: Task
    sampling: Any  # RolloutConfig | ValConfig
    seed: int
    encoded: dict[str, list[int]] = field(default_factory=dict)  # texts to tokens, shared by the sessions of a task
    prompts: list[list[int]] = field(default_factory=list)  # what this session has encoded
    calls: Counter = field(default_factory=Counter)  # of generate, by its tokens

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def encode(self, messages: list[dict] | str, tools: list | None = None) -> list[int]:
        """Token ids [L] of a prompt. PromptTooLong when it is, unless data.truncation says how to cut it. Messages go
        through the chat template, with the assistant's turn opened; a text does only when there are tools."""
        key = repr((messages, tools))
        if key not in self.encoded:
            how = FORMATS[self.engine.cfg.agent.format].how
            messages, tools = with_tools(messages, tools, self.tokenizer, how)
            tokens = render(messages, self.tokenizer, tools)
            try:
                self.encoded[key] = fit(tokens, self.engine.cfg.data, self.task)
            except ValueError as e:
                raise PromptTooLong(str(e)) from e
        self.prompts.append(self.encoded[key])
        return list(self.encoded[key])  # the agent's own: other sessions share the original

    def encode_reply(self, messages: list[dict]) -> list[int]:
        """Token ids of what stands between the end token that the policy has sampled and its next turn. As the chat
        template writes it: separators, `messages`, the opened turn."""
        key = repr(messages)
        if key not in self.encoded:
            ids = {self.tokenizer.eos_token_id, *self.engine.stop_token_ids} - {None}
            ends = self.tokenizer.convert_ids_to_tokens(sorted(ids))
            self.encoded[key] = encode_reply(messages, self.tokenizer, ends)
        return list(self.encoded[key])

    def prompt_of(self, tokens: list[int]) -> list[int]:
        """The longest prompt of this session that `tokens` begin with; all of them when there is none."""
        prompts = [prompt for prompt in self.prompts if tokens[: len(prompt)] == prompt]
        return max(prompts, key=len, default=tokens)

    def budget_left(self, tokens: list[int]) -> int:
        """How many more tokens, sampled or read, may follow. data.max_response_length is shared by all that comes
        after the prompt."""
        data = self.engine.cfg.data
        used = len(tokens) - len(self.prompt_of(tokens))
        longest = data.max_prompt_length + data.max_response_length
        return min(data.max_response_length - used, longest - len(tokens))

    async def generate(self, tokens: list[int], max_tokens: int | None = None) -> Reply:
        """Sample a continuation of `tokens`, of at most max_tokens and what the budget has left. BudgetUsed when
        nothing is left. Calls may run at the same time, from the same tokens too."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        left = self.budget_left(tokens)
        if left < 1:
            prompt = len(self.prompt_of(tokens))
            raise BudgetUsed(
                f"{len(tokens) - prompt} tokens follow the prompt of {prompt}: nothing is left of "
                f"data.max_response_length={self.engine.cfg.data.max_response_length}"
            )
        most = left if max_tokens is None else min(left, max_tokens)
        return await self.engine.generate(list(tokens), self.sampling, most, self.next_seed(tokens))

    def next_seed(self, tokens: list[int]) -> int:
        """The seed for continuing `tokens` once more. It follows from what is continued and how often that was, not
        from when: branches take turns in any order."""
        self.calls[tuple(tokens)] += 1
        first = self.prompts[0] if self.prompts else []
        behind_prompt = tokens[len(first) :] if tokens[: len(first)] == first else tokens
        return session_seed(self.seed, self.calls[tuple(tokens)], *behind_prompt)

    async def call_tool(self, call: Call) -> tuple[str, bool]:
        """(a tool's result as text, True), or (what went wrong, False)."""
        return await self.engine.tools.call(call)


def decode(tokens: list[int], tokenizer, skip_special_tokens: bool = True, **kwargs) -> str:
    """Their text. As an array: of a list, transformers looks at every element's type."""
    return tokenizer.decode(np.array(tokens), skip_special_tokens=skip_special_tokens, **kwargs)


def session_seed(*key) -> int:
    """A sampling seed from what names the session. 63 bits of a hash, so that no two sessions share one, whatever rank
    or batch they are in."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer. ValueError when the folder or id has none."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    is_folder = os.path.isdir(path)
    is_no_id = path.startswith((".", "/")) or path.count("/") > 1
    if is_no_id and not is_folder:
        raise ValueError(f"actor.path={path}: there is no such folder")
    if is_folder and not any(os.path.exists(os.path.join(path, name)) for name in files):
        raise ValueError(
            f"actor.path={path}: no tokenizer is in this folder: save the model's beside it ({', '.join(files)})"
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises a dozen kinds for the same thing
        raise ValueError(
            f"actor.path={path}: no tokenizer loads from it ({type(error).__name__}: {str(error).splitlines()[0]}): "
            "name a Hugging Face model folder or id that has one"
        ) from error


def stop_token_ids(path: str, tokenizer) -> list[int]:
    """Ends of turn: the tokenizer's, and those that the model's generation_config lists. (Its sampling settings are
    not used.)"""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):  # a model need not have one
        listed = GenerationConfig.from_pretrained(path).eos_token_id
        ids |= set(listed) if isinstance(listed, list) else {listed}
    return sorted(ids - {None})
