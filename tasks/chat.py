"""Chat templates: how a policy is told about its tools, and what is written between two of its turns."""

import functools
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any


def prompt_text(messages: list[dict] | str, tokenizer: Any, tools: list | None = None) -> str:
    """A text as it is; messages through the chat template, up to where the assistant begins to speak."""
    if isinstance(messages, str):
        return messages
    if not tokenizer.chat_template:
        raise ValueError(
            f"a prompt is chat messages, but the tokenizer {tokenizer.name_or_path!r} has no chat template: "
            "use text prompts or another model"
        )
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


def with_tools(messages: list[dict] | str, tools: list | None, tokenizer: Any, how: str) -> tuple:
    """(messages, tools) to render so that the policy knows its tools.

    The chat template says them where it has a place for them. Else the system message does, or the first message where
    the template has no such role; `how` says how to write a call. A text becomes a user's message.
    """
    if not tools:
        return messages, None
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    place = tool_place(tokenizer, repr(tokenizer.chat_template), json.dumps(tools))
    if place == "template":
        return messages, tools
    lines = [
        "You may call these functions:",
        "<tools>",
        *map(json.dumps, tools),
        "</tools>",
        how,
        "Its result comes in the next message.",
    ]
    told = "\n".join(lines)
    if place == "system" and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    first, *rest = messages
    if place == "system":
        content = f"{first['content']}\n\n{told}".strip()
    else:
        content = f"{told}\n\n{first['content']}"
    return [{**first, "content": content}, *rest], None


@functools.lru_cache
def tool_place(tokenizer: Any, template: str, tools: str) -> str:
    """Where the policy can be told about its tools: template, system or user.

    `tools` is their JSON. `template` only makes the cache look again when the tokenizer's template changes.
    """
    probe = [{"role": "user", "content": "?"}]
    if prompt_text(probe, tokenizer, json.loads(tools)) != prompt_text(probe, tokenizer):
        return "template"
    try:
        text = prompt_text([{"role": "system", "content": "lockstep"}, *probe], tokenizer)
    except Exception:  # whatever a template raises
        return "user"
    return "system" if "lockstep" in text else "user"


def as_json(text: str) -> str:
    """A text as it stands between the quotation marks of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


CHANGES = (str, str.strip, as_json)  # what templates do to contents


def encode_reply(messages: list[dict], tokenizer: Any, ends: Sequence[str]) -> list[int]:
    """Token ids that the chat template puts behind an end token of `ends`, to say `messages` and open the next turn.

    It is rendered behind a stand-in for the conversation, since a template may do as it likes with the history. And it
    is rendered once more with marks in place of the contents, which shows where they go: no text in them may become a
    special token. ValueError when the template can't be continued so.
    """
    stub = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "lockstep-turn"}]
    marks = [{**m, "content": f"lockstep-{i}-content"} for i, m in enumerate(messages)]
    blame = "the chat template can't continue a conversation with messages of " + ", ".join(m["role"] for m in messages)
    try:
        plan = prompt_text(stub + marks, tokenizer)
        rendered = prompt_text(stub + messages, tokenizer)
    except Exception as e:
        raise ValueError(f"{blame}: {type(e).__name__}: {e}") from e
    turn = plan.find("lockstep-turn")
    places = [(plan.find(end, turn), end) for end in ends]
    found = [(at, end) for at, end in places if at >= 0]
    if turn < 0 or not found:
        raise ValueError(f"{blame}: it ends the assistant's turn with none of the model's end tokens {ends}: {plan!r}")
    start, end = min(found)
    pieces = re.split(r"lockstep-(\d+)-content", plan[start:])  # template, number, template, ...
    all_there = len(pieces) == 2 * len(messages) + 1
    for change in CHANGES:
        parts = [(piece, False) for piece in pieces]  # (text, is it content?)
        for i in range(1, len(pieces), 2):
            parts[i] = (change(messages[int(pieces[i])]["content"]), True)
        if all_there and rendered.endswith("".join(text for text, _ in parts)):
            # Encoded with its end token, which may swallow blanks behind it.
            first, *tokens = guarded_tokens(parts, tokenizer)
            assert first == tokenizer.convert_tokens_to_ids(end), f"{end!r} is not one token"
            return tokens
    raise ValueError(f"{blame}: it changes or leaves out what they say: {rendered!r}")


def guarded_tokens(parts: list[tuple[str, bool]], tokenizer: Any) -> list[int]:
    """Token ids of texts end to end, (text, is it content?), so that no content becomes a special token.

    What reads as an added token (<|im_end|>, </tool_response>) and has characters of a content in it is cut behind its
    first character, and so encoded as the plain text that it is.
    """
    text = "".join(part for part, _ in parts)
    content = [is_content for part, is_content in parts for _ in part]  # of each character
    added = [token for token in tokenizer.get_added_vocab() if len(token) > 1 and token in text]
    cuts = set()
    for token in added:
        for m in re.finditer(f"(?={re.escape(token)})", text):
            if any(content[m.start() : m.start() + len(token)]):
                cuts.add(m.start() + 1)
    tokens = []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(text)]):
        tokens += tokenizer.encode(text[start:end], add_special_tokens=False)
    return tokens


def result_messages(texts: list[str], tokenizer: Any, tools: list | None) -> list[dict]:
    """Results as messages: of the role tool where the template knows tools, else one of the user's."""
    if not tools or tool_place(tokenizer, repr(tokenizer.chat_template), json.dumps(tools)) != "template":
        return [{"role": "user", "content": "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)}]
    return [{"role": "tool", "content": text} for text in texts]
