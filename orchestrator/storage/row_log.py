"""Rows on storage: appended, truncated, and read from either end in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from orchestrator.storage.row_line import Row, decode, encode

BLOCK, MAX_BLOCK = 1 << 16, 1 << 22
"""Bytes of one read: initially, and at most after doubling."""


class View(Protocol):
    """The bytes of a row file as they were when the view was created."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), fewer if the file has been truncated since."""


class RowFiles(Protocol):
    """The storage of a row file's bytes. Every method may raise OSError or an error of the store's client."""

    def view(self) -> View:
        """Return what is stored now."""

    def append(self, data: bytes) -> int:
        """Add all of `data` or nothing; return the new size."""

    def cut(self, size: int) -> None:
        """Keep only the first `size` bytes."""

    def rewrite(self, pieces: Sequence[tuple[int, int] | bytes]) -> None:
        """Replace the content by these pieces, in order: ranges (start, end) of the old content, and new bytes."""

    def remove(self) -> None:
        """Remove the file or all its parts."""

    def reopen(self) -> None:
        """Check again what is stored before the next change, because another process may have written."""


class StoredLine(NamedTuple):
    """A nonempty line: its first byte, the byte after its end, and its row, None if it is torn or altered."""

    start: int
    end: int
    row: Row | None


class Extent(NamedTuple):
    """Consecutive stored lines, from the row of step `first` to that of step `last`."""

    start: int
    end: int
    first: int
    last: int


class RowLog:
    """One row file. Only one writer is allowed. Others may read at the same time, in this process or elsewhere."""

    def __init__(self, files: RowFiles, name: str) -> None:
        self._files = files
        self._name = name
        self.cuts = 0
        """Counts removals of rows. A reader in another thread compares it to notice that its position became invalid.
        """

    def append(self, rows: Iterable[Row]) -> int:
        """Add rows and return the file's size in bytes. On return all rows are stored; after an error, none is."""
        data = b"".join(map(encode, rows))
        return self._files.append(data) if data else self.size()

    def size(self) -> int:
        """Size in bytes."""
        return self._files.view().size

    def forward(self, start: int = 0) -> Iterator[StoredLine]:
        """Yield the lines from byte `start` on, oldest first."""
        view = self._files.view()
        rest = b""
        offset = start
        block = BLOCK
        at = start
        while at < view.size and (data := view.read(at, min(at + block, view.size))):
            at = at + len(data)
            block = min(2 * block, MAX_BLOCK)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.strip():
                    yield self._stored_line(view, offset, line)
                offset += len(line) + 1
        if rest.strip():
            yield self._stored_line(view, offset, rest)

    def backward(self, end: int | None = None) -> Iterator[StoredLine]:
        """Yield the lines before byte `end`, newest first."""
        view = self._files.view()
        rest = b""
        block = BLOCK
        at = view.size if end is None else min(end, view.size)
        while at:
            start = max(at - block, 0)
            data = view.read(start, at)
            if len(data) < at - start:
                return  # the file was truncated in the meantime
            at = start
            block = min(2 * block, MAX_BLOCK)
            data = data + rest
            cut = data.find(b"\n") + 1 if start else 0
            if start and not cut:
                rest = data
                continue
            rest = data[:cut]
            line_start = start + len(data)
            lines = data[cut:].split(b"\n")
            for line in reversed(lines):
                line_start -= len(line)
                if line.strip():
                    yield self._stored_line(view, line_start, line)
                line_start -= 1

    def rows(self) -> Iterator[Row]:
        """Yield all rows, oldest first."""
        return (stored.row for stored in self.forward() if stored.row is not None)

    def last(self) -> Row | None:
        """Return the row that was appended last; None without rows."""
        return next((stored.row for stored in self.backward() if stored.row is not None), None)

    def newest(self) -> Iterator[Row]:
        """Yield valid rows, newest first. A row supersedes all earlier rows with its step or a later one."""
        lowest: float = float("inf")
        for stored in self.backward():
            if stored.row is not None and stored.row["step"] < lowest:
                lowest = stored.row["step"]
                yield stored.row

    def after(self, step: int, key: str = "step") -> Iterator[Row]:
        """Yield the rows after the last row whose step, or `key`, is at most `step`, oldest first."""
        ends_before = (stored.end for stored in self.backward() if stored.row and stored.row[key] <= step)
        start = next(ends_before, 0) if step >= 0 else 0
        return (stored.row for stored in self.forward(start) if stored.row is not None)

    def cut(self, step: int) -> int:
        """Remove all lines after the last row whose step is at most `step`. Return that row's step; 0 if no row
        remains.
        """
        kept = next((p for p in self.backward() if p.row is not None and p.row["step"] <= step), None)
        size = self.size()
        if (kept.end if kept else 0) < size:
            self.cuts += 1
            self._files.cut(kept.end if kept else 0)
        return kept.row["step"] if kept and kept.row else 0

    def extents(self, start: int = 0) -> list[Extent]:
        """Return the valid rows from byte `start` on, grouped into runs of consecutive steps in consecutive lines."""
        runs: list[list[int]] = []
        for stored in self.backward():
            if stored.start < start:
                break
            step = stored.row["step"] if stored.row is not None else None
            if step is None or (runs and step >= runs[-1][2]):
                continue
            if runs and step == runs[-1][2] - 1 and stored.end == runs[-1][0]:
                runs[-1][0], runs[-1][2] = stored.start, step
            else:
                runs.append([stored.start, stored.end, step, step])
        return [Extent(*extent) for extent in reversed(runs)]

    def insert(self, extents: Sequence[Extent], rows: Sequence[Row]) -> None:
        """Rewrite the file: the rows of `extents`, with `rows` inserted by step."""
        pieces: list[tuple[int, int] | bytes] = []
        waiting = sorted(rows, key=lambda row: int(row["step"]))
        for extent in extents:
            before = [row for row in waiting if row["step"] < extent.first]
            waiting = waiting[len(before) :]
            pieces += [b"".join(map(encode, before))] if before else []
            pieces.append((extent.start, extent.end))
        pieces += [b"".join(map(encode, waiting))] if waiting else []
        self.cuts += 1
        self._files.rewrite(pieces)

    def remove(self) -> None:
        """Remove the file."""
        self._files.remove()

    def reopen(self) -> None:
        """See `RowFiles.reopen`."""
        self._files.reopen()

    def _stored_line(self, view: View, start: int, line: bytes) -> StoredLine:
        return StoredLine(start, min(start + len(line) + 1, view.size), decode(line.strip(), self._name))


def gaps(extents: Sequence[Extent], first: int, last: int) -> list[tuple[int, int]]:
    """Return the steps from `first` to `last` that are in no extent, as pairs (first, last) of each gap."""
    missing = []
    wanted = first
    for extent in extents:
        if extent.first > wanted:
            missing.append((wanted, min(extent.first - 1, last)))
        wanted = max(wanted, extent.last + 1)
    if wanted <= last:
        missing.append((wanted, last))
    return missing


def missing_numbers(rows: Iterable[Row]) -> list[list[int]]:
    """Return the missing numbers of rows, from 1 on, as pairs (first, last) of each gap.

    A row has its number under `number`. A row without one, as in files of earlier versions, follows the row before.
    """
    missing = []
    last = 0
    for row in rows:
        number = row.get("number") or last + 1
        if number > last + 1:
            missing.append([last + 1, number - 1])
        last = max(last, number)
    return missing


def steps_text(missing: Sequence[Any]) -> str:
    """Return missing steps as text: the first five gaps, and how many more there are."""
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in missing[:5]]
    return ", ".join(shown) + (f" and {len(missing) - 5} more places" if len(missing) > 5 else "")
