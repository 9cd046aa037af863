"""The training texts of a conversation, written by a chat template, with the positions of the assistant's answers.

One text holds the whole conversation if the template never rewrites a message when others follow. Many templates do:
they drop the reasoning of an earlier answer, or end it differently. Then each answer gets its own text, after the
conversation that a server would show before it.

The model cannot learn what the template omits. So each answer's content, reasoning and calls (names and arguments) are
looked for in the text that the answer adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from orchestrator.data.prepare.chat_template import PROBE, Template
from orchestrator.data.prepare.messages import (
    THOUGHT,
    THOUGHT_ENDS,
    Message,
    has_all,
    left_out,
    squeezed,
    thought_of,
)

HINT = "name one that writes it in data.chat_template, or take it out"


class Written(NamedTuple):
    """A text, and the positions of its answers that are predicted."""

    text: str
    answers: list[tuple[int, int]]


def written(
    template: Template, messages: list[Message], tools: list[Any] | None, first: int = 0
) -> list[Written]:
    """Return the texts of a conversation. The answers from message `first` on are predicted, except those of weight
    0.

    Raises a one-line ValueError, also if the template omits something.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    predicted = [number for number in answers if number >= first and messages[number].get("weight") != 0]
    if not predicted:
        return [Written(template.write(messages, tools), [])]
    _check_tools(template, messages[: answers[0]], tools)
    marked = _as_marked(template, messages, tools, answers, predicted) if template.marks_answers else None
    texts = marked or _by_turn(template, messages, tools, predicted)
    _check_context(texts[-1].text, messages[: predicted[-1]], predicted)
    return texts


def _as_marked(
    template: Template,
    messages: list[Message],
    tools: list[Any] | None,
    answers: list[int],
    predicted: list[int],
) -> list[Written] | None:
    """Return the whole conversation with the answers that the template marks.

    None if some answers are not predicted, or if the template omits part of one.
    """
    text, spans = template.marked(messages, tools)
    if answers != predicted:
        return None
    marked_text = squeezed("".join(text[start:stop] for start, stop in spans))
    return [Written(text, spans)] if has_all([messages[number] for number in answers], marked_text) else None


def _by_turn(
    template: Template, messages: list[Message], tools: list[Any] | None, predicted: list[int]
) -> list[Written]:
    """Return one text for each answer. Answers share a text if the later text begins with the earlier one."""
    texts: list[Written] = []
    for number in predicted:
        if template.marks_answers:
            text, spans = _marked_turn(template, messages, tools, number)
        else:
            text, begin = _turn(template, messages, tools, number)
            spans = [(begin, len(text))]
        answer_text = "".join(text[start:stop] for start, stop in spans)
        _check(messages[number], number, squeezed(answer_text))
        if texts and text[: spans[0][0]].startswith(texts[-1].text):
            spans = texts.pop().answers + spans
        texts.append(Written(text, spans))
    conversation = template.write(messages, tools)
    last = texts.pop()
    return [*texts, last._replace(text=conversation) if conversation.startswith(last.text) else last]


def _marked_turn(
    template: Template, messages: list[Message], tools: list[Any] | None, number: int
) -> tuple[str, list[tuple[int, int]]]:
    """Return the conversation up to an answer, and the positions that the template marks in that answer."""
    text, spans = template.marked(messages[: number + 1], tools)
    before = template.write(messages[:number], tools) if number else ""
    begin = _common_prefix(before, text)
    spans = [(start, stop) for start, stop in spans if stop > begin and stop > start]
    if not spans:
        raise ValueError(f"the chat template marks nothing of message {number + 1} as generated")
    return text, spans


def _turn(
    template: Template, messages: list[Message], tools: list[Any] | None, number: int
) -> tuple[str, int]:
    """Return the conversation up to an answer as a server would hold it, and where the answer begins."""
    shown = template.write(messages[:number], tools, prompt=True)
    text = template.write(messages[: number + 1], tools)
    if text.startswith(shown):
        return text, len(shown)
    if thought_of(messages[number]):  # A server may write reasoning only on request.
        thinking = template.write(messages[:number], tools, prompt=True, enable_thinking=True)
        if text.startswith(thinking):
            return text, len(thinking)
    before = template.write(messages[:number], tools)
    if not shown.startswith(before):
        raise ValueError(_otherwise(number))
    if text.startswith(before):
        return shown + _in_thought(shown, text, len(before), number), len(shown)
    # The template rewrites the text before the answer once the answer is there.
    other = template.write([*messages[:number], {"role": "assistant", "content": PROBE}], tools)
    asks = shown[len(before) :]
    begin = text.rfind(asks, 0, _common_prefix(other, text)) if asks else -1
    if begin < 0:
        raise ValueError(_otherwise(number))
    return shown + text[begin + len(asks) :], len(shown)


def _in_thought(shown: str, text: str, before: int, number: int) -> str:
    """Return the answer of `text` for use after the prompt `shown`, which opens a thought after `before`. An answer
    without reasoning closes the thought.
    """
    thought_start = shown.find(THOUGHT, before)
    if (
        thought_start < 0
        or THOUGHT_ENDS in shown[thought_start:]
        or not text.startswith(shown[:thought_start])
    ):
        raise ValueError(_otherwise(number))
    if text.startswith(THOUGHT, thought_start):  # an empty thought
        return text[thought_start + len(THOUGHT) :]
    return f"{THOUGHT_ENDS}\n\n{text[thought_start:]}"


def _common_prefix(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)


def _otherwise(number: int) -> str:
    return (
        f"the chat template writes the text before message {number + 1} differently in its prompt for that answer than "
        "once the answer is there; mark answers in the template by {% generation %}"
    )


def _check_tools(template: Template, messages: list[Message], tools: list[Any] | None) -> None:
    """Raise ValueError if the template does not write every tool before the first answer."""
    names = [tool.get("function", tool).get("name") for tool in tools or ()]
    text = template.write(messages, tools, prompt=True) if names else ""
    if any(isinstance(name, str) and name not in text for name in names):
        raise ValueError("the chat template writes no tools; name one that does in data.chat_template")


def _check_context(text: str, messages: Sequence[Message], predicted: Sequence[int]) -> None:
    """Raise ValueError if the template omits something that an answer depends on. The reasoning before an earlier
    answer may be omitted, because a server omits it too.
    """
    text = squeezed(text)
    for number, message in enumerate(messages):
        if number not in predicted:
            _check(message, number, text, thoughts=False)


def _check(message: Message, number: int, text: str, thoughts: bool = True) -> None:
    if lacking := left_out(message, text, thoughts):
        raise ValueError(f"the chat template leaves out {lacking} in message {number + 1}; {HINT}")
