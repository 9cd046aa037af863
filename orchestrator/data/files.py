"""Small files of prepared data on any file system, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from typing import Any

from orchestrator.job.errors import InputError
from orchestrator.storage.open_backend import open_backend
from orchestrator.storage.posix_backend import PosixBackend
from orchestrator.storage.retry import Retry
from orchestrator.storage.uri import check_uri

DRAFT = re.compile(r".+\.[0-9a-f]{32}\.tmp")
"""Names of files on a disk that are not whole yet."""
STALE = 600.0
"""Seconds since the last change of a draft after which nobody writes it any more."""
TIMEOUT = 30.0
"""Seconds that a small call to a remote store may take."""


class Folder:
    """A folder on any fsspec file system. Raises InputError for a protocol that cannot be used."""

    def __init__(self, uri: str, retry: Retry | None = None) -> None:
        check_uri(uri)
        self.backend = open_backend(uri, TIMEOUT)
        self.retry = retry or Retry()
        self.local = isinstance(self.backend, PosixBackend)
        self.uri = self.backend.root if isinstance(self.backend, PosixBackend) else uri.rstrip("/")

    def at(self, name: str) -> str:
        """The path or URI of `name` within."""
        return f"{self.uri}/{name}"

    def read(self, name: str) -> bytes | None:
        """The bytes of a file, or None if there is none. Raises InputError if it may not be read."""
        try:
            return self.retry(self.backend.read, name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise InputError(
                f"may not be read ({error})", self.uri, "check permissions and credentials"
            ) from None

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fill `target` from a byte offset of a file; how many bytes there were. Raises FileNotFoundError."""
        return self.retry(self.backend.read_into, name, offset, target)

    def read_json(self, name: str) -> Any:
        """A JSON document, or None if there is none."""
        data = self.read(name)
        return None if data is None else json.loads(data)

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes of the files in a folder within and below it, by name as of there; empty if there is none."""
        skip = len(folder) + 1 if folder else 0
        return {path[skip:]: size for path, size in self.retry(self.backend.list, folder).items()}

    def remove_old_drafts(self) -> None:
        """Remove what a writer that was killed has left of a file; what another writes now is younger than STALE."""
        if not self.local or not os.path.isdir(self.uri):
            return
        for entry in os.scandir(self.uri):
            with contextlib.suppress(OSError):  # of another who removes it too
                if DRAFT.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > STALE:
                    os.unlink(entry.path)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self.retry(self.backend.remove, name)

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole: a reader sees the old one or the new one, also after a crash of the machine."""
        self.retry(self.backend.replace, name, data)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON document whole."""
        self.write(name, json.dumps(value).encode() + b"\n")
