"""Reading the text of a span, document by document.

A .txt file is one document, or several separated by lines with only `<|endoftext|>`; a line of .jsonl and a row of
.parquet is one document. A .txt document may continue in the next span, so documents come in pieces: the pieces of all
spans in order are the pieces of the file.

In `data_format` 1, that of an earlier version, lines are never cut, however long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.data.manifest import FORMAT
from orchestrator.data.sources import Span, opened
from orchestrator.data.sources.arrow_files import batches, rows_before
from orchestrator.data.sources.lines import Line, line_at, line_break, line_number, lines
from orchestrator.job.errors import InputError

SEPARATOR = b"<|endoftext|>"
PIECE_BYTES = 2**18
"""Size at which a long document is cut into pieces, after a line or between two words, to bound memory."""
LINE_BYTES = 2**26
"""A longer line of .jsonl is refused, since all of it must be in memory."""
BOM = b"\xef\xbb\xbf"
BATCH_ROWS = 256
"""Rows of a .parquet file that are read at once."""


class TextPiece(NamedTuple):
    """A piece of a document's text, of `bytes` bytes in UTF-8. The last piece of a document `ends` it; the last piece
    of the first text of a pair `halves` it."""

    text: str
    ends: bool
    bytes: int
    halves: bool = False


def pieces(span: Span, data_format: int = FORMAT) -> Iterator[TextPiece]:
    """The span's text, in pieces.

    Raises InputError for text that is not UTF-8, for rows without the field, and for a file that has changed since its
    content was identified.
    """
    read = {".parquet": _rows, ".arrow": _rows, ".jsonl": _json, ".txt": _text}[span.file.kind]
    with opened(span) as file:
        yield from read(span, file, data_format)


def _text(span: Span, file: BinaryIO, data_format: int) -> Iterator[TextPiece]:
    longest = None if data_format == 1 else PIECE_BYTES
    size = span.file.size
    start, stop = (line_break(file, at, size, longest) for at in (span.start, span.stop))
    last = Line(stop, line_at(file, stop), True) if stop < size else None
    held: list[bytes] = []
    began = held_bytes = 0
    for line, following in pairwise(
        chain(_without_mark(lines(file, start, stop, longest), data_format), [last])
    ):
        if line is None or _separates(line):
            continue
        ends, data = following is None or _separates(following), line.data
        if ends:
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        began = began if held else line.at
        held.append(data)
        held_bytes += len(data)
        if ends or held_bytes >= PIECE_BYTES:
            yield _decode(held, ends, span, began, file)
            held, held_bytes = [], 0
    if held:
        yield _decode(held, False, span, began, file)


def _without_mark(found: Iterator[Line], data_format: int) -> Iterator[Line]:
    """The lines, without the byte order mark that some editors put at the start of a UTF-8 file."""
    for line in found:
        marked = data_format > 1 and line.at == 0 and line.data.startswith(BOM)
        yield Line(len(BOM), line.data.removeprefix(BOM), line.whole) if marked else line


def _separates(line: Line) -> bool:
    return line.whole and line.data.rstrip(b"\r\n") == SEPARATOR


def _decode(parts: list[bytes], ends: bool, span: Span, at: int, file: BinaryIO) -> TextPiece:
    data = b"".join(parts)
    try:
        return TextPiece(data.decode(), ends, len(data))
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 at byte {at + error.start}, in line {line_number(file, at + error.start)}"
        raise InputError(f"{what} ({error.reason})", span.file.uri, "convert it to UTF-8") from None


def _json(span: Span, file: BinaryIO, data_format: int) -> Iterator[TextPiece]:
    longest = None if data_format == 1 else LINE_BYTES
    size = span.file.size
    at = line_break(file, span.start, size, None)
    file.seek(at)
    while at < span.stop and (line := file.readline(-1 if longest is None else longest + 1)):
        if longest is not None and len(line) > longest:
            raise _bad(span, file, at, f"is longer than {longest >> 20} MiB", "split the document")
        if line.strip():
            yield from _document(_fields(line, span, file, at), data_format)
        at += len(line)


def _fields(line: bytes, span: Span, file: BinaryIO, at: int) -> list[str]:
    """The texts of a line of .jsonl."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad(span, file, at, f"is not JSON ({error})", "fix or remove it") from None
    texts = []
    for key in span.file.fields:
        text = row.get(key) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise _bad(span, file, at, f"has no text '{key}'", "set field to the text's key")
        if not is_unicode(text):
            raise _bad(span, file, at, f"has half a surrogate pair in '{key}'", "fix or remove it")
        texts.append(text)
    return texts


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad(span: Span, file: BinaryIO, at: int, what: str, hint: str) -> InputError:
    """The error for the line that starts at byte `at`."""
    return InputError(f"line {line_number(file, at)}, at byte {at}, {what}", span.file.uri, hint)


def _rows(span: Span, file: BinaryIO, data_format: int) -> Iterator[TextPiece]:
    row = 0
    try:
        for row, batch in batches_of(span, file, list(span.file.fields)):
            for texts in zip(*(_column(span, batch, key) for key in span.file.fields), strict=True):
                if None not in texts:
                    yield from _document(texts, data_format)
            row += batch.num_rows
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        what = f"cannot be read from row {row} on ({' '.join(str(error).split())[:200]})"
        raise InputError(what, span.file.uri, "write the file anew") from None


def batches_of(span: Span, file: BinaryIO, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a span of a .parquet or .arrow file, some at once, with the number of those before them. Raises
    OSError and ValueError."""
    if span.file.kind == ".arrow":
        row = rows_before(file, span.start)
        found = (batch.select(columns) for batch in batches(file, span.start, span.stop))
    else:
        table = pq.ParquetFile(file)
        row = sum(table.metadata.row_group(group).num_rows for group in range(span.start))
        groups = list(range(span.start, span.stop))
        found = table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns)
    for batch in found:
        yield row, batch
        row += batch.num_rows


def _column(span: Span, batch: pa.RecordBatch, key: str) -> list[str | None]:
    column = batch.column(key)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise InputError(f"column '{key}' is {column.type}, not text", span.file.uri)
    texts: list[str | None] = column.to_pylist()
    return texts


def _document(texts: Sequence[str], data_format: int) -> Iterator[TextPiece]:
    """The pieces of a row's text, or of the two texts of a pair."""
    *first, last = texts
    for text in first:
        yield from (piece._replace(ends=False, halves=piece.ends) for piece in cut_text(text, data_format))
    yield from cut_text(last, data_format)


def cut_text(text: str, data_format: int) -> Iterator[TextPiece]:
    """A document in pieces of at most PIECE_BYTES characters, cut after a line or else between two words."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        stop = text.rfind("\n", start, start + PIECE_BYTES) + 1 or start + PIECE_BYTES
        if data_format > 1 and not text.endswith("\n", start, stop):
            stop = _between_words(text, start, stop)
        yield TextPiece(text[start:stop], False, len(text[start:stop].encode()))
        start = stop
    yield TextPiece(text[start:], True, len(text[start:].encode()))


def _between_words(text: str, start: int, stop: int) -> int:
    """The last single space in text[start:stop]; `stop` if there is none. See `orchestrator.data.sources.lines`."""
    at = stop
    while (at := text.rfind(" ", start + 1, at)) > 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return stop
