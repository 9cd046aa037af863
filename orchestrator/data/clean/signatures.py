"""Document comparison by a hash of the text, or by a MinHash signature (Broder, 1997) of its word n-grams.

A file holds the comparison data of one part's documents. It ends with one record per document and band, sorted by key.
Documents with equal keys in a band are candidates; their signatures decide whether they are similar. Keys are uniformly
distributed over RANGES ranges, so that a task can read the records of a few ranges alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.clean.document_rules import needs_extra
from orchestrator.data.samples.order import mix
from orchestrator.data.store.data_folder import DataFolder

RANGES = 64
"""Number of key ranges that can be read separately."""
RECORD = np.dtype([("key", "<u8"), ("document", "<u4")])
"""One entry of a band: a document's key, and its number within the part."""
WORDS = 2**20
"""Maximum number of cached word hashes."""
FOUND = 0.95
"""Minimum probability that a pair at the threshold becomes a candidate."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, an odd number: the base of the polynomial hashes."""
LARGEST_HEAD = 2**26
BATCH = 2**18
"""Hashes that are signed together."""


class WordHashes(dict[str, int]):
    """A cache of word hashes, shared by all texts."""

    def __missing__(self, word: str) -> int:
        if len(self) >= WORDS:
            self.clear()
        result = self[word] = xxhash.xxh3_64_intdigest(word.encode())
        return result

    def of_ngrams(self, words: Sequence[str], length: int) -> np.ndarray:
        """Return a hash of each n-gram of `length` words, uint64; one hash of all words if the text is shorter."""
        hashes = np.fromiter(map(self.__getitem__, words), np.uint64, len(words))
        length = min(length, len(words))
        count = len(words) - length + 1 if words else 0
        # A polynomial hash modulo 2^64, computed for all n-grams at once: one pass for each of their words.
        result = np.zeros(count, np.uint64)
        for at in range(length):
            result = result * MULTIPLIER + hashes[at : at + count]
        return mix(result)


@dataclass(frozen=True)
class Comparison:
    """How documents are compared: by keys of `bands` bands, and signatures of `width` bytes.

    Two documents are similar if at least `least_equal` bytes of their signatures are equal.
    """

    bands: int
    width: int
    least_equal: int


EXACT = Comparison(1, 8, 8)


def comparison(threshold: float, hashes: int) -> Comparison:
    """Return the comparison for near duplicates at a Jaccard `threshold`.

    A band of r hashes agrees with probability threshold^r. The largest r is chosen for which at least one of the hashes
    // r bands agrees with probability FOUND (locality-sensitive hashing).
    """
    rows = max(
        (n for n in range(1, hashes + 1) if 1 - (1 - threshold**n) ** (hashes // n) >= FOUND), default=1
    )
    # one byte of each hash is compared, and two unequal hashes share it with probability 1/256
    return Comparison(hashes // rows, hashes, math.ceil(hashes * (threshold + (1 - threshold) / 256)))


def exact(hashes: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys [documents, 1] and signatures [documents, 8] of documents, given the 128-bit hashes of their
    text.
    """
    hash_bytes = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16)
    return np.ascontiguousarray(hash_bytes[:, :8]).view("<u8"), hash_bytes[:, 8:]


def minhash(rows: Iterable[np.ndarray], hashes: int, seed: int, bands: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys [documents, bands] and signatures [documents, hashes] of documents, given their n-gram hashes.

    The results of a document without n-grams are meaningless.
    """
    keys = [np.zeros((0, bands), np.uint64)]
    signatures = [np.zeros((0, hashes), np.uint8)]
    for batch in _batches(rows):
        numbers = _minima(batch, hashes, seed)
        # the last bits of a number are not uniform enough, so it is mixed before one byte is taken
        signatures.append((mix(numbers) >> np.uint64(56)).astype(np.uint8))
        width = hashes // bands
        banded = numbers[:, : width * bands].reshape(len(numbers), bands, width)
        key = np.broadcast_to(np.arange(bands, dtype=np.uint64), (len(numbers), bands))
        for at in range(width):
            key = key * MULTIPLIER + banded[:, :, at]
        keys.append(mix(key))
    return np.concatenate(keys), np.concatenate(signatures)


def _batches(rows: Iterable[np.ndarray]) -> Iterable[list[np.ndarray]]:
    """Group documents until a group has BATCH n-grams."""
    batch: list[np.ndarray] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row)
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _minima(rows: list[np.ndarray], hashes: int, seed: int) -> np.ndarray:
    """Return the minimum of each hash function over a document's n-grams, uint64 [documents, hashes]."""
    rensa = needs_extra("near_duplicates", "rensa")
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.uint64)
    made = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(rows), offsets, num_perm=hashes, seed=seed
    )
    return np.array(made.to_rows(), dtype=np.uint64).reshape(len(rows), hashes)


def algorithm() -> str:
    """Return what a signature depends on besides the options. Raises InputError without rensa."""
    return f"rensa {needs_extra('near_duplicates', 'rensa').RMinHash.ALGORITHM_VERSION}"


def damaged(folder: DataFolder, name: str) -> InputError:
    """Return the error for a damaged file of comparison data."""
    return InputError("is damaged", folder.at(name), "remove it; the same command makes it again")


@dataclass(frozen=True)
class Compared:
    """A file with the comparison data of one part."""

    folder: DataFolder
    name: str
    header: dict[str, Any]

    @property
    def rows(self) -> int:
        """Number of documents with a signature."""
        return int(self.header["rows"])

    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the documents and the sizes of their text in bytes, uint32 [rows] each."""
        result = self._part(0, 8 * self.rows, self.header["sums"]["documents"])
        return np.frombuffer(result, "<u4")[: self.rows], np.frombuffer(result, "<u4")[self.rows :]

    def signatures(self) -> np.ndarray:
        """Return the signatures, uint8 [rows, width]."""
        width = self.header["width"]
        result = self._part(8 * self.rows, self.rows * width, self.header["sums"]["signatures"])
        return np.frombuffer(result, np.uint8).reshape(self.rows, width)

    def records(self, band: int, first: int, last: int) -> np.ndarray:
        """Return the records of a band with keys in the ranges [first, last), sorted by key. Raises InputError if
        damaged.
        """
        counts = self.header["counts"][band]
        sums = self.header["sums"]["ranges"][band]
        before = (8 + self.header["width"]) * self.rows + RECORD.itemsize * (
            sum(map(sum, self.header["counts"][:band])) + sum(counts[:first])
        )
        result = self._part(before, RECORD.itemsize * sum(counts[first:last]), None)
        at = 0
        for number in range(first, last):
            size = RECORD.itemsize * counts[number]
            if counts[number] and xxhash.xxh3_64_hexdigest(result[at : at + size]) != sums[number]:
                raise damaged(self.folder, self.name)
            at += size
        return np.frombuffer(result, RECORD)

    def _part(self, offset: int, size: int, checksum: str | None) -> bytes:
        result = bytearray(size)
        view = memoryview(result)
        at = 0
        while at < size:
            count = self.folder.read_into(self.name, self.header["begin"] + offset + at, view[at:])
            if not count:
                raise damaged(self.folder, self.name)
            at += count
        if checksum is not None and xxhash.xxh3_64_hexdigest(result) != checksum:
            raise damaged(self.folder, self.name)
        return bytes(result)


def write(
    folder: DataFolder,
    name: str,
    documents: np.ndarray,
    sizes: np.ndarray,
    keys: np.ndarray,
    signatures: np.ndarray,
    words: np.ndarray,
) -> None:
    """Store the comparison data of one part.

    Args:
        folder, name: the file to write.
        documents, sizes: number and bytes of text of each document.
        keys: uint64 [documents, bands].
        signatures: uint8 [documents, width].
        words: bool [documents]; only documents with words become candidates.
    """
    listed = documents.astype("<u4").tobytes() + sizes.astype("<u4").tobytes()
    counts = []
    sums = []
    parts = []
    for band in range(keys.shape[1]):
        records = np.zeros(np.count_nonzero(words), RECORD)
        records["key"], records["document"] = keys[words, band], documents[words]
        records = records[np.argsort(records["key"], kind="stable")]
        # The upper 6 bits of a key are its range: 2^6 = RANGES.
        ends = np.searchsorted(records["key"] >> np.uint64(58), np.arange(RANGES + 1))
        bytes_of_ranges = [records[a:b].tobytes() for a, b in pairwise(ends.tolist())]
        counts.append(np.diff(ends).tolist())
        sums.append([xxhash.xxh3_64_hexdigest(part) if part else "" for part in bytes_of_ranges])
        parts.append(b"".join(bytes_of_ranges))
    signed = np.ascontiguousarray(signatures).tobytes()
    checksums = {
        "documents": xxhash.xxh3_64_hexdigest(listed),
        "signatures": xxhash.xxh3_64_hexdigest(signed),
        "ranges": sums,
    }
    header = {"rows": len(documents), "width": signatures.shape[1], "counts": counts, "sums": checksums}
    head = json.dumps(header).encode()
    begin = len(head).to_bytes(8, "little") + xxhash.xxh3_64_digest(head)
    folder.write(name, begin + head + listed + signed + b"".join(parts))


def opened(folder: DataFolder, name: str) -> Compared:
    """Open a stored file. Raises InputError if it is damaged, FileNotFoundError if it is missing."""
    begin = bytearray(16)
    if folder.read_into(name, 0, memoryview(begin)) != 16:
        raise damaged(folder, name)
    size = int.from_bytes(begin[:8], "little")
    head = bytearray(size if size <= LARGEST_HEAD else 0)
    if folder.read_into(name, 16, memoryview(head)) != size or xxhash.xxh3_64_digest(head) != begin[8:]:
        raise damaged(folder, name)
    return Compared(folder, name, {**json.loads(head), "begin": 16 + size})
