"""The interface of a storage backend: files below one root, for commits, prepared data and exports.

POSIX directories and object stores differ in how a file becomes durable and how a publication becomes atomic: by
fsync and a hard link, or by a conditional put. `open_backend` chooses the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffers = Sequence[bytes | memoryview]


class Backend(Protocol):
    """Files below one root, named by relative paths. Every call may raise OSError or the store client's own errors."""

    def list(self, folder: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all files below a folder, at any depth, by path. Empty if the folder does not
        exist.
        """

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises FileNotFoundError."""

    def read(self, path: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError."""

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Read a part of a file.

        Args:
            path: the path of the file.
            offset: the first byte to read.
            target: the buffer to fill.

        Returns:
            The number of bytes read. It is smaller than the buffer at the end of the file.
        """

    def write(self, path: str, buffers: Buffers) -> None:
        """Write a new file. When this returns, the file survives a power cut.

        Args:
            path: the path of the file.
            buffers: its content, in order.
        """

    def publish(self, path: str, data: bytes) -> None:
        """Create a file atomically and durably.

        Args:
            path: the path of the file.
            data: its content.

        Raises:
            FileExistsError: the file exists.
        """

    def replace(self, path: str, data: bytes | memoryview) -> None:
        """Create or replace a file atomically. A power cut may bring the old content back.

        Args:
            path: the path of the file.
            data: its content.
        """

    def remove(self, path: str, durable: bool = False) -> None:
        """Remove a file. A missing one is not an error.

        Args:
            path: the path of the file.
            durable: whether the file must stay removed after a power cut.
        """

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it is empty."""
