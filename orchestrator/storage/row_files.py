"""Where rows are stored: one file on a local file system, numbered parts on an object store, whose objects cannot grow.

A part is named by the numbers that it stands for: `part-00000007` for what was added as the eighth, and
`part-00000000-00000007` for what was `part-00000000` to `part-00000007` before. A part whose numbers another one has
too, among more, counts no longer: so parts are put together, and rows are cut off, by one put; what is removed
afterwards is only swept away, and a crash at any point changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.storage.atomic import replace_file
from orchestrator.storage.object_backend import create_object
from orchestrator.storage.retry import storage_failed

TOGETHER = 8
"""Parts of one order of magnitude that are put together."""
AT_ONCE = 64
"""Parts that are put together at most by one writing."""
ENOUGH = 4 << 20
"""Bytes of a part that is put together with no more others."""


@dataclass(frozen=True)
class FileView:
    """A file as long as it was when it was looked at."""

    path: str
    size: int

    def read(self, start: int, end: int) -> bytes:
        """See `View`."""
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)


class SingleRowFile:
    """A file that grows."""

    def __init__(self, path: str) -> None:
        self._path = path

    def view(self) -> FileView:
        """See `RowFiles`."""
        try:
            return FileView(self._path, os.stat(self._path).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return FileView(self._path, 0)

    def append(self, data: bytes) -> int:
        """See `RowFiles`."""
        with open(self._path, "ab+", buffering=0) as file:
            size = file.tell()
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                data = b"\n" + data  # a crash tore the last row: leave it alone on its line
            view = memoryview(data)
            try:
                while view:
                    view = view[file.write(view) or 0 :]
                os.fsync(file.fileno())
            except OSError:  # a full disk takes a part; none of it may stay, since all will be written again
                file.truncate(size)
                raise
        return size + len(data)

    def cut(self, size: int) -> None:
        """See `RowFiles`."""
        with open(self._path, "rb+") as file:
            file.truncate(size)
            os.fsync(file.fileno())

    def rewrite(self, pieces: Sequence[tuple[int, int] | bytes]) -> None:
        """See `RowFiles`."""
        view = self.view()

        def content() -> Iterator[bytes]:
            for piece in pieces:
                data = b""
                for data in [piece] if isinstance(piece, bytes) else _blocks(view.read, *piece):
                    yield data
                if data[-1:] != b"\n":
                    yield b"\n"

        replace_file(self._path, content())

    def remove(self) -> None:
        """See `RowFiles`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class Part(NamedTuple):
    """An object: the first and last number that it stands for, and its bytes."""

    low: int
    high: int
    size: int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return f"part-{self.low:08d}" + (f"-{self.high:08d}" if self.high > self.low else "")


class PartsView:
    """Parts as they were listed."""

    def __init__(self, tape: NumberedRowFiles, parts: Sequence[Part]) -> None:
        self._tape, self._parts = tape, parts
        self.size = sum(part.size for part in parts)

    def read(self, start: int, end: int) -> bytes:
        """See `View`. Parts that were put together since are found again, since no byte has moved."""
        for _ in range(TOGETHER):
            try:
                return b"".join(self._tape.get(*found) for found in _within(self._parts, start, end))
            except FileNotFoundError:
                self._parts = self._tape.parts()
        raise FileNotFoundError(f"{self._tape.path}: its parts are exchanged faster than they can be read")


class NumberedRowFiles:
    """Numbered parts below `path`; `call` makes every request, within its bounds."""

    def __init__(self, fs: Any, path: str, call: Callable[..., Any]) -> None:
        self._fs, self.path, self._call = fs, path, call
        self._mine: tuple[Part, ...] | None = None  # as far as this writer knows, without another listing
        self._stale: list[Part] = []

    def view(self) -> PartsView:
        """See `RowFiles`."""
        return PartsView(self, self.parts())

    def parts(self) -> tuple[Part, ...]:
        """The parts that count, in order."""
        return _split(self._listed())[0]

    def get(self, part: Part, start: int, end: int) -> bytes:
        """Bytes of a part. Raises FileNotFoundError if it is there no more."""
        if (start, end) == (0, part.size):
            return bytes(self._call(self._fs.cat_file, f"{self.path}/{part.name}"))
        return bytes(self._call(self._fs.cat_file, f"{self.path}/{part.name}", start=start, end=end))

    def append(self, data: bytes) -> int:
        """See `RowFiles`. There is one writer, so its number is known from the last one, without a listing."""
        if self._mine is None:
            self._open()
            last = self._known()[-1:]
            torn = [part for part in last if part.size and self.get(part, part.size - 1, part.size) != b"\n"]
            data = b"\n" + data if torn else data
        while True:
            number = self._next()
            try:
                self._put(Part(number, number, len(data)), data)
                self._mine = (*self._known(), Part(number, number, len(data)))
                break
            except FileExistsError:
                # Ours, if the answer to an earlier try was lost; what has come since then is still to be written.
                standing = bytes(self._call(self._fs.cat_file, f"{self.path}/part-{number:08d}"))
                self._mine = (*self._known(), Part(number, number, len(standing)))
                data = data.removeprefix(standing)
                if not data:
                    break
        try:
            self._tidy()
        except Exception as error:
            if not storage_failed(error):
                raise
            self._mine = None  # what is there is looked up again
            return self.view().size
        return sum(part.size for part in self._known())

    def cut(self, size: int) -> None:
        """See `RowFiles`. One put has what stays of the part that is cut, in the place of all that follow."""
        self._open()
        self._splice(size, sum(part.size for part in self._known()), b"")

    def rewrite(self, pieces: Sequence[tuple[int, int] | bytes]) -> None:
        """See `RowFiles`; place by place, the last one first."""
        self._open()
        after, new = sum(part.size for part in self._known()), b""
        for piece in reversed(pieces):
            if isinstance(piece, bytes):
                new = piece + new
                continue
            if new or piece[1] != after:
                self._splice(piece[1], after, new)
            after, new = piece[0], b""
        if new or after:
            self._splice(0, after, new)

    def remove(self) -> None:
        """See `RowFiles`."""
        for part in reversed(self._listed()):
            self._call(self._fs.rm_file, f"{self.path}/{part.name}")
        self._mine = None

    def _splice(self, start: int, end: int, data: bytes) -> None:
        """Put `data` in the place of these bytes: one new part in the place of those that they are in."""
        parts, low, begin = self._known(), 0, 0
        if not parts:
            if data:
                self.append(data)
            return
        while low + 1 < len(parts) and begin + parts[low].size <= start:
            begin, low = begin + parts[low].size, low + 1
        high, reached = low, begin + parts[low].size
        while high + 1 < len(parts) and (
            reached < end or high == low
        ):  # two at least: a name that is not taken
            high, reached = high + 1, reached + parts[high + 1].size
        head, tail = (
            b"".join(self.get(*found) for found in _within(parts, *span))
            for span in ((begin, start), (end, reached))
        )
        new = _ended(head) + data + tail
        number = parts[high].high if high > low else self._next()
        self._replace(low, high, Part(parts[low].low, number, len(new)), new)

    def _tidy(self) -> None:
        """Put parts of like size together where there are too many, and sweep away what counts no longer."""
        parts = self._known()
        for order in range(_order(ENOUGH)):
            start = len(parts)
            while start and _order(parts[start - 1].size) <= order:
                start -= 1
            if len(parts) - start >= TOGETHER:
                chosen = _first(parts[start:])
                data = b"".join(self.get(part, 0, part.size) for part in chosen)
                whole = Part(chosen[0].low, chosen[-1].high, len(data))
                self._replace(start, start + len(chosen) - 1, whole, data)
                return

    def _replace(self, low: int, high: int, whole: Part, data: bytes) -> None:
        """Put a part in the place of the known ones from number `low` to number `high`."""
        parts = self._known()
        self._put(whole, data)
        self._mine = (*parts[:low], whole, *parts[high + 1 :])
        self._stale += parts[low : high + 1]
        self._sweep()

    def _put(self, part: Part, data: bytes) -> None:
        self._call(create_object, self._fs, f"{self.path}/{part.name}", data)

    def _sweep(self) -> None:
        while self._stale:
            try:
                self._call(self._fs.rm_file, f"{self.path}/{self._stale[-1].name}")
            except FileNotFoundError:
                pass
            except Exception as error:
                if not storage_failed(error):
                    raise
                return
            self._stale.pop()

    def _known(self) -> tuple[Part, ...]:
        assert self._mine is not None
        return self._mine

    def _open(self) -> None:
        self._mine, self._stale = _split(self._listed())

    def _next(self) -> int:
        return self._known()[-1].high + 1 if self._known() else 0

    def _listed(self) -> list[Part]:
        try:
            found = self._call(self._fs.ls, self.path, detail=True)
        except FileNotFoundError:
            return []
        names = ((info["name"].rsplit("/", 1)[-1].split("-"), int(info["size"] or 0)) for info in found)
        return sorted(
            Part(int(words[1]), int(words[-1]), size)
            for words, size in names
            if words[0] == "part" and 2 <= len(words) <= 3 and all(map(str.isdigit, words[1:]))
        )


def _split(parts: Iterable[Part]) -> tuple[tuple[Part, ...], list[Part]]:
    """Those that count, and those whose numbers another one has too."""
    counts: list[Part] = []
    stale: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.low, -part.high)):
        (stale if counts and part.low <= counts[-1].high else counts).append(part)
    return tuple(counts), stale


def _within(parts: Sequence[Part], start: int, end: int) -> list[tuple[Part, int, int]]:
    """Where bytes `start` to `end` are: parts, and from where to where in each."""
    found, at = [], 0
    for part in parts:
        low, high = max(start - at, 0), min(end - at, part.size)
        if low < high:
            found.append((part, low, high))
        at += part.size
    return found


def _order(size: int) -> int:
    """The order of magnitude of a size."""
    order = 0
    while size >= TOGETHER:
        size, order = size // TOGETHER, order + 1
    return order


def _first(parts: Sequence[Part]) -> Sequence[Part]:
    """The first of these that together are one part that is large enough; at least two."""
    size = 0
    for number, part in enumerate(parts[:AT_ONCE]):
        size += part.size
        if size > ENOUGH and number >= 2:
            return parts[:number]
    return parts[:AT_ONCE]


def _ended(data: bytes) -> bytes:
    return data if not data or data.endswith(b"\n") else data + b"\n"


def _blocks(read: Callable[[int, int], bytes], start: int, end: int) -> Iterable[bytes]:
    while start < end:
        data = read(start, min(start + ENOUGH, end))
        if not data:
            return
        yield data
        start += len(data)
