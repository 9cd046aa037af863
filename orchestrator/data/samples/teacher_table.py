"""A teacher's largest logits of prepared samples. They are computed once and stored next to the data.

    <prepared data>/teacher/<key>/000000.bin      the samples of one part: a head, then a record for each sample
    <prepared data>/teacher/<key>/manifest.json   k, and the mean probability of the k tokens, once all parts are there

A record has tokens int32 [L, k], logits fp32 [L, k] and log-sums fp32 [L], little-endian, after their xxh3_64. A head
has the sum of the probabilities that are kept, fp64, and their number, int64. The key covers everything that determines
the values. Steps read single records and verify each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
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


class TeacherTable:
    """The logits of the samples 0 to `samples` - 1, `k` at each of `length` positions. Only one process may write."""

    def __init__(
        self, data: str, key: str, samples: int, length: int, k: int, retry: Retry | None = None
    ) -> None:
        """`data` is the URI of the samples' prepared data, and `key` identifies the values."""
        self._folder = DataFolder(f"{data}/teacher/{key}", retry)
        self._record = np.dtype(
            [
                ("sum", "<u8"),
                ("tokens", "<i4", (length, k)),
                ("logits", "<f4", (length, k)),
                ("log_sum", "<f4", (length,)),
            ]
        )
        self.samples = samples
        self.k = k
        self._size = max(1, min(MOST, PART_BYTES // self._record.itemsize))

    @property
    def parts(self) -> list[range]:
        """The samples of each part, in order."""
        size = self._size
        return [range(a, min(a + size, self.samples)) for a in range(0, self.samples, size)]

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are not there whole."""
        sizes = self._folder.sizes("")
        return [
            number
            for number, part in enumerate(self.parts)
            if sizes.get(_name(number)) != HEAD.itemsize + len(part) * self._record.itemsize
        ]

    def write(self, number: int, records: TopRecords, mass: float, tokens: int) -> None:
        """Store part `number`, with the sum of the probabilities that are kept of so many predicted tokens."""
        content = np.zeros(len(self.parts[number]), self._record)
        for name, values in records._asdict().items():
            content[name] = values
        content["sum"] = [_sum_of(record) for record in content]
        head = np.array([(mass, tokens)], HEAD)
        self._folder.write(_name(number), head.tobytes() + content.tobytes())

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
            number, index = divmod(sample, self._size)
            offset = HEAD.itemsize + index * self._record.itemsize
            self._fill(number, offset, result[row : row + 1])
            if result["sum"][row] != _sum_of(result[row]):
                self._refuse(number)
        return TopRecords(result["tokens"], result["logits"], result["log_sum"])

    def _head(self, number: int) -> np.ndarray:
        head = np.empty(1, HEAD)
        self._fill(number, 0, head)
        return head

    def _fill(self, number: int, offset: int, target: np.ndarray) -> None:
        try:
            done = self._folder.read_into(_name(number), offset, target.view(np.uint8).data)
        except FileNotFoundError:
            done = 0
        if done != target.nbytes:
            self._refuse(number)

    def _refuse(self, number: int) -> None:
        hint = "remove the file, and the run computes it again"
        raise InputError("the stored logits of a teacher are damaged", self._folder.at(_name(number)), hint)


def _sum_of(record: np.void) -> int:
    return xxhash.xxh3_64_intdigest(record.tobytes()[SUM_BYTES:])


def _name(number: int) -> str:
    return f"{number:06d}.bin"
