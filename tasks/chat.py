"""Chat templates: how a policy is told about its tools, and what is written between two of its turns."""

import functools
import itertools
import json
import re


def prompt_text(messages: list[dict] | str, tokenizer, tools: list | None = None) -> str:
    """A text as it is; messages through the chat template, up to where the assistant begins to speak."""
    if isinstance(messages, str):
        return messages
    if not tokenizer.chat_template:
        raise ValueError(
            f"a prompt is chat messages, but the tokenizer {tokenizer.name_or_path!r} has no chat template: use text prompts or another model"
        )
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


def with_tools(messages: list[dict] | str, tools: list | None, tokenizer, how: str) -> tuple:
    """(messages, tools) to render so that the policy knows its tools: by the chat template where it has a place for them,
    else told in the system message, or before the first one where there is no such role. A text becomes a user's message."""
    if not tools:
        return messages, None
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    place = tool_place(tokenizer, repr(tokenizer.chat_template), json.dumps(tools))
    if place == "template":
        return messages, tools
    told = "\n".join(
        [
            "You may call these functions:",
            "<tools>",
            *map(json.dumps, tools),
            "</tools>",
            how,
            "Its result comes in the next message.",
        ]
    )
    if place == "system" and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    first, *rest = messages
    content = f"{first['content']}\n\n{told}".strip() if place == "system" else f"{told}\n\n{first['content']}"
    return [{**first, "content": content}, *rest], None


@functools.lru_cache
def tool_place(tokenizer, template: str, tools: str) -> str:
    """Where the policy can be told about its tools: template, system or user."""
    probe = [{"role": "user", "content": "?"}]
    if prompt_text(probe, tokenizer, json.loads(tools)) != prompt_text(probe, tokenizer):
        return "template"
    try:
        return (
            "system"
            if "lockstep" in prompt_text([{"role": "system", "content": "lockstep"}, *probe], tokenizer)
            else "user"
        )
    except Exception:  # whatever a template raises
        return "user"


def encode_reply(messages: list[dict], tokenizer, ends: list[str]) -> list[int]:
    """Token ids that the chat template puts behind an end token of `ends`, to say `messages` and open the next turn.

    It is rendered behind a stand-in for the conversation: a template may do as it likes with the history. Contents are rendered as
    marks to see where they go, since no text in them may become a special token.
    """
    stub = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "lockstep-turn"}]
    marks = [{**m, "content": f"lockstep-{i}-content"} for i, m in enumerate(messages)]
    blame = "the chat template can't continue a conversation with messages of " + ", ".join(m["role"] for m in messages)
    try:
        plan, rendered = (prompt_text(stub + said, tokenizer) for said in (marks, messages))
    except Exception as e:
        raise ValueError(f"{blame}: {type(e).__name__}: {e}") from e
    start = plan.find("lockstep-turn")
    found = sorted((at, end) for end in ends if (at := plan.find(end, start)) >= 0)
    if start < 0 or not found:
        raise ValueError(f"{blame}: it ends the assistant's turn with none of the model's end tokens {ends}: {plan!r}")
    pieces = re.split(r"lockstep-(\d+)-content", plan[found[0][0] :])  # template, number, template, ...
    for change in (
        str,
        str.strip,
        lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    ):  # what templates do to contents
        parts = [
            (change(messages[int(piece)]["content"]), True) if i % 2 else (piece, False)
            for i, piece in enumerate(pieces)
        ]
        if len(pieces) == 2 * len(messages) + 1 and rendered.endswith("".join(text for text, _ in parts)):
            end, *tokens = guarded_tokens(parts, tokenizer)  # with its end token, which may swallow blanks behind it
            assert end == tokenizer.convert_tokens_to_ids(found[0][1]), f"{found[0][1]!r} is not one token"
            return tokens
    raise ValueError(f"{blame}: it changes or leaves out what they say: {rendered!r}")


def guarded_tokens(parts: list[tuple[str, bool]], tokenizer) -> list[int]:
    """Token ids of texts end to end, (text, is it content?). What reads as an added token (<|im_end|>, </tool_response>) and has
    characters of a content in it is cut behind its first one, so that it is encoded as the plain text that it is."""
    text, content = "".join(t for t, _ in parts), [is_content for t, is_content in parts for _ in t]
    added = [token for token in tokenizer.get_added_vocab() if len(token) > 1 and token in text]
    cuts = {
        m.start() + 1
        for token in added
        for m in re.finditer(f"(?={re.escape(token)})", text)
        if any(content[m.start() : m.start() + len(token)])
    }
    return [
        x
        for a, b in itertools.pairwise([0, *sorted(cuts), len(text)])
        for x in tokenizer.encode(text[a:b], add_special_tokens=False)
    ]


def result_messages(texts: list[str], tokenizer, tools: list | None) -> list[dict]:
    """Results as messages: of the role tool where the template knows tools, else one of the user's."""
    if not tools or tool_place(tokenizer, repr(tokenizer.chat_template), json.dumps(tools)) != "template":
        return [{"role": "user", "content": "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)}]
    return [{"role": "tool", "content": text} for text in texts]
