"""A memory-mapped token shard on a local disk, whose blocks are verified by their checksums before use."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.prepare.shards import BLOCK_BYTES
from orchestrator.data.store.manifest import TokenShard

SUM_DIGITS = 16


class DamagedShard(Exception):
    """A file is damaged. It has been quarantined, so that it is made again."""


class DataGone(InputError):
    """Prepared data is missing, completely or in part.

    For a command this is wrong input. A rank that raises it need not end the run: the controller makes the data
    again, because another rank may just have quarantined a damaged file.
    """

    kind = ""


class VerifiedShard:
    """The tokens of a shard. A block is verified when it is first read; a shard of format 1 is one block.

    The file is mapped, so that it can be read even after its removal. Raises ValueError if it is missing or has the
    wrong size.
    """

    def __init__(self, path: Path, dtype: str, shard: TokenShard) -> None:
        expected = shard.tokens * np.dtype(dtype).itemsize
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                # an empty file cannot be mapped
                data = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
        except FileNotFoundError:
            raise ValueError(f"shard {shard.file} is missing") from None
        if size != expected:
            raise ValueError(f"shard {shard.file} has {size} bytes instead of {expected}")
        self._path = path
        self._shard = shard
        self._dtype = np.dtype(dtype)
        self._tokens = np.frombuffer(data, self._dtype)
        self._block = BLOCK_BYTES if shard.blocks else max(expected, 1)
        self._sound = np.zeros(-(-expected // self._block), dtype=bool)

    def __len__(self) -> int:
        return self._shard.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop), fewer at the shard's end. Raises DamagedShard."""
        size = self._dtype.itemsize
        for number in range(start * size // self._block, -(-min(stop, len(self)) * size // self._block)):
            if not self._sound[number]:
                self._check(number)
        return self._tokens[start:stop]

    def check(self) -> None:
        """Verify all blocks. Raises DamagedShard."""
        self.read(0, len(self))

    def _check(self, number: int) -> None:
        block = self._tokens.view(np.uint8)[number * self._block : (number + 1) * self._block].data
        if self._shard.blocks:
            expected = self._shard.blocks[number * SUM_DIGITS : (number + 1) * SUM_DIGITS]
            sound = xxhash.xxh3_64_hexdigest(block) == expected
        else:
            sound = xxhash.xxh3_128_hexdigest(block) == self._shard.xxh3
        if not sound:
            quarantine(self._path)
            raise DamagedShard(
                f"{self._path}: block {number} of {len(self._sound)} is not what was written; the file is put aside "
                "and made again from the text"
            )
        self._sound[number] = True


def quarantine(path: Path) -> None:
    """Rename a damaged file so that it is made again. Ranks that have it open keep it."""
    with contextlib.suppress(OSError):
        os.replace(path, f"{path}.damaged")
