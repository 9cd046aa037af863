"""Clusters of documents that are alike, in all parts, and which document of each is kept.

A document has one number: its part's in the upper and its place there in the lower 32 bits. Numbers are in the order of
the sources, whatever the size of the parts, so that the clusters do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from orchestrator.data.clean.signatures import RANGES, Compared, Comparison

RECORDS = 2**21
"""Records that one task sorts, about; with their signatures some hundred bytes each."""
LEADERS = 32
"""Documents that stand for those with the same key: more kinds of documents than that in one key are not compared."""
PAIR = np.dtype([("one", "<u8"), ("other", "<u8")])


class Slice(NamedTuple):
    """The keys of one band in ranges [first, last), of all parts."""

    band: int
    first: int
    last: int


def slices(documents: int, comparison: Comparison) -> list[Slice]:
    """The work of comparing, divided so that each has about RECORDS records."""
    each = max(1, min(RANGES, RANGES * RECORDS // max(1, documents)))
    firsts = range(0, RANGES, each)
    return [Slice(b, n, min(RANGES, n + each)) for b in range(comparison.bands) for n in firsts]


class Parts(Protocol):
    """All parts, those of training first; each is read when it is asked for."""

    @property
    def count(self) -> int:
        """How many there are."""

    def compared(self, number: int) -> Compared:
        """What the documents of a part are compared by."""

    def alive(self, number: int) -> np.ndarray | None:
        """Which documents of a part are to be compared, bool [documents]; None for all."""


def pairs(parts: Parts, piece: Slice, comparison: Comparison) -> np.ndarray:
    """Pairs of documents that are alike and have equal keys in a slice, PAIR [pairs]. All that are alike in one key are
    joined by its first document."""
    keys = [np.zeros(0, np.uint64)]
    numbers = [np.zeros(0, np.uint64)]
    for number in range(parts.count):
        records = parts.compared(number).records(*piece)
        alive = parts.alive(number)
        records = records if alive is None else records[alive[records["document"]]]
        keys.append(records["key"])
        numbers.append(np.uint64(number) << np.uint64(32) | records["document"].astype(np.uint64))
    key = np.concatenate(keys)
    document = np.concatenate(numbers)
    del keys, numbers
    order = np.lexsort((document, key))
    key = key[order]
    document = document[order]
    same = key[1:] == key[:-1]
    shared = (
        np.concatenate([same, [False]]) | np.concatenate([[False], same]) if len(key) else np.zeros(0, bool)
    )
    key = key[shared]
    document = document[shared]
    if not len(key):
        return np.zeros(0, PAIR)
    signatures = _signatures(parts, document)
    begins = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    leader = np.repeat(begins, np.diff([*begins, len(key)]))
    equal = _equal(signatures, leader, np.arange(len(key)))
    found = [
        _pairs(
            document, leader, np.flatnonzero((equal >= comparison.alike) & (leader != np.arange(len(key))))
        )
    ]
    left = np.flatnonzero(equal < comparison.alike)
    for group in np.split(left, np.flatnonzero(np.diff(leader[left])) + 1):
        found += _led(document, signatures, group, comparison.alike)
    return np.concatenate(found)


def _led(document: np.ndarray, signatures: np.ndarray, left: np.ndarray, alike: int) -> Iterator[np.ndarray]:
    """Pairs among documents of one key that are unlike its first: each of the next leaders takes those like it."""
    for _ in range(LEADERS):
        if len(left) < 2:
            return
        leader = np.full(len(left) - 1, left[0])
        like = _equal(signatures, leader, left[1:]) >= alike
        yield _pairs(document, np.full(len(document), left[0]), left[1:][like])
        left = left[1:][~like]


def _equal(signatures: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How many bytes of two signatures are equal, by rows."""
    step = 2**16
    found = [np.zeros(0, np.int64)]
    for at in range(0, len(one), step):
        same = signatures[one[at : at + step]] == signatures[other[at : at + step]]
        found.append(np.count_nonzero(same, axis=1))
    return np.concatenate(found)


def _pairs(document: np.ndarray, leader: np.ndarray, members: np.ndarray) -> np.ndarray:
    found = np.zeros(len(members), PAIR)
    found["one"], found["other"] = document[leader[members]], document[members]
    return found


def _signatures(parts: Parts, document: np.ndarray) -> np.ndarray:
    """The signatures of documents, read part by part."""
    owner = (document >> np.uint64(32)).astype(np.int64)
    found = np.zeros((len(document), parts.compared(int(owner[0])).header["width"]), np.uint8)
    for number in np.unique(owner):
        mine = owner == number
        part = parts.compared(int(number))
        rows = np.searchsorted(part.sizes()[0], (document[mine] & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        found[mine] = part.signatures()[rows]
    return found


class Clusters(NamedTuple):
    """Documents that are in a cluster, sorted, and the one that is kept instead of each."""

    document: np.ndarray
    kept: np.ndarray

    def of_part(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The places in a part of the documents that are removed, and the documents that are kept instead."""
        begin, end = np.searchsorted(self.document, [np.uint64(number << 32), np.uint64((number + 1) << 32)])
        removed = self.document[begin:end] != self.kept[begin:end]
        mine = self.document[begin:end][removed] & np.uint64(0xFFFFFFFF)
        return mine.astype(np.int64), self.kept[begin:end][removed]


def clusters(found: Sequence[np.ndarray], parts: Parts, held_out: int, longest: bool) -> Clusters:
    """Join pairs into clusters, and choose what is kept of each: the longest document if that is asked for, and among
    such the first. Documents of parts from `held_out` on are not training's, and are kept before all others."""
    joined = np.unique(np.concatenate([np.zeros(0, PAIR), *found]))
    document, place = np.unique(np.concatenate([joined["one"], joined["other"]]), return_inverse=True)
    if not len(document):
        return Clusters(document, document)
    one = place[: len(joined)]
    other = place[len(joined) :]
    graph = coo_matrix((np.ones(len(joined), np.int8), (one, other)), shape=(len(document), len(document)))
    label = connected_components(graph, directed=False)[1]
    owner = (document >> np.uint64(32)).astype(np.int64)
    size = _sizes(parts, document, owner) if longest else np.zeros(len(document), np.int64)
    order = np.lexsort((document, -size, owner < held_out, label))
    first = np.concatenate([[True], np.diff(label[order]) != 0])
    best = np.zeros(label.max() + 1, np.uint64)
    best[label[order][first]] = document[order][first]
    kept = best[label]
    kept[owner >= held_out] = document[owner >= held_out]
    return Clusters(document, kept)


def _sizes(parts: Parts, document: np.ndarray, owner: np.ndarray) -> np.ndarray:
    found = np.zeros(len(document), np.int64)
    for number in np.unique(owner):
        documents, sizes = parts.compared(int(number)).sizes()
        mine = owner == number
        found[mine] = sizes[
            np.searchsorted(documents, (document[mine] & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        ]
    return found
