"""Check that a source's rows have the columns in its `field`. Otherwise a wrong name would silently be a null in
every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.fields import columns_of, keys_of
from orchestrator.config.records import may_be_null
from orchestrator.data.sources.files import TABLES, Part, SourceFile, Span
from orchestrator.data.sources.rows import rows
from orchestrator.data.sources.spans import cut
from orchestrator.data.sources.table_rows import schema_in

SHOWN = 8
"""Number of existing names that a message lists."""
NEAR = "did you mean"
Keys = tuple[str | int, ...]


def first_parts(files: Sequence[SourceFile], part_bytes: int) -> list[Part]:
    """Return the first part of each source, as `cut` makes it. Later files are not opened."""
    files_by_source: dict[int, list[SourceFile]] = {}
    for file in files:
        source_files = files_by_source.setdefault(file.source, [])
        if sum(part_file.size for part_file in source_files) < part_bytes:
            source_files.append(file)
    return [parts[0] for source_files in files_by_source.values() if (parts := cut(source_files, part_bytes))]


def check_columns(parts: Iterable[Part], where: str, objective: str = "") -> None:
    """Raise InputError if a source names a column, or a path into one, that no row of its first part has.

    Args:
        parts: the parts of the sources; the first of each source is read.
        where: the key of the sources in the job file.
        objective: the objective of records.

    If the policy leaves out and counts rows that lack something, only columns that may be null are checked.
    """
    first: dict[int, Part] = {}
    for part in parts:
        first.setdefault(part[0].file.source, part)
    for number, part in first.items():
        _check(part, _sought(part[0].file, objective), f"{where}.{number}.field")


def _sought(file: SourceFile, objective: str) -> list[str]:
    """Return the columns to look for."""
    if file.kind == ".txt":
        return []
    fields = file.fields
    if file.on_error != "fail":
        fields = (
            tuple(column for name, column in file.field.items() if may_be_null(objective, name))
            if isinstance(file.field, dict)
            else ()
        )
    return [column for field in fields for column in columns_of(field)]


def check_columns_of_steps(parts: Iterable[Part], columns: Mapping[str, str]) -> None:
    """Raise InputError if a cleaning step names a column, or a path into one, that no row of any source's first part
    has.

    Args:
        parts: the parts of the sources; the first of each source is read.
        columns: the columns, each with its key in the job file.
    """
    first: dict[int, Part] = {}
    for part in parts:
        first.setdefault(part[0].file.source, part)
    lacking = [_lacking(part, list(columns)) for part in first.values()] if columns else []
    for column, where in columns.items():
        if not lacking or not all(column in columns_of_part for columns_of_part in lacking):
            continue  # a source may have no such column, because columns depend on its format
        tables = [part[0].file.kind != ".txt" for part in first.values()]
        hints = [found[column].hint() for found, is_table in zip(lacking, tables, strict=True) if is_table]
        hint = min(hints, key=lambda hint: not hint.startswith(NEAR), default="text files have no columns")
        raise InputError(f"names '{column}', which no row of the first part of any source has", where, hint)


def _check(part: Part, columns: Sequence[str], where: str) -> None:
    """Raise InputError for the first of the `columns` that no row of a part has."""
    lacking = _lacking(part, columns)
    for column in columns:
        if column in lacking:
            problem = f"names '{column}', which no row of the first part has, as in {part[0].file.uri}"
            hint = f"{lacking[column].hint()}; put rows with other columns into a separate source"
            raise InputError(problem, where, hint)


def _lacking(part: Part, columns: Sequence[str]) -> dict[str, _PathMatch]:
    """Return those of the `columns` that no row of a part has, each with how far its path leads into a row."""
    sought = set(columns)
    lacking = dict[str, _PathMatch]()
    for span in part if columns else ():
        in_table = _columns_of_table(span)
        for row in rows(span, columns=tuple(columns)):
            for column in tuple(sought):
                match = _PathMatch(row.values, column, in_table)
                if match.is_there:
                    sought.remove(column)
                elif not match.is_open:
                    lacking.setdefault(column, match)
            if not sought:
                return {}
    return {column: match for column, match in lacking.items() if column in sought}


def _columns_of_table(span: Span) -> list[str]:
    """Return the columns of a table, whose rows otherwise have only the requested ones; empty for other kinds."""
    schema = schema_in(span) if span.file.kind in TABLES else None
    return [] if schema is None else list(schema.names)


class _PathMatch:
    """How far a path leads into a row.

    Attributes:
        is_there: to its end, or to a list that is too short.
        is_open: to a null, so that another row may decide.
    """

    def __init__(self, values: Mapping[str, Any], path: str, in_table: Sequence[str]) -> None:
        self._keys = _keys(values, path)
        self._done = 0
        self._in_table = in_table
        value: Any = values
        while self._done < len(self._keys):
            key = self._keys[self._done]
            is_list = isinstance(value, list | tuple)
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif is_list and str(key).isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                break
            self._done += 1
        at_end = self._done == len(self._keys)
        self.is_there = at_end or (isinstance(value, list | tuple) and str(self._keys[self._done]).isdigit())
        self.is_open = not at_end and value is None
        self._value = value

    def hint(self) -> str:
        """Return a hint that names existing columns instead of the missing one."""
        result = self._value
        before = self._keys[: self._done]
        after = self._keys[self._done + 1 :]
        if not isinstance(result, Mapping):
            return f"'{_path(before)}' is {type(result).__name__}, into which no path leads"
        names = [str(name) for name in (self._in_table if not before and self._in_table else result)]
        similar = get_close_matches(str(self._keys[self._done]), names, n=1)
        if similar:
            return f"{NEAR} '{_path((*before, *similar, *after))}'?"
        listed = [_path((*before, name)) for name in names[:SHOWN]]
        return (
            f"there are {', '.join(listed)}{', ...' if len(names) > SHOWN else ''}"
            if names
            else "check the name"
        )


def _keys(values: Mapping[str, Any], path: str) -> Keys:
    """Return the steps of a path. A column whose name looks like one takes precedence."""
    if path in values:
        return (path,)
    try:
        return keys_of(path)
    except ValueError:
        return (path,)


def _path(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
