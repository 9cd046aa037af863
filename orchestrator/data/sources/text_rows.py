"""The documents of a text file, in pieces if they are long.

A file is one document, or several separated by lines with only `<|endoftext|>`. A document may continue in the next
span: the pieces of all spans in order are the pieces of the file.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any, BinaryIO

from orchestrator.data.sources.files import Span
from orchestrator.data.sources.lines import LONGEST_SEPARATOR, Line, line_at, line_break, lines
from orchestrator.data.sources.plain import damage_of
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import replaced, sound

SEPARATOR = b"<|endoftext|>"
PIECE_BYTES = 2**18
"""Size at which a long document is cut into pieces, after a line or between two words, to bound memory."""
BOM = codecs.BOM_UTF8

Piece = tuple[int, dict[str, Any], bool]


def read(
    span: Span, file: BinaryIO, rejected: Rejected, data_format: int, _: tuple[str, ...]
) -> Iterator[Piece]:
    """Yield the pieces of a span. An unusable piece is left out, and the document ends where its last piece would."""
    longest = None if data_format == 1 else PIECE_BYTES
    start = 0
    stop = sys.maxsize
    last = None
    if not span.file.compression:
        size = span.file.size
        start, stop = (line_break(file, at, size, longest) for at in (span.start, span.stop))
        last = Line(stop, line_at(file, stop), True) if stop < size else None
    decode = _Decoder(span, rejected, span.file.on_error != "fail" and _goes_on(file, start))
    if not span.file.compression:
        file.seek(start)  # the file position has moved
    pending: list[bytes] = []
    began = held_bytes = 0
    for line, following in pairwise(
        chain(_without_mark(lines(file, start, stop, longest), data_format), [last])
    ):
        if line is None or _separates(line):
            continue
        ends = following is None or _separates(following)
        data = line.data
        if following is None and damage_of(file):
            yield from decode.cut_off([*pending, data], began if pending else line.at)
            return
        if ends:
            data = data.removesuffix(b"\n").removesuffix(b"\r")
        began = began if pending else line.at
        pending.append(data)
        held_bytes += len(data)
        if ends or held_bytes >= PIECE_BYTES:
            yield from decode(pending, ends, began)
            pending = []
            held_bytes = 0
    if pending:
        yield from decode(pending, False, began)


class _Decoder:
    """Turns bytes into pieces. `_open` is whether the current document has, or may have, a piece that its end must
    follow.
    """

    def __init__(self, span: Span, rejected: Rejected, goes_on: bool) -> None:
        self._file = span.file
        self._rejected = rejected
        self._open = goes_on

    def __call__(self, parts: list[bytes], ends: bool, at: int) -> Iterator[Piece]:
        data = b"".join(parts)
        try:
            text = self._text(data, at)
        except Unfit as unfit:
            self._rejected.refuse(self._file, unfit, at, data)
            if ends and self._open:
                yield at, {"text": ""}, True
            self._open &= not ends
            return
        yield at, {"text": text}, ends
        self._open = not ends

    def cut_off(self, parts: list[bytes], at: int) -> Iterator[Piece]:
        """Return the last piece of a truncated file, which is kept only under `repair`."""
        if self._file.on_error == "repair":
            text = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(parts))
            yield from self([text.encode()], True, at)
        elif self._open:
            yield at, {"text": ""}, True

    def _text(self, data: bytes, at: int) -> str:
        """Decode UTF-8. Raises Unfit, or InputError if the policy is to fail."""
        policy = self._file.on_error
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            unfit = Unfit("utf-8", f"is not UTF-8 ({error.reason})", "convert it to UTF-8")
            around = data[max(0, error.start - 20) : error.start + 60]
            if policy == "fail":
                self._rejected.refuse(self._file, unfit, at + error.start, around)
            if policy == "skip":
                raise unfit from None
            text = replaced(data)
            self._rejected.repair(self._file, unfit, at + error.start, around)
        if policy == "fail":
            return text
        text, unfit_ = sound(text, policy)
        if unfit_:
            self._rejected.repair(self._file, unfit_, at, data)
        return text


def goes_on(span: Span, file: BinaryIO) -> bool:
    """Return whether the first text of a span continues a document that has text before the span."""
    if span.file.compression:
        return False
    start = line_break(file, span.start, span.file.size, PIECE_BYTES)
    if _separates(Line(start, line_at(file, start), True)):  # the document has ended before it
        return False
    return _goes_on(file, start)


def _goes_on(file: BinaryIO, start: int) -> bool:
    """Return whether the text from byte `start` continues a document that has text before it."""
    if not start:
        return False
    file.seek(max(0, start - LONGEST_SEPARATOR))
    before = file.read(min(start, LONGEST_SEPARATOR))
    *_, line = before.removesuffix(b"\n").removesuffix(b"\r").split(b"\n")
    return line != SEPARATOR


def _without_mark(lines: Iterator[Line], data_format: int) -> Iterator[Line]:
    """Yield the lines without the byte order mark that some editors put at the start of a UTF-8 file."""
    for line in lines:
        marked = data_format > 1 and line.at == 0 and line.data.startswith(BOM)
        yield Line(len(BOM), line.data.removeprefix(BOM), line.whole) if marked else line


def _separates(line: Line) -> bool:
    return line.whole and line.data.rstrip(b"\r\n") == SEPARATOR
