"""The rows of .csv and .tsv files, by the names in their first row.

A value in double quotes may hold line ends. Where no row can be made of a line and those after it, that line alone is
refused, so that one stray quote does not take all that follows with it.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, BinaryIO

from orchestrator.data.sources import lines
from orchestrator.data.sources.files import Span
from orchestrator.data.sources.plain import damage_of
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import replaced

BOM = b"\xef\xbb\xbf"


def read(
    span: Span, file: BinaryIO, rejected: Rejected, _: int, __: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file, each with the byte at which it begins. A row of too few values lacks the last of them;
    under a policy that goes on without a row, it is taken for one that is cut off."""
    csv.field_size_limit(lines.LINE_BYTES)  # its own limit is 128 KiB
    reader = _Reader(span, file, rejected)
    names: list[str] | None = None
    for at, values in reader:
        if names is None:
            names = values
            if twice := [name for name in span.file.columns if names.count(name) > 1]:
                what = f"has several columns called '{twice[0]}'"
                rejected.refuse(
                    span.file, Unfit("columns", what, "give each a name of its own"), at, ",".join(values)
                )
                return
        elif len(values) > len(names) or (len(values) < len(names) and span.file.on_error != "fail"):
            what = f"has {len(values)} values, and there are {len(names)} columns"
            rejected.refuse(span.file, Unfit("columns", what), at, ",".join(values))
        else:
            yield at, dict(zip_longest(names, values))


class _Reader:
    """The rows of a file as lists, with the bytes at which they begin."""

    def __init__(self, span: Span, file: BinaryIO, rejected: Rejected) -> None:
        self._source, self._file, self._rejected = span.file, file, rejected
        self._delimiter = "\t" if span.file.kind == ".tsv" else ","
        self._at, self._named = 0, False
        self._ahead: deque[bytes] = deque()
        self._taken: list[bytes] = []

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        while True:
            begin, self._taken = self._at, []
            try:
                values = next(csv.reader(self._lines(), delimiter=self._delimiter, strict=True), None)
            except (Unfit, csv.Error) as error:
                first = self._taken[0]
                if damage_of(self._file) and not self._ahead:
                    return  # which is told of the file
                unfit = error if isinstance(error, Unfit) else Unfit("csv", f"is no row of CSV ({error})")
                self._rejected.refuse(self._source, unfit, begin, first[:1000])
                if not self._named:
                    return  # no value of the file has a name
                self._ahead.extendleft(reversed(self._taken[1:]))
                self._at = begin + len(first)
                continue
            if values is None:
                return
            if damage_of(self._file) and not self._ahead and not self._taken[-1].endswith(b"\n"):
                return
            self._at = begin + sum(map(len, self._taken))
            if values:
                self._named = True
                yield begin, values

    def _lines(self) -> Iterator[str]:
        """The lines that a row takes, decoded. Raises Unfit."""
        size = 0
        while line := self._ahead.popleft() if self._ahead else self._file.readline(lines.LINE_BYTES + 1):
            self._taken.append(line)
            size += len(line)
            if size > lines.LINE_BYTES:
                raise Unfit("long", f"is longer than {lines.LINE_BYTES >> 20} MiB", "split the document")
            yield self._decoded(line.removeprefix(BOM) if self._at == 0 and len(self._taken) == 1 else line)

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
