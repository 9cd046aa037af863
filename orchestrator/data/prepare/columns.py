"""What an objective reads of a row, by its own names: the same whatever kind of file the row is from.

A table numbers its labels and says their names beside its schema; a file of CSV has but texts, so that a list stands
there as JSON; a table, and lines that were made of one, give a mapping the keys of all others in its column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.fields import columns_of, template_of
from orchestrator.config.records import COMPARED, LABELLED, may_be_null
from orchestrator.data.prepare.messages import without_nulls
from orchestrator.data.sources import Span
from orchestrator.data.sources.arrow_files import label_names
from orchestrator.data.sources.fields import value_of
from orchestrator.data.sources.files import TABLES
from orchestrator.data.sources.rejected import Unfit
from orchestrator.data.sources.table_rows import schema_in

TALKS = ("conversation", *COMPARED, "kto")
"""Objectives that read messages."""
LABELS = ("label", "labels")
"""What objectives call the labels of a row."""


class WrongRow(Unfit):
    """What is wrong with a row for the objective that reads it, and what to do."""

    def __init__(self, what: str, hint: str = "fix or remove it") -> None:
        super().__init__("record", what, hint)


class RowColumns:
    """Takes what an objective reads from the rows of one span."""

    def __init__(self, span: Span, objective: str, labels: Sequence[str], data_format: int) -> None:
        """`labels` are those of the job. Raises InputError for labels that are made by a template of numbers that have
        names."""
        self._columns = span.file.field if isinstance(span.file.field, dict) else {}
        self._objective = objective
        self._labels = labels
        self._format = data_format
        self._names = _names_in(span, self._columns, objective) if data_format > 5 else {}
        in_table = span.file.kind in TABLES and data_format == 5
        self._has_nulls = objective in TALKS and (in_table or data_format > 5)

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a row. Raises Unfit."""
        found = {name: value_of(row, column) for name, column in self._columns.items()}
        for name, names in self._names.items():
            found[name] = self._named(found[name], names)
        if self._format > 5:
            found = _as_lists(found, self._objective)
        optional = may_be_null(self._objective)
        for name, value in found.items():
            if value is None and name not in optional:
                raise WrongRow(
                    f"has no '{self._columns[name]}'", "map the columns in data.sources, or remove the row"
                )
        return {name: without_nulls(value) for name, value in found.items()} if self._has_nulls else found

    def _named(self, value: Any, names: tuple[str, ...]) -> Any:
        """A label by its name where it is a number, or a list of such: the job may order its labels otherwise. Raises
        WrongRow."""
        if isinstance(value, list):
            return [self._named(each, names) for each in value]
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if not 0 <= value < len(names):
            raise WrongRow(f"its label {value} is not among 0 to {len(names) - 1}, which its column names")
        name = names[value]
        if self._labels and name not in self._labels:
            if names == tuple(map(str, range(len(names)))):  # which name nothing
                return value
            what = f"its label {value} is called '{name}' by its column, and data.labels has no such name"
            raise WrongRow(what, f"name the labels as the column does: {_shown(names)}")
        return name


def _names_in(span: Span, columns: Mapping[str, str], objective: str) -> dict[str, tuple[str, ...]]:
    """The names of the labels in the columns of a table whose labels are numbers, by what the objective calls each.

    Raises InputError for a template over such a column: it would write the number.
    """
    asked = {name: columns[name] for name in LABELS if name in columns}
    if span.file.kind not in TABLES or objective not in (*LABELLED, "kto") or not asked:
        return {}
    if (schema := schema_in(span)) is None:
        return {}
    found = {}
    for name, field in asked.items():
        for column in columns_of(field):
            if not (names := label_names(schema, column)):
                continue
            if template_of(field) is not None and field not in schema.names:
                what = f"'{column}' holds the numbers of {_shown(names)}, and a template would write these"
                raise InputError(what, span.file.uri, f"name the column alone: {{{name}: {column}}}")
            found[name] = names
    return found


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _as_lists(values: dict[str, Any], objective: str) -> dict[str, Any]:
    """The values with lists, messages and yes or no in place of texts that are these: CSV has nothing else."""
    found = dict(values)
    if objective == "token_classification":
        found |= {name: _listed(value) for name, value in values.items()}
    if objective == "kto" and isinstance(label := values.get("label"), str):
        found["label"] = {"true": True, "false": False}.get(label.strip().lower(), label)
    if objective not in TALKS:
        return found
    if "messages" in values:
        found["messages"] = _messages(values["messages"])
        return found
    # beside a prompt of text an answer is one too, whatever it holds
    prompt = values.get("prompt")
    if prompt is None or messages_in(prompt) is not prompt:
        spoken = ("prompt", "completion", "chosen", "rejected")
        found |= {name: messages_in(values[name]) for name in spoken if name in values}
    return found


def _listed(value: Any) -> Any:
    """The list that a text in JSON says; what is none as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _messages(value: Any) -> Any:
    """The messages that a text in JSON says, or a list of such texts; what is none as it is."""
    found = _listed(value)
    return [_listed(each) for each in found] if isinstance(found, list) else found


def messages_in(value: Any) -> Any:
    """The messages that a text in JSON says, if they have the keys of such; what is none as it is."""
    if not isinstance(value, str):
        return value
    found = _messages(value)
    given = found if isinstance(found, list) else [found]
    spoken = all(isinstance(each, Mapping) and each.keys() & {"role", "from"} for each in given)
    return found if given and spoken else value
