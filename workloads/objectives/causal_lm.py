"""Next-token prediction (Radford et al. 2018, GPT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.model.masks import SEGMENTS
from workloads.objectives.options import choice
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective


def positions_in(parts: np.ndarray) -> np.ndarray:
    """Return the position of each token in its part, int64 [length]. Equal part numbers are adjacent."""
    index = np.arange(len(parts))
    starts = np.flatnonzero(np.diff(parts, prepend=parts[0] - 1))
    return index - starts[np.searchsorted(starts, index, side="right") - 1]


@dataclass(frozen=True, kw_only=True)
class CausalLM(SampledObjective):
    """Predict each token from those before it. tokens and labels are int64 [length]; labels are already shifted.

    documents="pack": text is one stream, and tokens attend across document ends (GPT-2). documents="isolate": adds
    segments and positions, int64 [length]. A document sees only itself, and the token after a document's end is not
    predicted from it.

    A shorter window is filled with eos, from which nothing is predicted. The tokenizer's tokens before a text
    (`Vocabulary.before`), such as bos, are read but not predicted.
    """

    name = "causal_lm"
    architectures = frozenset({"decoder"})
    overlap: ClassVar[int] = 1
    partial: ClassVar[bool] = True
    framed: ClassVar[bool] = True
    predicts_every_token: ClassVar[bool] = True
    documents: str = choice("pack", "isolate")

    def window(self, sequence_length: int) -> int:
        return sequence_length + 1

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        window = self.read_window(read, sample)
        tokens = window[:-1]
        labels = window[1:]
        eos = self.vocabulary.eos
        is_end = self._ends(window)
        labels = np.where(self._opens(window, is_end)[1:], IGNORE, labels)
        is_end = is_end[:-1]
        # The end of a document still belongs to it, hence minus `is_end`.
        document = np.cumsum(is_end) - is_end
        if missing := self.sequence_length - len(tokens):
            tokens = np.pad(tokens, (0, missing), constant_values=eos)
            labels = np.pad(labels, (0, missing), constant_values=IGNORE)
            is_end = np.pad(is_end, (0, missing), constant_values=True)
            document = np.pad(document, (0, missing), constant_values=document[-1] + 1)
        if self.documents == "pack":
            return {"tokens": tokens, "labels": labels}
        return {
            "tokens": tokens,
            "labels": np.where(is_end, IGNORE, labels),
            SEGMENTS: document,
            "positions": positions_in(document),
        }

    def _ends(self, window: np.ndarray) -> np.ndarray:
        """Return which tokens end a document, bool [window]: eos, except before a text."""
        eos = self.vocabulary.eos
        before = np.array(self.vocabulary.before, dtype=np.int64)
        is_eos = window == eos
        if eos not in before:
            return is_eos
        ends = np.zeros(len(window), dtype=bool)
        # Of several eos in a row at the beginning, the last one is before a text, and so is every other one before
        # it.
        first = int(np.argmin(is_eos)) if not is_eos.all() else 0
        at = len(before) if first % 2 else 0
        for position in np.flatnonzero(is_eos).tolist():
            if position < at:
                continue
            ends[position] = True
            follows = np.array_equal(window[position + 1 : position + 1 + len(before)], before)
            at = position + 1 + (len(before) if follows else 0)
        return ends

    def _opens(self, window: np.ndarray, is_end: np.ndarray) -> np.ndarray:
        """Return which tokens are before a text, bool [window]."""
        before = self.vocabulary.before
        is_before = np.zeros(len(window), dtype=bool)
        starts = np.flatnonzero(is_end) + 1 if before else ()
        for start in (0, *starts):
            opening = window[start : start + len(before)]
            is_before[start : start + len(opening)] = np.array_equal(opening, before[: len(opening)])
        return is_before
