"""The contract of a storage backend: the files below one root, as commits, prepared data and exports need them.

POSIX directories and object stores differ in what makes a file durable and what makes a publication atomic: fsync and
a hard link on the one, a conditional put on the other. `open_backend` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffers = Sequence[bytes | memoryview]


class Backend(Protocol):
    """Files below one root, named by relative paths. Every call may raise OSError or the store client's own errors."""

    def list(self, folder: str = "") -> dict[str, int]:
        """All files below a folder, at any depth: their sizes in bytes by path. Empty if there is no such folder."""

    def read(self, path: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Fill `target` from byte `offset` of a file; returns the number of bytes read, fewer at the file's end."""

    def write(self, path: str, buffers: Buffers) -> None:
        """Write a new file. When this returns, the file survives a power cut."""

    def publish(self, path: str, data: bytes) -> None:
        """Create a file atomically and durably. Raises FileExistsError if there is one already."""

    def replace(self, path: str, data: bytes | memoryview) -> None:
        """Create or replace a file atomically. A power cut may bring the old content back."""

    def remove(self, path: str, settle: bool = False) -> None:
        """Remove a file; a missing one is no error. With `settle`, a power cut cannot bring it back after this."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it is empty."""
