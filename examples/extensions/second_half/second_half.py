"""Next-token prediction that has seen half a window before its first prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.options import fraction
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective


@dataclass(frozen=True, kw_only=True)
class SecondHalf(SampledObjective):
    """Predict the next token, but not in the first `skip` of each window."""

    name = "second_half"
    architectures = frozenset({"decoder"})
    overlap: ClassVar[int] = 1  # a window ends with the token that the next one begins with
    skip: float = fraction(0.5)

    def window(self, sequence_length: int) -> int:
        """One token more than the model reads: the label of the last position."""
        return sequence_length + 1

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        """tokens and labels, int64 [sequence_length]; labels of IGNORE are not predicted."""
        window = self.read_window(read, sample)
        tokens = window[:-1]
        labels = window[1:].copy()
        labels[: int(self.skip * len(labels))] = IGNORE
        return {"tokens": tokens, "labels": labels}
