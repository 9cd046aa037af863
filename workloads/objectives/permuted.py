"""Prediction in a random order (Yang et al. 2019, XLNet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.options import at_least
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective
from workloads.objectives.spans import padded


@dataclass(frozen=True, kw_only=True)
class PermutedLM(SampledObjective):
    """XLNet's permutation language modelling, its two streams laid side by side in one sequence.

    The sequence is the text (content stream) and after it a <mask> token for each target (query stream). Of a
    random factorisation order the last 1/`k` of the text are the targets (partial prediction, section 2.3):
    a query sees the text before its target in that order and its own position, never its target; a target in
    the content stream sees what is before it in the order and itself; all other text sees all other text.
    Weights are shared between the streams as in the paper, so that a plain transformer with `attention`, bool
    [length, length], and `positions`, int64 [length], computes both in one pass. Segment recurrence and
    relative segment encodings are of the model and left out.
    """

    name = "permuted_lm"
    architectures = frozenset({"encoder", "prefix"})
    needs: ClassVar[tuple[str, ...]] = ("mask", "pad")
    k: int = at_least(2, 6)

    def window(self, sequence_length: int) -> int:
        text = sequence_length
        while text + self._targets(text) > sequence_length:
            text -= 1
        return text

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        text = self.read_window(read, sample)
        size, length = len(text), self.sequence_length
        order = rng.permutation(np.flatnonzero(self.is_text(text)))
        targets = order[len(order) - min(self._targets(size), len(order)) :]
        # The place in the order: 0 for what is given, 1, 2, ... for the targets.
        place = np.zeros(size, dtype=np.int64)
        place[targets] = np.arange(len(targets)) + 1
        used = size + len(targets)
        attention = np.eye(length, dtype=bool)
        attention[:size, :size] |= place[None, :] <= place[:, None]
        attention[size:used, :size] = place[None, :] < place[targets][:, None]
        tokens = np.concatenate((text, np.full(len(targets), self.token("mask"))))
        labels = np.concatenate((np.full(size, IGNORE), text[targets]))
        return {
            "tokens": padded(tokens, length, self.token("pad")),
            "labels": padded(labels, length, IGNORE),
            "positions": padded(np.concatenate((np.arange(size), targets)), length, 0),
            "padding": np.arange(length) < used,
            "attention": attention,
        }

    def _targets(self, text: int) -> int:
        return max(1, text // self.k)
