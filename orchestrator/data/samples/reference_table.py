"""Log-probabilities of prepared answers under a run's initial model. They are computed once and stored next to the
data.

    <prepared data>/reference/<key>/000000.bin    fp32 [samples, 2] of one part, little-endian, after its xxh3_64

The key covers everything that determines the values: the base's checksum, the samples, and how they are read.
Existing parts are not computed again, so an interrupted computation continues, and further runs over the same data
and base compute nothing.
"""

from __future__ import annotations

import numpy as np
import xxhash

from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.retry import Retry

PART = 512
"""Number of samples in a part."""
SUM_BYTES = 8


class ReferenceTable:
    """The log-probabilities of the samples 0 to `samples` - 1. Only one process may write."""

    def __init__(self, data: str, key: str, samples: int, retry: Retry | None = None) -> None:
        """`data` is the URI of the samples' prepared data."""
        self._folder = DataFolder(f"{data}/reference/{key}", retry)
        self.samples = samples

    @property
    def parts(self) -> list[range]:
        """The samples of each part, in order."""
        return [range(a, min(a + PART, self.samples)) for a in range(0, self.samples, PART)]

    def read(self) -> np.ndarray:
        """Return all values, fp32 [samples, 2]. Missing and damaged parts are NaN."""
        values = np.full((self.samples, 2), np.nan, dtype="<f4")
        for number, part in enumerate(self.parts):
            data = self._folder.read(_name(number)) or b""
            content = data[SUM_BYTES:]
            if len(content) == 8 * len(part) and data[:SUM_BYTES] == xxhash.xxh3_64_digest(content):
                values[part.start : part.stop] = np.frombuffer(content, "<f4").reshape(-1, 2)
        return values

    def write(self, number: int, values: np.ndarray) -> None:
        """Store part `number`."""
        content = np.ascontiguousarray(values, dtype="<f4").tobytes()
        self._folder.write(_name(number), xxhash.xxh3_64_digest(content) + content)


def _name(number: int) -> str:
    return f"{number:06d}.bin"
