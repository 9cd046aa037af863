"""Prepared data as one token stream per source, memory-mapped."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from tokenizers import Tokenizer

from orchestrator.data import manifest
from orchestrator.data.files import Folder
from orchestrator.data.manifest import Manifest, Shard
from orchestrator.errors import InputError

if TYPE_CHECKING:
    from workloads.workload import Vocabulary


class Tokens:
    """Read access to prepared data. Open it with `Tokens.open`."""

    def __init__(self, folder: Folder, manifest: Manifest, shards: list[list[np.ndarray]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._shards = shards
        self._ends = [np.cumsum([len(shard) for shard in source], dtype=np.int64) for source in shards]

    @classmethod
    def open(cls, uri: str) -> Tokens:
        """The prepared data at `uri`.

        Local shards are mapped where they lie. Others are downloaded once a node, checked, and kept under the
        system's folder for temporary files. Raises InputError if the data is missing or damaged.
        """
        folder = Folder(uri)
        found = manifest.read(folder)
        if found is None:
            raise InputError(
                "there is no prepared data", folder.uri, "make it with `orchestrator data prepare`"
            )
        locate = _local if folder.local else _downloaded
        shards = [
            [_map(locate(folder, found, shard), found, shard, folder) for shard in source.shards]
            for source in found.sources
        ]
        return cls(folder, found, shards)

    @property
    def sources(self) -> int:
        """Number of sources."""
        return len(self._shards)

    def length(self, source: int) -> int:
        """Tokens of a source."""
        return int(self._ends[source][-1]) if len(self._ends[source]) else 0

    def window(self, source: int, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of a source, int64; they may come from several shards."""
        ends = self._ends[source]
        if start < 0 or length < 0 or start + length > self.length(source):
            raise IndexError(
                f"tokens {start} to {start + length} of {self.length(source)} in source {source}"
            )
        found = np.empty(length, dtype=np.int64)
        number, filled = int(np.searchsorted(ends, start, side="right")), 0
        while filled < length:
            shard = self._shards[source][number]
            at = start + filled - (int(ends[number]) - len(shard))
            piece = shard[at : at + length - filled]
            found[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return found

    def samples(self, source: int, sequence_length: int, window: int) -> int:
        """How many windows of `window` tokens a source has when one starts every `sequence_length` tokens."""
        return max(0, (self.length(source) - window) // sequence_length + 1)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data."""
        return Tokenizer.from_str((self.folder.read(self.manifest.tokenizer) or b"").decode())

    def vocabulary(self) -> Vocabulary:
        """What an objective must know of the tokenizer."""
        from orchestrator.data.vocabulary import vocabulary_of  # it brings torch, which reading does not need

        return vocabulary_of(self.tokenizer(), self.manifest)


def _map(path: Path, found: Manifest, shard: Shard, folder: Folder) -> np.ndarray:
    expected = shard.tokens * np.dtype(found.dtype).itemsize
    size = path.stat().st_size if path.exists() else None
    if size != expected:
        state = "is missing" if size is None else f"has {size} bytes instead of {expected}"
        raise InputError(
            f"shard {shard.file} {state}", folder.uri, "remove the folder and prepare the data again"
        )
    return np.memmap(path, dtype=found.dtype, mode="r")


def _local(folder: Folder, found: Manifest, shard: Shard) -> Path:
    return Path(folder.at(shard.file))


def _downloaded(folder: Folder, found: Manifest, shard: Shard) -> Path:
    """A copy of a remote shard on this node. Its name holds its checksum, so it is never stale."""
    kept = Path(tempfile.gettempdir()) / f"orchestrator-tokens-{os.getuid()}" / found.fingerprint
    kept.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = kept / f"{Path(shard.file).stem}-{shard.xxh3}.bin"
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            _download(folder, shard, path)
    return path


def _download(folder: Folder, shard: Shard, path: Path) -> None:
    draft = path.with_suffix(".tmp")
    state = xxhash.xxh3_128()
    try:
        block = memoryview(bytearray(2**22))
        with draft.open("wb") as file:
            while count := folder.read_into(shard.file, file.tell(), block):
                state.update(block[:count])
                file.write(block[:count])
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        raise InputError(
            f"shard {shard.file} is missing", folder.uri, "remove the folder and prepare again"
        ) from None
    if state.hexdigest() != shard.xxh3:
        raise InputError(
            f"shard {shard.file} is damaged", folder.uri, "remove the folder and prepare the data again"
        )
    os.replace(draft, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, so that one rank of a node downloads while the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
