"""Rows on storage: added at the end, cut from the end, and read from either end without holding them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from orchestrator.storage.row_line import Row, decode, encode

BLOCK, LARGEST = 1 << 16, 1 << 22
"""Bytes that are read at once: at first, and at most."""


class View(Protocol):
    """The bytes of a file of rows as they were when it was looked at."""

    @property
    def size(self) -> int:
        """How many there are."""

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`, fewer if the file has been cut since."""


class RowFiles(Protocol):
    """Bytes that are added at the end and cut from the end. All of it may raise OSError."""

    def view(self) -> View:
        """What is stored now."""

    def append(self, data: bytes) -> int:
        """Add `data`, whole or not at all; the size then."""

    def cut(self, size: int) -> None:
        """Drop all but the first `size` bytes."""

    def rewrite(self, pieces: Sequence[tuple[int, int] | bytes]) -> None:
        """Let these be the bytes: ranges of what there is, in order, and new ones between them."""

    def remove(self) -> None:
        """Remove everything."""


class Placed(NamedTuple):
    """A line that is not empty: where it begins and ends, and its row, None if it is none."""

    start: int
    end: int
    row: Row | None


class Extent(NamedTuple):
    """Lines that follow each other on storage, from the row of step `first` to that of step `last`."""

    start: int
    end: int
    first: int
    last: int


class RowLog:
    """One file of rows. There is one writer; others may read meanwhile, in this process and elsewhere."""

    def __init__(self, tape: RowFiles, name: str) -> None:
        self._tape, self._name = tape, name
        self.cuts = 0
        """How often rows were taken away: who reads in another thread sees by it that its place is no more."""

    def append(self, rows: Iterable[Row]) -> int:
        """Add rows. They are stored when this returns; if it raises, none of them is. Returns the size in bytes."""
        data = b"".join(map(encode, rows))
        return self._tape.append(data) if data else self.size()

    def size(self) -> int:
        """Bytes that are stored."""
        return self._tape.view().size

    def forward(self, start: int = 0) -> Iterator[Placed]:
        """The lines from byte `start` on, oldest first."""
        view, rest, place, block = self._tape.view(), b"", start, BLOCK
        at = start
        while at < view.size and (data := view.read(at, min(at + block, view.size))):
            at, block = at + len(data), min(2 * block, LARGEST)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.strip():
                    yield self._placed(view, place, line)
                place += len(line) + 1
        if rest.strip():
            yield self._placed(view, place, rest)

    def backward(self, end: int | None = None) -> Iterator[Placed]:
        """The lines before byte `end`, newest first."""
        view, rest, block = self._tape.view(), b"", BLOCK
        at = view.size if end is None else min(end, view.size)
        while at:
            start = max(at - block, 0)
            data = view.read(start, at)
            if len(data) < at - start:
                return  # it has been cut since
            at, block, data = start, min(2 * block, LARGEST), data + rest
            cut = data.find(b"\n") + 1 if start else 0
            if start and not cut:
                rest = data
                continue
            rest, place = data[:cut], start + len(data)
            lines = data[cut:].split(b"\n")
            for line in reversed(lines):
                place -= len(line)
                if line.strip():
                    yield self._placed(view, place, line)
                place -= 1

    def rows(self) -> Iterator[Row]:
        """All rows, oldest first."""
        return (placed.row for placed in self.forward() if placed.row is not None)

    def last(self) -> Row | None:
        """The row that was added last, None if there is none."""
        return next((placed.row for placed in self.backward() if placed.row is not None), None)

    def newest(self) -> Iterator[Row]:
        """Rows that count, newest first: a row takes the place of all before it with its step or a later one."""
        least: float = float("inf")
        for placed in self.backward():
            if placed.row is not None and placed.row["step"] < least:
                least = placed.row["step"]
                yield placed.row

    def after(self, step: int) -> Iterator[Row]:
        """Rows behind the newest one that is of `step` or an earlier one, oldest first."""
        found = (placed.end for placed in self.backward() if placed.row and placed.row["step"] <= step)
        start = next(found, 0) if step >= 0 else 0
        return (placed.row for placed in self.forward(start) if placed.row is not None)

    def cut(self, step: int) -> int:
        """Drop all behind the newest row that is of `step` or an earlier one; the step of that one, 0 if there is
        none."""
        kept = next((p for p in self.backward() if p.row is not None and p.row["step"] <= step), None)
        size = self.size()
        if (kept.end if kept else 0) < size:
            self.cuts += 1
            self._tape.cut(kept.end if kept else 0)
        return kept.row["step"] if kept and kept.row else 0

    def extents(self, start: int = 0) -> list[Extent]:
        """The rows that count behind byte `start`, as far as they follow each other by step and by place."""
        found: list[list[int]] = []
        for placed in self.backward():
            if placed.start < start:
                break
            step = placed.row["step"] if placed.row is not None else None
            if step is None or (found and step >= found[-1][2]):
                continue
            if found and step == found[-1][2] - 1 and placed.end == found[-1][0]:
                found[-1][0], found[-1][2] = placed.start, step
            else:
                found.append([placed.start, placed.end, step, step])
        return [Extent(*extent) for extent in reversed(found)]

    def insert(self, extents: Sequence[Extent], rows: Sequence[Row]) -> None:
        """Let the rows of the file be those of `extents`, with `rows` in their places between them."""
        pieces: list[tuple[int, int] | bytes] = []
        waiting = sorted(rows, key=lambda row: int(row["step"]))
        for extent in extents:
            before = [row for row in waiting if row["step"] < extent.first]
            waiting = waiting[len(before) :]
            pieces += [b"".join(map(encode, before))] if before else []
            pieces.append((extent.start, extent.end))
        pieces += [b"".join(map(encode, waiting))] if waiting else []
        self.cuts += 1
        self._tape.rewrite(pieces)

    def remove(self) -> None:
        """Remove the file."""
        self._tape.remove()

    def _placed(self, view: View, start: int, line: bytes) -> Placed:
        return Placed(start, min(start + len(line) + 1, view.size), decode(line.strip(), self._name))


def gaps(extents: Sequence[Extent], first: int, last: int) -> list[tuple[int, int]]:
    """The steps from `first` to `last` that extents do not hold, as pairs of the first and the last missing one."""
    missing, wanted = [], first
    for extent in extents:
        if extent.first > wanted:
            missing.append((wanted, min(extent.first - 1, last)))
        wanted = max(wanted, extent.last + 1)
    if wanted <= last:
        missing.append((wanted, last))
    return missing


def told(missing: Sequence[Any]) -> str:
    """Missing steps in words."""
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in missing[:5]]
    return ", ".join(shown) + (f" and {len(missing) - 5} more places" if len(missing) > 5 else "")
