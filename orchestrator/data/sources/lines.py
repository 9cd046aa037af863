"""The lines of a byte range of a file, in bounded memory.

A file is divided at arbitrary bytes. The text of a range starts and ends at the first break at or after these bytes.
A break is the end of a line. If no line ends within the bound, the break is before the last single space between two
words within the bound: nearly all tokenizers start a new token there, so the tokens equal those of the uncut line.
Without such a space, the break is between two characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

WHITE = b" \t\r\n\v\f"
LONGEST_SEPARATOR = 64
BLOCK = 2**20
LINE_BYTES = 2**26
"""Longer rows in line-based files are refused, because a whole row must be in memory."""


def reach_of(data_format: int) -> int | None:
    """Return how many bytes after its spans a task may read for data of a format; None for no limit."""
    return None if data_format == 1 else LINE_BYTES


class Line(NamedTuple):
    """A line with its line end, or a part of a line that exceeds the bound. `at` is the offset of its first byte,
    `whole` whether it is complete.
    """

    at: int
    data: bytes
    whole: bool


def line_break(file: BinaryIO, at: int, size: int, longest: int | None, stop: int | None = None) -> int:
    """Return the offset of the first break at or after byte `at` of a file of `size` bytes.

    If the first break is not before `stop`, any offset from `stop` on may be returned. A line of more than `longest`
    bytes also breaks between words; with None only at its end.
    """
    if at <= 0 or at >= size:
        return max(0, min(at, size))
    file.seek(at - 1)
    head = file.readline(BLOCK if longest is None else longest + 1)
    if longest is not None and len(head) > longest and not head.endswith(b"\n"):
        return at - 1 + word_break(head)
    end = at - 1 + len(head)
    while longest is None and head and not head.endswith(b"\n") and (stop is None or end < stop):
        head = file.readline(BLOCK)
        end += len(head)
    return end


def lines(file: BinaryIO, start: int, stop: int, longest: int | None) -> Iterator[Line]:
    """Yield the lines of bytes [start, stop) of a file, where both are breaks. Lines longer than `longest` bytes come
    in parts.

    From byte 0 on, the file is only read forwards, and `stop` may be beyond its end.
    """
    if start >= stop:
        return
    begins = True
    if start:
        file.seek(start - 1)
        begins = file.read(1) == b"\n"
    at = start
    carry = b""
    while at < stop:
        room = stop - at if longest is None else min(longest + 1, stop - at)
        data = carry + file.readline(room - len(carry))
        if not data:
            return
        is_ended = data.endswith(b"\n")
        over = len(data) < room
        carry = b""
        if longest is not None and len(data) > longest and not is_ended:
            cut = word_break(data)
            data, carry, over = data[:cut], data[cut:], False
        at += len(data)
        yield Line(at - len(data), data, begins and (is_ended or over or (at >= stop and not file.read(1))))
        begins = is_ended


def line_at(file: BinaryIO, at: int) -> bytes:
    """Return the start of the line that begins at byte `at`, long enough to recognise a separator; empty if none
    begins there.
    """
    if at:
        file.seek(at - 1)
        if file.read(1) != b"\n":
            return b""
    file.seek(at)
    return file.readline(LONGEST_SEPARATOR)


def line_number(file: BinaryIO, at: int) -> int:
    """Return the number, from 1, of the line that contains byte `at` of a newly opened file."""
    count = 1
    remaining = at
    while remaining > 0 and (block := file.read(min(remaining, BLOCK))):
        count += block.count(b"\n")
        remaining -= len(block)
    return count


def word_break(data: bytes) -> int:
    """Return where to cut a line that continues after `data`: before the last single space, else before the last
    character.
    """
    at = len(data) - 1
    while (at := data.rfind(b" ", 1, at)) > 0:
        if data[at - 1] not in WHITE and data[at + 1] not in WHITE:
            return at
    at = len(data) - 1
    while at > max(1, len(data) - 4) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at
