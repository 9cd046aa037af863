"""Rows of named columns to records, by the objective that reads them; see `workloads.objectives.records`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from orchestrator.data.prepared.manifest import RECORDS_FORMAT
from orchestrator.data.preprocessing.answers import Answers, unmarked
from orchestrator.data.preprocessing.conversations import Template
from orchestrator.data.preprocessing.messages import without_nulls
from orchestrator.data.sources import Span, opened
from orchestrator.data.sources.arrow_files import label_names
from orchestrator.data.sources.fields import value_of
from orchestrator.data.sources.files import TABLES
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import is_unicode
from orchestrator.data.sources.rows import rows
from orchestrator.job.errors import InputError
from orchestrator.job.records import COLUMNS, COMPARED
from workloads.objectives.records import pack, to_bits


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


class WrongRow(Unfit):
    """What is wrong with a row for the objective that reads it, and what to do."""

    def __init__(self, what: str, hint: str = "fix or remove it") -> None:
        super().__init__("record", what, hint)


def records_of(
    span: Span,
    kind: RecordKind,
    encoder: Tokenizer,
    eos: int,
    rejected: Rejected | None = None,
    data_format: int = RECORDS_FORMAT,
) -> Iterator[Record]:
    """The records of a span, in order; `eos` is the token that ends a text. What cannot be used goes to `rejected`, see
    `rows`. `data_format` is that of the prepared data.

    Raises InputError that names file and row if the policy of the file is to fail.
    """
    rejected = rejected or Rejected()
    columns = span.file.field if isinstance(span.file.field, dict) else {}
    template = Template(kind.template, dict(kind.tokens)) if kind.template else None
    with_tools = kind.tool_template if data_format > 5 else ""
    tool_template = Template(with_tools, dict(kind.tokens)) if with_tools else None
    answers = Answers(encoder, template, eos, data_format, tool_template)
    _check_label_names(span, kind)
    nulls = span.file.kind in TABLES and kind.objective in _ANSWERS and data_format > 4
    for row in rows(span, rejected):
        try:
            values = _values(row.values, columns, kind.objective)
            if nulls:
                values = {name: without_nulls(value) for name, value in values.items()}
            if kind.objective in _ANSWERS:
                found = _of_answers(values, kind.objective, answers)
            else:
                found = [_ENCODERS[kind.objective](values, kind, encoder)]
        except Unfit as error:
            rejected.refuse(span.file, error, row.at, row.values)
            continue
        text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
        for left, (words, tokens) in enumerate(found, 1 - len(found)):
            yield Record(words, tokens, text, left < 0)


def _check_label_names(span: Span, kind: RecordKind) -> None:
    """Raise InputError if a dataset of Hugging Face numbers the same labels in another order than the job."""
    field = span.file.field if isinstance(span.file.field, dict) else {}
    column = field.get("label", field.get("labels"))
    if span.file.kind != ".arrow" or column is None:
        return
    with opened(span) as file:
        try:
            theirs = label_names(file, column)
        except (OSError, ValueError):  # which reading its rows will tell
            return
    if theirs != list(kind.labels) and sorted(theirs) == sorted(kind.labels):
        what = f"column '{column}' numbers its labels as {', '.join(theirs)}"
        raise InputError(what, span.file.uri, "give data.labels in that order")


def _values(row: Mapping[str, Any], columns: Mapping[str, str], objective: str) -> dict[str, Any]:
    """What the objective reads of a row, by its own names. Raises Unfit."""
    found = {name: value_of(row, column) for name, column in columns.items()}
    optional = ("answer", "start") if objective == "span_extraction" else COLUMNS[objective].optional
    for name, value in found.items():
        if value is None and name not in optional:
            raise WrongRow(f"has no '{columns[name]}'", "map the columns in data.sources, or remove the row")
    return found


def _text(values: Mapping[str, Any], name: str) -> str:
    text = values.get(name)
    if not isinstance(text, str):
        raise WrongRow(f"its {name} is {type(text).__name__}, not a text")
    if not is_unicode(text):
        raise WrongRow(f"has half a surrogate pair in its {name}")
    return text


def _label(value: Any, labels: Sequence[str]) -> int:
    """The number of a label that is given by name or by number."""
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    number = int(value) if isinstance(value, str) and value.strip().isdigit() else value
    if isinstance(number, bool):
        number = int(number)
    if not isinstance(number, int):
        shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
        raise WrongRow(f"its label {value!r} is none of {shown}", "name all labels in data.labels")
    if not 0 <= number < len(labels):
        raise WrongRow(
            f"its label {number} is not among 0 to {len(labels) - 1}", "name all labels in data.labels"
        )
    return number


def _ids(encoder: Tokenizer, text: str) -> list[int]:
    ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
    return ids


Encoded = tuple[np.ndarray, np.ndarray]


def _joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _labelled(values: Mapping[str, Any], kind: RecordKind, encoder: Tokenizer) -> Encoded:
    first = _ids(encoder, _text(values, "text"))
    second = _ids(encoder, _text(values, "pair")) if values.get("pair") is not None else []
    if "pair" in values and not second:
        raise WrongRow("its pair is empty")
    if kind.objective == "regression":
        try:
            number = float(values["label"])
        except (TypeError, ValueError):
            raise WrongRow(f"its label {values['label']!r} is no number") from None
        if not math.isfinite(number):
            raise WrongRow(f"its label {number} is not finite")
        word = to_bits(number)
    else:
        word = _label(values["label"], kind.labels)
    return pack([first, second, [word]]), _joined(first, second)


def _by_word(values: Mapping[str, Any], kind: RecordKind, encoder: Tokenizer) -> Encoded:
    words, labels = values["words"], values["labels"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise WrongRow("its words are no list of texts")
    if not all(map(is_unicode, words)):
        raise WrongRow("has half a surrogate pair in its words")
    if not isinstance(labels, list) or len(labels) != len(words):
        raise WrongRow(f"it has {len(words)} words and not as many labels")
    numbers = [_label(label, kind.labels) for label in labels]
    found: Encoding = encoder.encode(words, is_pretokenized=True, add_special_tokens=False)
    before, marks = None, []
    for word in found.word_ids:
        marks.append(numbers[word] + 1 if word is not None and word != before else 0)
        before = word
    return pack([found.ids, marks]), _joined(found.ids)


def _answered(values: Mapping[str, Any], kind: RecordKind, encoder: Tokenizer) -> Encoded:
    question, context = _ids(encoder, _text(values, "question")), _text(values, "context")
    found: Encoding = encoder.encode(context, add_special_tokens=False)
    place = [0, 0]
    if values.get("answer"):
        answer, start = _text(values, "answer"), values.get("start")
        if isinstance(start, str) and start.strip().isdigit():
            start = int(start)
        if not isinstance(start, int) or context[start : start + len(answer)] != answer:
            raise WrongRow(f"its answer {answer[:40]!r} does not stand at character {start} of the context")
        stop = start + len(answer)
        inside = [n for n, (a, b) in enumerate(found.offsets) if a < stop and b > start]
        if not inside:
            raise WrongRow(f"its answer {answer[:40]!r} has no token")
        place = [inside[0] + 1, inside[-1] + 1]
    return pack([question, found.ids, place]), _joined(question, found.ids)


def _translated(values: Mapping[str, Any], kind: RecordKind, encoder: Tokenizer) -> Encoded:
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
    "regression": _labelled,
    "token_classification": _by_word,
    "span_extraction": _answered,
    "seq2seq": _translated,
}
_ANSWERS: Mapping[str, Callable[[Mapping[str, Any], Answers], list[Encoded]]] = {
    "conversation": _spoken,
    **dict.fromkeys(COMPARED, _compared),
    "kto": _judged,
}
