"""Masked sequence to sequence pre-training (Song et al. 2019, MASS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.masking import corrupt, labels_at
from workloads.objectives.options import fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.spans import documents


@dataclass(frozen=True, kw_only=True)
class Mass(SampledObjective):
    """MASS: the encoder misses a consecutive fragment, the decoder predicts that fragment alone.

    Each document in the window has one fragment, `rate` of its length, at a random place (section 3.2); in
    the encoder its tokens are 80 % masked, 10 % random, 10 % kept (section 4.1). The decoder keeps every
    position: it reads the fragment's previous token inside the fragment and <mask> elsewhere, so that it
    cannot lean on tokens that the encoder sees.
    """

    name = "mass"
    architectures = frozenset({"encoder-decoder"})
    needs: ClassVar[tuple[str, ...]] = ("mask",)
    rate: float = fraction(0.5)

    @property
    def decoder_start(self) -> int:
        """The token that the decoder begins with."""
        return self.token("mask")

    @property
    def target_length(self) -> int:
        """Length of decoder_tokens and labels."""
        return self.sequence_length

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = self.read_window(read, sample)
        hidden = np.zeros(len(tokens), dtype=bool)
        for start, stop in zip(*documents(tokens, self.vocabulary.eos), strict=True):
            length = max(1, round(self.rate * (stop - start)))
            begin = int(rng.integers(start, stop - length + 1))
            hidden[begin : begin + length] = True
        hidden &= self.is_text(tokens)
        follows = hidden & np.concatenate(([False], hidden[:-1]))
        everything = np.ones(len(tokens), dtype=bool)
        return {
            "tokens": corrupt(tokens, hidden, self.token("mask"), self.text_ids, rng),
            "padding": everything,
            # Shifted by one: at position i the decoder reads token i - 1, if both are in the fragment.
            "decoder_tokens": np.where(follows, np.roll(tokens, 1), self.token("mask")),
            "decoder_padding": everything,
            "labels": labels_at(tokens, hidden),
        }
