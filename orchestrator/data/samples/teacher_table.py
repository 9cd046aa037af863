"""A teacher's largest logits of prepared samples. They are computed once and stored next to the data.

    <prepared data>/teacher/<key>/000000.bin      the samples of one part: a head, then a record for each sample
    <prepared data>/teacher/<key>/manifest.json   k, and the mean probability of the k tokens, once all parts are there

Parts go through the samples by number, or in the order in which steps first read them. In the latter case a hash of
the part's sample numbers is in its name: 000000-<hash>.bin.

A record has tokens int32 [L, k], logits fp32 [L, k] and log-sums fp32 [L], little-endian, after their xxh3_64. A head
has the sum of the probabilities that are kept, fp64, and their number, int64. The key covers everything that determines
the values. Steps read single records and verify each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data.samples.first_use import FirstUse
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.retry import Retry

MANIFEST = "manifest.json"
PART_BYTES = 2**23
"""Approximate bytes of a part."""
MOST = 512
"""Most samples of a part."""
SUM_BYTES = 8
HEAD = np.dtype([("mass", "<f8"), ("tokens", "<i8")])


class TopRecords(NamedTuple):
    """Tokens int32 [n, L, k], logits fp32 [n, L, k] and log-sums fp32 [n, L] of n samples."""

    tokens: np.ndarray
    logits: np.ndarray
    log_sum: np.ndarray


def record_of(length: int, k: int) -> np.dtype[np.void]:
    """Return the type of a sample's record: `k` logits at each of `length` positions."""
    fields = [
        ("sum", "<u8"),
        ("tokens", "<i4", (length, k)),
        ("logits", "<f4", (length, k)),
        ("log_sum", "<f4", (length,)),
    ]
    return np.dtype(fields)


def part_size(length: int, k: int, most: int) -> int:
    """Return how many samples, at most `most`, a part of about PART_BYTES has."""
    return max(1, min(most, PART_BYTES // record_of(length, k).itemsize))


class TeacherTable:
    """The logits of the samples 0 to `samples` - 1, `k` at each of `length` positions.

    Several processes may write a part, if they write the same bits.
    """

    def __init__(
        self,
        data: str,
        key: str,
        samples: int,
        length: int,
        k: int,
        retry: Retry | None = None,
        order: FirstUse | None = None,
    ) -> None:
        """Open the table.

        Args:
            data: URI of the samples' prepared data.
            key: what identifies the values.
            samples: number of samples.
            length: positions of a sample.
            k: logits at each.
            retry: how to retry reads.
            order: the parts in the order of use; None if parts go through the samples by number.
        """
        self._folder = DataFolder(f"{data}/teacher/{key}", retry)
        self._record = record_of(length, k)
        self.samples = samples
        self.k = k
        self._size = part_size(length, k, MOST)
        self._order = order
        self._there: set[int] = set()
        """Numbers of parts that `lacks` has found."""

    @property
    def parts(self) -> Sequence[Sequence[int] | np.ndarray]:
        """The samples of each part, in order."""
        if self._order is not None:
            return self._order.parts
        size = self._size
        return [range(a, min(a + size, self.samples)) for a in range(0, self.samples, size)]

    def name(self, number: int) -> str:
        """Return the file name of part `number`."""
        if self._order is None:
            return f"{number:06d}.bin"
        samples = np.ascontiguousarray(self._order.parts[number], "<i8")
        return f"{number:06d}-{xxhash.xxh3_64_hexdigest(samples.tobytes())}.bin"

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not there whole."""
        sizes = self._folder.sizes("")
        return [
            number
            for number, part in enumerate(self.parts)
            if sizes.get(self.name(number)) != self._bytes(len(part))
        ]

    def has(self, name: str, samples: int) -> bool:
        """Return whether the part of this name is there whole, with so many samples."""
        return self._folder.size(name) == self._bytes(samples)

    def lacks(self, samples: np.ndarray) -> list[int]:
        """Return the numbers of the parts that these samples need and that are not there yet."""
        numbers = {self._place(sample)[0] for sample in samples.tolist()} - self._there
        self._there |= {number for number in numbers if self.has(self.name(number), len(self.parts[number]))}
        return sorted(numbers - self._there)

    def _bytes(self, samples: int) -> int:
        return HEAD.itemsize + samples * self._record.itemsize

    def write(self, name: str, records: TopRecords, mass: float, tokens: int) -> None:
        """Store the part of this name, with the sum of the probabilities that are kept of so many predicted tokens."""
        content = np.zeros(len(records.tokens), self._record)
        for field, values in records._asdict().items():
            content[field] = values
        content["sum"] = [_sum_of(record) for record in content]
        head = np.array([(mass, tokens)], HEAD)
        self._folder.write(name, head.tobytes() + content.tobytes())

    def finish(self, about: Mapping[str, object]) -> float:
        """Write the manifest, with `about` in it; return the mean probability of the tokens that are kept."""
        heads = np.concatenate([self._head(number) for number in range(len(self.parts))])
        mass = float(heads["mass"].sum() / max(int(heads["tokens"].sum()), 1))
        self._folder.write_json(MANIFEST, {**about, "k": self.k, "samples": self.samples, "mass": mass})
        return mass

    def read(self, samples: np.ndarray) -> TopRecords:
        """Return the records of samples.

        Raises:
            InputError: if a record is damaged or missing.
        """
        result = np.empty(len(samples), self._record)
        for row, sample in enumerate(samples.tolist()):
            number, index = self._place(sample)
            offset = HEAD.itemsize + index * self._record.itemsize
            self._fill(number, offset, result[row : row + 1])
            if result["sum"][row] != _sum_of(result[row]):
                self._refuse(number)
        return TopRecords(result["tokens"], result["logits"], result["log_sum"])

    def _place(self, sample: int) -> tuple[int, int]:
        """Return the number of a sample's part, and its index there."""
        if self._order is None:
            return divmod(sample, self._size)
        place = self._order.place(sample)
        assert place is not None, f"no step of the run was to read sample {sample}"
        return place

    def _head(self, number: int) -> np.ndarray:
        head = np.empty(1, HEAD)
        self._fill(number, 0, head)
        return head

    def _fill(self, number: int, offset: int, target: np.ndarray) -> None:
        try:
            done = self._folder.read_into(self.name(number), offset, target.view(np.uint8).data)
        except FileNotFoundError:
            done = 0
        if done != target.nbytes:
            self._refuse(number)

    def _refuse(self, number: int) -> None:
        hint = "remove the file, and the run computes it again"
        raise InputError(
            "the stored logits of a teacher are damaged", self._folder.at(self.name(number)), hint
        )


def _sum_of(record: np.void) -> int:
    return xxhash.xxh3_64_intdigest(record.tobytes()[SUM_BYTES:])
