"""The plain bytes of a file that is compressed, read forwards in bounded memory.

A file is one or more compressed streams, one after the other. One that is cut off gives the bytes before the cut. Of
one that is damaged in another way only the streams that ended before the damage can be trusted: their checksums were
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
"""How a compressed file begins; of zstd also the frames that hold no data."""
CHUNK = 2**16
"""Compressed bytes that are taken, and plain bytes that are given, at once."""
ERRORS = (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError)


class Damage(NamedTuple):
    """Why the plain bytes end early: the file is cut off, or it is damaged; and what the decoder said."""

    cut_off: bool
    reason: str


class Plain(io.RawIOBase):
    """The plain bytes of compressed streams.

    Attributes:
        damage: why the bytes end early, known when all were read.
        sound: how many of the bytes read so far can be trusted whatever comes after them.
    """

    def __init__(
        self, file: BinaryIO, compression: str, known: tuple[int, Damage | None] | None = None
    ) -> None:
        """`known` is what `measured` found: no more bytes than that are given."""
        self._streams = _zstandard(file, self) if compression == "zst" else _streams(file, compression, self)
        self._known = known
        self._made = 0
        self._held = b""
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
        if self._known is not None and self._made + room > self._known[0]:
            room = self._known[0] - self._made
            if not room:
                self.damage = self._known[1]
                return 0
        if not self._held:
            self._held = next(self._streams, b"")
        part = self._held[:room]
        self._held = self._held[room:]
        target[: len(part)] = part
        self._made += len(part)
        return len(part)


class _Inflate:
    """zlib's decoder with the interface of bz2's and lzma's."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, most)

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
    """The plain bytes of all streams of a file; says in `plain` where they end early."""
    made = 0
    rest = b""
    while rest := (rest or file.read(CHUNK)):
        rest = rest.lstrip(b"\0")  # padding between streams
        if not rest:
            continue
        decoder = _DECODERS[compression]()
        while not decoder.eof:
            data = rest or (file.read(CHUNK) if decoder.needs_input else b"")
            ended = not data and decoder.needs_input
            rest = b""
            try:
                out = decoder.decompress(data, CHUNK)
            except ERRORS as error:
                plain.damage = Damage(False, str(error))
                return
            made += len(out)
            if decoder.eof:
                plain.sound = made
                rest = decoder.unused_data
            elif ended and not out:
                plain.sound = made
                plain.damage = Damage(True, "its end is missing")
                return
            if out:
                yield out


class _Counted(io.RawIOBase):
    """A file that knows whether it was read to its end."""

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
    """As `_streams`, of zstd, by pyarrow; without the first `skip` bytes. All of a damaged file is distrusted, since
    pyarrow does not say where its frames end."""
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
        if counted.at_end and step > 1:  # the last step has lost what it had
            for out in _zstandard(file, plain, made, 1):
                made += len(out)
                yield out
        plain.damage = Damage(counted.at_end, str(error))
        plain.sound = made if counted.at_end else 0
        return
    plain.sound = made


def measured(file: BinaryIO, compression: str) -> tuple[int, Damage | None]:
    """How many plain bytes of a file can be trusted, and why no more."""
    plain = Plain(file, compression)
    while plain.read(CHUNK):
        pass
    file.seek(0)
    return plain.sound, plain.damage


def damage_of(file: BinaryIO) -> Damage | None:
    """Why the plain bytes of a file that was read to its end have ended early, if they have."""
    raw = getattr(file, "raw", None)
    return raw.damage if isinstance(raw, Plain) else None


@contextmanager
def opened_plain(file: SourceFile) -> Iterator[BinaryIO]:
    """The plain bytes of a file, for messages: no checksum is compared."""
    with open_input(file.uri) as raw:
        yield io.BufferedReader(Plain(raw, file.compression)) if file.compression else raw
