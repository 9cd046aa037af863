"""Clusters of similar documents over all parts, and the document of each that is kept.

A document's number has its part in the upper 32 bits and its place in the part in the lower 32. Numbers follow the
order of the sources whatever the size of the parts, so the clusters do not depend on that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from orchestrator.data.clean.signatures import RANGES, Compared, Comparison

RECORDS = 2**21
"""Approximate number of records that one task sorts. With its signature, a record takes some hundred bytes."""
LEADERS = 32
"""Maximum number of documents under one key that all others are compared with. It bounds the comparisons, which would
otherwise grow with the square of a key's documents.
"""
PAIR = np.dtype([("one", "<u8"), ("other", "<u8")])


class Slice(NamedTuple):
    """The keys of one band in the ranges [first, last), over all parts."""

    band: int
    first: int
    last: int


def slices(documents: int, comparison: Comparison) -> list[Slice]:
    """Divide the comparison into slices of about RECORDS records."""
    ranges_per_slice = max(1, min(RANGES, RANGES * RECORDS // max(1, documents)))
    firsts = range(0, RANGES, ranges_per_slice)
    return [Slice(b, n, min(RANGES, n + ranges_per_slice)) for b in range(comparison.bands) for n in firsts]


class Parts(Protocol):
    """All parts, training parts first; each is read on demand."""

    @property
    def count(self) -> int:
        """Number of parts."""

    def compared(self, number: int) -> Compared:
        """Return the comparison data of a part."""

    def alive(self, number: int) -> np.ndarray | None:
        """Return which documents of a part take part in the comparison, bool [documents]; None for all."""


def pairs(parts: Parts, piece: Slice, comparison: Comparison) -> np.ndarray:
    """Return the pairs of similar documents with equal keys in a slice, PAIR [pairs].

    Each document is paired with one leader that it is similar to, which suffices to join them into one cluster.
    """
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
    # Only keys that at least two documents share are compared.
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
    # leader[i] is the index of the first document with the key of document i.
    leader = np.repeat(begins, np.diff([*begins, len(key)]))
    equal = _equal(signatures, leader, np.arange(len(key)))
    result = [
        _pairs(
            document,
            leader,
            np.flatnonzero((equal >= comparison.least_equal) & (leader != np.arange(len(key)))),
        )
    ]
    unlike = np.flatnonzero(equal < comparison.least_equal)
    for group in np.split(unlike, np.flatnonzero(np.diff(leader[unlike])) + 1):
        result += _led(document, signatures, group, comparison.least_equal)
    return np.concatenate(result)


def _led(
    document: np.ndarray, signatures: np.ndarray, candidates: np.ndarray, least_equal: int
) -> Iterator[np.ndarray]:
    """Yield pairs among documents of one key that are unlike its first: each next leader takes those similar to it."""
    for _ in range(LEADERS):
        if len(candidates) < 2:
            return
        leader = np.full(len(candidates) - 1, candidates[0])
        like = _equal(signatures, leader, candidates[1:]) >= least_equal
        yield _pairs(document, np.full(len(document), candidates[0]), candidates[1:][like])
        candidates = candidates[1:][~like]


def _equal(signatures: np.ndarray, first_rows: np.ndarray, second_rows: np.ndarray) -> np.ndarray:
    """Return for each pair of rows how many signature bytes are equal, int64. Works in steps to bound memory."""
    step = 2**16
    result = [np.zeros(0, np.int64)]
    for at in range(0, len(first_rows), step):
        same = signatures[first_rows[at : at + step]] == signatures[second_rows[at : at + step]]
        result.append(np.count_nonzero(same, axis=1))
    return np.concatenate(result)


def _pairs(document: np.ndarray, leader: np.ndarray, members: np.ndarray) -> np.ndarray:
    result = np.zeros(len(members), PAIR)
    result["one"], result["other"] = document[leader[members]], document[members]
    return result


def _signatures(parts: Parts, document: np.ndarray) -> np.ndarray:
    """Return the signatures of documents, uint8 [documents, width], read part by part."""
    owner = (document >> np.uint64(32)).astype(np.int64)
    result = np.zeros((len(document), parts.compared(int(owner[0])).header["width"]), np.uint8)
    for number in np.unique(owner):
        mine = owner == number
        part = parts.compared(int(number))
        rows = np.searchsorted(part.sizes()[0], (document[mine] & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        result[mine] = part.signatures()[rows]
    return result


class Clusters(NamedTuple):
    """The documents that belong to a cluster, sorted, and for each the document that is kept."""

    document: np.ndarray
    kept: np.ndarray

    def removed_of_part(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of a part's removed documents, and the documents kept instead of them."""
        begin, end = np.searchsorted(self.document, [np.uint64(number << 32), np.uint64((number + 1) << 32)])
        removed = self.document[begin:end] != self.kept[begin:end]
        mine = self.document[begin:end][removed] & np.uint64(0xFFFFFFFF)
        return mine.astype(np.int64), self.kept[begin:end][removed]


def clusters(pairs: Sequence[np.ndarray], parts: Parts, held_out: int, longest: bool) -> Clusters:
    """Join pairs into clusters (connected components), and choose the document of each that is kept.

    Args:
        pairs: pairs of similar documents, as from `pairs`.
        parts: all parts.
        held_out: number of the first part that is not training text. Documents from there on always win.
        longest: keep the longest document; otherwise, and among equally long ones, the first.
    """
    joined = np.unique(np.concatenate([np.zeros(0, PAIR), *pairs]))
    document, index_of_document = np.unique(
        np.concatenate([joined["one"], joined["other"]]), return_inverse=True
    )
    if not len(document):
        return Clusters(document, document)
    first_index = index_of_document[: len(joined)]
    second_index = index_of_document[len(joined) :]
    graph = coo_matrix(
        (np.ones(len(joined), np.int8), (first_index, second_index)), shape=(len(document), len(document))
    )
    label = connected_components(graph, directed=False)[1]
    owner = (document >> np.uint64(32)).astype(np.int64)
    size = _sizes(parts, document, owner) if longest else np.zeros(len(document), np.int64)
    # lexsort uses its last key first: cluster, then held-out documents, then length, then order of the sources.
    order = np.lexsort((document, -size, owner < held_out, label))
    first = np.concatenate([[True], np.diff(label[order]) != 0])
    best = np.zeros(label.max() + 1, np.uint64)
    best[label[order][first]] = document[order][first]
    kept = best[label]
    kept[owner >= held_out] = document[owner >= held_out]
    return Clusters(document, kept)


def _sizes(parts: Parts, document: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return the bytes of text of documents, int64 [documents], read part by part."""
    result = np.zeros(len(document), np.int64)
    for number in np.unique(owner):
        documents, sizes = parts.compared(int(number)).sizes()
        mine = owner == number
        result[mine] = sizes[
            np.searchsorted(documents, (document[mine] & np.uint64(0xFFFFFFFF)).astype(np.uint32))
        ]
    return result
