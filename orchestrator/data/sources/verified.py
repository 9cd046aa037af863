"""Source files, read so that a change since their content was identified is detected.

The hash of a file's content is part of the fingerprint of prepared data. The file is read again later, for
tokenising, and may have changed in between. So a local file is read in blocks, each compared with the checksum taken
first, and a remote object must still have the same ETag.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import xxhash

from orchestrator.config.errors import InputError
from orchestrator.storage.file_system import RemoteFileSystem, shared_file_system
from orchestrator.storage.input_files import TIMEOUT, RemoteFile, SeekableFile
from orchestrator.storage.retry import Retry

BLOCK_BYTES = 2**20
"""Bytes that one checksum covers."""
SUM_DIGITS = 16
"""Hexadecimal digits of one checksum, xxh3_64."""
READ_BYTES = 2**20


def identify(path: str) -> tuple[int, str, str]:
    """Return the size of a local file in bytes, its checksum, and the concatenated checksums of its blocks."""
    checksum = xxhash.xxh3_128()
    size = 0
    sums = []
    with open(path, "rb", buffering=0) as file:
        while block := _full(file, BLOCK_BYTES):
            checksum.update(block)
            sums.append(xxhash.xxh3_64_hexdigest(block))
            size += len(block)
    return size, checksum.hexdigest(), "".join(sums)


def tag(fs: RemoteFileSystem, path: str, info: dict[str, Any]) -> str:
    """Return the identity of a remote object's content: its ETag, or what its file system has instead."""
    return str(info.get("ETag") or Retry()(fs.ukey, path))


def open_source(uri: str, size: int, content: str, sums: str, first: int = 0) -> BinaryIO:
    """Open the first `size` bytes of a source file. `sums` are the checksums of its blocks from block `first` on.

    Reading raises InputError if the content has changed since it was identified. Bytes appended since then are not
    read.
    """
    if not size:
        return io.BytesIO()
    if sums:
        return Guarded(VerifiedFile(uri, size, sums, first), size)
    check_unchanged(uri, size, content, sums)
    fs, path = shared_file_system(uri, TIMEOUT)
    return Guarded(RemoteFile(fs, path, Retry(), size), size)


def check_unchanged(uri: str, size: int, content: str, sums: str) -> None:
    """Raise InputError if a remote object has changed since it was identified. Local files are verified by block."""
    if sums or not size:
        return
    fs, path = shared_file_system(uri, TIMEOUT)
    if tag(fs, path, Retry()(fs.info, path)) != content:
        raise changed(uri)


def changed(uri: str) -> InputError:
    """Return the error for a changed file."""
    return InputError(
        "has changed since this command began to read it",
        uri,
        "do not change it while it is read; run the same command again",
    )


class ReadFailed(Exception):
    """Storage failed with `error` while a parser read from it. The parser must not mistake this for damaged input."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Guarded(io.BufferedReader):
    """A buffered file of `size` bytes.

    A storage error becomes ReadFailed. A parser that a damaged length makes ask for too many bytes gets those that
    exist, without memory for the others.
    """

    def __init__(self, raw: io.RawIOBase, size: int) -> None:
        super().__init__(_Guard(raw), READ_BYTES)
        self._size = size

    def read(self, size: int | None = -1) -> bytes:
        """See `io.BufferedReader`."""
        remaining = max(0, self._size - self.tell())
        return super().read(remaining if size is None or size < 0 else min(size, remaining))


class _Guard(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int | None:
        try:
            return self._raw.readinto(buffer)
        except InputError:
            raise
        except Exception as error:
            raise ReadFailed(error) from None

    def close(self) -> None:
        self._raw.close()
        super().close()


class VerifiedFile(SeekableFile):
    """A local file of `size` bytes whose blocks from `first` on are verified by `sums`. Other blocks cannot be read."""

    def __init__(self, path: str, size: int, sums: str, first: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._path = path
        self._size = size
        self._sums = sums
        self._first = first
        self._last_block: tuple[int, bytes] = (-1, b"")

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """See `io.RawIOBase`. Raises InputError if a block has changed."""
        if self._at >= self._size:
            return 0
        number, within = divmod(self._at, BLOCK_BYTES)
        block = self._block(number)
        part = block[within : within + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def close(self) -> None:
        """See `io.RawIOBase`."""
        self._file.close()
        super().close()

    def _block(self, number: int) -> bytes:
        if self._last_block[0] != number:
            self._file.seek(number * BLOCK_BYTES)
            block = _full(self._file, min(BLOCK_BYTES, self._size - number * BLOCK_BYTES))
            at = (number - self._first) * SUM_DIGITS
            expected = self._sums[at : at + SUM_DIGITS] if at >= 0 else ""
            if not expected:
                raise AssertionError(f"block {number} of {self._path} is read without its checksum")
            if xxhash.xxh3_64_hexdigest(block) != expected:
                raise changed(self._path)
            self._last_block = (number, block)
        return self._last_block[1]


def _full(file: io.FileIO, size: int) -> bytes:
    """Read `size` bytes, fewer at the end of the file."""
    parts = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
