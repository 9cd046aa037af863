"""The decompressed bytes of a compressed file, read forwards in bounded memory.

A file is one or more compressed streams in sequence. A truncated stream gives the bytes before the end. If a stream
is damaged in another way, only the streams that ended before the damage can be trusted, because their checksums were
right.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from orchestrator.data.sources.files import SourceFile
from orchestrator.storage.input_files import open_input

MAGIC = {
    "gz": (b"\x1f\x8b",),
    "bz2": (b"BZh",),
    "xz": (b"\xfd7zXZ\x00",),
    "zst": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))),
}
"""The first bytes of a compressed file; for zstd also those of frames without data."""
CHUNK = 2**16
"""Compressed bytes of one read, and decompressed bytes of one result."""
ERRORS = (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError)


class Damage(NamedTuple):
    """Why the decompressed bytes end early: the file is truncated or damaged; and the decoder's message."""

    cut_off: bool
    reason: str


class Plain(io.RawIOBase):
    """The decompressed bytes of compressed streams.

    Attributes:
        damage: why the bytes end early; known after all were read.
        sound: how many of the bytes read so far can be trusted, whatever follows.
    """

    def __init__(
        self, file: BinaryIO, compression: str, trusted: tuple[int, Damage | None] | None = None
    ) -> None:
        """`trusted` is the result of `measured`; no bytes beyond it are returned."""
        self._streams = _zstandard(file, self) if compression == "zst" else _streams(file, compression, self)
        self._trusted = trusted
        self._made = 0
        self._buffer = b""
        self.damage: Damage | None = None
        self.sound = 0
        head = file.read(len(MAGIC[compression][-1]))
        file.seek(0)
        if not head.startswith(MAGIC[compression]):
            self.damage = Damage(not head, f"it does not begin as .{compression} does")
            self._streams = iter(())

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        target = memoryview(buffer).cast("B")
        room = len(target)
        if self._trusted is not None and self._made + room > self._trusted[0]:
            room = self._trusted[0] - self._made
            if not room:
                self.damage = self._trusted[1]
                return 0
        if not self._buffer:
            self._buffer = next(self._streams, b"")
        part = self._buffer[:room]
        self._buffer = self._buffer[room:]
        target[: len(part)] = part
        self._made += len(part)
        return len(part)


class _Inflate:
    """zlib's decoder with the interface of bz2's and lzma's."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_bytes: int) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, max_bytes)

    @property
    def needs_input(self) -> bool:
        return not self._decoder.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data


_DECODERS: dict[str, Any] = {"gz": _Inflate, "bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}


def _streams(file: BinaryIO, compression: str, plain: Plain) -> Iterator[bytes]:
    """Yield the decompressed bytes of all streams of a file. If they end early, record why in `plain`."""
    made = 0
    buffer = b""
    while buffer := (buffer or file.read(CHUNK)):
        buffer = buffer.lstrip(b"\0")  # padding between streams
        if not buffer:
            continue
        decoder = _DECODERS[compression]()
        while not decoder.eof:
            data = buffer or (file.read(CHUNK) if decoder.needs_input else b"")
            at_end = not data and decoder.needs_input
            buffer = b""
            try:
                out = decoder.decompress(data, CHUNK)
            except ERRORS as error:
                plain.damage = Damage(False, str(error))
                return
            made += len(out)
            if decoder.eof:
                plain.sound = made
                buffer = decoder.unused_data
            elif at_end and not out:
                plain.sound = made
                plain.damage = Damage(True, "its end is missing")
                return
            if out:
                yield out


class _Counted(io.RawIOBase):
    """A file that records whether it was read to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.at_end = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.at_end |= not data
        return data


def _zstandard(file: BinaryIO, plain: Plain, skip: int = 0, step: int = CHUNK) -> Iterator[bytes]:
    """Like `_streams`, for zstd, by pyarrow, without the first `skip` bytes.

    Nothing of a damaged file is trusted, because pyarrow does not report where frames end.
    """
    file.seek(0)
    counted = _Counted(file)
    stream = pa.CompressedInputStream(pa.PythonFile(counted, mode="r"), "zstd")
    made = 0
    try:
        while made < skip and (out := stream.read(min(CHUNK, skip - made))):
            made += len(out)
        while out := stream.read(step):
            made += len(out)
            yield out
    except ERRORS as error:
        if counted.at_end and step > 1:  # the last step lost its data
            for out in _zstandard(file, plain, made, 1):
                made += len(out)
                yield out
        plain.damage = Damage(counted.at_end, str(error))
        plain.sound = made if counted.at_end else 0
        return
    plain.sound = made


def measured(file: BinaryIO, compression: str) -> tuple[int, Damage | None]:
    """Return how many decompressed bytes of a file are intact, and what ends them."""
    plain = Plain(file, compression)
    while plain.read(CHUNK):
        pass
    file.seek(0)
    return plain.sound, plain.damage


def damage_of(file: BinaryIO) -> Damage | None:
    """Return why the decompressed bytes of a completely read file ended early, if they did."""
    raw = getattr(file, "raw", None)
    return raw.damage if isinstance(raw, Plain) else None


@contextmanager
def opened_plain(file: SourceFile) -> Iterator[BinaryIO]:
    """Return the decompressed bytes of a file, for messages. Checksums are not compared."""
    with open_input(file.uri) as raw:
        yield io.BufferedReader(Plain(raw, file.compression)) if file.compression else raw
