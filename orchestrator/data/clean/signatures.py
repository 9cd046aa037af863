"""What is compared of documents: a hash of the text, or a MinHash signature (Broder, 1997) of its words in a row.

A file holds what one part's documents are compared by. Records of a band and a document, sorted by a key, come last:
documents with equal keys in a band are candidates, and their signatures then say whether they are alike. Keys are
uniform, so that a task may read those of one of RANGES alone.
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
from orchestrator.data.clean.text_steps import needs_extra
from orchestrator.data.samples.order import mix
from orchestrator.data.store.data_folder import DataFolder

RANGES = 64
"""Ranges of keys that can be read by themselves."""
RECORD = np.dtype([("key", "<u8"), ("document", "<u4")])
WORDS = 2**20
"""Words whose hashes are kept at most."""
FOUND = 0.95
"""Least probability that a pair at the threshold becomes a candidate."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
LARGEST_HEAD = 2**26
BATCH = 2**18
"""Hashes that are signed at once."""


class WordHashes(dict[str, int]):
    """The hashes of words, kept for the next text."""

    def __missing__(self, word: str) -> int:
        if len(self) >= WORDS:
            self.clear()
        found = self[word] = xxhash.xxh3_64_intdigest(word.encode())
        return found

    def of_rows(self, words: Sequence[str], length: int) -> np.ndarray:
        """A hash of each `length` words in a row, uint64; of all words if there are fewer."""
        hashes = np.fromiter(map(self.__getitem__, words), np.uint64, len(words))
        length = min(length, len(words))
        count = len(words) - length + 1 if words else 0
        found = np.zeros(count, np.uint64)
        for at in range(length):
            found = found * MULTIPLIER + hashes[at : at + count]
        return mix(found)


@dataclass(frozen=True)
class Comparison:
    """How documents are compared: keys of `bands` bands, and signatures of `width` bytes of which at least `alike` are
    equal."""

    bands: int
    width: int
    alike: int


EXACT = Comparison(1, 8, 8)


def comparison(threshold: float, hashes: int) -> Comparison:
    """Of near duplicates: as many hashes in a band as find a pair at the threshold with probability FOUND."""
    rows = max(
        (n for n in range(1, hashes + 1) if 1 - (1 - threshold**n) ** (hashes // n) >= FOUND), default=1
    )
    # one byte of each hash is compared: two of unequal documents are equal by chance in one case of 256
    return Comparison(hashes // rows, hashes, math.ceil(hashes * (threshold + (1 - threshold) / 256)))


def exact(hashes: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The keys [documents, 1] and signatures [documents, 8] of documents by the 128-bit hashes of their text."""
    both = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 16)
    return np.ascontiguousarray(both[:, :8]).view("<u8"), both[:, 8:]


def near(rows: Iterable[np.ndarray], hashes: int, seed: int, bands: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys [documents, bands] and signatures [documents, hashes] of documents by the hashes of their rows of words;
    of no meaning for one without words."""
    keys = [np.zeros((0, bands), np.uint64)]
    signatures = [np.zeros((0, hashes), np.uint8)]
    for batch in _batches(rows):
        numbers = _minima(batch, hashes, seed)
        # the last bits of a number are not uniform enough for a byte of it
        signatures.append((mix(numbers) >> np.uint64(56)).astype(np.uint8))
        width = hashes // bands
        banded = numbers[:, : width * bands].reshape(len(numbers), bands, width)
        key = np.broadcast_to(np.arange(bands, dtype=np.uint64), (len(numbers), bands))
        for at in range(width):
            key = key * MULTIPLIER + banded[:, :, at]
        keys.append(mix(key))
    return np.concatenate(keys), np.concatenate(signatures)


def _batches(rows: Iterable[np.ndarray]) -> Iterable[list[np.ndarray]]:
    held: list[np.ndarray] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row)
        if size >= BATCH:
            yield held
            held = []
            size = 0
    if held:
        yield held


def _minima(rows: list[np.ndarray], hashes: int, seed: int) -> np.ndarray:
    rensa = needs_extra("near_duplicates", "rensa")
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.uint64)
    made = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(rows), offsets, num_perm=hashes, seed=seed
    )
    return np.array(made.to_rows(), dtype=np.uint64).reshape(len(rows), hashes)


def algorithm() -> str:
    """What a signature depends on beside the options. Raises InputError without rensa."""
    return f"rensa {needs_extra('near_duplicates', 'rensa').RMinHash.ALGORITHM_VERSION}"


def damaged(folder: DataFolder, name: str) -> InputError:
    """The error for a damaged file of what documents are compared by."""
    return InputError("is damaged", folder.at(name), "remove it; the same command makes it anew")


@dataclass(frozen=True)
class Compared:
    """A file of what one part's documents are compared by: `rows` documents with `sizes` in bytes of text."""

    folder: DataFolder
    name: str
    header: dict[str, Any]

    @property
    def rows(self) -> int:
        """Documents with a signature."""
        return int(self.header["rows"])

    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers and the sizes of the documents."""
        found = self._part(0, 8 * self.rows, self.header["sums"]["documents"])
        return np.frombuffer(found, "<u4")[: self.rows], np.frombuffer(found, "<u4")[self.rows :]

    def signatures(self) -> np.ndarray:
        """The signatures, uint8 [rows, width]."""
        width = self.header["width"]
        found = self._part(8 * self.rows, self.rows * width, self.header["sums"]["signatures"])
        return np.frombuffer(found, np.uint8).reshape(self.rows, width)

    def records(self, band: int, first: int, last: int) -> np.ndarray:
        """The records of a band with keys in ranges [first, last), sorted by key."""
        counts = self.header["counts"][band]
        sums = self.header["sums"]["ranges"][band]
        before = (8 + self.header["width"]) * self.rows + RECORD.itemsize * (
            sum(map(sum, self.header["counts"][:band])) + sum(counts[:first])
        )
        found = self._part(before, RECORD.itemsize * sum(counts[first:last]), None)
        at = 0
        for number in range(first, last):
            size = RECORD.itemsize * counts[number]
            if counts[number] and xxhash.xxh3_64_hexdigest(found[at : at + size]) != sums[number]:
                raise damaged(self.folder, self.name)
            at += size
        return np.frombuffer(found, RECORD)

    def _part(self, offset: int, size: int, checksum: str | None) -> bytes:
        found = bytearray(size)
        view = memoryview(found)
        at = 0
        while at < size:
            count = self.folder.read_into(self.name, self.header["begin"] + offset + at, view[at:])
            if not count:
                raise damaged(self.folder, self.name)
            at += count
        if checksum is not None and xxhash.xxh3_64_hexdigest(found) != checksum:
            raise damaged(self.folder, self.name)
        return bytes(found)


def write(
    folder: DataFolder,
    name: str,
    documents: np.ndarray,
    sizes: np.ndarray,
    keys: np.ndarray,
    signatures: np.ndarray,
    words: np.ndarray,
) -> None:
    """Store what a part's documents are compared by: their numbers, sizes, keys [documents, bands] and signatures.
    Only those that have `words`, bool [documents], are candidates."""
    listed = documents.astype("<u4").tobytes() + sizes.astype("<u4").tobytes()
    counts = []
    sums = []
    parts = []
    for band in range(keys.shape[1]):
        records = np.zeros(np.count_nonzero(words), RECORD)
        records["key"], records["document"] = keys[words, band], documents[words]
        records = records[np.argsort(records["key"], kind="stable")]
        ends = np.searchsorted(records["key"] >> np.uint64(58), np.arange(RANGES + 1))
        found = [records[a:b].tobytes() for a, b in pairwise(ends.tolist())]
        counts.append(np.diff(ends).tolist())
        sums.append([xxhash.xxh3_64_hexdigest(part) if part else "" for part in found])
        parts.append(b"".join(found))
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
    """The stored file. Raises InputError if it is damaged, FileNotFoundError if there is none."""
    begin = bytearray(16)
    if folder.read_into(name, 0, memoryview(begin)) != 16:
        raise damaged(folder, name)
    size = int.from_bytes(begin[:8], "little")
    head = bytearray(size if size <= LARGEST_HEAD else 0)
    if folder.read_into(name, 16, memoryview(head)) != size or xxhash.xxh3_64_digest(head) != begin[8:]:
        raise damaged(folder, name)
    return Compared(folder, name, {**json.loads(head), "begin": 16 + size})
