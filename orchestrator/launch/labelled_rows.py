"""Find out from rows with labels what a job can learn from them: the objective, the columns, and the labels."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.data.sources.arrow_files import label_names, schema_of
from orchestrator.data.sources.dataset_card import Cards
from orchestrator.data.sources.files import SourceFile
from orchestrator.data.sources.kinds import Kind
from orchestrator.launch.first_rows import USUAL, is_cut, no_rows, row_files, rows_of, unreadable

MOST = 100_000
"""Rows whose labels are counted at most."""
LABELS = ("label", "labels", "class", "category", "sentiment", "intent", "topic", "target", "stars", "rating")
"""Usual names of the column with the label."""
PAIRS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("text1", "text2"),
    ("text_a", "text_b"), ("question1", "question2"), ("question", "sentence"), ("text", "pair"),
)  # fmt: skip
"""Usual names of two texts that have one label together."""
TAGGED = (("words", "tokens"), ("labels", "tags", "ner_tags", "pos_tags", "chunk_tags"))
"""Usual names of the columns with words, and with a label for each."""
MULTI = "multi_label_classification"
REGRESSION = "regression"
SEVERAL = 50
"""More different whole numbers than this are amounts and no labels."""


@dataclass(frozen=True)
class Labelled:
    """What a job reads of rows with labels.

    Attributes:
        objective: the objective that they fit.
        field: the `field` of a source.
        labels: how many rows have each label, in the order of `data.labels`; empty for numbers.
        rows: rows that were looked at.
        more: whether there are more rows.
    """

    objective: str
    field: dict[str, str]
    labels: Mapping[str, int]
    rows: int
    more: bool

    @property
    def line(self) -> str:
        """Return the labels and their counts."""
        shown = ", ".join(f"{name} ({count:,})" for name, count in self.labels.items())
        begin = f"the first {self.rows:,} rows" if self.more else f"{self.rows:,} rows"
        without = self.rows - sum(self.labels.values())
        if without > 0 and self.objective == "sequence_classification":
            shown += f"; without a label: {without:,}, which a run refuses"
        return f"{begin}; labels: {shown}" if shown else begin


def labelled_rows(
    uris: Sequence[str], requested: str | None, reads_spans: bool, label: str | None = None
) -> Labelled | None:
    """Return what rows with labels are for; None if they have no label.

    Args:
        uris: the data: paths, globs or folders.
        requested: the objective that the user wants; None for the one that fits.
        reads_spans: whether questions with contexts are for span extraction, as for encoders.
        label: the column with the label; None for a usual name.

    Raises InputError if the rows do not fit the objective that is asked for, or have no column `label`.
    """
    files = [file for uri in uris for file in row_files(uri)]
    if not files:
        return None
    sampled = list(islice(_read_rows(files, uris[0]), MOST + 1))
    rows = sampled[:MOST]
    more = len(sampled) > MOST or any(is_cut(*file) for file in files)
    if not rows:
        raise no_rows(uris[0])
    first = rows[0]
    if label is not None and label not in first:
        problem = f"has no column {label}, only {', '.join(first)}"
        raise InputError(problem, uris[0], "name the column with the label")
    field = _field(first, reads_spans, (label,) if label is not None else ())
    if field is None:
        if requested is not None:
            hint = f"name its column {LABELS[0]}, or write the job by hand, see docs/guides/labelled-data.md"
            raise InputError(f"has no column with a label, only {', '.join(first)}", uris[0], hint)
        return None
    if "start" in field:
        return Labelled("span_extraction", field, {}, len(rows), more)
    column = field["labels"] if "words" in field else field["label"]
    values = [row[column] for row in rows if row.get(column) not in (None, "")]
    named = _names(files[0], field, column)
    objective = _objective(values, field, named)
    if objective == MULTI and not named and _is_multi_hot(values):
        problem = f"its column {column} has 0 or 1 for each label, and no names of the labels"
        hint = 'write the names of each row\'s labels, as in ["sport", "economy"]'
        raise InputError(problem, uris[0], hint)
    if requested in (REGRESSION, "sequence_classification") and objective in (
        REGRESSION,
        "sequence_classification",
    ):
        objective = requested
    if requested is not None and requested != objective:
        raise InputError(
            f"its rows fit {objective}, not {requested}", uris[0], f"give --objective {objective}"
        )
    if objective == MULTI:
        field = {name: column for name, column in field.items() if name != "label"} | {"labels": column}
    names = () if objective == REGRESSION or named == tuple(map(str, range(len(named)))) else named
    counts = Counter(name for value in values for name in _labels_in(value, names))
    order = names or sorted(counts, key=_sort_key)
    labels = {} if objective == REGRESSION else {name: counts[name] for name in order}
    return Labelled(objective, field, labels, len(rows), more)


def labels_of_sources(found: Mapping[str, Labelled]) -> tuple[str, ...]:
    """Return the labels of several sources together, each once, as training takes them from all sources.

    If each source has its labels in their sorted order, so has the result. Otherwise a schema or dataset card gives an
    order: the labels of the first source come first, then what each further one adds.

    Args:
        found: what the rows of each source are for, by its URI.

    Raises InputError if two sources contradict: they fit different objectives, or one numbers the labels that the other
    names.
    """
    labels = list(dict.fromkeys(label for each in found.values() for label in each.labels))
    if all([*each.labels] == sorted(each.labels, key=_sort_key) for each in found.values()):
        labels.sort(key=_sort_key)
    first, *others = found
    for uri in others:
        one, other = found[first], found[uri]
        if other.objective != one.objective:
            problem = f"its rows fit {other.objective}, and those of {first} fit {one.objective}"
            raise InputError(problem, uri, "use sources whose labels are of one kind")
        if {_are_numbers(one.labels), _are_numbers(other.labels)} == {True, False}:
            problem = f"its labels are {_some(other.labels)}, and those of {first} are {_some(one.labels)}"
            raise InputError(problem, uri, "write the same names of labels in both")
    return tuple(labels)


def _are_numbers(labels: Iterable[str]) -> bool | None:
    """Return whether labels are all numbers, or all names; None for a mixture or for none."""
    kinds = {_number(label) is not None for label in labels}
    return kinds.pop() if len(kinds) == 1 else None


def _some(labels: Iterable[str]) -> str:
    shown = [*labels]
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


def _read_rows(files: Sequence[tuple[Any, str, Kind]], uri: str) -> Iterator[dict[str, Any]]:
    try:
        for file in files:
            yield from rows_of(*file)
    except (OSError, ValueError, csv.Error) as error:
        raise unreadable(error, uri, "cannot be read") from None


def _field(row: Mapping[str, Any], reads_spans: bool, label_names: Sequence[str]) -> dict[str, str] | None:
    """Return the columns of a record by the names of the first row's; None without a label.

    The label is in one of the columns `label_names`, or in one with a usual name if these are empty.
    """
    answers = row.get("answers")
    spans = isinstance(answers, Mapping) and {"text", "answer_start"} <= answers.keys()
    if reads_spans and spans and {"question", "context"} <= row.keys():
        columns = {"answer": "answers.text.0", "start": "answers.answer_start.0"}
        return {"question": "question", "context": "context", **columns}
    words, tags = (
        next((name for name in names if isinstance(row.get(name), list)), None)
        for names in (TAGGED[0], label_names or TAGGED[1])
    )
    if words and tags and len(row[words]) == len(row[tags]):
        return {"words": words, "labels": tags}
    names = label_names or LABELS
    label = next((name for name in names if name in row and not isinstance(row[name], Mapping)), None)
    texts = [name for name, value in row.items() if isinstance(value, str) and name != label]
    if label is None or not texts:
        return None
    for pair in PAIRS:
        if {*pair} <= {*texts}:
            return {"text": pair[0], "pair": pair[1], "label": label}
    named = [name for name in USUAL if name in texts]
    text = named[0] if named else max(texts, key=lambda name: len(row[name]))
    return {"text": text, "label": label}


def _is_multi_hot(values: Sequence[Any]) -> bool:
    """Return whether each row has a list of one length above 1, of 0 and 1 alone."""
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) != len(values) or len({len(flags) for flags in lists}) != 1 or len(lists[0]) < 2:
        return False
    return {str(number) for flags in lists for number in flags} <= {"0", "1", "0.0", "1.0", "True", "False"}


def _objective(values: Sequence[Any], field: Mapping[str, str], names: Sequence[str]) -> str:
    if "words" in field:
        return "token_classification"
    if any(isinstance(value, list) for value in values):
        return MULTI
    if names:
        return "sequence_classification"
    numbers = [number for value in values if (number := _number(value)) is not None]
    are_numbers = bool(values) and len(numbers) == len(values)
    if are_numbers and (any(number != int(number) for number in numbers) or len({*numbers}) > SEVERAL):
        return REGRESSION
    return "sequence_classification"


def _number(value: Any) -> float | None:
    """Return a number, or the number that a text of a CSV file is; None for others."""
    if isinstance(value, bool):
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return result if abs(result) < 1e15 else None


def _names(file: tuple[Any, str, Kind], field: dict[str, str], column: str) -> tuple[str, ...]:
    """Return the names of a column's labels that the schema or the dataset card has; empty without any."""
    fs, path, kind = file
    if kind.kind == ".parquet":
        import pyarrow.parquet as pq

        with fs.open(path, "rb") as opened:
            result = label_names(pq.ParquetFile(opened).schema_arrow, column)
    elif kind.kind == ".arrow":
        with fs.open(path, "rb") as opened:
            result = label_names(schema_of(opened), column)
    else:
        source = SourceFile(
            0, path, kind=kind.kind, size=0, content="", field=field, compression=kind.compression
        )
        result = tuple(Cards().labels_of(source, fs, path).get(column, ()))
    return result


def _labels_in(value: Any, names: Sequence[str]) -> list[str]:
    """Return the names of a row's label, or of its labels."""
    if isinstance(value, list):
        return [name for item in value for name in _labels_in(item, names)]
    number = _number(value)
    if names and number is not None and 0 <= number < len(names) and str(value) not in names:
        return [names[int(number)]]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def _sort_key(name: str) -> tuple[int, float, str]:
    number = _number(name)
    return (0, number, name) if number is not None else (1, 0.0, name)
