"""Copies of prepared data on a node's own disk: whole shards of a remote store, and files derived from them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest, TokenShard
from orchestrator.data.store.quarantine import put_aside
from orchestrator.data.store.verified_shard import DataGone
from orchestrator.storage.atomic import replace_file
from orchestrator.storage.own_folder import own_folder_or_another

AGAIN = "run or prepare the job again, which makes what is missing"
"""Hint for prepared data that is missing or damaged."""


def copies_of(manifest: DataManifest) -> Path:
    """Return this node's folder for copies of prepared data and files derived from it."""
    copies = own_folder_or_another("tokens") / manifest.fingerprint
    copies.mkdir(exist_ok=True, mode=0o700)
    return copies


def derived_folder(folder: DataFolder) -> Path | None:
    """Return the data's own folder, if files that are derived from the data may be written there; None otherwise."""
    return Path(folder.uri) if folder.local and os.access(folder.uri, os.W_OK) else None


def downloaded(folder: DataFolder, manifest: DataManifest, shard: TokenShard) -> Path:
    """Return the path of a local copy of a remote shard, downloaded if needed.

    The name contains the shard's checksum, so it is never stale.
    """
    copies = copies_of(manifest)
    path = copies / f"{Path(shard.file).stem}-{shard.xxh3}.bin"
    size = shard.tokens * np.dtype(manifest.dtype).itemsize
    with locked(path.with_suffix(".lock")):
        if not path.exists() or path.stat().st_size != size:
            _download(folder, shard, path)
    return path


def _download(folder: DataFolder, shard: TokenShard, path: Path) -> None:
    """Download a shard to `path`, whose lock is held. Raises DataGone if it is missing or damaged."""
    for draft in path.parent.glob(f"{path.name}.*.tmp"):  # left by a killed download
        draft.unlink()
    block = memoryview(bytearray(2**22))

    def blocks() -> Iterator[memoryview]:
        at = 0
        digest = xxhash.xxh3_128()
        while count := folder.read_into(shard.file, at, block):
            at += count
            digest.update(block[:count])
            yield block[:count]
        if digest.hexdigest() != shard.xxh3:
            put_aside(folder, shard.file)
            raise DataGone(f"shard {shard.file} is damaged", folder.uri, AGAIN)

    try:
        replace_file(str(path), blocks())
    except FileNotFoundError:
        put_aside(folder, shard.file)
        raise DataGone(f"shard {shard.file} is missing", folder.uri, AGAIN) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, which ends with the process: one rank of a node downloads, the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
