"""The messages of a conversation and its tools, checked, and as chat templates are meant to be given them: without
what is null, and with the arguments of a call as a mapping, which data often has as text."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.data.sources.repair import is_unicode

ROLES = ("system", "user", "assistant", "tool", "developer")
REASONED = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message for what was thought before the answer."""
THOUGHT, THOUGHT_ENDS = "<think>", "</think>"
"""The tags around what was thought in a content, as most models write them."""
SPEAKERS = {"human": "user", "gpt": "assistant", "function_response": "tool", "observation": "tool"}
"""Whom messages in the manner of ShareGPT, {from, value}, name otherwise than by a role."""

Message = dict[str, Any]


def checked(messages: Any) -> list[Message]:
    """The messages. Raises ValueError in one line for what is no conversation of text."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("its messages are no list of messages")
    return [_message(message, number) for number, message in enumerate(messages, 1)]


def check_answers(messages: list[Message]) -> None:
    """Raise ValueError in one line for an answer from which nothing can be learnt, or only in part."""
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        if message.get("weight", 1) not in (0, 1):
            weight = message["weight"]
            raise ValueError(
                f"its message {number} has a weight of {weight!r}; an answer is predicted (1) or not (0)"
            )
        said = message.keys() & {"tool_calls", *REASONED} or text_of(message["content"]).strip()
        if message.get("weight") != 0 and not said:
            raise ValueError(f"its message {number}, of the assistant, is empty")


def check_written(text: str, messages: list[Message], tools: list[Any] | None) -> None:
    """Raise ValueError in one line if a chat template has left out of `text` what it does not know: the tools, or a
    call of one. For data in format 5; `left_out` asks for more."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for what, named in (("tools", tools or ()), ("tool calls", calls)):
        names = [each.get("function", each).get("name") for each in named]
        if any(isinstance(name, str) and name not in text for name in names):
            raise ValueError(f"the chat template writes no {what}; name one that does in data.chat_template")


def thought_of(message: Message) -> str:
    """What was thought before an answer: under a key of its own, or between tags at the beginning of its content."""
    apart = next((message[key] for key in REASONED if message.get(key)), "")
    return (apart if isinstance(apart, str) else "") or _in_two(message)[0]


def squeezed(text: str) -> str:
    """A text without its spaces, which templates take away and add."""
    return "".join(text.split())


def left_out(message: Message, text: str, thoughts: bool = True) -> str:
    """What a `squeezed` text lacks of a message: its content, its reasoning if `thoughts` matter, or a call by its name
    and arguments; empty if it lacks nothing."""
    return _look(message, text, 0, thoughts)[1]


def has_all(messages: Sequence[Message], text: str) -> bool:
    """Whether a `squeezed` text has all of the messages, one after the other."""
    at = 0
    for message in messages:
        at, lacking = _look(message, text, at, True)
        if lacking:
            return False
    return True


def _look(message: Message, text: str, at: int, thoughts: bool) -> tuple[int, str]:
    """Where in `text`, from `at` on, a message ends, and what the text lacks of it."""
    end = at
    parts = [("the reasoning", thought_of(message) if thoughts else ""), ("the content", _in_two(message)[1])]
    for name, part in parts:
        found = _end_of([_spellings(part)], text, at)
        if found is None:
            return at, name
        end = max(end, found)
    place = at
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        found = _end_of([(squeezed(function["name"]),), *_said_by(function["arguments"])], text, place)
        if found is None:
            return at, f"a call of {function['name']}"
        place = found
    return max(end, place), ""


def _end_of(pieces: Sequence[tuple[str, ...]], text: str, at: int) -> int | None:
    """Where the last of some pieces ends, each in its first spelling from `at` on; None if one is not there. The
    first place of a piece is never behind the one that is meant."""
    end = at
    for spellings in pieces:
        ends = [place + len(one) for one in spellings if (place := text.find(one, at)) >= 0]
        if not ends:
            return None
        end = max(end, min(ends))
    return end


def _said_by(value: Any) -> list[tuple[str, ...]]:
    """The pieces that a call's arguments leave in a text, in whatever form a template writes them: keys, texts, numbers
    and truth values. One that is null may be left out."""
    if isinstance(value, Mapping):
        return [piece for key, item in value.items() for piece in (_spellings(str(key)), *_said_by(item))]
    if isinstance(value, list):
        return [piece for item in value for piece in _said_by(item)]
    if isinstance(value, str):
        return [_spellings(value)]
    return [] if value is None else [(json.dumps(value), str(value))]


def _spellings(text: str) -> tuple[str, ...]:
    """A text as it stands, and as JSON, HTML and Python spell it, without spaces."""
    as_json = (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    as_html = (html.escape(text, quote=quoted) for quoted in (False, True))
    forms = (text, *as_json, *as_html, text.replace("'", r"\'"), repr(text)[1:-1])
    return tuple(dict.fromkeys(map(squeezed, forms)))


def _in_two(message: Message) -> tuple[str, str]:
    """What of a message's content stands between tags for a thought, and the rest."""
    content = text_of(message.get("content") or "")
    if message["role"] != "assistant" or THOUGHT_ENDS not in content:
        return "", content
    thought, _, rest = content.rpartition(THOUGHT_ENDS)
    return thought.strip().removeprefix(THOUGHT), rest


def tools_of(given: Any) -> list[Any] | None:
    """The tools that a conversation may call, as a list or its JSON; None if there are none. Raises ValueError."""
    found = _of_json(given) if isinstance(given, str) else given
    if not found:
        return None
    if isinstance(found, list):
        found = [_of_json(tool) if isinstance(tool, str) else tool for tool in found]
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise ValueError("its tools are no list of mappings")
    if not is_unicode(json.dumps(found, ensure_ascii=False, default=str)):
        raise ValueError("has half a surrogate pair in its tools")
    return found


def text_of(content: str | list[Message]) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def without_nulls(value: Any) -> Any:
    """A value of a table without the keys that are null: a table gives a mapping the keys of all others in its
    column."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _message(given: Any, number: int) -> Message:
    message = _with_role(_said(given))
    content, calls = message.get("content"), message.pop("tool_calls", None)
    if isinstance(content, list):
        message["content"] = content = [_part(part, number) for part in content]
    if not isinstance(content, str | list) and not (calls and content is None):
        raise ValueError(f"its message {number} has no content of text")
    if not is_unicode(json.dumps(message, ensure_ascii=False, default=str)):
        raise ValueError(f"has half a surrogate pair in its message {number}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"the role {role!r} of its message {number} is none of {', '.join(ROLES)}")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"its message {number} has tool_calls that are no list of an assistant's")
        message["tool_calls"] = [_call(call, number) for call in calls]
    return message


def _with_role(message: Message) -> Message:
    """The message with role and content, which stand in from and value in the manner of ShareGPT."""
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    spoken = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    return {
        "role": SPEAKERS.get(role, role) if isinstance(role, str) else role,
        "content": message["value"],
        **spoken,
    }


def _part(given: Any, number: int) -> Message:
    part = _said(given)
    if part.get("type") != "text":
        what = f"a part of type {part.get('type')!r}"
        raise ValueError(f"its message {number} has {what}, and only parts of text are read")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"its message {number} has a part without text")
    return part


def _call(given: Any, number: int) -> Message:
    call = _said(given)
    nested = "function" in call
    function = _said(call["function"]) if nested else call
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _of_json(arguments or "{}")
    if not isinstance(function.get("name"), str) or not isinstance(arguments, Mapping):
        raise ValueError(f"its message {number} has a tool call without a name, or without arguments in JSON")
    function = {**function, "arguments": arguments}
    found = {**call, "function": function} if nested else function
    if not is_unicode(json.dumps(found, ensure_ascii=False, default=str)):
        raise ValueError(f"has half a surrogate pair in a tool call of its message {number}")
    return found


def _said(given: Any) -> Message:
    """What a mapping says; nothing if it is none."""
    return (
        {key: value for key, value in given.items() if value is not None}
        if isinstance(given, Mapping)
        else {}
    )


def _of_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
