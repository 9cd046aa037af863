"""Masked language modelling over translated pairs (Conneau and Lample 2019, XLM, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.causal_lm import positions_in
from workloads.objectives.masked_lm import masked
from workloads.objectives.masking import choose_tokens
from workloads.objectives.options import fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.spans import padded


@dataclass(frozen=True, kw_only=True)
class TranslationLM(SampledObjective):
    """XLM's translation language modelling: tokens are masked on both sides of a pair, and a pair sees both sides.

    A document is `source <sep> target`. A sample is as many whole pairs as fit, and padding. token_types are 0 in the
    source and its <sep>, 1 in the target. Positions restart on each side. attention, bool [length, length], keeps
    pairs apart. A pair longer than a sample is cut at its end. A source that then lacks its <sep> counts as padding
    and is not predicted. If a tokenizer has one token for <sep> and the end of a document, as BERT's has, every
    second one ends a document. Under rule 1, a sample is a window of the text, cut anywhere.
    """

    name = "translation_lm"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = ("sep", "mask")
    unit = "documents"
    rate: float = fraction(0.15)

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        text = self.read_window(read, sample)
        pad = self.vocabulary.padding
        tokens = padded(text, self.sequence_length, pad)
        real = np.arange(self.sequence_length) < len(text)
        separators = (tokens == self.token("sep")) & real
        closing = (tokens == self.vocabulary.eos) & real
        if self.rule > 1 and self.vocabulary.eos == self.vocabulary.sep:
            closing = separators & (np.cumsum(separators) % 2 == 0)
            separators = separators & ~closing
        # int64 [length]: number of the pair that a token belongs to.
        document = np.cumsum(closing) - closing + ~real  # padding is a separate document
        paired = (np.bincount(document, weights=separators) == 1)[document]
        before = np.cumsum(separators) - separators
        first = np.searchsorted(document, document)
        types = np.where(paired, before - before[first], 0)
        chosen = choose_tokens(self.is_text(tokens) & paired, self.rate, rng)
        together = (document[:, None] == document[None, :]) & paired[:, None]
        return {
            **masked(self, tokens, chosen, rng),
            "token_types": types,
            "positions": positions_in(2 * document + types),
            "padding": paired,
            "attention": together | np.eye(len(tokens), dtype=bool),
        }
