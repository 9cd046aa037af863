"""Convert table rows to the records of an objective; see `workloads.record_format` for the formats."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from orchestrator.config.records import COMPARED, PROMPT, REWARDED
from orchestrator.data.encoding.framing import UNFRAMED, Framing
from orchestrator.data.encoding.tokenizer import roles_of
from orchestrator.data.prepare.answers import Answers, unmarked
from orchestrator.data.prepare.chat_template import Template
from orchestrator.data.prepare.columns import RowColumns, WrongRow
from orchestrator.data.prepare.labels import BY_NUMBER, Labels
from orchestrator.data.sources import Span
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import is_unicode
from orchestrator.data.sources.rows import rows
from orchestrator.data.store.manifest import RECORDS_FORMAT
from workloads.record_format import pack, to_bits


@dataclass(frozen=True)
class RecordKind:
    """How rows become records.

    Attributes:
        objective: the objective that reads the records.
        labels: the label names.
        template: the chat template.
        tokens: names and texts of the special tokens that the template uses.
        tool_template: the template for conversations with tools, if it differs from `template`.
    """

    objective: str
    labels: tuple[str, ...] = ()
    template: str = ""
    tokens: tuple[tuple[str, str], ...] = ()
    tool_template: str = ""

    def to_json(self, data_format: int = RECORDS_FORMAT) -> dict[str, Any]:
        """Return plain data. It is part of the fingerprint of prepared data in this format."""
        fields = asdict(self)
        if data_format < 6 or not self.tool_template:
            del fields["tool_template"]
        return fields

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordKind:
        """Restore a RecordKind from parsed JSON. The inverse of `to_json`."""
        tokens = tuple((name, token) for name, token in data["tokens"])
        tools = data.get("tool_template", "")
        return cls(data["objective"], tuple(data["labels"]), data["template"], tokens, tools)


class Record(NamedTuple):
    """One record of a row.

    Attributes:
        words: the words of the record, as they are stored.
        tokens: the token ids in the record.
        text: the row's content, which distinguishes it from other rows.
        goes_on: whether another record of the same row follows. A conversation whose answers are separate records has
            several.
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
    """Yield the records of a span, in order.

    Args:
        span: the rows to read.
        kind: how rows become records.
        encoder: the tokenizer.
        eos: the token that ends a text.
        rejected: collects the rows that cannot be used, see `rows`.
        data_format: format of the prepared data.
        framing: the special tokens around each text.

    Raises InputError with file and row if the file's policy is to fail.
    """
    rejected = rejected or Rejected()
    columns = RowColumns(span, kind.objective, kind.labels, data_format)
    template = Template(kind.template, dict(kind.tokens)) if kind.template else None
    with_tools = kind.tool_template if data_format > 5 else ""
    tool_template = Template(with_tools, dict(kind.tokens)) if with_tools else None
    answers = Answers(
        encoder, template, eos=eos, data_format=data_format, framing=framing, tool_template=tool_template
    )
    labels = Labels(kind.labels, data_format)
    for row in rows(span, rejected, data_format):
        try:
            values = columns.read(row.values)
            if kind.objective in _ANSWERS:
                encoded = _answer_records(values, kind.objective, answers)
            else:
                encoded = [_ENCODERS[kind.objective](values, labels, encoder)]
        except Unfit as error:
            rejected.refuse(span.file, error, row.at, row.values)
            continue
        if kind.labels and labels.is_by_number(values.get("label", values.get("labels"))):
            rejected.note(span.file, "label", BY_NUMBER, row.at, row.values)
        text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
        for number, (words, tokens) in enumerate(encoded, 1 - len(encoded)):
            yield Record(words, tokens, text, number < 0)


def _text(values: Mapping[str, Any], name: str) -> str:
    text = values.get(name)
    if not isinstance(text, str):
        raise WrongRow(f"its {name} is {type(text).__name__}, not a text")
    if not is_unicode(text):
        raise WrongRow(f"has an unpaired surrogate in its {name}")
    return text


def _ids(encoder: Tokenizer, text: str) -> list[int]:
    ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
    return ids


Encoded = tuple[np.ndarray, np.ndarray]


def _joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _texts(values: Mapping[str, Any], encoder: Tokenizer, data_format: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a row's text, and of its second text if it is a pair. Raises WrongRow."""
    first = _ids(encoder, _text(values, "text"))
    second = _ids(encoder, _text(values, "pair")) if values.get("pair") is not None else []
    if "pair" in values and not second:
        raise WrongRow("its pair is empty")
    if data_format > 5 and not first and not second and not _is_framed(encoder):
        raise WrongRow("its text has no token and this tokenizer adds none, so nothing can be classified")
    return first, second


def _is_framed(encoder: Tokenizer) -> bool:
    """Return whether even an empty text gets tokens: those the tokenizer adds, or its <cls> and <sep>."""
    roles = {"cls", "sep"} & roles_of(encoder, {}).keys()
    return bool(encoder.num_special_tokens_to_add(is_pair=False) or roles)


def _labelled(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    first, second = _texts(values, encoder, labels.data_format)
    return pack([first, second, [labels.number_of(values["label"])]]), _joined(first, second)


def _labelled_by_several(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    first, second = _texts(values, encoder, labels.data_format)
    labels_of_row = values["labels"]
    if not isinstance(labels_of_row, list):
        raise WrongRow(f"its labels are {str(labels_of_row)[:40]!r}, not a list")
    if labels_of_row and all(isinstance(label, float) for label in labels_of_row):
        # As transformers takes them: a number for each label, 1.0 where it applies.
        if len(labels_of_row) != len(labels.names) or not {*labels_of_row} <= {0.0, 1.0}:
            raise WrongRow(
                f"its labels are {len(labels_of_row)} numbers, not 0.0 or 1.0 for each of {len(labels.names)} labels"
            )
        labels_of_row = [labels.names[number] for number, applies in enumerate(labels_of_row) if applies]
    numbers = sorted({labels.number_of(label) for label in labels_of_row})
    return pack([first, second, numbers]), _joined(first, second)


def _scored(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    first, second = _texts(values, encoder, labels.data_format)
    try:
        number = float(values["label"])
    except (TypeError, ValueError):
        raise WrongRow(f"its label {values['label']!r} is not a number") from None
    if not math.isfinite(number):
        raise WrongRow(f"its label {number} is not finite")
    return pack([first, second, [to_bits(number)]]), _joined(first, second)


def _by_word(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    words = values["words"]
    labels_of_row = values["labels"]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise WrongRow("its words are not a list of texts")
    if not all(map(is_unicode, words)):
        raise WrongRow("has an unpaired surrogate in its words")
    if not isinstance(labels_of_row, list) or len(labels_of_row) != len(words):
        raise WrongRow(f"it has {len(words)} words but another number of labels")
    numbers = [labels.number_of(label) for label in labels_of_row]
    ids, word_of = _in_words(words, encoder, labels.data_format)
    before = None
    marks = []
    for word in word_of:
        marks.append(numbers[word] + 1 if word is not None and word != before else 0)
        before = word
    return pack([ids, marks]), _joined(ids)


def _in_words(words: list[str], encoder: Tokenizer, data_format: int) -> tuple[list[int], list[int | None]]:
    """Return the tokens of a text that is given as words, and for each token the index of its word.

    The words are joined with single spaces and tokenised as running text. A space belongs to the word after it.
    Before format 6, each word was encoded alone, without its space.
    """
    if data_format < 6:
        alone: Encoding = encoder.encode(words, is_pretokenized=True, add_special_tokens=False)
        return alone.ids, alone.word_ids
    text = ""
    stops = []
    for word in words:
        bare = word.strip() or word
        apart = text and bare and not text[-1].isspace() and not bare[0].isspace()
        text += f" {bare}" if apart else bare
        stops.append(len(text))
    encoding: Encoding = encoder.encode(text, add_special_tokens=False)
    word_indices = [bisect_right(stops, start) for start, _ in encoding.offsets]
    return encoding.ids, [index if index < len(words) else None for index in word_indices]


def _answered(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    question = _ids(encoder, _text(values, "question"))
    context = _text(values, "context")
    encoding: Encoding = encoder.encode(context, add_special_tokens=False)
    answer_range = [0, 0]
    if values.get("answer"):
        answer = _text(values, "answer")
        start = values.get("start")
        if isinstance(start, str) and start.strip().isdecimal():
            start = int(start)
        if not isinstance(start, int) or context[start : start + len(answer)] != answer:
            raise WrongRow(f"its answer {answer[:40]!r} is not at character {start} of the context")
        stop = start + len(answer)
        inside = [n for n, (a, b) in enumerate(encoding.offsets) if a < stop and b > start]
        if not inside:
            raise WrongRow(f"its answer {answer[:40]!r} has no token")
        answer_range = [inside[0] + 1, inside[-1] + 1]
    return pack([question, encoding.ids, answer_range]), _joined(question, encoding.ids)


def _translated(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    source, target = (_ids(encoder, _text(values, name)) for name in ("source", "target"))
    if not target:
        raise WrongRow("its target is empty")
    return pack([source, target]), _joined(source, target)


def _embedding_texts(values: Mapping[str, Any], labels: Labels, encoder: Tokenizer) -> Encoded:
    names = (
        ("anchor", "positive", "negative") if values.get("negative") is not None else ("anchor", "positive")
    )
    texts = [_ids(encoder, _text(values, name)) for name in names]
    if empty := [name for name, text in zip(names, texts, strict=True) if not text]:
        raise WrongRow(f"its {empty[0]} has no token")
    return pack(texts), _joined(*texts)


def _answer_records(values: Mapping[str, Any], objective: str, answers: Answers) -> list[Encoded]:
    try:
        return _ANSWERS[objective](values, answers)
    except ValueError as error:
        raise WrongRow(str(error)) from None


def _spoken(values: Mapping[str, Any], answers: Answers) -> list[Encoded]:
    if "messages" in values:
        encoded = answers.conversation(values["messages"], values.get("tools"))
    else:
        encoded = answers.to_turn(values["prompt"], values["completion"], values.get("tools"))
    if any(np.array_equal(unmarked(words), words) for words in encoded):
        raise WrongRow("it has no answer of the assistant that is predicted", "remove it")
    return [(words, unmarked(words)) for words in encoded]


def _compared(values: Mapping[str, Any], answers: Answers) -> list[Encoded]:
    chosen, rejected = answers.paired(values)
    return [(pack([chosen, rejected]), _joined(unmarked(chosen), unmarked(rejected)))]


def _judged(values: Mapping[str, Any], answers: Answers) -> list[Encoded]:
    if not isinstance(values["label"], bool):
        raise WrongRow(f"its label {values['label']!r} is not true or false")
    prompt, completion = values.get("prompt"), values.get("completion")
    if "messages" in values:  # the last one is judged
        messages = values["messages"]
        if not isinstance(messages, list) or len(messages) < 2:
            raise ValueError("its messages are not a list of a prompt and an answer")
        prompt, completion = messages[:-1], messages[-1]
    words = answers.after(prompt, completion, "completion", values.get("tools"))
    return [(pack([words, [int(values["label"])]]), unmarked(words))]


def _prompt_with_columns(values: Mapping[str, Any], answers: Answers) -> list[Encoded]:
    """Return a prompt, and the other columns as JSON text, which rewards read.

    CSV writes nothing for null, so an empty text is null in every format.
    """
    columns = {
        name: None if value == "" else value
        for name, value in values.items()
        if name not in (PROMPT, "tools")
    }
    prompt = answers.prompt(values[PROMPT], values.get("tools"))
    text = json.dumps(columns, sort_keys=True, ensure_ascii=False, default=str)
    return [(pack([prompt, np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)]), prompt)]


_ENCODERS: Mapping[str, Callable[..., Encoded]] = {
    "sequence_classification": _labelled,
    "multi_label_classification": _labelled_by_several,
    "regression": _scored,
    "token_classification": _by_word,
    "span_extraction": _answered,
    "seq2seq": _translated,
    "sentence_embeddings": _embedding_texts,
}
_ANSWERS: Mapping[str, Callable[[Mapping[str, Any], Answers], list[Encoded]]] = {
    "conversation": _spoken,
    **dict.fromkeys(COMPARED, _compared),
    "kto": _judged,
    **dict.fromkeys(REWARDED, _prompt_with_columns),
}
