"""Text that grows at its end, as what a rank prints: files of bounded size in a folder of a run directory.

`rank-0.log` is continued in `rank-0.log.1`, `rank-0.log.2` and so on; of a long one the beginning and the end are kept.
On an object store, whose objects cannot grow, the last file is written again as a whole.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.retry import Retry
from orchestrator.storage.uri import is_local

PART_BYTES = 1 << 20
"""Bytes after which another file is begun."""
PARTS = 16
"""Files that are kept at the end, beside the first."""
TIMEOUT = 15.0
"""Seconds for a small call to a remote store."""
RETRY = Retry(attempts=3, first=0.2, cap=2.0, deadline=20.0)
_PART = re.compile(r"(?P<name>.+\.log)(\.(?P<part>\d+))?")


class TextLog:
    """Writes one text, from its beginning; nobody else writes it."""

    def __init__(self, folder: str, name: str) -> None:
        """Of the text `name` (which ends in .log) in `folder`, two folders below the run directory."""
        self._local = is_local(folder)
        self._fs, self._folder = open_file_system(folder, TIMEOUT)
        self._name = name
        self._part = 0
        self._size = 0
        self._held = b""

    def append(self, data: bytes) -> None:
        """Add to the end. Raises OSError and errors of the store's client; then nothing was added, or part of it on a
        local file system. A run directory that is gone, as one that was moved, is not made anew."""
        while data:
            if self._size >= PART_BYTES:
                self._begin_part()
            now = data[: PART_BYTES - self._size]
            data = data[PART_BYTES - self._size :]
            path = posixpath.join(self._folder, _file(self._name, self._part))
            if self._local:
                for folder in (posixpath.dirname(self._folder), self._folder):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder)
                with open(path, "ab") as file:
                    file.write(now)
            else:
                RETRY(self._fs.pipe_file, path, self._held + now)
                self._held += now
            self._size += len(now)

    def _begin_part(self) -> None:
        self._part = self._part + 1
        self._size = 0
        self._held = b""
        if self._part > PARTS:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(posixpath.join(self._folder, _file(self._name, self._part - PARTS)))


def _file(name: str, part: int) -> str:
    return f"{name}.{part}" if part else name


class TextLogs:
    """Reads the texts in a folder. Raises OSError and errors of the store's client."""

    def __init__(self, folder: str) -> None:
        self._uri = folder
        self._fs, self._folder = open_file_system(folder, TIMEOUT)

    def parts(self) -> dict[str, list[int]]:
        """The texts there are, in order, with the numbers of their files; none if there is no such folder."""
        found: dict[str, list[int]] = {}
        for match in filter(None, map(_PART.fullmatch, self.folders())):
            found.setdefault(match["name"], []).append(int(match["part"] or 0))
        return {name: sorted(found[name]) for name in sorted(found, key=_by_number)}

    def folders(self) -> list[str]:
        """The names of the folders in this one, in order."""
        try:
            found: list[Any] = RETRY(self._fs.ls, self._folder, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((posixpath.basename(path.rstrip("/")) for path in found), key=_by_number)

    def inside(self, folder: str) -> TextLogs:
        """The texts of one of the folders."""
        return TextLogs(posixpath.join(self._uri, folder))

    def keep(self, count: int) -> None:
        """Remove all texts but the last `count`."""
        for name, numbers in list(self.parts().items())[: -count or None]:
            for number in numbers:
                RETRY(self._fs.rm_file, posixpath.join(self._folder, _file(name, number)))

    def remove(self, folder: str) -> None:
        """Remove the texts of one of the folders."""
        inside = self.inside(folder)
        inside.keep(0)
        with contextlib.suppress(FileNotFoundError):  # where folders are made, as on a local file system
            self._fs.rmdir(inside._folder)

    def read(self, name: str, numbers: Sequence[int], part: int = 0, at: int = 0) -> tuple[bytes, int, int]:
        """What there is of a text, whose files have these numbers, from byte `at` of file `part` on, and the place
        after it. Files that are not there any more are passed over."""
        text = b""
        for number in numbers:
            if number < part:
                continue
            start = at if number == part else 0
            path = posixpath.join(self._folder, _file(name, number))
            with contextlib.suppress(FileNotFoundError):
                new = bytes(RETRY(self._fs.cat_file, path, start, start + PART_BYTES))
                text = text + new
                part = number
                at = start + len(new)
        return text, part, at


def _by_number(name: str) -> tuple[str, int]:
    """So that rank-10 comes after rank-9."""
    digits = re.search(r"\d+", name)
    return (name[: digits.start()], int(digits[0])) if digits else (name, -1)
