"""The messages of a conversation and its tools, checked, and as chat templates are meant to be given them: without
what is null, and with the arguments of a call as a mapping, which data often has as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.data.sources.repair import is_unicode

ROLES = ("system", "user", "assistant", "tool", "developer")
REASONED = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message for what was thought before the answer."""
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
    call of one."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for what, named in (("tools", tools or ()), ("tool calls", calls)):
        names = [each.get("function", each).get("name") for each in named]
        if any(isinstance(name, str) and name not in text for name in names):
            raise ValueError(f"the chat template writes no {what}; name one that does in data.chat_template")


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
