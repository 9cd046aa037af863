"""The files that hold rows: one file on a local file system; numbered parts on an object store, whose objects cannot
grow.

A part is named by the numbers it covers: `part-00000007` holds the eighth addition, `part-00000000-00000007` the
merged content of `part-00000000` to `part-00000007`. A part is stale if another part covers its numbers and more. So
a single put merges parts or truncates rows atomically. Removing stale parts afterwards only saves space, and a crash
at any point changes nothing.
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

MERGE_COUNT = 8
"""Number of parts of similar size that are merged; sizes are similar within this factor."""
MERGE_AT_MOST = 64
"""Maximum number of parts in one merge."""
MERGED_BYTES = 4 << 20
"""Parts of this size, in bytes, are not merged further."""


@dataclass(frozen=True)
class FileView:
    """The bytes of a file up to its size when the view was created."""

    path: str
    size: int

    def read(self, start: int, end: int) -> bytes:
        """See `View`."""
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)


class SingleRowFile:
    """A local file that grows. See `RowFiles`."""

    def __init__(self, path: str, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called before every change; it raises if changes are not allowed."""
        self._path = path
        self._check = check

    def view(self) -> FileView:
        """See `RowFiles`."""
        try:
            return FileView(self._path, os.stat(self._path).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return FileView(self._path, 0)

    def append(self, data: bytes) -> int:
        """See `RowFiles`."""
        self._check()
        with open(self._path, "ab+", buffering=0) as file:
            size = file.tell()
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                data = b"\n" + data  # a crash tore the last row, so the next one starts on its own line
            view = memoryview(data)
            try:
                while view:
                    view = view[file.write(view) or 0 :]
                os.fsync(file.fileno())
            except OSError:  # a full disk may have taken a part of the data; all of it will be written again
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
        self._check()
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

    def reopen(self) -> None:
        """See `RowFiles`. Nothing is cached for a local file."""


class Part(NamedTuple):
    """An object: the first and last number that it covers, and its size in bytes."""

    low: int
    high: int
    size: int

    @property
    def name(self) -> str:
        """Return the name of the object in the folder of parts."""
        return f"part-{self.low:08d}" + (f"-{self.high:08d}" if self.high > self.low else "")


class PartsView:
    """The bytes of the parts that existed when the view was created."""

    def __init__(self, files: NumberedRowFiles, parts: Sequence[Part]) -> None:
        self._files = files
        self._parts = parts
        self.size = sum(part.size for part in parts)

    def read(self, start: int, end: int) -> bytes:
        """See `View`. If parts were merged meanwhile, they are listed again: merging does not move bytes."""
        for _ in range(MERGE_COUNT):
            try:
                pieces = _within(self._parts, start, end)
                return b"".join(self._files.get(part, first, stop) for part, first, stop in pieces)
            except FileNotFoundError:
                self._parts = self._files.parts()
        raise FileNotFoundError(f"{self._files.path}: its parts are merged faster than they can be read")


class NumberedRowFiles:
    """Numbered parts below `path` of `fs`. See `RowFiles`. `call` calls a function of `fs` with retries."""

    def __init__(self, fs: Any, path: str, call: Callable[..., Any]) -> None:
        self._fs = fs
        self.path = path
        self._call = call
        self._parts_known: tuple[Part, ...] | None = None  # None before the first listing
        self._stale: list[Part] = []

    def view(self) -> PartsView:
        """See `RowFiles`."""
        return PartsView(self, self.parts())

    def parts(self) -> tuple[Part, ...]:
        """Return the parts that are not stale, in order."""
        return _current_and_stale(self._listed())[0]

    def get(self, part: Part, start: int, end: int) -> bytes:
        """Return bytes [start, end) of a part. Raises FileNotFoundError if it was merged and removed."""
        if (start, end) == (0, part.size):
            return bytes(self._call(self._fs.cat_file, f"{self.path}/{part.name}"))
        return bytes(self._call(self._fs.cat_file, f"{self.path}/{part.name}", start=start, end=end))

    def append(self, data: bytes) -> int:
        """See `RowFiles`. With a single writer, the next number is known without listing the parts."""
        if self._parts_known is None:
            self._open()
            last = self._parts()[-1:]
            torn = [part for part in last if part.size and self.get(part, part.size - 1, part.size) != b"\n"]
            data = b"\n" + data if torn else data
        while True:
            number = self._next()
            try:
                self._put(Part(number, number, len(data)), data)
                self._parts_known = (*self._parts(), Part(number, number, len(data)))
                break
            except FileExistsError:
                # This part is ours, but the answer to its put was lost. Only rows added since then remain to be
                # written.
                existing = bytes(self._call(self._fs.cat_file, f"{self.path}/part-{number:08d}"))
                self._parts_known = (*self._parts(), Part(number, number, len(existing)))
                data = data.removeprefix(existing)
                if not data:
                    break
        try:
            self._compact()
        except Exception as error:
            if not storage_failed(error):
                raise
            self._parts_known = None  # list the parts again before the next write
            return self.view().size
        return sum(part.size for part in self._parts())

    def cut(self, size: int) -> None:
        """See `RowFiles`. One put replaces the truncated part, and all parts after it, by the remainder."""
        self._open()
        self._splice(size, sum(part.size for part in self._parts()), b"")

    def rewrite(self, pieces: Sequence[tuple[int, int] | bytes]) -> None:
        """See `RowFiles`. Works from the end to the start, with one put for each gap."""
        self._open()
        after = sum(part.size for part in self._parts())
        new = b""
        for piece in reversed(pieces):
            if isinstance(piece, bytes):
                new = piece + new
                continue
            if new or piece[1] != after:
                self._splice(piece[1], after, new)
            after = piece[0]
            new = b""
        if new or after:
            self._splice(0, after, new)

    def remove(self) -> None:
        """See `RowFiles`."""
        for part in reversed(self._listed()):
            self._call(self._fs.rm_file, f"{self.path}/{part.name}")
        self._parts_known = None

    def reopen(self) -> None:
        """See `RowFiles`. A number that seems free may be covered by a part that another writer merged."""
        self._parts_known = None

    def _splice(self, start: int, end: int, data: bytes) -> None:
        """Replace bytes [start, end) by `data`: one new part replaces the parts that contain these bytes."""
        parts = self._parts()
        low = 0
        begin = 0
        if not parts:
            if data:
                self.append(data)
            return
        while low + 1 < len(parts) and begin + parts[low].size <= start:
            begin = begin + parts[low].size
            low = low + 1
        high = low
        reached = begin + parts[low].size
        while high + 1 < len(parts) and (
            reached < end or high == low
        ):  # take at least two parts, so that the new part's name is unique
            high, reached = high + 1, reached + parts[high + 1].size
        head, tail = (
            b"".join(self.get(part, first, stop) for part, first, stop in _within(parts, *span))
            for span in ((begin, start), (end, reached))
        )
        new = _with_newline(head) + data + tail
        number = parts[high].high if high > low else self._next()
        self._replace(low, high, Part(parts[low].low, number, len(new)), new)

    def _compact(self) -> None:
        """Merge parts of similar size once there are MERGE_COUNT of them."""
        parts = self._parts()
        for order in range(_order(MERGED_BYTES)):
            start = len(parts)
            while start and _order(parts[start - 1].size) <= order:
                start -= 1
            if len(parts) - start >= MERGE_COUNT:
                chosen = _to_merge(parts[start:])
                data = b"".join(self.get(part, 0, part.size) for part in chosen)
                merged = Part(chosen[0].low, chosen[-1].high, len(data))
                self._replace(start, start + len(chosen) - 1, merged, data)
                return

    def _replace(self, low: int, high: int, merged: Part, data: bytes) -> None:
        """Replace the parts at indices `low` to `high` by one that holds `data`."""
        parts = self._parts()
        self._put(merged, data)
        self._parts_known = (*parts[:low], merged, *parts[high + 1 :])
        self._stale += parts[low : high + 1]
        self._remove_stale()

    def _put(self, part: Part, data: bytes) -> None:
        self._call(create_object, self._fs, f"{self.path}/{part.name}", data)

    def _remove_stale(self) -> None:
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

    def _parts(self) -> tuple[Part, ...]:
        assert self._parts_known is not None
        return self._parts_known

    def _open(self) -> None:
        self._parts_known, self._stale = _current_and_stale(self._listed())

    def _next(self) -> int:
        return self._parts()[-1].high + 1 if self._parts() else 0

    def _listed(self) -> list[Part]:
        try:
            entries = self._call(self._fs.ls, self.path, detail=True)
        except FileNotFoundError:
            return []
        names = ((info["name"].rsplit("/", 1)[-1].split("-"), int(info["size"] or 0)) for info in entries)
        return sorted(
            Part(int(words[1]), int(words[-1]), size)
            for words, size in names
            if words[0] == "part" and 2 <= len(words) <= 3 and all(map(str.isdecimal, words[1:]))
        )


def _current_and_stale(parts: Iterable[Part]) -> tuple[tuple[Part, ...], list[Part]]:
    """Return the parts that hold rows, and the stale ones."""
    current: list[Part] = []
    stale: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.low, -part.high)):
        (stale if current and part.low <= current[-1].high else current).append(part)
    return tuple(current), stale


def _within(parts: Sequence[Part], start: int, end: int) -> list[tuple[Part, int, int]]:
    """Return where bytes [start, end) are: each part with its first byte and the byte after its last."""
    pieces = []
    at = 0
    for part in parts:
        low = max(start - at, 0)
        high = min(end - at, part.size)
        if low < high:
            pieces.append((part, low, high))
        at += part.size
    return pieces


def _order(size: int) -> int:
    """Return the order of magnitude of a size, to base MERGE_COUNT."""
    order = 0
    while size >= MERGE_COUNT:
        size = size // MERGE_COUNT
        order = order + 1
    return order


def _to_merge(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the first parts that together reach MERGED_BYTES: at least two, at most MERGE_AT_MOST."""
    size = 0
    for number, part in enumerate(parts[:MERGE_AT_MOST]):
        size += part.size
        if size > MERGED_BYTES and number >= 2:
            return parts[:number]
    return parts[:MERGE_AT_MOST]


def _with_newline(data: bytes) -> bytes:
    return data if not data or data.endswith(b"\n") else data + b"\n"


def _blocks(read: Callable[[int, int], bytes], start: int, end: int) -> Iterable[bytes]:
    while start < end:
        data = read(start, min(start + MERGED_BYTES, end))
        if not data:
            return
        yield data
        start += len(data)
