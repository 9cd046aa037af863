"""A memory-mapped token shard on a local disk, whose blocks are verified by their checksums before use."""

from __future__ import annotations

import contextlib
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

    With `maps`, the file is mapped from the beginning, so that it can be read even after its removal. Otherwise it is
    mapped when it is read, until `close`. Raises ValueError if the file is missing or has the wrong size.
    """

    def __init__(self, path: Path, dtype: str, shard: TokenShard, maps: bool = True) -> None:
        expected = shard.tokens * np.dtype(dtype).itemsize
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            state = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise ValueError(f"shard {shard.file} {state}")
        self._path = path
        self._shard = shard
        self._dtype = np.dtype(dtype)
        self._mapped: np.ndarray | None = None
        if maps:
            self._map()
        self._block = BLOCK_BYTES if shard.blocks else max(expected, 1)
        self._sound = np.zeros(-(-expected // self._block), dtype=bool)

    def __len__(self) -> int:
        return self._shard.tokens

    @property
    def is_mapped(self) -> bool:
        """Whether the file is mapped."""
        return self._mapped is not None

    def close(self) -> None:
        """Unmap the file, and forget which blocks were verified."""
        self._mapped = None
        self._sound[:] = False

    def _map(self) -> np.ndarray:
        if self._mapped is None:
            try:  # an empty file cannot be mapped
                self._mapped = (
                    np.memmap(self._path, dtype=self._dtype, mode="r")
                    if len(self)
                    else np.zeros(0, self._dtype)
                )
            except FileNotFoundError:
                raise DamagedShard(f"{self._path} is missing; it is made again from the text") from None
        return self._mapped

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop), fewer at the shard's end. Raises DamagedShard."""
        tokens = self._map()
        size = self._dtype.itemsize
        for number in range(start * size // self._block, -(-min(stop, len(self)) * size // self._block)):
            if not self._sound[number]:
                self._check(tokens, number)
        return tokens[start:stop]

    def check(self) -> None:
        """Verify all blocks. Raises DamagedShard."""
        self.read(0, len(self))

    def _check(self, tokens: np.ndarray, number: int) -> None:
        block = tokens.view(np.uint8)[number * self._block : (number + 1) * self._block].data
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
