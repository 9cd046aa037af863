"""Whole documents of a part. Cleaning rules judge a document, so no document spans two parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from orchestrator.config.errors import InputError
from orchestrator.data.sources import Part, Span, opened
from orchestrator.data.sources.documents import texts_of_row
from orchestrator.data.sources.rejected import Rejected
from orchestrator.data.sources.rows import rows
from orchestrator.data.sources.text_rows import SEPARATOR
from orchestrator.data.store.manifest import FORMAT

DOCUMENT_BYTES = 2**26
"""Maximum size of a document, because all of it must fit in memory."""
BLOCK = 2**20
_LINE = re.escape(SEPARATOR) + rb"\r?\n"
_SEPARATOR, _FIRST = re.compile(rb"(?<=\n)" + _LINE), re.compile(rb"\A" + _LINE + rb"|(?<=\n)" + _LINE)
"""Lines that separate documents: within a file, and also at its beginning."""
_LONGEST = len(SEPARATOR) + 3


def aligned(parts: Sequence[Part]) -> list[Part]:
    """Return the same text in parts that end at document boundaries. Only .txt files need to move their cuts.

    Raises InputError if a cut falls into a document of more than DOCUMENT_BYTES.
    """
    moved: dict[tuple[str, int], int] = {}

    def edge(span: Span, at: int) -> int:
        if span.file.kind != ".txt" or not 0 < at < span.file.size:
            return at
        key = span.file.uri, at
        if key not in moved:
            with opened(replace(span, sums="", first=0)) as file:
                moved[key] = _next_document(file, at, span)
        return moved[key]

    result = []
    for part in parts:
        spans = [
            replace(
                span, start=start, stop=stop, bytes=span.bytes if span.file.kind != ".txt" else stop - start
            )
            for span in part
            for start, stop in [(edge(span, span.start), edge(span, span.stop))]
            if start < stop or span.start >= span.stop
        ]
        if spans:
            result.append(tuple(spans))
    return result


def _next_document(file: BinaryIO, at: int, span: Span) -> int:
    """Return the start of the first document that begins at or after byte `at`; the file's size without one."""
    # Blocks overlap by the longest separator, so that one across their boundary is found.
    begin = max(0, at - _LONGEST)
    file.seek(begin)
    buffer = file.read(BLOCK)
    while buffer:
        for match in (_SEPARATOR if begin else _FIRST).finditer(buffer):
            if begin + match.end() >= at:
                return begin + match.end()
        if begin - at > DOCUMENT_BYTES:
            raise _too_long(span, at)
        begin += max(0, len(buffer) - _LONGEST)
        file.seek(begin)
        buffer = file.read(BLOCK)
        if len(buffer) <= _LONGEST and not _SEPARATOR.search(buffer):
            break
    return span.file.size


def _too_long(span: Span, at: int | None = None) -> InputError:
    problem = f"has a document of more than {DOCUMENT_BYTES >> 20} MiB" + (f" at byte {at}" if at else "")
    hint = "data.clean judges whole documents: divide it by lines of <|endoftext|>, or prepare it without data.clean"
    return InputError(problem, span.file.uri, hint)


def texts(
    part: Part, columns: tuple[str, ...] = (), rejected: Rejected | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each document of a part with its row, which holds the requested columns that exist.

    Unusable rows go to `rejected`. Raises InputError as `rows` does, and for a document of more than DOCUMENT_BYTES.
    """
    rejected = rejected or Rejected()
    for span in part:
        pending: list[str] = []
        size = 0
        for row in rows(span, rejected, FORMAT, columns):
            if span.file.kind != ".txt":
                texts_in_row = texts_of_row(span, row, rejected)
                if texts_in_row is not None:
                    yield texts_in_row[0], row.values
                continue
            pending.append(row.values["text"])
            size += len(pending[-1])
            if size > DOCUMENT_BYTES:
                raise _too_long(span)
            if row.ends:
                yield "".join(pending), {}
                pending = []
                size = 0
        if pending:
            yield "".join(pending), {}
