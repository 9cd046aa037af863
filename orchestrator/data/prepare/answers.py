"""Answers after prompts as marked tokens. Both are plain texts, or messages that a chat template writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from orchestrator.data.encoding.framing import UNFRAMED, Framing
from orchestrator.data.prepare.chat_template import PROBE, Template
from orchestrator.data.prepare.messages import (
    THOUGHT,
    THOUGHT_ENDS,
    Message,
    check_answers,
    check_written,
    checked,
    has_all,
    left_out,
    squeezed,
    thought_of,
    tools_of,
)
from orchestrator.data.sources.repair import is_unicode
from orchestrator.data.store.manifest import RECORDS_FORMAT
from workloads.record_format import MARK

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

    One text holds the whole conversation if the template never rewrites a message when others follow. Many templates
    do: they drop the reasoning of an earlier answer, or end it differently. Then each answer gets its own text, after
    the conversation that a server would show before it.

    The model cannot learn what the template omits. So each answer's content, reasoning and calls (names and arguments)
    are looked for in the text that the answer adds.

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


@dataclass(frozen=True)
class Answers:
    """Converts answers and the prompts before them to marked tokens.

    Attributes:
        encoder: the tokenizer.
        template: the chat template that writes messages; None without one.
        eos: the token that ends a text.
        data_format: format of the prepared data, see `manifest.FORMATS`.
        framing: the special tokens around a text, and how their names in a text are read. A template writes its own.
        tool_template: the template that writes messages with tools; None if `template` does.
    """

    encoder: Tokenizer
    template: Template | None
    eos: int
    data_format: int = RECORDS_FORMAT
    framing: Framing = UNFRAMED
    tool_template: Template | None = None

    def marked(self, text: str, answers: Sequence[tuple[int, int]], special: bool = True) -> np.ndarray:
        """Return the tokens of a text, uint32, with MARK set on those of the answers.

        Args:
            text: the text.
            answers: first and last character (exclusive) of each answer.
            special: read the names of special tokens as these tokens, as in the output of a chat template.

        A token that begins before an answer and ends within it belongs to the answer, because a byte-level tokenizer
        joins a word and the space before it.
        """
        self.encoder.encode_special_tokens = not special
        encoding: Encoding = self.encoder.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        starts, stops = (
            np.array([pair[side] for pair in encoding.offsets], dtype=np.int64) for side in (0, 1)
        )
        predicted = np.zeros(len(ids), dtype=bool)
        for begin, end in answers:
            reached = stops > begin if self.data_format > 3 else starts >= begin
            predicted |= reached & (starts < end) & (stops <= end) & (stops > starts)
        return (ids | np.where(predicted, MARK, 0)).astype(np.uint32)

    def conversation(self, messages: Any, tools: Any = None) -> list[np.ndarray]:
        """Return a conversation as marked tokens, in which the assistant's answers are predicted.

        Several texts result if each answer needs its own, see `turns`. Raises a one-line ValueError.
        """
        named = tools_of(tools)
        parsed = self._as_template_reads(messages, named)
        if self.data_format < 6:
            return [self.marked(*self._written(parsed, named))]
        return self._turns(parsed, named)

    def _turns(self, messages: list[Message], tools: list[Any] | None, first: int = 0) -> list[np.ndarray]:
        """Return the texts of a conversation (see `turns.written`) as marked tokens."""
        template = self._writer(tools)
        texts = written(template, messages, tools, first)
        return [
            self.marked(text.text, text.answers)
            if template.marks_answers
            else self._behind_prompts(text.text, text.answers)
            for text in texts
        ]

    def _behind_prompts(self, text: str, answers: Sequence[tuple[int, int]]) -> np.ndarray:
        """Like `marked`, but no whitespace token spans the end of a prompt and the beginning of its answer.

        A server tokenises the prompt alone, such as the tag of a thought with its line break.
        """
        together = self.marked(text, answers)
        begins = [begin for begin, _ in answers if text[max(begin - 1, 0) : begin + 1].isspace()]
        if not begins:
            return together
        tokens = self.encoder.encode(text, add_special_tokens=False).offsets
        cuts = [
            begin
            for begin in begins
            if any(start < begin < stop and text[start:stop].isspace() for start, stop in tokens)
        ]
        pieces = pairwise([0, *cuts, len(text)])
        apart = np.concatenate(
            [
                self.marked(
                    text[start:stop], [(a - start, b - start) for a, b in answers if start <= a < stop]
                )
                for start, stop in pieces
            ]
        )
        same_text = self._text_of(apart) == self._text_of(together)
        return apart if same_text else together  # some tokenizers add a space at the beginning of each text

    def _text_of(self, words: np.ndarray) -> str:
        return str(self.encoder.decode(unmarked(words).tolist(), skip_special_tokens=False))

    def _writer(self, tools: list[Any] | None) -> Template:
        """Return the template for a conversation that may call these tools."""
        template = self.tool_template if tools is not None and self.tool_template else self.template
        assert template is not None
        return template

    def _written(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Like `_rendered`, for data in a format before 6. Also raises ValueError if the template omits a tool or a
        call.
        """
        text, answers = self._rendered(messages, tools)
        if self.data_format > 4:
            check_written(text, messages, tools)
        return text, answers

    def _rendered(
        self, messages: list[Message], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the template's text, and the positions of the predicted answers in it. Raises a one-line
        ValueError."""
        assert self.template is not None
        text, answers = self.template.render(messages, tools)
        only_read = [number for number, message in enumerate(messages) if message.get("weight") == 0]
        for number in reversed(only_read if self.data_format > 4 else []):
            # A template may mark several places in one message.
            before, after = (
                len(self.template.render(messages[:end], tools)[1]) if end else 0
                for end in (number, number + 1)
            )
            del answers[before:after]
        return text, answers

    def _as_template_reads(self, messages: Any, tools: list[Any] | None) -> list[Message]:
        """Return the messages in the form that the template reads. Raises a one-line ValueError."""
        template = self._writer(tools)
        checked_messages = checked(messages, self.data_format)
        if self.data_format < 5:
            return list(messages)
        check_answers(checked_messages)
        checked_messages = template.as_read(checked_messages)
        return checked_messages if self.data_format < 6 else template.calls_as_read(checked_messages)

    def paired(self, values: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return both answers of a row, each after the prompt, as marked tokens. Raises a one-line ValueError."""
        chosen = values["chosen"]
        rejected = values["rejected"]
        prompt = values.get("prompt")
        if chosen == rejected:
            raise ValueError("its chosen and its rejected answer are equal")
        if prompt is None:
            prompt, chosen, rejected = _without_prompt(chosen, rejected)
        tools = values.get("tools")
        return self.after(prompt, chosen, "chosen", tools), self.after(prompt, rejected, "rejected", tools)

    def after(self, prompt: Any, answer: Any, name: str, tools: Any = None) -> np.ndarray:
        """Return a prompt and its answer as marked tokens, in which only the answer is predicted.

        Args:
            prompt: a text, or a list of messages.
            answer: a text that the end of a document follows if the prompt is a text; else one or more messages, or
                the text of one.
            name: the answer's column, for error messages.
            tools: the tools that the messages may call.

        Raises a one-line ValueError.
        """
        if not isinstance(prompt, str):
            texts = self._after_messages(prompt, answer, name, tools)
            if len(texts) > 1:
                raise ValueError(
                    f"its {name} has {len(texts)} answers that the chat template does not write as one text; give one "
                    "of them, after a prompt that contains those before it"
                )
            return texts[0]
        if not isinstance(answer, str):
            raise ValueError(f"its prompt is a text but its {name} is not; give both as texts or as messages")
        _check_text(prompt, "prompt")
        _check_text(answer, name)
        if not answer and self.data_format > 3:
            raise ValueError(f"its {name} is empty")
        predicted = [(len(prompt), len(prompt) + len(answer))]
        words = self.marked(prompt + answer, predicted, special=self.framing.parsed)
        before, after = self.framing.around(unmarked(words), self.eos)
        ending = [number | MARK for number in after]
        return _not_empty(np.concatenate([before, words, ending]).astype(np.uint32), name)

    def prompt(self, prompt: Any, tools: Any = None) -> np.ndarray:
        """Return the tokens of a prompt, int64, open at its end for an answer.

        Args:
            prompt: a text, or a list of messages that the chat template writes, up to where the answer begins.
            tools: the tools that the messages may call.

        Raises a one-line ValueError.
        """
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
            words = self.marked(prompt, [], special=self.framing.parsed)
            before, _ = self.framing.around(unmarked(words), self.eos)
            result = np.concatenate([before, words]).astype(np.int64)
        else:
            if not isinstance(prompt, list):
                raise ValueError(f"its prompt is {type(prompt).__name__}, not a text or a list of messages")
            if self.template is None:
                raise ValueError(
                    "it holds messages, but the tokenizer has no chat template; name one in data.chat_template"
                )
            named = tools_of(tools)
            prompt_messages = self._given_prompt(prompt, named)
            result = unmarked(self.marked(self._writer(named).opening(prompt_messages, named), []))
        if not len(result):
            raise ValueError("its prompt is empty")
        return result

    def _given_prompt(self, messages: list[Any], tools: list[Any] | None) -> list[Message]:
        """Like `_as_template_reads`, for messages without an answer at their end."""
        template = self._writer(tools)
        return template.calls_as_read(template.as_read(checked(messages, self.data_format)))

    def to_turn(self, prompt: Any, answer: Any, tools: Any = None) -> list[np.ndarray]:
        """Return a conversation from two columns as marked tokens, in which the answer is predicted.

        A text is a turn; a user's text is stripped. There may be several results, as in `conversation`. Raises a
        one-line ValueError.
        """
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt.strip()}]
        return self._after_messages(prompt, answer, "completion", tools)

    def _after_messages(self, prompt: Any, answer: Any, name: str, tools: Any) -> list[np.ndarray]:
        if not isinstance(prompt, list):
            raise ValueError(f"its prompt is {type(prompt).__name__}, not a text or a list of messages")
        return [_not_empty(words, name) for words in self._spoken(prompt, _messages(answer, name), tools)]

    def _spoken(self, prompt: list[Any], answer: list[Any], tools: Any) -> list[np.ndarray]:
        if self.template is None:
            raise ValueError(
                "it holds messages, but the tokenizer has no chat template; name one in data.chat_template"
            )
        named = tools_of(tools)
        messages = self._as_template_reads([*prompt, *answer], named)
        count = sum(message["role"] == "assistant" for message in messages[len(prompt) :])
        if self.data_format > 5:
            if not count:
                raise ValueError("it has no answer of the assistant")
            return self._turns(messages, named, len(prompt))
        text, answers = self._written(messages, named)
        if not count:
            raise ValueError("it has no answer of the assistant")
        if self.data_format > 4:
            before = messages[: len(prompt)]
            count = len(answers) - (len(self._rendered(before, named)[1]) if before else 0)
        return [self.marked(text, answers[-count:] if count else [])]


def _not_empty(words: np.ndarray, name: str) -> np.ndarray:
    """Return the marked tokens. Raises ValueError if none of them can be predicted."""
    if not (words[1:] & MARK).any():
        raise ValueError(f"its {name} is empty")
    return words


def unmarked(words: np.ndarray) -> np.ndarray:
    """Return the token ids of marked tokens, int64."""
    return np.asarray(words, dtype=np.int64) & ~MARK


def _messages(answer: Any, name: str) -> list[Any]:
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    if isinstance(answer, Mapping):
        return [answer]
    if not isinstance(answer, list):
        raise ValueError(f"its {name} is {type(answer).__name__}, not a text or a list of messages")
    return answer


def _without_prompt(chosen: Any, rejected: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Split two conversations into their common beginning, which is the prompt, and the rest of each."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ValueError("it has no prompt, and its answers are not conversations that begin with one")
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise ValueError(
            "it has no prompt, and its chosen and rejected conversations have no common beginning"
        )
    return chosen[:common], chosen[common:], rejected[common:]


def _check_text(text: str, name: str) -> None:
    if not is_unicode(text):
        raise ValueError(f"has an unpaired surrogate in its {name}")
