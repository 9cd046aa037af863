"""Blocks of shards on a remote store, read one by one. The most recently used ones are kept on this node's disk.

    <copies of the data>/blocks/<checksum of the shard>-<number>    one block, as it is in the shard

All processes of a node share the folder. A block is verified by the manifest's checksum whenever it is read, from the
store or from the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from orchestrator.data.prepare.shards import BLOCK_BYTES
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, TokenShard
from orchestrator.data.store.node_copies import copies_of, locked
from orchestrator.data.store.quarantine import put_aside
from orchestrator.data.store.verified_shard import SUM_DIGITS, DamagedShard
from orchestrator.storage.atomic import DRAFT, replace_file

IN_MEMORY = 32
"""Blocks that a process holds in memory."""
LOCKS = 64
"""Number of lock files: a block is loaded under a lock, so that only one process of a node requests it."""
SWEEP = 16
"""A process looks for removable blocks whenever it has added this share of the cache."""


def cache_for(manifest: DataManifest, keep: int | None, growing: bool) -> BlockCache | None:
    """Return the cache for blocks of remote data, with `keep` bytes; None if all data fits, which is then copied
    whole.

    Data without block checksums is always copied whole. The final size of `growing` data is unknown.
    """
    folder = copies_of(manifest)
    if keep is None:
        keep = shutil.disk_usage(folder).free // 2
    size = sum(source.tokens for source in manifest.sources) * np.dtype(manifest.dtype).itemsize
    copied = sum(path.stat().st_size for path in folder.glob("*.bin"))
    is_copied = size - copied <= keep and not growing
    return None if is_copied or manifest.format < 2 else BlockCache(folder / "blocks", keep)


class BlockCache:
    """Files in the folder `place` of about `most` bytes in total; the least recently used ones are removed.

    If the disk is full, or `most` is 0, nothing is kept.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._most = max_bytes
        self._added = max_bytes
        self._in_memory: OrderedDict[str, bytes] = OrderedDict()
        self._guard = threading.Lock()

    def read(self, name: str, load: Callable[[], bytes], is_sound: Callable[[bytes], bool]) -> bytes:
        """Return a block: from memory, from the disk if it is sound there, or from `load`. Raises as `load`."""
        with self._guard:
            if name in self._in_memory:
                self._in_memory.move_to_end(name)
                return self._in_memory[name]
        result = self._from_disk(name, is_sound)
        if result is None:
            number = int(xxhash.xxh3_64_intdigest(name.encode())) % LOCKS
            with locked(self._folder / f"{number}.lock"):
                result = self._from_disk(name, is_sound)
                if result is None:
                    result = load()
                    self._keep(name, result)
        with self._guard:
            self._in_memory[name] = result
            while len(self._in_memory) > IN_MEMORY:
                self._in_memory.popitem(last=False)
        return result

    def _from_disk(self, name: str, is_sound: Callable[[bytes], bool]) -> bytes | None:
        """Return a block from the disk, and mark it as just used."""
        path = self._folder / name
        try:
            result = path.read_bytes()
            if is_sound(result):
                os.utime(path)
                return result
            path.unlink()
        except OSError:
            return None
        return None

    def _keep(self, name: str, data: bytes) -> None:
        if len(data) > self._most:
            return
        with contextlib.suppress(OSError):  # the disk is full: the block is used without keeping it
            self._added += len(data)
            if self._added * SWEEP >= self._most:
                self._added = 0
                self._remove_oldest(len(data))
            replace_file(str(self._folder / name), [data])

    def _remove_oldest(self, coming: int) -> None:
        """Remove the least recently used blocks, and drafts of killed processes, until there is room."""
        files = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):
                if not entry.name.endswith(".lock"):
                    status = entry.stat()
                    files.append((status.st_mtime, entry.path, status.st_size))
        total = sum(size for _, _, size in files) + coming
        room = self._most - self._most // SWEEP
        for _, path, size in sorted(files):
            if total <= room:
                break
            if not DRAFT.fullmatch(os.path.basename(path)) or total > self._most:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size


class RemoteShard:
    """The tokens of a shard on a store. Only blocks that are read are fetched; see `VerifiedShard`.

    Reading raises DamagedShard if the object is damaged or missing, and the store's error if it does not answer.
    """

    def __init__(self, folder: DataFolder, dtype: str, shard: TokenShard, cache: BlockCache) -> None:
        self._folder = folder
        self._shard = shard
        self._cache = cache
        self._dtype = np.dtype(dtype)
        self._size = shard.tokens * self._dtype.itemsize

    def __len__(self) -> int:
        return self._shard.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop), fewer at the shard's end."""
        first = start * self._dtype.itemsize
        last = min(stop, len(self)) * self._dtype.itemsize
        numbers = range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
        data = b"".join(self._block(number) for number in numbers)
        begin = first - numbers.start * BLOCK_BYTES
        return np.frombuffer(data[begin : begin + last - first], self._dtype)

    def check(self) -> None:
        """Read and verify all blocks."""
        for number in range(-(-self._size // BLOCK_BYTES)):
            self._block(number)

    def _block(self, number: int) -> bytes:
        expected = self._shard.blocks[number * SUM_DIGITS : (number + 1) * SUM_DIGITS]

        def is_sound(data: bytes) -> bool:
            return xxhash.xxh3_64_hexdigest(data) == expected

        def load() -> bytes:
            for _ in range(2):  # damage in transit is gone on the next try
                if is_sound(data := self._fetched(number)):
                    return data
            raise self._lost(f"block {number} is not what was written")

        return self._cache.read(f"{self._shard.xxh3}-{number}", load, is_sound)

    def _fetched(self, number: int) -> bytes:
        begin = number * BLOCK_BYTES
        data = bytearray(min(BLOCK_BYTES, self._size - begin))
        try:
            count = self._folder.read_into(self._shard.file, begin, memoryview(data))
        except FileNotFoundError:
            raise self._lost("is missing") from None
        return bytes(data[:count])

    def _lost(self, problem: str) -> DamagedShard:
        put_aside(self._folder, self._shard.file)
        return DamagedShard(f"{self._folder.at(self._shard.file)}: {problem}; it is made again from the text")
