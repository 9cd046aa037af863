"""Check the messages and tools of a conversation, and bring them into the form that chat templates expect: no null
values, and call arguments as a mapping even where the data has them as text.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.data.sources.repair import is_unicode
from orchestrator.data.store.manifest import RECORDS_FORMAT

ROLES = ("system", "user", "assistant", "tool", "developer")
REASONED = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold the reasoning before an answer."""
THOUGHT, THOUGHT_ENDS = "<think>", "</think>"
"""The tags that most models put around reasoning in the content."""
SPEAKERS = {"human": "user", "gpt": "assistant", "function_response": "tool", "observation": "tool"}
"""The roles behind the speaker names of ShareGPT messages ({from, value})."""
CALLER = "function_call"
"""The ShareGPT speaker whose text is the JSON of a tool call, or of a list of them. Read from data format 7 on."""

Message = dict[str, Any]


def checked(messages: Any, data_format: int = RECORDS_FORMAT) -> list[Message]:
    """Return the messages in their checked form.

    Args:
        messages: the value of a row.
        data_format: format of the prepared data.

    Raises a one-line ValueError if they are not a text conversation.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("its messages are not a list of messages")
    return [_message(message, number, data_format > 6) for number, message in enumerate(messages, 1)]


def check_answers(messages: list[Message]) -> None:
    """Raise a one-line ValueError for an answer that has nothing, or only part of it, to train on."""
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        if message.get("weight", 1) not in (0, 1):
            weight = message["weight"]
            raise ValueError(
                f"its message {number} has a weight of {weight!r}; an answer is predicted (1) or not (0)"
            )
        has_content = message.keys() & {"tool_calls", *REASONED} or text_of(message["content"]).strip()
        if message.get("weight") != 0 and not has_content:
            raise ValueError(f"its message {number}, of the assistant, is empty")


def check_written(text: str, messages: list[Message], tools: list[Any] | None) -> None:
    """Raise a one-line ValueError if a chat template omitted the tools or a tool call from `text`.

    For prepared data in format 5. `left_out` is the stricter check of later formats.
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for feature, named in (("tools", tools or ()), ("tool calls", calls)):
        names = [tool.get("function", tool).get("name") for tool in named]
        if any(isinstance(name, str) and name not in text for name in names):
            raise ValueError(
                f"the chat template writes no {feature}; name one that does in data.chat_template"
            )


def thought_of(message: Message) -> str:
    """Return the reasoning before an answer, from its own key or from between tags at the start of the content."""
    apart = next((message[key] for key in REASONED if message.get(key)), "")
    return (apart if isinstance(apart, str) else "") or _in_two(message)[0]


def squeezed(text: str) -> str:
    """Return a text without whitespace, because templates add and remove it."""
    return "".join(text.split())


def left_out(message: Message, text: str, thoughts: bool = True) -> str:
    """Return what a `squeezed` text lacks of a message, or an empty text if nothing is missing.

    Looked for are the content, the reasoning if `thoughts` is set, and each call's name and arguments.
    """
    return _look(message, text, 0, thoughts)[1]


def has_all(messages: Sequence[Message], text: str) -> bool:
    """Return whether a `squeezed` text contains all of the messages, in order."""
    at = 0
    for message in messages:
        at, lacking = _look(message, text, at, True)
        if lacking:
            return False
    return True


def _look(message: Message, text: str, at: int, thoughts: bool) -> tuple[int, str]:
    """Return the index in `text` where a message ends, searched from `at`, and the part that `text` lacks, if any."""
    end = at
    parts = [("the reasoning", thought_of(message) if thoughts else ""), ("the content", _in_two(message)[1])]
    for name, part in parts:
        stop = _end_of([_spellings(part)], text, at)
        if stop is None:
            return at, name
        end = max(end, stop)
    after_calls = at
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        stop = _end_of(
            [(squeezed(function["name"]),), *_argument_pieces(function["arguments"])], text, after_calls
        )
        if stop is None:
            return at, f"a call of {function['name']}"
        after_calls = stop
    return max(end, after_calls), ""


def _end_of(pieces: Sequence[tuple[str, ...]], text: str, at: int) -> int | None:
    """Return where the last of the pieces ends, or None if one is missing.

    For each piece, the spelling that ends first from `at` on counts. This index is never later than the intended one.
    """
    end = at
    for spellings in pieces:
        ends = [start + len(spelling) for spelling in spellings if (start := text.find(spelling, at)) >= 0]
        if not ends:
            return None
        end = max(end, min(ends))
    return end


def _argument_pieces(value: Any) -> list[tuple[str, ...]]:
    """Return the pieces that a call's arguments leave in a text, whatever form the template writes: keys, texts,
    numbers and booleans. A null argument may be omitted.
    """
    if isinstance(value, Mapping):
        return [
            piece for key, item in value.items() for piece in (_spellings(str(key)), *_argument_pieces(item))
        ]
    if isinstance(value, list):
        return [piece for item in value for piece in _argument_pieces(item)]
    if isinstance(value, str):
        return [_spellings(value)]
    return [] if value is None else [(json.dumps(value), str(value))]


def _spellings(text: str) -> tuple[str, ...]:
    """Return a text unchanged and as JSON, HTML and Python spell it, all without whitespace."""
    as_json = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    as_html = (html.escape(text, quote=quoted) for quoted in (False, True))
    forms = (text, *as_json, *as_html, text.replace("'", r"\'"), repr(text)[1:-1])
    return tuple(dict.fromkeys(map(squeezed, forms)))


def _in_two(message: Message) -> tuple[str, str]:
    """Split a message's content into the reasoning between tags and the rest."""
    content = text_of(message.get("content") or "")
    if message["role"] != "assistant" or THOUGHT_ENDS not in content:
        return "", content
    thought, _, answer = content.rpartition(THOUGHT_ENDS)
    return thought.strip().removeprefix(THOUGHT), answer


def tools_of(value: Any) -> list[Any] | None:
    """Return the tools of a conversation, given as a list or as JSON; None without tools. Raises ValueError."""
    tools = _parsed_or_text(value) if isinstance(value, str) else value
    if not tools:
        return None
    if isinstance(tools, list):
        tools = [_parsed_or_text(tool) if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("its tools are not a list of mappings")
    if not is_unicode(json.dumps(tools, ensure_ascii=False, default=str)):
        raise ValueError("has an unpaired surrogate in its tools")
    return tools


def text_of(content: str | list[Message]) -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def without_nulls(value: Any) -> Any:
    """Return a table value without null keys. A table gives each mapping the keys of all mappings of its column."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _message(value: Any, number: int, has_callers: bool) -> Message:
    message = _with_role(_non_null(value), has_callers)
    content = message.get("content")
    calls = message.pop("tool_calls", None)
    if isinstance(content, list):
        message["content"] = content = [_part(part, number) for part in content]
    if not isinstance(content, str | list) and not (calls and content is None):
        raise ValueError(f"its message {number} has no content of text")
    if not is_unicode(json.dumps(message, ensure_ascii=False, default=str)):
        raise ValueError(f"has an unpaired surrogate in its message {number}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"the role {role!r} of its message {number} is not one of {', '.join(ROLES)}")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"its message {number} has tool_calls that are not a list of an assistant's")
        message["tool_calls"] = [_call(call, number) for call in calls]
    return message


def _with_role(message: Message, has_callers: bool) -> Message:
    """Return the message with `role` and `content` or `tool_calls`. ShareGPT messages name these `from` and `value`."""
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    spoken = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    if role == CALLER and has_callers:
        value = message["value"]
        calls = _parsed_or_text(value) if isinstance(value, str) else value
        return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls], **spoken}
    return {
        "role": SPEAKERS.get(role, role) if isinstance(role, str) else role,
        "content": message["value"],
        **spoken,
    }


def _part(value: Any, number: int) -> Message:
    part = _non_null(value)
    if part.get("type") != "text":
        kind = f"a part of type {part.get('type')!r}"
        raise ValueError(f"its message {number} has {kind}, but only parts of text are read")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"its message {number} has a part without text")
    return part


def _call(value: Any, number: int) -> Message:
    call = _non_null(value)
    nested = "function" in call
    function = _non_null(call["function"]) if nested else call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed_or_text(arguments or "{}")
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(f"its message {number} has a tool call without a name, or without arguments in JSON")
    function = {**function, "arguments": arguments}
    checked_call = {**call, "function": function} if nested else function
    if not is_unicode(json.dumps(checked_call, ensure_ascii=False, default=str)):
        raise ValueError(f"has an unpaired surrogate in a tool call of its message {number}")
    return checked_call


def _non_null(item: Any) -> Message:
    """Return a mapping without its null values; empty if `item` is not a mapping."""
    return (
        {key: value for key, value in item.items() if value is not None} if isinstance(item, Mapping) else {}
    )


def _parsed_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
