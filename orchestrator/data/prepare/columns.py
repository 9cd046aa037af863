"""Read an objective's values from a row, under the objective's own names, whatever the file type.

The types differ: a table numbers its labels and names them in its schema; of other files, a dataset card may hold the
names. CSV has only texts, so a list is written as
JSON. Tables, and JSON lines made from tables, give a mapping the keys of all mappings in its column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.fields import columns_of, template_of
from orchestrator.config.records import LABELLED, LABELS, TALKING, may_be_null
from orchestrator.data.prepare.messages import without_nulls
from orchestrator.data.sources import Span
from orchestrator.data.sources.arrow_files import label_names
from orchestrator.data.sources.fields import value_of
from orchestrator.data.sources.files import TABLES
from orchestrator.data.sources.rejected import Unfit
from orchestrator.data.sources.table_rows import schema_in


class WrongRow(Unfit):
    """The problem of a row for the objective that reads it, and how to fix it."""

    def __init__(self, problem: str, hint: str = "fix or remove it") -> None:
        super().__init__("record", problem, hint)


class RowColumns:
    """Reads an objective's values from the rows of one span."""

    def __init__(self, span: Span, objective: str, labels: Sequence[str], data_format: int) -> None:
        """`labels` are those of the job. Raises InputError if a template builds labels from a column of numbers that
        have names.
        """
        self._columns = span.file.field if isinstance(span.file.field, dict) else {}
        self._objective = objective
        self._labels = labels
        self._format = data_format
        self._names = _names_in(span, self._columns, objective) if data_format > 5 else {}
        in_table = span.file.kind in TABLES and data_format == 5
        self._has_nulls = objective in TALKING and (in_table or data_format > 5)

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a row. Raises Unfit."""
        values = {name: value_of(row, column) for name, column in self._columns.items()}
        for name, names in self._names.items():
            values[name] = self._named(_listed(values[name]), names)
        if self._format > 5:
            values = _as_lists(values, self._objective)
        for name, value in values.items():
            if value is None and not may_be_null(self._objective, name):
                raise WrongRow(
                    f"has no '{self._columns[name]}'", "map the columns in data.sources, or remove the row"
                )
        return {name: without_nulls(value) for name, value in values.items()} if self._has_nulls else values

    def _named(self, value: Any, names: tuple[str, ...]) -> Any:
        """Replace a label number, or a list of them, by the names in the column. The job may order its labels
        differently. Raises WrongRow.
        """
        if isinstance(value, list):
            return [self._named(label, names) for label in value]
        if isinstance(value, str) and value.isdecimal() and value not in (*names, *self._labels):
            value = int(value)  # CSV has only texts
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if not 0 <= value < len(names):
            raise WrongRow(f"its label {value} is not among 0 to {len(names) - 1}, which its column names")
        name = names[value]
        if self._labels and name not in self._labels:
            if names == tuple(map(str, range(len(names)))):  # these names carry no meaning
                return value
            problem = f"its label {value} is called '{name}' by its column, and data.labels has no such name"
            raise WrongRow(problem, f"name the labels as the column does: {_shown(names)}")
        return name


def _names_in(span: Span, columns: Mapping[str, str], objective: str) -> dict[str, tuple[str, ...]]:
    """Return the label names of numeric label columns, by the objective's name for each column: those in a table's
    schema, else those in the dataset's card.

    Raises InputError for a template over such a column, because it would write the number.
    """
    label_columns = {name: columns[name] for name in LABELS if name in columns}
    if objective not in (*LABELLED, "kto") or not label_columns:
        return {}
    schema = schema_in(span) if span.file.kind in TABLES else None
    names_of = {}
    for name, field in label_columns.items():
        for column in columns_of(field):
            in_schema = label_names(schema, column) if schema is not None else ()
            if not (names := in_schema or tuple(span.file.labels.get(column, ()))):
                continue
            if template_of(field) is not None and (schema is None or field not in schema.names):
                problem = f"'{column}' holds the numbers of {_shown(names)}, and a template would write these"
                raise InputError(problem, span.file.uri, f"name the column alone: {{{name}: {column}}}")
            names_of[name] = names
    return names_of


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _as_lists(values: dict[str, Any], objective: str) -> dict[str, Any]:
    """Convert texts to lists, messages and booleans, because CSV holds only texts."""
    converted = dict(values)
    if objective in ("token_classification", "multi_label_classification"):
        converted |= {name: _listed(value) for name, value in values.items()}
    if objective == "multi_label_classification" and values.get("labels") == "":
        converted["labels"] = []  # CSV writes nothing for no label
    if objective == "kto" and isinstance(label := values.get("label"), str):
        converted["label"] = {"true": True, "false": False}.get(label.strip().lower(), label)
    if objective not in TALKING:
        return converted
    if "messages" in values:
        converted["messages"] = _messages(values["messages"])
        return converted
    # if the prompt is plain text, the answer is plain text too, whatever it holds
    prompt = values.get("prompt")
    if prompt is None or messages_in(prompt) is not prompt:
        spoken = ("prompt", "completion", "chosen", "rejected")
        converted |= {name: messages_in(values[name]) for name in spoken if name in values}
    return converted


def _listed(value: Any) -> Any:
    """Parse a text as a JSON list or mapping; return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _messages(value: Any) -> Any:
    """Parse messages given as one JSON text or as a list of JSON texts; return any other value unchanged."""
    parsed = _listed(value)
    return [_listed(item) for item in parsed] if isinstance(parsed, list) else parsed


def messages_in(value: Any) -> Any:
    """Parse a JSON text whose items have the keys of messages; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    parsed = _messages(value)
    candidates = parsed if isinstance(parsed, list) else [parsed]
    spoken = all(isinstance(item, Mapping) and item.keys() & {"role", "from"} for item in candidates)
    return parsed if candidates and spoken else value
