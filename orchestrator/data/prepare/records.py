"""Rows of named columns to records, by the objective that reads them; see `workloads.objectives.records`."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from orchestrator.config.records import COMPARED
from orchestrator.data.encoding.framing import UNFRAMED, Framing
from orchestrator.data.encoding.tokenizer import roles_of
from orchestrator.data.prepare.answers import Answers, unmarked
from orchestrator.data.prepare.columns import RowColumns, WrongRow
from orchestrator.data.prepare.conversations import Template
from orchestrator.data.sources import Span
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import is_unicode
from orchestrator.data.sources.rows import rows
from orchestrator.data.store.manifest import RECORDS_FORMAT
from workloads.objectives.records import pack, to_bits

NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
TRUTHS = ("true", "false")
SHOWN = 8
"""Most labels that a message names."""


@dataclass(frozen=True)
class Labels:
    """The labels of a job, and which of them a row means.

    Attributes:
        names: the labels, in the order of their numbers.
        data_format: of the prepared data. Before 6 a JSON number or boolean was a number even where a label had its
            name.
    """

    names: tuple[str, ...]
    data_format: int = 6

    def number_of(self, value: Any) -> int:
        """The number of the label that a row names. Raises Unfit if there is none."""
        if self.data_format < 6:
            return _in_range(value, _whole(value) if not isinstance(value, float) else None, self.names)
        named = self._named(value)
        if named is not None:
            return named
        number = None if self._are_values(value) else _whole(value)
        return _in_range(value, number, self.names)

    def is_by_number(self, value: Any) -> bool:
        """Whether a value, or one of a list of such, says a label by its number, which no label is called."""
        if self.data_format < 6:
            return False
        values = value if isinstance(value, list) else [value]
        return any(self._named(each) is None for each in values)

    def _named(self, value: Any) -> int | None:
        """The number of the label with the name that `value` is, or spells; None if there is none."""
        if isinstance(value, str):
            return self.names.index(value) if value in self.names else None
        if isinstance(value, bool):
            spelled = [number for number, name in enumerate(self.names) if name.lower() == TRUTHS[not value]]
            if spelled:
                return spelled[0]
        if not isinstance(value, int | float):
            return None
        alike = [n for n, name in enumerate(self.names) if NUMBER.fullmatch(name) and float(name) == value]
        return alike[0] if alike else None

    def _are_values(self, value: Any) -> bool:
        """Whether labels are numbers or truths themselves, so that another one of these is no place among them."""
        if any(NUMBER.fullmatch(name) for name in self.names):
            return True
        return isinstance(value, bool) and any(name.lower() in TRUTHS for name in self.names)


def _whole(value: Any) -> int | None:
    """The whole number that a value is, or spells; None if it is none."""
    if isinstance(value, str):
        spelled = value.strip()
        return int(spelled) if spelled.isdecimal() and len(spelled) < 10 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) else None


def _in_range(value: Any, number: int | None, names: Sequence[str]) -> int:
    hint = "name all labels in data.labels"
    if isinstance(value, str) and value in names:
        return names.index(value)
    if number is None:
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        raise Unfit("record", f"its label {value!r} is none of {shown}", hint)
    if not 0 <= number < len(names):
        raise Unfit("record", f"its label {number} is not among 0 to {len(names) - 1}", hint)
    return number


@dataclass(frozen=True)
class RecordKind:
    """How rows become records: the objective that reads them, the names of the labels, and the chat template with the
    names of the special tokens that it uses; that for conversations with tools, if it is another one."""

    objective: str
    labels: tuple[str, ...] = ()
    template: str = ""
    tokens: tuple[tuple[str, str], ...] = ()
    tool_template: str = ""

    def to_json(self, data_format: int = RECORDS_FORMAT) -> dict[str, Any]:
        """As plain data, which is part of the fingerprint of data in this format."""
        found = asdict(self)
        if data_format < 6 or not self.tool_template:
            del found["tool_template"]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordKind:
        """The inverse of `to_json`, of what JSON has made of it."""
        tokens = tuple((name, token) for name, token in data["tokens"])
        tools = data.get("tool_template", "")
        return cls(data["objective"], tuple(data["labels"]), data["template"], tokens, tools)


class Record(NamedTuple):
    """A record of a row.

    Attributes:
        words, tokens: its words, and the ids of its tokens.
        text: the row's content, which tells it from others.
        goes_on: whether another record of the same row follows, of a conversation that is learnt turn by turn.
    """

    words: np.ndarray
    tokens: np.ndarray
    text: str
    goes_on: bool = False


def records_of(
    span: Span,
    kind: RecordKind,
    encoder: Tokenizer,
    eos: int,
    rejected: Rejected | None = None,
    data_format: int = RECORDS_FORMAT,
    framing: Framing = UNFRAMED,
) -> Iterator[Record]:
    """The records of a span, in order; `eos` is the token that ends a text. What cannot be used goes to `rejected`, see
    `rows`. `data_format` is that of the prepared data, `framing` what stands around a text in it.

    Raises InputError that names file and row if the policy of the file is to fail.
    """
    rejected = rejected or Rejected()
    columns = RowColumns(span, kind.objective, kind.labels, data_format)
    template = Template(kind.template, dict(kind.tokens)) if kind.template else None
    with_tools = kind.tool_template if data_format > 5 else ""
    tool_template = Template(with_tools, dict(kind.tokens)) if with_tools else None
    answers = Answers(encoder, template, eos, data_format, framing, tool_template)
    labels = Labels(kind.labels, data_format)
    for row in rows(span, rejected, data_format):
        try:
            values = columns.read(row.values)
            if kind.objective in _ANSWERS:
                found = _of_answers(values, kind.objective, answers)
            else:
                found = [_ENCODERS[kind.objective](values, labels, encoder)]
        except Unfit as error:
            rejected.refuse(span.file, error, row.at, row.values)
            continue
        if kind.labels and labels.is_by_number(values.get("label", values.get("labels"))):
            rejected.note(span.file, "label", "takes a label by its number", row.at, row.values)
        text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
        for left, (words, tokens) in enumerate(found, 1 - len(found)):
            yield Record(words, tokens, text, left < 0)


def _text(values: Mapping[str, Any], name: str) -> str:
    text = values.get(name)
    if not isinstance(text, str):
        raise WrongRow(f"its {name} is {type(text).__name__}, not a text")
    if not is_unicode(text):
        raise WrongRow(f"has half a surrogate pair in its {name}")
    return text


def _ids(encoder: Tokenizer, text: str) -> list[int]:
    ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
    return ids


Encoded = tuple[np.ndarray, np.ndarray]


def _joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _texts(values: Mapping[str, Any], encoder: Tokenizer, data_format: int) -> tuple[list[int], list[int]]:
    """The tokens of a row's text and of the second one of a pair. Raises WrongRow."""
    first = _ids(encoder, _text(values, "text"))
    second = _ids(encoder, _text(values, "pair")) if values.get("pair") is not None else []
    if "pair" in values and not second:
        raise WrongRow("its pair is empty")
    if data_format > 5 and not first and not second and not _is_framed(encoder):
        raise WrongRow(
            "its text has no token, and this tokenizer adds none, so that nothing could be classified"
        )
    return first, second


def _is_framed(encoder: Tokenizer) -> bool:
    """Whether something stands around a text whatever it is: what the tokenizer adds, or its <cls> and <sep>."""
    found = {"cls", "sep"} & roles_of(encoder, {}).keys()
    return bool(encoder.num_special_tokens_to_add(is_pair=False) or found)


def _labelled(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    first, second = _texts(values, encoder, labels.data_format)
    return pack([first, second, [labels.number_of(values["label"])]]), _joined(first, second)


def _scored(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    first, second = _texts(values, encoder, labels.data_format)
    try:
        number = float(values["label"])
    except (TypeError, ValueError):
        raise WrongRow(f"its label {values['label']!r} is no number") from None
    if not math.isfinite(number):
        raise WrongRow(f"its label {number} is not finite")
    return pack([first, second, [to_bits(number)]]), _joined(first, second)


def _by_word(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    words, given = values["words"], values["labels"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise WrongRow("its words are no list of texts")
    if not all(map(is_unicode, words)):
        raise WrongRow("has half a surrogate pair in its words")
    if not isinstance(given, list) or len(given) != len(words):
        raise WrongRow(f"it has {len(words)} words and not as many labels")
    numbers = [labels.number_of(label) for label in given]
    ids, word_of = _in_words(words, encoder, labels.data_format)
    before, marks = None, []
    for word in word_of:
        marks.append(numbers[word] + 1 if word is not None and word != before else 0)
        before = word
    return pack([ids, marks]), _joined(ids)


def _in_words(words: list[str], encoder: Tokenizer, data_format: int) -> tuple[list[int], list[int | None]]:
    """The tokens of a text that is given in words, and the word that each belongs to. They are those of the running
    text, in which a space stands between two words and belongs to the second. Before format 6 each word was encoded
    alone, without its space."""
    if data_format < 6:
        alone: Encoding = encoder.encode(words, is_pretokenized=True, add_special_tokens=False)
        return alone.ids, alone.word_ids
    text, stops = "", []
    for word in words:
        bare = word.strip() or word
        apart = text and bare and not text[-1].isspace() and not bare[0].isspace()
        text += f" {bare}" if apart else bare
        stops.append(len(text))
    found: Encoding = encoder.encode(text, add_special_tokens=False)
    places = [bisect_right(stops, start) for start, _ in found.offsets]
    return found.ids, [place if place < len(words) else None for place in places]


def _answered(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    question, context = _ids(encoder, _text(values, "question")), _text(values, "context")
    found: Encoding = encoder.encode(context, add_special_tokens=False)
    place = [0, 0]
    if values.get("answer"):
        answer, start = _text(values, "answer"), values.get("start")
        if isinstance(start, str) and start.strip().isdecimal():
            start = int(start)
        if not isinstance(start, int) or context[start : start + len(answer)] != answer:
            raise WrongRow(f"its answer {answer[:40]!r} does not stand at character {start} of the context")
        stop = start + len(answer)
        inside = [n for n, (a, b) in enumerate(found.offsets) if a < stop and b > start]
        if not inside:
            raise WrongRow(f"its answer {answer[:40]!r} has no token")
        place = [inside[0] + 1, inside[-1] + 1]
    return pack([question, found.ids, place]), _joined(question, found.ids)


def _translated(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    source, target = (_ids(encoder, _text(values, name)) for name in ("source", "target"))
    if not target:
        raise WrongRow("its target is empty")
    return pack([source, target]), _joined(source, target)


def _of_answers(values: Mapping[str, Any], objective: str, answers: Answers) -> list[Encoded]:
    try:
        return _ANSWERS[objective](values, answers)
    except ValueError as error:
        raise WrongRow(str(error)) from None


def _spoken(values: Mapping[str, Any], answers: Answers) -> list[Encoded]:
    if "messages" in values:
        found = answers.of_messages(values["messages"], values.get("tools"))
    else:
        found = answers.to_turn(values["prompt"], values["completion"], values.get("tools"))
    if any(np.array_equal(unmarked(words), words) for words in found):
        raise WrongRow("it has no answer of the assistant that is predicted", "remove it")
    return [(words, unmarked(words)) for words in found]


def _compared(values: Mapping[str, Any], answers: Answers) -> list[Encoded]:
    chosen, rejected = answers.paired(values)
    return [(pack([chosen, rejected]), _joined(unmarked(chosen), unmarked(rejected)))]


def _judged(values: Mapping[str, Any], answers: Answers) -> list[Encoded]:
    if not isinstance(values["label"], bool):
        raise WrongRow(f"its label {values['label']!r} is not true or false")
    words = answers.after(values["prompt"], values["completion"], "completion", values.get("tools"))
    return [(pack([words, [int(values["label"])]]), unmarked(words))]


_ENCODERS: Mapping[str, Callable[..., Encoded]] = {
    "sequence_classification": _labelled,
    "regression": _scored,
    "token_classification": _by_word,
    "span_extraction": _answered,
    "seq2seq": _translated,
}
_ANSWERS: Mapping[str, Callable[[Mapping[str, Any], Answers], list[Encoded]]] = {
    "conversation": _spoken,
    **dict.fromkeys(COMPARED, _compared),
    "kto": _judged,
}
