"""Files below a root, wherever that is: what commits, run directories and prepared data need of it.

What differs between a POSIX directory and an object store is what makes a file durable and what makes a
publication atomic: fsync and link there, a conditional put here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

Buffers = Sequence[bytes | memoryview]


class Backend(Protocol):
    """What a commit needs of a file system. Every call may raise OSError or the store's own errors."""

    def list(self, folder: str = "") -> dict[str, int]:
        """All files below a folder, with their sizes in bytes."""

    def read(self, path: str) -> bytes:
        """A whole file."""

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        """Fill `target` from a byte offset; returns how many bytes there were."""

    def write(self, path: str, buffers: Buffers) -> None:
        """Write a file; when this returns it survives a power cut."""

    def publish(self, path: str, data: bytes) -> None:
        """Write a file at once or not at all; raises FileExistsError where one stands."""

    def replace(self, path: str, data: bytes) -> None:
        """Write a file at once or not at all, over what stands there; a power cut may undo it."""

    def remove(self, path: str, settle: bool = False) -> None:
        """Remove a file; none there is no error. With `settle`, no power cut brings it back after this."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it is empty."""


def is_local(uri: str) -> bool:
    """Whether a URI names a place on this machine's file systems."""
    return "::" not in uri and ("://" not in uri or uri.startswith(("file://", "local://")))


def local_path(uri: str) -> str:
    """The absolute path that a local URI names."""
    return os.path.abspath(os.path.expanduser(uri.split("://", 1)[-1]))


def open_backend(uri: str, timeout: float) -> Backend:
    """The backend of an fsspec URI; credentials and endpoints come from the environment, as fsspec has it.

    `timeout` bounds the seconds of a call to a remote store, as in `RemoteFileSystem`. Raises ValueError or ImportError
    for a protocol that cannot be used.
    """
    if is_local(uri):
        from orchestrator.storage.posix import PosixBackend

        return PosixBackend(local_path(uri))
    from orchestrator.storage.objects import ObjectBackend

    return ObjectBackend(uri, timeout)
