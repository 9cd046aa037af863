"""What a chat template is given of a conversation, and what of one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.data.prepare.messages import (
    check_answers,
    check_written,
    checked,
    text_of,
    tools_of,
    without_nulls,
)

CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}


def test_null_keys_go_and_arguments_in_json_become_a_mapping() -> None:
    written = {"function": {"name": "add", "arguments": '{"a": 1, "b": null}'}, "id": None}
    given = {"role": "assistant", "content": None, "name": None, "tool_calls": [written]}
    assert checked([given]) == [{"role": "assistant", "tool_calls": [CALL]}]
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": ""}]}
    assert checked([flat]) == [{**flat, "tool_calls": [{"name": "now", "arguments": {}}]}]
    none = {"role": "user", "content": "a", "tool_calls": []}
    assert checked([none]) == [{"role": "user", "content": "a"}]


def test_sharegpt_s_function_call_calls_tools() -> None:
    """As LLaMA-Factory and Glaive write calls: JSON of one, or of a list. Earlier data left such rows out."""
    call = {"name": "add", "arguments": {"a": 1}}
    for value in (call, json.dumps(call), [call], json.dumps([call])):
        (found,) = checked([{"from": "function_call", "value": value, "weight": 0}])
        assert found == {"role": "assistant", "tool_calls": [call], "weight": 0}
    (found,) = checked([{"from": "function_call", "value": json.dumps([call, call])}])
    assert found["tool_calls"] == [call, call]
    for value in ("add(1)", "", json.dumps({"name": "add", "arguments": 3}), {"arguments": {}}):
        with pytest.raises(ValueError, match="its message 1 has a tool call without a name, or without arg"):
            checked([{"from": "function_call", "value": value}])
    with pytest.raises(ValueError, match="the role 'function_call' of its message 1 is not one of"):
        checked([{"from": "function_call", "value": json.dumps(call)}], data_format=6)


def test_text_stands_in_parts_too() -> None:
    parts = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "film"}]
    (found,) = checked([{"role": "user", "content": parts}])
    assert text_of(found["content"]) == "a film"
    assert found["content"][0] == {"type": "text", "text": "a "}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "image", "url": "a"}]}, "has a part of type 'image', but only parts"),
        ({"role": "user", "content": [{"type": "text"}]}, "has a part without text"),
        ({"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, "has an unpaired surrogate"),
        ({"role": "user", "content": ["a"]}, "has a part of type None"),
        ({"role": "user"}, "has no content of text"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "that are not a list of an assistant's"),
        ({"role": "assistant", "tool_calls": CALL}, "that are not a list of an assistant's"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "a tool call without a name"),
        ({"role": "assistant", "tool_calls": [{"name": "a", "arguments": "{a: 1}"}]}, "without arguments in JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "a", "arguments": {"b": "\ud800"}}]}, "an unpaired surrogate"),
    ],
)  # fmt: skip
def test_what_is_no_message_of_text(message: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checked([{"role": "system", "content": "a"}, message])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": " "}, "message 1, of the assistant, is empty"),
        ({"content": [{"type": "text", "text": ""}]}, "message 1, of the assistant, is empty"),
        (
            {"content": "a", "weight": 0.5},
            r"message 1 has a weight of 0\.5; an answer is predicted \(1\) or not \(0\)",
        ),
        ({"content": "a", "weight": "0"}, "message 1 has a weight of '0'"),
        ({"content": "a", "weight": 0}, ""),
        ({"content": "", "weight": 0}, ""),
        ({"content": "", "weight": 1}, "message 1, of the assistant, is empty"),
        ({"content": "", "tool_calls": [CALL]}, ""),
        ({"content": "", "reasoning_content": "so"}, ""),
        ({"content": "a", "weight": 1}, ""),
    ],
)
def test_answers_from_which_nothing_is_learnt(message: dict[str, Any], says: str) -> None:
    given = checked([{"role": "assistant", **message}])
    if not says:
        check_answers(given)
        return
    with pytest.raises(ValueError, match=says):
        check_answers(given)


def test_tools_are_a_list_or_its_json() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    for given in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert tools_of(given) == [tool]
    for none in (None, [], "[]", ""):
        assert tools_of(none) is None
    for wrong in ({"name": "add"}, "add", [1]):
        with pytest.raises(ValueError, match="its tools are not a list of mappings"):
            tools_of(wrong)


def test_what_a_template_leaves_out_is_told() -> None:
    given = checked([{"role": "assistant", "tool_calls": [CALL]}])
    check_written("add add", given, [{"name": "add"}])
    with pytest.raises(ValueError, match="the chat template writes no tool calls; name one"):
        check_written("assistant: ", given, None)
    with pytest.raises(ValueError, match="the chat template writes no tools; name one"):
        check_written("add", given, [{"function": {"name": "subtract"}}])


def test_a_table_s_nulls_go_at_every_depth() -> None:
    assert without_nulls([{"a": None, "b": [{"c": None, "d": [None, 1]}]}]) == [{"b": [{"d": [None, 1]}]}]
