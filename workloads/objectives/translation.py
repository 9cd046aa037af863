"""Masked language modelling over translated pairs (Conneau and Lample 2019, XLM, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.causal_lm import document_of, positions_in
from workloads.objectives.masked_lm import masked
from workloads.objectives.masking import choose_tokens
from workloads.objectives.options import fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective


@dataclass(frozen=True, kw_only=True)
class TranslationLM(SampledObjective):
    """XLM's translation language modelling: tokens are masked on both sides of a pair, and a pair sees both.

    A document is `source <sep> target`. The window is taken as it is: token_types are 0 in the source and its
    <sep>, 1 in the target; positions start again with each side; attention, bool [length, length], keeps
    pairs apart. A document in the window without exactly one <sep>, such as a target whose source stands in
    the window before, is not a pair: it counts as padding and is not predicted.
    """

    name = "translation_lm"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = ("sep", "mask")
    rate: float = fraction(0.15)

    def window(self, sequence_length: int) -> int:
        return sequence_length

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = self.read_window(read, sample)
        document = document_of(tokens, self.vocabulary.eos)
        separators = tokens == self.token("sep")
        paired = (np.bincount(document, weights=separators) == 1)[document]
        before = np.cumsum(separators) - separators
        first = np.searchsorted(document, document)
        types = np.where(paired, before - before[first], 0)
        text = self.is_text(tokens) & paired
        together = (document[:, None] == document[None, :]) & paired[:, None]
        return {
            **masked(self, tokens, choose_tokens(text, self.rate, rng), rng),
            "token_types": types,
            "positions": positions_in(2 * document + types),
            "padding": paired,
            "attention": together | np.eye(len(tokens), dtype=bool),
        }
