"""Verifying every byte of a shard file by the checksums in the manifest."""

from __future__ import annotations

import math

from orchestrator.checkpoint.manifest import CommitManifest, commit_folder
from orchestrator.checkpoint.shard import ITEM_BYTES, digest
from orchestrator.storage.backend import Backend
from orchestrator.storage.retry import LostBytes, Retry, read_stored

READ_BYTES = 16 << 20  # bytes read at once

Span = tuple[int, int, str, str]  # first byte, byte after the last, checksum, what it covers


def checksummed_ranges(commit: CommitManifest) -> dict[str, list[Span]]:
    """All ranges that have a checksum, in order, by file; together they cover the file."""
    found = {
        name: [(0, entry.header_bytes, entry.header, "the header")] for name, entry in commit.files.items()
    }
    for name, tensor in commit.tensors.items():
        for chunk in tensor.chunks:
            end = chunk.offset + math.prod(chunk.shape) * ITEM_BYTES[tensor.dtype]
            for number, checksum in enumerate(chunk.blocks):
                at = chunk.offset + number * commit.block_bytes
                found[chunk.file].append(
                    (at, min(at + commit.block_bytes, end), checksum, f"{name} block {number}")
                )
    return {name: sorted(ranges) for name, ranges in found.items()}


def damaged_ranges(
    backend: Backend, retry: Retry, commit: CommitManifest, file: str, ranges: list[Span]
) -> list[str]:
    """A line for each range of a file whose checksum is wrong, up to one that cannot be read. A missing file is not
    reported here, see `wrong_files`."""
    size = commit.files[file].size
    lines: list[str] = []
    base, held = 0, memoryview(b"")
    for low, high, checksum, label in ranges:
        if high > base + len(held):
            base = low
            target = memoryview(bytearray(min(max(READ_BYTES, high - low), size - low)))
            try:
                path = f"{commit_folder(commit.step)}/{file}"
                held = target[: read_stored(retry, backend.read_into, path, low, target)]
            except FileNotFoundError:
                return []
            except LostBytes as error:
                unreadable = f"{file}: {label} at byte {low} cannot be read: {error.strerror}"
                return [*lines, unreadable]
        if digest(held[low - base : high - base]) != checksum:
            lines.append(f"{file}: {label} at byte {low} is damaged")
    return lines
