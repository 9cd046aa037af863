"""The rows of a span of any kind. Texts, pairs of texts and records are made from them.

A row is a line of .jsonl, .csv or .tsv, an object of a list in .json, a row of .parquet or .arrow, or the members of
a .tar that share a key. A text file has rows with the single column `text`: its documents, or pieces of long ones.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, BinaryIO, NamedTuple

from orchestrator.data.sources import json_rows, lines, table_rows, tar_rows, text_rows
from orchestrator.data.sources.files import VANISHED, Span, opened
from orchestrator.data.sources.plain import Damage, Plain, damage_of, measured
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import replaced, sound_value
from orchestrator.data.store.manifest import FORMAT

BOM = b"\xef\xbb\xbf"


def read(
    span: Span, file: BinaryIO, rejected: Rejected, _: int, __: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a file, each with the byte at which it begins.

    A row with too few values lacks the last columns; if the policy is to continue, it counts as truncated.
    """
    csv.field_size_limit(lines.LINE_BYTES)  # Python's own limit is 128 KiB
    reader = _Reader(span, file, rejected)
    names: list[str] | None = None
    for at, values in reader:
        if names is None:
            names = values
            if twice := [name for name in span.file.columns if names.count(name) > 1]:
                problem = f"has several columns called '{twice[0]}'"
                rejected.refuse(
                    span.file, Unfit("columns", problem, "give each a different name"), at, ",".join(values)
                )
                return
        elif len(values) > len(names) or (len(values) < len(names) and span.file.on_error != "fail"):
            problem = f"has {len(values)} values, and there are {len(names)} columns"
            rejected.refuse(span.file, Unfit("columns", problem), at, ",".join(values))
        else:
            yield at, dict(zip_longest(names, values))


class _Reader:
    """The rows of a file as lists, with the bytes at which they begin."""

    def __init__(self, span: Span, file: BinaryIO, rejected: Rejected) -> None:
        self._source = span.file
        self._file = file
        self._rejected = rejected
        self._delimiter = "\t" if span.file.kind == ".tsv" else ","
        self._at = 0
        self._named = False
        self._ahead: deque[bytes] = deque()
        self._row_lines: list[bytes] = []

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        while True:
            begin = self._at
            self._row_lines = []
            try:
                values = next(csv.reader(self._lines(), delimiter=self._delimiter, strict=True), None)
            except (Unfit, csv.Error) as error:
                first = self._row_lines[0]
                if damage_of(self._file) and not self._ahead:
                    return  # errors about the file itself
                unfit = error if isinstance(error, Unfit) else Unfit("csv", f"is not a row of CSV ({error})")
                self._rejected.refuse(self._source, unfit, begin, first[:1000])
                if not self._named:
                    return  # no value of the file has a name
                self._ahead.extendleft(reversed(self._row_lines[1:]))
                self._at = begin + len(first)
                continue
            if values is None:
                return
            if damage_of(self._file) and not self._ahead and not self._row_lines[-1].endswith(b"\n"):
                return
            self._at = begin + sum(map(len, self._row_lines))
            if values:
                self._named = True
                yield begin, values

    def _lines(self) -> Iterator[str]:
        """Yield the decoded lines of a row. Raises Unfit."""
        size = 0
        while line := self._ahead.popleft() if self._ahead else self._file.readline(lines.LINE_BYTES + 1):
            self._row_lines.append(line)
            size += len(line)
            if size > lines.LINE_BYTES:
                raise Unfit("long", f"is longer than {lines.LINE_BYTES >> 20} MiB", "split the document")
            yield self._decoded(
                line.removeprefix(BOM) if self._at == 0 and len(self._row_lines) == 1 else line
            )

    def _decoded(self, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            unfit = Unfit("utf-8", f"is not UTF-8 ({error.reason})", "convert it to UTF-8")
            if self._source.on_error != "repair":
                raise unfit from None
            text = replaced(line)
            self._rejected.repair(self._source, unfit, self._at, line[:1000])
            return text


class Row(NamedTuple):
    """A row of named columns and its position: the byte at which its line starts in the decompressed text, or its
    number.

    `ends` is False for a piece of a document that continues in the next row.
    """

    at: int
    values: Mapping[str, Any]
    ends: bool = True


def rows(
    span: Span, rejected: Rejected | None = None, data_format: int = FORMAT, columns: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Yield the rows of a span in order.

    Args:
        span: what to read.
        rejected: collects unusable input. Without it, such input is not counted, and a compressed file is not
            verified first.
        data_format: format of the prepared data.
        columns: further columns of a table or an archive besides those in its fields. A line always has all columns.

    Raises InputError for unusable input if the policy of the file is to fail, and for a file that has changed since
    its content was identified.
    """
    file = span.file
    checked = rejected is not None and span.file.on_error != "fail"
    rejected = rejected or Rejected()
    if file.content == VANISHED:
        rejected.refuse(file, Unfit("vanished", "there is no such file", "remove it from the list"))
        return
    read = _READERS[file.kind]
    by_folders = file.folders if data_format > 5 else {}
    with opened_sound(span, rejected, checked) as handle:
        for at, values, *ends in read(span, handle, rejected, data_format, columns):
            values = {**by_folders, **values} if by_folders else values
            if file.on_error == "fail" or file.kind == ".txt" or _is_sound(span, at, values, rejected):
                yield Row(at, values, *ends)


@contextmanager
def opened_sound(span: Span, rejected: Rejected, checked: bool) -> Iterator[BinaryIO]:
    """Yield the decompressed bytes of a span's file. If they end early, `rejected` gets a note after all were read.

    If `checked`, a compressed file is read once before, and then only as far as it can be trusted.
    """
    file = span.file
    with opened(span) as raw:
        handle = raw
        if file.compression:
            trusted = measured(raw, file.compression) if checked else None
            handle = io.BufferedReader(Plain(raw, file.compression, trusted), lines.BLOCK)
        yield handle
        if damage := damage_of(handle):
            rejected.refuse(file, _unfit(damage))


def _is_sound(span: Span, at: int, values: dict[str, Any], rejected: Rejected) -> bool:
    """Return whether the texts needed from a row are valid, after repair if that is the policy. If not, the row goes
    to `rejected`.
    """
    file = span.file
    names = {column if column in values else column.split(".")[0].split("[")[0] for column in file.columns}
    repaired = None
    for name in names & values.keys():
        try:
            values[name], is_repaired = sound_value(values[name], file.on_error)
            repaired = repaired or is_repaired
        except Unfit as unfit:
            rejected.refuse(file, unfit, at, values)
            return False
    if repaired:
        rejected.repair(file, repaired, at, values)
    return True


def _unfit(damage: Damage) -> Unfit:
    if damage.cut_off:
        return Unfit("torn", f"is cut off ({damage.reason})", "fetch the file again")
    return Unfit("damaged", f"is damaged ({damage.reason})", "fetch the file again")


_READERS: dict[str, Callable[..., Iterator[tuple[Any, ...]]]] = {
    ".txt": text_rows.read,
    ".jsonl": json_rows.read,
    ".csv": read,
    ".tsv": read,
    ".parquet": table_rows.read,
    ".arrow": table_rows.read,
    ".tar": tar_rows.read,
}
