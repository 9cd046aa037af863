"""Text that grows at its end, such as a rank's output: files of bounded size in a folder of a run directory.

`rank-0.log` continues in `rank-0.log.1`, `rank-0.log.2` and so on. A long text is shortened to its beginning and its
end. Objects in a store cannot grow, so there the last file is rewritten as a whole.
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
"""Bytes after which a new file is started."""
PARTS = 16
"""Number of files kept at the end, besides the first."""
TIMEOUT = 15.0
"""Seconds for a small call to a remote store."""
RETRY = Retry(attempts=3, first=0.2, cap=2.0, deadline=20.0)
_PART = re.compile(r"(?P<name>.+\.log)(\.(?P<part>\d+))?")


class TextLog:
    """Writes one text, from its beginning. There must be no other writer."""

    def __init__(self, folder: str, name: str) -> None:
        """The text `name` (which ends in .log) in `folder`, two folders below the run directory."""
        self._local = is_local(folder)
        self._fs, self._folder = open_file_system(folder, TIMEOUT)
        self._name = name
        self._part = 0
        self._size = 0
        self._held = b""

    def append(self, data: bytes) -> None:
        """Add to the end. Raises OSError and errors of the store's client; then nothing was added, or part of it on a
        local file system.

        A run directory that no longer exists, for example because it was moved, is not created again.
        """
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
        """Return the texts, in order, with the numbers of their files; empty if the folder does not exist."""
        numbers_of: dict[str, list[int]] = {}
        for match in filter(None, map(_PART.fullmatch, self.folders())):
            numbers_of.setdefault(match["name"], []).append(int(match["part"] or 0))
        return {name: sorted(numbers_of[name]) for name in sorted(numbers_of, key=_by_number)}

    def folders(self) -> list[str]:
        """Return the names of the folders in this one, in order."""
        try:
            entries: list[Any] = RETRY(self._fs.ls, self._folder, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((posixpath.basename(path.rstrip("/")) for path in entries), key=_by_number)

    def inside(self, folder: str) -> TextLogs:
        """Return the texts of one of the folders."""
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
        # only where folders exist by themselves, as on a local file system
        with contextlib.suppress(FileNotFoundError):
            self._fs.rmdir(inside._folder)

    def read(self, name: str, numbers: Sequence[int], part: int = 0, at: int = 0) -> tuple[bytes, int, int]:
        """Return a text from byte `at` of file `part` on, and the position after it.

        `numbers` are the numbers of the text's files. Files that no longer exist are skipped.
        """
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
    """Return a sort key that puts rank-10 after rank-9."""
    digits = re.search(r"\d+", name)
    return (name[: digits.start()], int(digits[0])) if digits else (name, -1)
