"""The lines of a stretch of a file, none of which takes more memory than a bound.

A file is cut at bytes; the text of a stretch begins and ends at the breaks that follow these bytes. A break is the end
of a line. Where none comes within the bound it is in front of a space that stands alone between two words, the last one
within the bound, since there nearly all tokenizers begin another token anyway: the tokens are then those of the uncut
line. Where there is no such space either, the cut is between two characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

WHITE = b" \t\r\n\v\f"
LONGEST_SEPARATOR = 64
BLOCK = 2**20


class Line(NamedTuple):
    """A line with its end, or a part of one that is longer than the bound. `at` is its first byte's place in the file;
    `whole` tells which it is."""

    at: int
    data: bytes
    whole: bool


def line_break(file: BinaryIO, at: int, size: int, longest: int | None) -> int:
    """Where the text begins of a stretch that is cut at byte `at` of a file of `size` bytes.

    With `longest` None only the end of a line is a break.
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
    """The lines of bytes [start, stop) of a file, both breaks; those longer than `longest` bytes in parts."""
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
    """The beginning of the line that begins at byte `at`, long enough to tell a separator; empty in a line's middle."""
    if at:
        file.seek(at - 1)
        if file.read(1) != b"\n":
            return b""
    file.seek(at)
    return file.readline(LONGEST_SEPARATOR)


def line_number(file: BinaryIO, at: int) -> int:
    """The number, from 1, of the line that byte `at` is in."""
    file.seek(0)
    count, left = 1, at
    while left > 0 and (block := file.read(min(left, BLOCK))):
        count += block.count(b"\n")
        left -= len(block)
    return count


def word_break(data: bytes) -> int:
    """Where to cut a line that goes on after `data`: before the last space that stands alone, else a character."""
    at = len(data) - 1
    while (at := data.rfind(b" ", 1, at)) > 0:
        if data[at - 1] not in WHITE and data[at + 1] not in WHITE:
            return at
    at = len(data) - 1
    while at > max(1, len(data) - 4) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _line_ends(file: BinaryIO, stop: int) -> bool:
    """Whether nothing comes after byte `stop`: a file's last line needs no line end."""
    file.seek(stop)
    return not file.read(1)
