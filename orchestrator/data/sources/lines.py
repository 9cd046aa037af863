"""The lines of a range of bytes of a file, with bounded memory.

A file is divided at arbitrary bytes; the text of a range starts and ends at the first break after these bytes. A break
is the end of a line. If no line ends within the bound, the break is before the last single space between two words
within the bound: nearly all tokenizers start a new token there, so that the tokens are those of the uncut line. If
there is no such space either, the break is between two characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

WHITE = b" \t\r\n\v\f"
LONGEST_SEPARATOR = 64
BLOCK = 2**20


class Line(NamedTuple):
    """A line with its line end, or a part of one that is longer than the bound. `at` is the offset of its first byte;
    `whole` is whether it is a full line."""

    at: int
    data: bytes
    whole: bool


def line_break(file: BinaryIO, at: int, size: int, longest: int | None) -> int:
    """The offset of the first break at or after byte `at` of a file of `size` bytes.

    A line of more than `longest` bytes also breaks between words; with None only at its end.
    """
    if at <= 0 or at >= size:
        return max(0, min(at, size))
    file.seek(at - 1)
    head = file.readline(BLOCK if longest is None else longest + 1)
    if longest is not None and len(head) > longest and not head.endswith(b"\n"):
        return at - 1 + word_break(head)
    end = at - 1 + len(head)
    while longest is None and head and not head.endswith(b"\n"):
        head = file.readline(BLOCK)
        end += len(head)
    return end


def lines(file: BinaryIO, start: int, stop: int, longest: int | None) -> Iterator[Line]:
    """The lines of bytes [start, stop) of a file, where both are breaks; lines longer than `longest` bytes in parts."""
    if start >= stop:
        return
    file.seek(max(start - 1, 0))
    begins = start == 0 or file.read(1) == b"\n"
    at = start
    file.seek(at)
    while at < stop:
        room = stop - at if longest is None else min(longest + 1, stop - at)
        data = file.readline(room)
        if not data:
            return
        ended = data.endswith(b"\n")
        if longest is not None and len(data) > longest and not ended:
            data = data[: word_break(data)]
            file.seek(at + len(data))
        at += len(data)
        yield Line(at - len(data), data, begins and (ended or (at >= stop and _line_ends(file, stop))))
        begins = ended


def line_at(file: BinaryIO, at: int) -> bytes:
    """The start of the line that begins at byte `at`, long enough to recognise a separator; empty if none begins
    there."""
    if at:
        file.seek(at - 1)
        if file.read(1) != b"\n":
            return b""
    file.seek(at)
    return file.readline(LONGEST_SEPARATOR)


def line_number(file: BinaryIO, at: int) -> int:
    """The number, from 1, of the line with byte `at`."""
    file.seek(0)
    count, left = 1, at
    while left > 0 and (block := file.read(min(left, BLOCK))):
        count += block.count(b"\n")
        left -= len(block)
    return count


def word_break(data: bytes) -> int:
    """Where to cut a line that continues after `data`: before the last single space, else before the last character."""
    at = len(data) - 1
    while (at := data.rfind(b" ", 1, at)) > 0:
        if data[at - 1] not in WHITE and data[at + 1] not in WHITE:
            return at
    at = len(data) - 1
    while at > max(1, len(data) - 4) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _line_ends(file: BinaryIO, stop: int) -> bool:
    """Whether the file ends at byte `stop`: its last line needs no line end."""
    file.seek(stop)
    return not file.read(1)
