"""Reading of input files that the user names by path or URI: text, price tables, tokenizers."""

from __future__ import annotations

import errno
import io
from typing import Any, BinaryIO

from orchestrator.storage.file_system import PART_BYTES, RemoteFileSystem
from orchestrator.storage.retry import Retry
from orchestrator.storage.uri import is_local, local_path

TIMEOUT = 30.0
"""Seconds for a small call to a remote store."""
BUFFER_BYTES = 1 << 20
"""Read-ahead for a remote file, where every read is a request."""


def open_input(uri: str, retry: Retry | None = None) -> BinaryIO:
    """Open a local or remote file for reading and seeking. Remote reads are retried as `retry` says.

    Raises FileNotFoundError; ValueError or ImportError for a protocol that cannot be used.
    """
    if is_local(uri):
        return open(local_path(uri), "rb")
    fs = RemoteFileSystem(uri, TIMEOUT)
    return io.BufferedReader(RemoteFile(fs, fs.root, retry or Retry()), BUFFER_BYTES)


class SeekableFile(io.RawIOBase):
    """Base class of files that are read and sought by position: `_size` bytes, of which the one at `_at` is next."""

    _size: int
    _at = 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at


class RemoteFile(SeekableFile):
    """A remote file that can be read and sought. Each read is one call with a deadline, and is retried if it fails."""

    def __init__(self, fs: RemoteFileSystem, path: str, retry: Retry, size: int | None = None) -> None:
        """`size` is the file's size; None to ask the store."""
        self._fs = fs
        self._path = path
        self._retry = retry
        self._size = int(retry(fs.info, path)["size"]) if size is None else size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`. Positions before the start count as the start."""
        self._at = max(0, super().seek(offset, whence))
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        target = memoryview(buffer).cast("B")
        count = min(len(target), self._size - self._at, PART_BYTES)
        if count <= 0:
            return 0
        data = self._retry(self._fs.cat_file, self._path, self._at, self._at + count)
        if len(data) < count:
            raise OSError(errno.EIO, f"ended after {self._at + len(data)} of {self._size} bytes", self._path)
        target[:count] = data
        self._at += count
        return count
