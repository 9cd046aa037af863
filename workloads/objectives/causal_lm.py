"""Next-token prediction (Radford et al. 2018, GPT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.model.masks import SEGMENTS
from workloads.objectives.options import choice
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective


def document_of(tokens: np.ndarray, eos: int) -> np.ndarray:
    """The number of the document that each token belongs to, int64 [length]; eos belongs to what it ends."""
    ends = tokens == eos
    return np.cumsum(ends) - ends


def positions_in(parts: np.ndarray) -> np.ndarray:
    """Position of each token in its part, int64 [length], for part numbers that stand in runs."""
    index = np.arange(len(parts))
    starts = np.flatnonzero(np.diff(parts, prepend=parts[0] - 1))
    return index - starts[np.searchsorted(starts, index, side="right") - 1]


@dataclass(frozen=True, kw_only=True)
class CausalLM(SampledObjective):
    """Predict each token from those before it. tokens and labels int64 [length]; labels are already shifted.

    documents="pack": text is one stream, tokens attend across document ends (GPT-2).
    documents="isolate": adds segments and positions, int64 [length]: a document sees itself alone, and what follows a
    document's end is not predicted from it.

    A shorter window is filled up with eos, from which nothing is predicted.
    """

    name = "causal_lm"
    architectures = frozenset({"decoder"})
    overlap: ClassVar[int] = 1
    partial: ClassVar[bool] = True
    documents: str = choice("pack", "isolate")

    def window(self, sequence_length: int) -> int:
        return sequence_length + 1

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        window = self.read_window(read, sample)
        tokens, labels, eos = window[:-1], window[1:], self.vocabulary.eos
        document = document_of(tokens, eos)
        if missing := self.sequence_length - len(tokens):
            tokens = np.pad(tokens, (0, missing), constant_values=eos)
            labels = np.pad(labels, (0, missing), constant_values=IGNORE)
            document = np.pad(document, (0, missing), constant_values=document[-1] + 1)
        if self.documents == "pack":
            return {"tokens": tokens, "labels": labels}
        return {
            "tokens": tokens,
            "labels": np.where(tokens == eos, IGNORE, labels),
            SEGMENTS: document,
            "positions": positions_in(document),
        }
