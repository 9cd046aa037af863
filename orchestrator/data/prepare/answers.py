"""Answers after prompts as marked tokens: texts, or messages that a chat template writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from orchestrator.data.encoding.framing import UNFRAMED, Framing
from orchestrator.data.prepare.conversations import Template
from orchestrator.data.prepare.messages import Message, check_answers, check_written, checked, tools_of
from orchestrator.data.prepare.turns import written
from orchestrator.data.sources.repair import is_unicode
from orchestrator.data.store.manifest import RECORDS_FORMAT
from workloads.objectives.records import MARK


@dataclass(frozen=True)
class Answers:
    """Makes marked tokens of answers and what comes before them.

    Attributes:
        encoder: the tokenizer.
        template: the chat template that writes messages, None if there is none.
        eos: the token that ends a text.
        data_format: of the prepared data, see `manifest.FORMATS`.
        framing: what stands around a text, and how names of special tokens in it are read. A template writes its own.
        tool_template: the one that writes messages with tools, None if `template` does.
    """

    encoder: Tokenizer
    template: Template | None
    eos: int
    data_format: int = RECORDS_FORMAT
    framing: Framing = UNFRAMED
    tool_template: Template | None = None

    def marked(self, text: str, answers: Sequence[tuple[int, int]], special: bool = True) -> np.ndarray:
        """The tokens of a text, uint32, with MARK on those of the answers at these characters. A token that begins
        before an answer and ends in it is the answer's: a byte-level tokenizer joins the space before a word to it.
        The names of special tokens are read as such if they are `special`, as in what a chat template writes."""
        self.encoder.encode_special_tokens = not special
        found: Encoding = self.encoder.encode(text, add_special_tokens=False)
        ids = np.array(found.ids, dtype=np.int64)
        starts, stops = (np.array([pair[side] for pair in found.offsets], dtype=np.int64) for side in (0, 1))
        predicted = np.zeros(len(ids), dtype=bool)
        for begin, end in answers:
            reached = stops > begin if self.data_format > 3 else starts >= begin
            predicted |= reached & (starts < end) & (stops <= end) & (stops > starts)
        return (ids | np.where(predicted, MARK, 0)).astype(np.uint32)

    def of_messages(self, messages: Any, tools: Any = None) -> list[np.ndarray]:
        """A conversation as marked tokens, of which the assistant's answers are predicted; it may call `tools`. Where
        each answer has to stand in a text of its own (see `turns`) these are several. Raises ValueError in one line."""
        named = tools_of(tools)
        given = self._given(messages, named)
        if self.data_format < 6:
            return [self.marked(*self._written(given, named))]
        return self._turns(given, named)

    def _turns(self, messages: list[Message], tools: list[Any] | None, first: int = 0) -> list[np.ndarray]:
        """The texts of a conversation (see `turns.written`) as marked tokens."""
        template = self._writer(tools)
        found = written(template, messages, tools, first)
        return [
            self.marked(*each) if template.marks_answers else self._behind_prompts(*each) for each in found
        ]

    def _behind_prompts(self, text: str, answers: Sequence[tuple[int, int]]) -> np.ndarray:
        """As `marked`, but no token of white space has both the end of a prompt and the beginning of its answer: a
        server has the tokens of the prompt alone, as of a thought's tag with the end of its line."""
        whole = self.marked(text, answers)
        begins = [begin for begin, _ in answers if text[max(begin - 1, 0) : begin + 1].isspace()]
        if not begins:
            return whole
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
        same_text = self._text_of(apart) == self._text_of(whole)
        return apart if same_text else whole  # some tokenizers add a space where a text begins

    def _text_of(self, words: np.ndarray) -> str:
        return str(self.encoder.decode(unmarked(words).tolist(), skip_special_tokens=False))

    def _writer(self, tools: list[Any] | None) -> Template:
        """The template that writes a conversation that may call these tools."""
        found = self.tool_template if tools is not None and self.tool_template else self.template
        assert found is not None
        return found

    def _written(self, given: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """As `_rendered`, for data in a format before 6. Raises ValueError too if the template leaves out a tool or a
        call."""
        text, answers = self._rendered(given, tools)
        if self.data_format > 4:
            check_written(text, given, tools)
        return text, answers

    def _rendered(self, given: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """What the template writes, and where in it the answers stand that are predicted. Raises ValueError in one
        line."""
        assert self.template is not None
        text, answers = self.template.render(given, tools)
        only_read = [number for number, each in enumerate(given) if each.get("weight") == 0]
        for number in reversed(only_read if self.data_format > 4 else []):
            # Of one message a template may mark several places.
            before, after = (
                len(self.template.render(given[:end], tools)[1]) if end else 0 for end in (number, number + 1)
            )
            del answers[before:after]
        return text, answers

    def _given(self, messages: Any, tools: list[Any] | None) -> list[Message]:
        """The messages as the template is given them. Raises ValueError in one line."""
        template = self._writer(tools)
        found = checked(messages)
        if self.data_format < 5:
            return list(messages)
        check_answers(found)
        found = template.as_read(found)
        return found if self.data_format < 6 else template.calls_as_read(found)

    def paired(self, values: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Both answers of a row, each after the prompt, as marked tokens. Raises ValueError in one line."""
        chosen, rejected, prompt = values["chosen"], values["rejected"], values.get("prompt")
        if chosen == rejected:
            raise ValueError("its chosen and its rejected answer are equal")
        if prompt is None:
            prompt, chosen, rejected = _without_prompt(chosen, rejected)
        tools = values.get("tools")
        return self.after(prompt, chosen, "chosen", tools), self.after(prompt, rejected, "rejected", tools)

    def after(self, prompt: Any, answer: Any, name: str, tools: Any = None) -> np.ndarray:
        """A prompt and the answer to it as marked tokens, of which only the answer is predicted.

        Both are texts, which the end of a document follows; or the prompt is a list of messages, and the answer one
        more or the text of one, and it may call `tools`. `name` is that of the answer's column. Raises ValueError in
        one line.
        """
        if not isinstance(prompt, str):
            found = self._after_messages(prompt, answer, name, tools)
            if len(found) > 1:
                raise ValueError(
                    f"its {name} has {len(found)} answers that the chat template does not write as one text; give one "
                    "of them, after a prompt that has those before it"
                )
            return found[0]
        if not isinstance(answer, str):
            raise ValueError(
                f"its prompt is a text, and its {name} is none; give both as texts or as messages"
            )
        _check_text(prompt, "prompt")
        _check_text(answer, name)
        if not answer and self.data_format > 3:
            raise ValueError(f"its {name} is empty")
        whole = [(len(prompt), len(prompt) + len(answer))]
        words = self.marked(prompt + answer, whole, special=self.framing.parsed)
        before, after = self.framing.around(unmarked(words), self.eos)
        ending = [number | MARK for number in after]
        return _not_empty(np.concatenate([before, words, ending]).astype(np.uint32), name)

    def to_turn(self, prompt: Any, answer: Any, tools: Any = None) -> list[np.ndarray]:
        """A conversation of two columns as marked tokens, of which the answer is predicted: a text is a turn, without
        the spaces around a user's. There are several as in `of_messages`. Raises ValueError in one line."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt.strip()}]
        return self._after_messages(prompt, answer, "completion", tools)

    def _after_messages(self, prompt: Any, answer: Any, name: str, tools: Any) -> list[np.ndarray]:
        if not isinstance(prompt, list):
            raise ValueError(f"its prompt is {type(prompt).__name__}, not a text or a list of messages")
        return [_not_empty(words, name) for words in self._spoken(prompt, _messages(answer, name), tools)]

    def _spoken(self, prompt: list[Any], said: list[Any], tools: Any) -> list[np.ndarray]:
        if self.template is None:
            raise ValueError(
                "it holds messages, and the tokenizer has no chat template; name one in data.chat_template"
            )
        named = tools_of(tools)
        given = self._given([*prompt, *said], named)
        count = sum(message["role"] == "assistant" for message in given[len(prompt) :])
        if self.data_format > 5:
            if not count:
                raise ValueError("it has no answer of the assistant")
            return self._turns(given, named, len(prompt))
        text, answers = self._written(given, named)
        if not count:
            raise ValueError("it has no answer of the assistant")
        if self.data_format > 4:
            before = given[: len(prompt)]
            count = len(answers) - (len(self._rendered(before, named)[1]) if before else 0)
        return [self.marked(text, answers[-count:] if count else [])]


def _not_empty(words: np.ndarray, name: str) -> np.ndarray:
    """The marked tokens. Raises ValueError if none of them can be predicted."""
    if not (words[1:] & MARK).any():
        raise ValueError(f"its {name} is empty")
    return words


def unmarked(words: np.ndarray) -> np.ndarray:
    """The token ids of marked tokens, int64."""
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
    """Two conversations that begin alike as the prompt, which that is, and what follows in each."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ValueError("it has no prompt, and its answers are no conversations that begin with one")
    alike = 0
    while alike < min(len(chosen), len(rejected)) and chosen[alike] == rejected[alike]:
        alike += 1
    if not alike:
        raise ValueError("it has no prompt, and its chosen and rejected conversations do not begin alike")
    return chosen[:alike], chosen[alike:], rejected[alike:]


def _check_text(text: str, name: str) -> None:
    if not is_unicode(text):
        raise ValueError(f"has half a surrogate pair in its {name}")
