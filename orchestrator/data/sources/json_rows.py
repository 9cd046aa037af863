"""The rows of JSON files: one object a line, or the objects of a single list in any layout."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO

from orchestrator.data.sources import lines
from orchestrator.data.sources.files import Span
from orchestrator.data.sources.plain import damage_of
from orchestrator.data.sources.rejected import Rejected, Unfit
from orchestrator.data.sources.repair import replaced

_A_LINE_EACH = "write each of its objects on a separate line, or call the file .json"
LIST = Unfit("json", "is not an object, and begins a list", _A_LINE_EACH)
NO_OBJECT = Unfit("json", "is not an object")
WHITE = b" \t\r\n"
"""JSON's white space."""

Found = Iterator[tuple[int, dict[str, Any]]]


def read(span: Span, file: BinaryIO, rejected: Rejected, data_format: int, _: tuple[str, ...]) -> Found:
    """Yield the rows of a span, each with the byte at which it begins."""
    longest = lines.reach_of(data_format)
    at = span.start
    stop = math.inf if span.file.compression else span.stop
    is_whole = not at and stop >= span.file.size and data_format > 5
    if at:
        at = lines.line_break(file, at, span.file.size, None, span.stop)
        file.seek(at)
    while at < stop and (line := file.readline(-1 if longest is None else longest + 1)):
        begin = at
        at = at + len(line)
        if is_whole and begins_list(line):
            yield from _List(span, file, rejected, line, begin)
            return
        is_whole &= not line.strip()
        if longest is not None and len(line) > longest:
            error = Unfit("long", f"is longer than {longest >> 20} MiB", "split the document")
            rejected.refuse(span.file, error, begin, line[:1000])
            while at < stop and not line.endswith(b"\n") and (line := file.readline(lines.BLOCK)):
                at += len(line)
            continue
        if not line.endswith(b"\n") and damage_of(file):
            return
        if line.strip() and (values := _object(line, span, begin, rejected)) is not None:
            yield begin, values


def begins_list(line: bytes) -> bool:
    """Return whether the first line of a file begins a list."""
    return line.removeprefix(codecs.BOM_UTF8).lstrip(WHITE).startswith(b"[")


def _object(line: bytes, span: Span, at: int, rejected: Rejected) -> dict[str, Any] | None:
    """Return the object in a line or list item; None if it goes to `rejected`."""
    file = span.file
    try:
        try:
            document = json.loads(line)
        except UnicodeDecodeError as error:
            unfit = Unfit("utf-8", f"is not JSON in UTF-8 ({error})")
            if file.on_error != "repair":
                raise unfit from None
            document = json.loads(replaced(line))
            rejected.repair(file, unfit, at, line)
    except Unfit as unfit:
        rejected.refuse(file, unfit, at, line)
        return None
    except (ValueError, RecursionError) as error:
        listed = at == 0 and line.lstrip().startswith(b"[")
        problem = LIST if listed else Unfit("json", f"is not JSON ({error})")
        rejected.refuse(file, problem, at, line)
        return None
    if not isinstance(document, dict):
        rejected.refuse(file, LIST if isinstance(document, list) else NO_OBJECT, at, line)
        return None
    return document


class _List:
    """The objects of a file's list, each with the byte at which it begins. Only one is in memory at a time.

    The buffer holds the file's bytes as Latin-1, one character a byte: JSON's own characters are the same in UTF-8,
    and an object's position is a byte offset. Each object's bytes are decoded separately, so that invalid UTF-8 in
    one does not affect the others.
    """

    def __init__(self, span: Span, file: BinaryIO, rejected: Rejected, first: bytes, at: int) -> None:
        self._span = span
        self._file = file
        self._rejected = rejected
        self._text = first.decode("latin-1")
        self._at = at
        self._next = first.index(b"[") + 1
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def __iter__(self) -> Found:
        mark = self._mark()
        while mark and mark != "]":
            item = self._item()
            if item is None:
                return
            at = self._at + self._next - len(item)
            if (values := _object(item, self._span, at, self._rejected)) is not None:
                yield at, values
            mark = self._mark()
            if mark == ",":
                self._next += 1
                mark = self._mark()
            elif mark and mark != "]":
                self._refuse("json", "its list has no comma before this", "fix or remove it")
                return
        if mark == "]":
            self._next += 1
            if self._mark():
                self._refuse("json", "continues after the end of its list", "remove what follows it")
        elif not damage_of(self._file):
            self._refuse("torn", "is cut off: the end of its list is missing", "fetch the file again")

    def _mark(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            while self._next < len(self._text) and self._text[self._next] in WHITE.decode():
                self._next += 1
            if self._next < len(self._text):
                return self._text[self._next]
            if not self._more(lines.BLOCK):
                return ""

    def _item(self) -> bytes | None:
        """Return the bytes of the next item; None if it is invalid or truncated."""
        while True:
            buffered = len(self._text) - self._next
            try:
                end = self._decode(self._text, self._next)[1]
                # a number at the end may continue
                if end < len(self._text) or not self._more(lines.BLOCK):
                    item = self._text[self._next : end].encode("latin-1")
                    self._next = end
                    return item
            except (ValueError, RecursionError) as error:
                if buffered > lines.LINE_BYTES:
                    problem = f"is longer than {lines.LINE_BYTES >> 20} MiB, or not JSON ({error})"
                    self._refuse("long", problem, "split the document")
                    return None
                if not self._more(max(buffered, lines.BLOCK)):
                    if not damage_of(self._file):
                        self._refuse("json", f"is not JSON ({error})", "fix or remove it")
                    return None

    def _more(self, size: int) -> bool:
        """Read about `size` bytes more, and discard those before the next item; False at the end of the file."""
        data = self._file.read(size)
        self._at += self._next
        self._text = self._text[self._next :] + data.decode("latin-1")
        self._next = 0
        return bool(data)

    def _refuse(self, kind: str, problem: str, hint: str) -> None:
        """Refuse the rest of the file."""
        remainder = self._text[self._next :][:1000].encode("latin-1")
        self._rejected.refuse(self._span.file, Unfit(kind, problem, hint), self._at + self._next, remainder)
