"""Documents of text, made from the rows of a span of any kind.

A document may continue in the next span, so documents come in pieces: the pieces of all spans in order are those of
the file. In `data_format` 1, of an earlier version, lines are never cut, however long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orchestrator.data.sources import SourceFile, Span, cut, text_rows
from orchestrator.data.sources.fields import texts_of, value_of
from orchestrator.data.sources.files import TABLES
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.rows import Row, rows
from orchestrator.data.store.manifest import FORMAT

NULL = Unfit("null", "has no value")


class TextPiece(NamedTuple):
    """A piece of a document's text, `bytes` long in UTF-8. The document's last piece has `ends` set; the last piece
    of the first text of a pair has `halves` set.
    """

    text: str
    ends: bool
    bytes: int
    halves: bool = False


LOOK_BYTES = 2**20
"""Approximate number of bytes of a file that are checked before anything is prepared."""


def check_beginning(files: Sequence[SourceFile]) -> None:
    """Raise InputError if the first document of a source cannot be read, unless the policy is to continue.

    An .arrow file is not checked, because finding its batches reads all of it.
    """
    first = {file.source: file for file in reversed(files) if file.size}
    for file in first.values():
        if file.on_error == "fail" and file.kind != ".arrow":
            span = cut([file], LOOK_BYTES)[0][0]
            documents: Iterator[object] = rows(span) if isinstance(file.field, dict) else pieces(span)
            next(documents, None)


def pieces(span: Span, data_format: int = FORMAT, rejected: Rejected | None = None) -> Iterator[TextPiece]:
    """Yield the span's text in pieces. Unusable text goes to `rejected`, see `rows`.

    Raises InputError as `rows` does, and for rows without the text if the policy of the file is to fail.
    """
    rows_of_span = rows(span, rejected, data_format)
    rejected = rejected or Rejected()
    for row in rows_of_span:
        if span.file.kind == ".txt":
            text = row.values["text"]
            yield TextPiece(text, row.ends, len(text.encode()))
        elif (texts := texts_of_row(span, row, rejected)) is not None:
            yield from _document(texts, data_format)


def texts_of_row(span: Span, row: Row, rejected: Rejected) -> list[str] | None:
    """Return the text of a row, or both texts of a pair; None if it goes to `rejected`.

    A table row with an empty cell is never a document, under any policy.
    """
    file = span.file
    try:
        if file.kind in TABLES and any(
            value_of(row.values, field) is None for field in file.fields if row.values
        ):
            rejected.pass_over(file, NULL, row.at)
            return None
        return texts_of(row.values, file.fields)
    except Unfit as unfit:
        rejected.refuse(file, unfit, row.at, row.values)
        return None


def _document(texts: Sequence[str], data_format: int) -> Iterator[TextPiece]:
    """Yield the pieces of a row's text, or of the two texts of a pair."""
    *first, last = texts
    for text in first:
        yield from (piece._replace(ends=False, halves=piece.ends) for piece in cut_text(text, data_format))
    yield from cut_text(last, data_format)


def cut_text(text: str, data_format: int) -> Iterator[TextPiece]:
    """Yield a document in pieces of at most PIECE_BYTES characters, cut after a line or else between two words."""
    start = 0
    while len(text) - start > text_rows.PIECE_BYTES:
        stop = text.rfind("\n", start, start + text_rows.PIECE_BYTES) + 1 or start + text_rows.PIECE_BYTES
        if data_format > 1 and not text.endswith("\n", start, stop):
            stop = _between_words(text, start, stop)
        yield TextPiece(text[start:stop], False, len(text[start:stop].encode()))
        start = stop
    yield TextPiece(text[start:], True, len(text[start:].encode()))


def _between_words(text: str, start: int, stop: int) -> int:
    """Return the position of the last single space in text[start:stop]; `stop` without one. See
    `orchestrator.data.sources.lines`.
    """
    at = stop
    while (at := text.rfind(" ", start + 1, at)) > 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return stop
