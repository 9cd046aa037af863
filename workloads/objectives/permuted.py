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
    """XLNet's permutation language modelling, with both streams side by side in one sequence.

    The sequence is the text (content stream), then a <mask> token for each target (query stream). The last 1/`k` of a
    random factorisation order are the targets (partial prediction, section 2.3). A query sees the text before its
    target in that order and its own position, never its target. A target in the content stream sees what is before it
    in the order, and itself. All other text sees all other text. With `span` above 1, targets are spans of 1 to
    `span` tokens, each drawn from a context `k` times as long (section 3.1), also in a random order.

    Weights are shared between the streams as in the paper. So a plain transformer with `attention`, bool [length,
    length], `positions`, int64 [length], and `queries`, bool [length], computes both in one pass: XLNet itself, or
    any other model with the token <mask> in place of the queries' own vector. No segment reads the memory of the one
    before it.
    """

    name = "permuted_lm"
    architectures = frozenset({"encoder", "prefix"})
    needs: ClassVar[tuple[str, ...]] = ("mask", "pad")
    k: int = at_least(2, 6)
    span: int = at_least(1, 1)

    def window(self, sequence_length: int) -> int:
        text = sequence_length
        while text + self._targets(text) > sequence_length:
            text -= 1
        return text

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        text = self.read_window(read, sample)
        size = len(text)
        length = self.sequence_length
        order = rng.permutation(np.flatnonzero(self.is_text(text)))
        if self.span > 1:
            inside = np.isin(order, self._spans(text, rng))
            order = np.concatenate((order[~inside], order[inside]))
            count = int(inside.sum())
        else:
            count = min(self._targets(size), len(order))
        targets = order[len(order) - count :]
        # The index in the order: 0 for given text, 1, 2, ... for the targets.
        order_index = np.zeros(size, dtype=np.int64)
        order_index[targets] = np.arange(len(targets)) + 1
        used = size + len(targets)
        attention = np.eye(length, dtype=bool)
        attention[:size, :size] |= order_index[None, :] <= order_index[:, None]
        # Strictly below: a query must not see the token that it predicts, which the content stream does.
        attention[size:used, :size] = order_index[None, :] < order_index[targets][:, None]
        tokens = np.concatenate((text, np.full(len(targets), self.token("mask"))))
        labels = np.concatenate((np.full(size, IGNORE), text[targets]))
        return {
            "tokens": padded(tokens, length, self.token("pad")),
            "labels": padded(labels, length, IGNORE),
            "positions": padded(np.concatenate((np.arange(size), targets)), length, 0),
            "padding": np.arange(length) < used,
            "attention": attention,
            "queries": (np.arange(length) >= size) & (np.arange(length) < used),
        }

    def _spans(self, text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the positions of targets, in spans of 1 to `span` tokens, each within a context `k` times as long.
        Special tokens are never targets; surplus targets are dropped at random.
        """
        chosen: list[int] = []
        at = 0
        while at < len(text):
            length = int(rng.integers(1, self.span + 1))
            start = at + int(rng.integers(0, self.k * length - length + 1))
            chosen += range(start, min(start + length, len(text)))
            at += self.k * length
        positions = np.array(chosen, dtype=np.int64)
        return positions[self.is_text(text[positions])][: self._targets(len(text))]

    def _targets(self, text: int) -> int:
        return max(1, text // self.k)
