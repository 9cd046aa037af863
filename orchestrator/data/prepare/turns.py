"""What of a conversation is learnt: texts as a chat template writes them, with the places of the assistant's answers.

One text has the whole conversation where the template leaves what it has written of a message as it is when others
follow. Many do not: an earlier answer loses its thoughts, or ends otherwise. Then each answer stands in a text of its
own, behind what a server would show of the conversation before it.

What the template does not write is not learnt, so that it is missed: each answer's content, reasoning and calls, by
their names and arguments, are looked for in what the answer adds to the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from orchestrator.data.prepare.conversations import PROBE, Template
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
    """A text, and where in it the answers stand that are predicted."""

    text: str
    answers: list[tuple[int, int]]


def written(
    template: Template, messages: list[Message], tools: list[Any] | None, first: int = 0
) -> list[Written]:
    """The texts of a conversation, of which the answers from message `first` on are predicted, but for those of weight
    0. Raises ValueError in one line, also if the template leaves out something."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    predicted = [number for number in answers if number >= first and messages[number].get("weight") != 0]
    if not predicted:
        return [Written(template.write(messages, tools), [])]
    _check_tools(template, messages[: answers[0]], tools)
    found = _as_marked(template, messages, tools, answers, predicted) if template.marks_answers else None
    texts = found or _by_turn(template, messages, tools, predicted)
    _check_context(texts[-1].text, messages[: predicted[-1]], predicted)
    return texts


def _as_marked(
    template: Template,
    messages: list[Message],
    tools: list[Any] | None,
    answers: list[int],
    predicted: list[int],
) -> list[Written] | None:
    """The whole conversation with the answers that the template marks; None where not all of them are predicted, or
    something is left out of one."""
    text, places = template.marked(messages, tools)
    if answers != predicted:
        return None
    said = squeezed("".join(text[start:stop] for start, stop in places))
    return [Written(text, places)] if has_all([messages[number] for number in answers], said) else None


def _by_turn(
    template: Template, messages: list[Message], tools: list[Any] | None, predicted: list[int]
) -> list[Written]:
    """A text for each answer, and one for several where the text of a later one begins with that of an earlier one."""
    found: list[Written] = []
    for number in predicted:
        if template.marks_answers:
            text, places = _marked_turn(template, messages, tools, number)
        else:
            text, begin = _turn(template, messages, tools, number)
            places = [(begin, len(text))]
        said = "".join(text[start:stop] for start, stop in places)
        _check(messages[number], number, squeezed(said))
        if found and text[: places[0][0]].startswith(found[-1].text):
            places = found.pop().answers + places
        found.append(Written(text, places))
    whole = template.write(messages, tools)
    last = found.pop()
    return [*found, last._replace(text=whole) if whole.startswith(last.text) else last]


def _marked_turn(
    template: Template, messages: list[Message], tools: list[Any] | None, number: int
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation up to an answer, and what the template marks of that."""
    text, places = template.marked(messages[: number + 1], tools)
    before = template.write(messages[:number], tools) if number else ""
    begin = _alike(before, text)
    places = [(start, stop) for start, stop in places if stop > begin and stop > start]
    if not places:
        raise ValueError(f"the chat template marks nothing of message {number + 1} as generated")
    return text, places


def _turn(
    template: Template, messages: list[Message], tools: list[Any] | None, number: int
) -> tuple[str, int]:
    """The conversation up to an answer as a server would have it, and where the answer begins."""
    shown = template.write(messages[:number], tools, prompt=True)
    text = template.write(messages[: number + 1], tools)
    if text.startswith(shown):
        return text, len(shown)
    if thought_of(messages[number]):  # where a server shows no thoughts unless it is asked for them
        thinking = template.write(messages[:number], tools, prompt=True, enable_thinking=True)
        if text.startswith(thinking):
            return text, len(thinking)
    before = template.write(messages[:number], tools)
    if not shown.startswith(before):
        raise ValueError(_otherwise(number))
    if text.startswith(before):
        return shown + _in_thought(shown, text, len(before), number), len(shown)
    # What comes before it is written otherwise once the answer is there.
    other = template.write([*messages[:number], {"role": "assistant", "content": PROBE}], tools)
    asks = shown[len(before) :]
    begin = text.rfind(asks, 0, _alike(other, text)) if asks else -1
    if begin < 0:
        raise ValueError(_otherwise(number))
    return shown + text[begin + len(asks) :], len(shown)


def _in_thought(shown: str, text: str, before: int, number: int) -> str:
    """The answer of a `text` behind what is `shown` of it, which opens a thought after `before`: an answer that has no
    thought closes it."""
    place = shown.find(THOUGHT, before)
    if place < 0 or THOUGHT_ENDS in shown[place:] or not text.startswith(shown[:place]):
        raise ValueError(_otherwise(number))
    if text.startswith(THOUGHT, place):  # an empty one
        return text[place + len(THOUGHT) :]
    return f"{THOUGHT_ENDS}\n\n{text[place:]}"


def _alike(one: str, other: str) -> int:
    """With how many characters both begin."""
    either = min(len(one), len(other))
    return next((place for place in range(either) if one[place] != other[place]), either)


def _otherwise(number: int) -> str:
    return (
        f"the chat template writes what comes before message {number + 1} otherwise where it asks for that answer than "
        "where the answer is there; mark answers in the template by {% generation %}"
    )


def _check_tools(template: Template, messages: list[Message], tools: list[Any] | None) -> None:
    """Raise ValueError if the template does not tell of each tool before the first answer."""
    names = [tool.get("function", tool).get("name") for tool in tools or ()]
    text = template.write(messages, tools, prompt=True) if names else ""
    if any(isinstance(name, str) and name not in text for name in names):
        raise ValueError("the chat template writes no tools; name one that does in data.chat_template")


def _check_context(text: str, messages: Sequence[Message], predicted: Sequence[int]) -> None:
    """Raise ValueError if the template leaves out something that an answer depends on. What was thought before an
    earlier answer may be left out: a server leaves it out too."""
    text = squeezed(text)
    for number, message in enumerate(messages):
        if number not in predicted:
            _check(message, number, text, thoughts=False)


def _check(message: Message, number: int, text: str, thoughts: bool = True) -> None:
    if lacking := left_out(message, text, thoughts):
        raise ValueError(f"the chat template leaves out {lacking} in message {number + 1}; {HINT}")
