"""Best-fit decreasing: pieces of text into as few samples of one size as it finds (Ding et al., 2024, "Fewer
truncations improve language modeling", section 3)."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np


def cut(starts: np.ndarray, stops: np.ndarray, window: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """The pieces of the documents [start, stop): (starts, stops), int64, document after document.

    A document is one piece; one that is longer than `window` tokens is cut into windows of which each begins with the
    last `window` - `stride` tokens of the one before, and what is left. What has no token beyond those is left out.
    """
    sizes, overlap = stops - starts, window - stride
    full = np.maximum(0, (sizes - window) // stride + 1)
    parts = full + (sizes - full * stride > overlap)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    number = np.arange(len(first)) - first
    begins = np.repeat(starts, parts) + number * stride
    return begins, np.minimum(begins + window, np.repeat(stops, parts))


def pack(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The number of the sample that each piece goes into, int64; a sample holds `capacity` tokens.

    The longest piece comes first; each goes where the least room is left that it fits into. Pieces of one size are
    placed together, so the time is that of sorting, and a search for each change of the room that samples have.
    """
    found = np.full(len(sizes), -1, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    edges = np.flatnonzero(np.diff(sizes[order], prepend=-1))
    rooms = _Rooms(capacity)
    for begin, end in itertools.pairwise([*edges, len(order)]):
        size, left = int(sizes[order[begin]]), order[begin:end]
        for samples, each in rooms.places(size, len(left)):
            count = min(len(left), len(samples) * each)
            found[left[:count]] = np.repeat(samples, each)[:count]
            left = left[count:]
    return found


class _Rooms:
    """Samples by the room that they have left."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._count = capacity, 0
        self._by_room: dict[int, list[np.ndarray]] = {}
        self._rooms: list[int] = []  # those of which there are samples, ascending

    def places(self, size: int, pieces: int) -> Iterator[tuple[np.ndarray, int]]:
        """Samples, and how many pieces of a size each is given; the last of them may be given fewer."""
        while pieces:
            at = bisect_left(self._rooms, size)
            room = self._rooms[at] if at < len(self._rooms) else self._capacity
            each = room // size
            needed = -(-pieces // each)
            samples = self._take(room, needed) if at < len(self._rooms) else self._new(needed)
            count = min(pieces, each * len(samples))
            last = count - each * (len(samples) - 1)
            self._put(room - each * size, samples[:-1])
            self._put(room - last * size, samples[-1:])
            pieces -= count
            yield samples, each

    def _new(self, count: int) -> np.ndarray:
        self._count += count
        return np.arange(self._count - count, self._count)

    def _take(self, room: int, most: int) -> np.ndarray:
        there = self._by_room[room]
        samples = there.pop()
        if len(samples) > most:
            there.append(samples[most:])
        if not there:
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
