"""Whether the rows of a source have the columns that its `field` names. A wrong name would else be a value that is null
in every row, without a word where a value may be."""

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
"""Names that are told of those that there are."""
Keys = tuple[str | int, ...]


def first_parts(files: Sequence[SourceFile], part_bytes: int) -> list[Part]:
    """The first part of each source, as `cut` makes it; no file after it is opened."""
    of_source: dict[int, list[SourceFile]] = {}
    for file in files:
        held = of_source.setdefault(file.source, [])
        if sum(each.size for each in held) < part_bytes:
            held.append(file)
    return [parts[0] for held in of_source.values() if (parts := cut(held, part_bytes))]


def check_columns(parts: Iterable[Part], where: str, objective: str = "") -> None:
    """Raise InputError if a column, or a path into one, that a source names is in no row of its first part.

    `parts` are those of the sources, of which the first of each is read; `where` is the key of the sources in the job
    file; the `objective` is that of records. Where rows that lack something are left out by policy, and counted, only
    what may be null is looked for.
    """
    first: dict[int, Part] = {}
    for part in parts:
        first.setdefault(part[0].file.source, part)
    for number, part in first.items():
        _check(part, _sought(part[0].file, objective), f"{where}.{number}.field")


def _sought(file: SourceFile, objective: str) -> list[str]:
    """The columns that are looked for."""
    if file.kind == ".txt":
        return []
    fields = file.fields
    if file.on_error != "fail":
        nullable = may_be_null(objective)
        fields = (
            tuple(file.field[name] for name in nullable if name in file.field)
            if isinstance(file.field, dict)
            else ()
        )
    return [column for field in fields for column in columns_of(field)]


def _check(part: Part, columns: Sequence[str], where: str) -> None:
    """Raise InputError for the first of the `columns` that rows of a part lack, and no row has."""
    sought = set(columns)
    lacking = dict[str, _Place]()
    for span in part if columns else ():
        in_table = _columns_of_table(span)
        for row in rows(span):
            for column in tuple(sought):
                place = _Place(row.values, column, in_table)
                if place.is_there:
                    sought.remove(column)
                elif not place.is_open:
                    lacking.setdefault(column, place)
            if not sought:
                return
    for column in columns:
        if column in sought and column in lacking:
            what = f"names '{column}', which no row of the first part has, as in {part[0].file.uri}"
            hint = f"{lacking[column].hint()}; what only later rows have takes a source of its own"
            raise InputError(what, where, hint)


def _columns_of_table(span: Span) -> list[str]:
    """The columns of a table, whose rows are read with those alone that are asked for; none of another kind."""
    schema = schema_in(span) if span.file.kind in TABLES else None
    return [] if schema is None else list(schema.names)


class _Place:
    """How far a path leads into a row.

    Attributes:
        is_there: to its end, or to a list that is shorter.
        is_open: not to its end, but to a null, so that another row may tell.
    """

    def __init__(self, values: Mapping[str, Any], path: str, in_table: Sequence[str]) -> None:
        self._keys = _keys(values, path)
        self._done = 0
        self._in_table = in_table
        found: Any = values
        while self._done < len(self._keys):
            key = self._keys[self._done]
            is_list = isinstance(found, list | tuple)
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif is_list and str(key).isdigit() and int(key) < len(found):
                found = found[int(key)]
            else:
                break
            self._done += 1
        ended = self._done == len(self._keys)
        self.is_there = ended or (isinstance(found, list | tuple) and str(self._keys[self._done]).isdigit())
        self.is_open = not ended and found is None
        self._found = found

    def hint(self) -> str:
        """What there is in place of what is not there."""
        found = self._found
        before = self._keys[: self._done]
        after = self._keys[self._done + 1 :]
        if not isinstance(found, Mapping):
            return f"'{_path(before)}' is {type(found).__name__}, into which no path leads"
        names = [str(name) for name in (self._in_table if not before and self._in_table else found)]
        near = get_close_matches(str(self._keys[self._done]), names, n=1)
        if near:
            return f"did you mean '{_path((*before, *near, *after))}'?"
        listed = [_path((*before, name)) for name in names[:SHOWN]]
        return (
            f"there are {', '.join(listed)}{', ...' if len(names) > SHOWN else ''}"
            if names
            else "check the name"
        )


def _keys(values: Mapping[str, Any], path: str) -> Keys:
    """The steps of a path; a column whose name looks like one comes before."""
    if path in values:
        return (path,)
    try:
        return keys_of(path)
    except ValueError:
        return (path,)


def _path(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
