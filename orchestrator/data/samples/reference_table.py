"""Log-probabilities of prepared answers under the model that runs begin with: computed once, kept beside the data.

    <prepared data>/reference/<key>/000000.bin    fp32 [samples, 2] of one part, little-endian, after its xxh3_64

The key covers all that determines them: the base's checksum, the samples, and how they are read. A part that is there
is not computed again: what was interrupted goes on, and further runs over the same data and base need nothing.
"""

from __future__ import annotations

import numpy as np
import xxhash

from orchestrator.data.store.data_folder import DataFolder
from orchestrator.storage.retry import Retry

PART = 512
"""Samples of a part."""
SUM_BYTES = 8


class ReferenceTable:
    """The log-probabilities of the samples 0 to `samples` - 1; only one process writes."""

    def __init__(self, data: str, key: str, samples: int, retry: Retry | None = None) -> None:
        """`data` is the URI of the prepared data that the samples are of."""
        self._folder = DataFolder(f"{data}/reference/{key}", retry)
        self.samples = samples

    @property
    def parts(self) -> list[range]:
        """The samples of each part, in order."""
        return [range(a, min(a + PART, self.samples)) for a in range(0, self.samples, PART)]

    def read(self) -> np.ndarray:
        """fp32 [samples, 2]; NaN in the parts that are not there, or damaged."""
        found = np.full((self.samples, 2), np.nan, dtype="<f4")
        for number, part in enumerate(self.parts):
            data = self._folder.read(_name(number)) or b""
            content = data[SUM_BYTES:]
            if len(content) == 8 * len(part) and data[:SUM_BYTES] == xxhash.xxh3_64_digest(content):
                found[part.start : part.stop] = np.frombuffer(content, "<f4").reshape(-1, 2)
        return found

    def write(self, number: int, values: np.ndarray) -> None:
        """Keep part `number`."""
        content = np.ascontiguousarray(values, dtype="<f4").tobytes()
        self._folder.write(_name(number), xxhash.xxh3_64_digest(content) + content)


def _name(number: int) -> str:
    return f"{number:06d}.bin"
