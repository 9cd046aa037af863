"""The text of a span, document by document.

A .txt file is one document unless lines that hold only `<|endoftext|>` separate several; a line of .jsonl and
a row of .parquet is one. A .txt document may reach over the cut between two spans, so it comes in pieces: the
spans' pieces, one span after the other, are the pieces of the whole file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.data.sources import Span
from orchestrator.errors import InputError
from orchestrator.storage.inputs import open_input

SEPARATOR = b"<|endoftext|>"
PIECE_BYTES = 2**18
"""A long document is handed on in pieces of about this size, cut after a line, to bound memory."""


class Piece(NamedTuple):
    """Text of a document; `ends` where the document does, `halves` where the first of a pair does.

    `bytes` is its length in UTF-8.
    """

    text: str
    ends: bool
    bytes: int
    halves: bool = False


def pieces(span: Span) -> Iterator[Piece]:
    """The span's text. Raises InputError for text that is not UTF-8 and for rows without the field."""
    if span.file.kind == ".parquet":
        yield from _rows(span)
        return
    with open_input(span.file.uri) as file:
        yield from (_lines if span.file.kind == ".jsonl" else _text)(span, file)


def _text(span: Span, file: BinaryIO) -> Iterator[Piece]:
    held: list[bytes] = []
    size, lines = 0, _with_next(_whole_lines(span, file))
    for at, line, following in lines:
        if _separates(line):
            continue
        ends = following is None or _separates(following)
        if ends:
            line = line.removesuffix(b"\n").removesuffix(b"\r")
        held.append(line)
        size += len(line)
        if ends or size >= PIECE_BYTES:
            yield _decode(held, ends, span, at)
            held, size = [], 0
    if held:
        yield _decode(held, False, span, span.stop)


def _whole_lines(span: Span, file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, line, whether it is the span's) for the lines that begin within the span, and one beyond."""
    if span.start:
        file.seek(span.start - 1)
        file.readline()  # the rest of a line that began in the span before, if any
    else:
        file.seek(0)
    at = file.tell()
    while line := file.readline():
        yield at, line, at < span.stop
        if at >= span.stop:
            return
        at += len(line)


def _with_next(lines: Iterator[tuple[int, bytes, bool]]) -> Iterator[tuple[int, bytes, bytes | None]]:
    """(offset, line, the line after it or None) for the lines that are the span's."""
    held: tuple[int, bytes] | None = None
    for at, line, ours in lines:
        if held:
            yield *held, line
        held = (at, line) if ours else None
    if held:
        yield *held, None


def _separates(line: bytes) -> bool:
    return line.rstrip(b"\r\n") == SEPARATOR


def _decode(lines: list[bytes], ends: bool, span: Span, at: int) -> Piece:
    data = b"".join(lines)
    try:
        return Piece(data.decode(), ends, len(data))
    except UnicodeDecodeError as error:
        raise InputError(
            f"is not UTF-8 before byte {at} ({error.reason})", span.file.uri, "convert it to UTF-8"
        ) from None


def _lines(span: Span, file: BinaryIO) -> Iterator[Piece]:
    for at, line, ours in _whole_lines(span, file):
        if not ours or not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"the line at byte {at} is not JSON ({error})", span.file.uri) from None
        texts = []
        for key in span.file.fields:
            text = row.get(key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                what = f"the line at byte {at} has no text '{key}'"
                raise InputError(what, span.file.uri, "set field to the text's key")
            texts.append(text)
        yield from _document(texts)


def _rows(span: Span) -> Iterator[Piece]:
    groups = list(range(span.start, span.stop))
    with open_input(span.file.uri) as file:
        for batch in pq.ParquetFile(file).iter_batches(
            256, row_groups=groups, columns=list(span.file.fields)
        ):
            columns = [batch.column(key) for key in span.file.fields]
            for key, column in zip(span.file.fields, columns, strict=True):
                if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                    raise InputError(f"column '{key}' is {column.type}, not text", span.file.uri)
            for texts in zip(*(column.to_pylist() for column in columns), strict=True):
                if None not in texts:
                    yield from _document(texts)


def _document(texts: Sequence[str]) -> Iterator[Piece]:
    """The pieces of a row's text, or of the two texts of a pair."""
    *first, last = texts
    for text in first:
        yield from (piece._replace(ends=False, halves=piece.ends) for piece in _cut(text))
    yield from _cut(last)


def _cut(text: str) -> Iterator[Piece]:
    """A whole document in pieces of about PIECE_BYTES characters, cut after a line where there is one."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        stop = text.rfind("\n", start, start + PIECE_BYTES) + 1 or start + PIECE_BYTES
        yield Piece(text[start:stop], False, len(text[start:stop].encode()))
        start = stop
    yield Piece(text[start:], True, len(text[start:].encode()))
