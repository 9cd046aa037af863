"""A folder of prepared data, local or remote, whose small files are written atomically."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from orchestrator.config.errors import InputError
from orchestrator.storage.atomic import remove_drafts
from orchestrator.storage.open_backend import open_backend
from orchestrator.storage.posix_backend import PosixBackend
from orchestrator.storage.retry import Retry
from orchestrator.storage.uri import check_uri

Answer = TypeVar("Answer")
TIMEOUT = 30.0
"""Seconds for a small call to a remote store."""


class DataFolder:
    """A folder on a local path or any fsspec file system. Raises InputError for a URI that cannot be used."""

    def __init__(self, uri: str, retry: Retry | None = None) -> None:
        check_uri(uri)
        self.backend = open_backend(uri, TIMEOUT)
        self.retry = retry or Retry()
        self.local = isinstance(self.backend, PosixBackend)
        self.uri = self.backend.root if isinstance(self.backend, PosixBackend) else uri.rstrip("/")

    def at(self, name: str) -> str:
        """Return the path or URI of the file `name` in this folder."""
        return f"{self.uri}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing. Raises InputError if permission is denied."""
        return self._of_file(self.backend.read, name)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it is missing. Raises InputError if permission is denied."""
        return self._of_file(self.backend.size, name)

    def _of_file(self, ask: Callable[[str], Answer], name: str) -> Answer | None:
        try:
            return self.retry(ask, name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise InputError(
                f"may not be read ({error})", self.uri, "check permissions and credentials"
            ) from None

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        """Fill `target` from a byte offset of a file; return the number of bytes read. Raises FileNotFoundError."""
        return self.retry(self.backend.read_into, name, offset, target)

    def read_json(self, name: str) -> Any:
        """Return a JSON document; None if it is missing."""
        data = self.read(name)
        return None if data is None else json.loads(data)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of all files below `folder`, by path relative to it; empty if the folder does not
        exist.
        """
        skip = len(folder) + 1 if folder else 0
        return {path[skip:]: size for path, size in self.retry(self.backend.list, folder).items()}

    def remove_old_drafts(self) -> None:
        """Remove the drafts of killed writers, see `remove_drafts`."""
        if self.local:
            remove_drafts(self.uri)

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        self.retry(self.backend.remove, name)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Create or replace a file atomically, see `Backend.replace`."""
        self.retry(self.backend.replace, name, data)

    def write_json(self, name: str, value: Any) -> None:
        """Create or replace a JSON document atomically."""
        self.write(name, json.dumps(value).encode() + b"\n")
