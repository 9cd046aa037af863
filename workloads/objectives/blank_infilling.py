"""Autoregressive blank infilling (Du et al. 2022, GLM)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from workloads.objectives.options import at_least, fraction
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective
from workloads.objectives.spans import lengths_until, padded, run_starts, runs, scatter


@dataclass(frozen=True, kw_only=True)
class BlankInfilling(SampledObjective):
    """GLM: part A is the text with a <mask> for each span, part B the spans one after the other, in random order.

    Spans have lengths from Poisson(`mean_span`), without zeros, `rate` of the window in all (section 2.1). In part B,
    a span begins with `<extra_id_0>` (the paper's [START]) and predicts its tokens and then `<extra_id_1>` ([END]).
    Part A sees all of part A; part B sees part A and everything before it in part B. positions, int64 [2, length]:
    first the place in part A, which in part B is that of the span's <mask>; second the place within the span, from 1,
    which in part A is 0 (section 2.2). A span that meets a document end is split there. The window has room for 1.5
    times the expected number of spans; further ones are dropped.
    """

    name = "blank_infilling"
    architectures = frozenset({"prefix"})
    needs: ClassVar[tuple[str, ...]] = ("cls", "pad", "mask")
    begins = "cls"
    ends = ""
    sentinels: ClassVar[int] = 2
    rate: float = fraction(0.15)
    mean_span: float = at_least(1.0, 3.0)

    def window(self, sequence_length: int) -> int:
        window = sequence_length
        while self._longest(window) > sequence_length:
            window -= 1
        return window

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        text = self.read_window(read, sample)
        hidden = self._hidden(text, rng)
        begins = run_starts(hidden)
        cls = [self.token("cls")]
        masks = np.where(begins, self.token("mask"), text)
        part_a = np.concatenate((cls, masks[~hidden | begins]))
        # The place of each span's <mask> in part A; <cls> stands at 0, so the running count from 1 is right.
        mask_positions = np.cumsum(~hidden | begins)[begins]
        tokens = [part_a]
        labels = [np.full(len(part_a), IGNORE)]
        outer = [np.arange(len(part_a))]
        inner = [np.zeros(len(part_a), dtype=np.int64)]
        starts, stops = runs(hidden)
        start, end = self.vocabulary.sentinels[:2]
        for i in rng.permutation(len(starts)):
            span = text[starts[i] : stops[i]]
            tokens.append(np.concatenate(([start], span)))
            labels.append(np.concatenate((span, [end])))
            outer.append(np.full(len(span) + 1, mask_positions[i]))
            inner.append(np.arange(1, len(span) + 2))
        length = self.sequence_length
        used = sum(map(len, tokens))
        return {
            "tokens": padded(np.concatenate(tokens), length, self.token("pad")),
            "labels": padded(np.concatenate(labels), length, IGNORE),
            "positions": np.stack([padded(np.concatenate(p), length, 0) for p in (outer, inner)]),
            "padding": np.arange(length) < used,
            "attention": _attention(len(part_a), used, length),
        }

    def _hidden(self, text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the tokens of all spans, bool [window]."""
        drawn = rng.poisson(self.mean_span, size=4 * len(text))
        noise = max(1, round(self.rate * len(text)))
        hidden = scatter(lengths_until(noise, drawn[drawn > 0]), len(text), rng) & self.is_text(text)
        return hidden & (np.cumsum(run_starts(hidden)) <= self._spans(len(text)))

    def _spans(self, window: int) -> int:
        """Return the maximum number of spans of a window."""
        return ceil(1.5 * self.rate * window / self.mean_span)

    def _longest(self, window: int) -> int:
        """Return the length of <cls>, every token once, and a <mask> and a start for each span."""
        return 1 + window + 2 * self._spans(window)


def _attention(part_a: int, used: int, length: int) -> np.ndarray:
    row = np.arange(length)[:, None]
    column = np.arange(length)[None, :]
    real = (row < used) & (column < used)
    # Part A is visible to all; part B only to itself and what follows. Padding sees itself, or its softmax would be
    # NaN.
    return (real & ((column < part_a) | (column <= row))) | (row == column)
