"""The pieces of a source's stream that make up each packed sample. Computed once, kept on this node's disk,
memory-mapped.

    <prepared data>/packing/<key>/000000.json    of source 0: sizes and checksums, written last
    <prepared data>/packing/<key>/000000.first   int64 [samples + 1]: the number of each sample's first piece
    <prepared data>/packing/<key>/000000.pieces  int64 [pieces, 2]: the first token of each, and its length

Numbers are little-endian. The key covers everything that determines the pieces. For data on a remote store, the index
is in the folder of the local copies of its shards. A source is packed in parts of at most DOCUMENTS documents, so
that memory does not grow with its size. Each block's checksum is verified when the block is first read.
"""

from __future__ import annotations

import itertools
import json
import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from orchestrator.data.prepare.shards import BLOCK_BYTES
from orchestrator.data.store.manifest import TokenShard
from orchestrator.data.store.node_copies import locked
from orchestrator.data.store.verified_shard import VerifiedShard
from orchestrator.storage.atomic import draft_of, replace_file


def cut(starts: np.ndarray, stops: np.ndarray, window: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces (starts, stops) of the documents [start, stop), int64, in the order of documents.

    A document of at most `window` tokens is one piece. A longer one is cut into windows, each of which begins with
    the last `window` - `stride` tokens of the one before, and a rest. A rest without further tokens is dropped.
    """
    sizes = stops - starts
    overlap = window - stride
    full = np.maximum(0, (sizes - window) // stride + 1)
    parts = full + (sizes - full * stride > overlap)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    number = np.arange(len(first)) - first
    begins = np.repeat(starts, parts) + number * stride
    return begins, np.minimum(begins + window, np.repeat(stops, parts))


def pack(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the number of the sample that each piece goes into, int64. A sample holds `capacity` tokens.

    Best-fit decreasing: the longest piece comes first, and each goes into the fullest sample that has room for it.
    Pieces of one size are placed together, so the time is that of sorting plus one search for each change in the
    samples' room.
    """
    sample_of = np.full(len(sizes), -1, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    edges = np.flatnonzero(np.diff(sizes[order], prepend=-1))
    rooms = _Rooms(capacity)
    for begin, end in itertools.pairwise([*edges, len(order)]):
        size = int(sizes[order[begin]])
        waiting = order[begin:end]
        for samples, pieces_per_sample in rooms.places(size, len(waiting)):
            count = min(len(waiting), len(samples) * pieces_per_sample)
            sample_of[waiting[:count]] = np.repeat(samples, pieces_per_sample)[:count]
            waiting = waiting[count:]
    return sample_of


class _Rooms:
    """Samples by the room that they have left."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._count = 0
        self._by_room: dict[int, list[np.ndarray]] = {}
        self._rooms: list[int] = []  # sizes of room that some sample has, ascending

    def places(self, size: int, pieces: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield samples, and how many pieces of this size each gets; the last sample may get fewer."""
        while pieces:
            at = bisect_left(self._rooms, size)
            room = self._rooms[at] if at < len(self._rooms) else self._capacity
            per_sample = room // size
            needed = -(-pieces // per_sample)
            samples = self._take(room, needed) if at < len(self._rooms) else self._new(needed)
            count = min(pieces, per_sample * len(samples))
            last = count - per_sample * (len(samples) - 1)
            self._put(room - per_sample * size, samples[:-1])
            self._put(room - last * size, samples[-1:])
            pieces -= count
            yield samples, per_sample

    def _new(self, count: int) -> np.ndarray:
        self._count += count
        return np.arange(self._count - count, self._count)

    def _take(self, room: int, most: int) -> np.ndarray:
        group = self._by_room[room]
        samples = group.pop()
        if len(samples) > most:
            group.append(samples[most:])
        if not group:
            del self._by_room[room]
            self._rooms.remove(room)
        return samples[:most]

    def _put(self, room: int, samples: np.ndarray) -> None:
        if not room or not len(samples):
            return
        if room not in self._by_room:
            self._by_room[room] = []
            insort(self._rooms, room)
        self._by_room[room].append(samples)


FORMAT = 1
DOCUMENTS = 2**20
"""Documents that are packed together: so many that the underfull last samples of a part do not matter."""
DTYPE = "<i8"


class PackingIndex:
    """The samples of a packed source, made by `open_index`. Raises DamagedShard if a file was changed."""

    def __init__(self, folder: Path, source: int, facts: dict[str, Any]) -> None:
        """Raises ValueError if a file is missing or has the wrong size."""
        self.facts = facts
        """Numbers of samples, pieces ("count"), tokens, documents, and documents that are "cut"; and checksums."""
        self._first, self._pieces = (
            VerifiedShard(folder / f"{source:06d}.{name}", DTYPE, _shard(f"{source:06d}.{name}", facts[name]))
            for name in ("first", "pieces")
        )

    def __len__(self) -> int:
        return int(self.facts["samples"])

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        """Return first token and length of each piece of a sample, ascending."""
        first, last = self._first.read(sample, sample + 2).tolist()
        rows = self._pieces.read(2 * first, 2 * last).reshape(-1, 2)
        return [(int(start), int(length)) for start, length in rows]


def open_index(
    derived: Path, digest: str, source: int, ends: Iterable[np.ndarray], window: int, stride: int
) -> PackingIndex:
    """Return the index of a source in the folder `derived`. Make it unless it exists.

    Args:
        derived: the folder on this node's disk for files derived from the data.
        digest: digest of the documents of all sources.
        source: number of the source.
        ends: the index after the last token of each document, ascending int64, in parts.
        window: tokens of a sample.
        stride: tokens after which the next piece of a longer document begins.
    """
    key = xxhash.xxh3_128_hexdigest(json.dumps([FORMAT, digest, window, stride, DOCUMENTS]).encode())
    folder = derived / "packing" / key
    folder.mkdir(parents=True, exist_ok=True)
    facts = folder / f"{source:06d}.json"
    if (index := _existing(folder, source, facts)) is not None:  # an index may be empty, so compare with None
        return index
    with locked(facts.with_suffix(".lock")):  # one process of a node packs, the others wait
        if (index := _existing(folder, source, facts)) is None:
            _write(folder, source, facts=facts, ends=ends, window=window, stride=stride)
            index = _existing(folder, source, facts)
    assert index is not None
    return index


def _existing(folder: Path, source: int, facts: Path) -> PackingIndex | None:
    """Return the index if it is complete, else None."""
    try:
        stored = json.loads(facts.read_bytes())
        if stored.pop("checksum") != _checksum(stored):
            return None
        return PackingIndex(folder, source, stored)
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _write(
    folder: Path, source: int, facts: Path, ends: Iterable[np.ndarray], window: int, stride: int
) -> None:
    """Pack a source part by part into drafts, then rename the drafts."""
    totals: dict[str, Any] = dict.fromkeys(("samples", "count", "tokens", "documents", "cut"), 0)
    names = ("first", "pieces")
    drafts = {name: Path(draft_of(str(folder / f"{source:06d}.{name}"))) for name in names}
    try:
        with drafts["first"].open("wb") as first, drafts["pieces"].open("wb") as pieces:
            sums = {"first": _Sums(first), "pieces": _Sums(pieces)}
            for starts, stops in _parts(ends):
                firsts, rows = _packed(starts, stops, window, stride)
                sums["first"].write(firsts[:-1] + totals["count"])
                sums["pieces"].write(rows)
                totals["samples"] += len(firsts) - 1
                totals["count"] += len(rows)
                totals["tokens"] += int(rows[:, 1].sum())
                totals["documents"] += len(starts)
                totals["cut"] += int((stops - starts > window).sum())
            sums["first"].write(np.array([totals["count"]]))
            totals |= {name: sums[name].finish() for name in names}
        for name, draft in drafts.items():
            os.replace(draft, folder / f"{source:06d}.{name}")
        content = json.dumps({**totals, "checksum": _checksum(totals)}).encode()
        replace_file(str(facts), [memoryview(content)])
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def _parts(ends: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the documents [start, stop), at most DOCUMENTS at a time."""
    begin = 0
    for part_ends in ends:
        for at in range(0, len(part_ends), DOCUMENTS):
            stops = part_ends[at : at + DOCUMENTS]
            yield np.concatenate(([begin], stops[:-1])), stops
            begin = int(stops[-1])


def _packed(starts: np.ndarray, stops: np.ndarray, window: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents; samples are in the order of their first tokens.

    Returns (firsts, rows): the number of each sample's first piece, with the end of the last one, int64 [samples +
    1]; and start and length of each piece, int64 [pieces, 2].
    """
    begins, ends = cut(starts, stops, window, stride)
    sample = pack(ends - begins, window)
    if not len(sample):
        return np.zeros(1, np.int64), np.zeros((0, 2), np.int64)
    # pieces are in the order of the text, so the first piece of a sample is its first occurrence
    _, first, sample = np.unique(sample, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(len(first))
    number = rank[sample]
    order = np.argsort(number, kind="stable")
    counts = np.bincount(number)
    rows = np.stack((begins, ends - begins), axis=1)[order]
    return np.concatenate(([0], np.cumsum(counts))), rows


class _Sums:
    """Writes numbers to a file, and computes their checksums."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._count = 0
        self._digest = xxhash.xxh3_128()
        self._block_bytes = bytearray()
        self._blocks = list[str]()

    def write(self, values: np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=DTYPE).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._count += values.size
        self._block_bytes += data
        while len(self._block_bytes) >= BLOCK_BYTES:
            self._blocks.append(xxhash.xxh3_64_hexdigest(bytes(self._block_bytes[:BLOCK_BYTES])))
            del self._block_bytes[:BLOCK_BYTES]

    def finish(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._block_bytes:
            self._blocks.append(xxhash.xxh3_64_hexdigest(bytes(self._block_bytes)))
        return {"numbers": self._count, "xxh3": self._digest.hexdigest(), "blocks": "".join(self._blocks)}


def _shard(name: str, facts: dict[str, Any]) -> TokenShard:
    return TokenShard(
        name, facts["numbers"], documents=0, bytes=0, xxh3=facts["xxh3"], blocks=facts["blocks"]
    )


def _checksum(facts: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
