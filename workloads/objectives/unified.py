"""One model under several attention masks (Dong et al. 2019, UniLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.masked_lm import masked
from workloads.objectives.masking import budget
from workloads.objectives.options import fraction
from workloads.objectives.pairs import FRAME, PAIR_NEEDS, framed_pair, two_segments
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.spans import lengths_until, scatter

MODES, SHARES = ("bidirectional", "seq2seq", "left_to_right", "right_to_left"), (1 / 3, 1 / 3, 1 / 6, 1 / 6)
"""Section 2.4: how often each mask is used."""


def attention_of(mode: str, types: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return which token attends to which, bool [length, length]. Padding attends only to itself.

    Args:
        mode: one of MODES.
        types: 0 in the source, 1 in the target, int64 [length].
        real: bool [length].
    """
    row = np.arange(len(types))[:, None]
    column = np.arange(len(types))[None, :]
    source = (types == 0)[None, :]
    allowed = {
        "bidirectional": np.ones((len(types), len(types)), dtype=bool),
        "seq2seq": source | ((types == 1)[:, None] & (column <= row)),
        "left_to_right": column <= row,
        "right_to_left": column >= row,
    }[mode]
    return (allowed & real[:, None] & real[None, :]) | (row == column)


@dataclass(frozen=True, kw_only=True)
class UnifiedLM(SampledObjective):
    """UniLM's cloze under mixed masks: <cls> first <sep> second <sep>, masked tokens predicted in place.

    A third of the samples attend both ways, a third from source to target (seq2seq), a sixth each from left
    to right and from right to left (section 2.4). Masks fall on one token 80 % of the time, else on two or
    three in a row. The next sentence task of the bidirectional third is left to `next_sentence`.
    """

    name = "unified_lm"
    architectures = frozenset({"encoder", "prefix"})
    needs: ClassVar[tuple[str, ...]] = PAIR_NEEDS
    begins = "cls"
    ends = "sep"
    unit = "document"
    rate: float = fraction(0.15)

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        first, second = two_segments(self, self.read_window(read, sample), rng)
        tokens, types, real = framed_pair(self, first, second)
        text = np.flatnonzero(self.is_text(tokens))
        drawn = rng.choice([1, 2, 3], p=[0.8, 0.1, 0.1], size=len(tokens))
        lengths = lengths_until(budget(self.is_text(tokens), self.rate), drawn)
        chosen = np.zeros(len(tokens), dtype=bool)
        chosen[text] = scatter(lengths, len(text), rng, gap=0)
        mode = str(rng.choice(MODES, p=SHARES))
        extra = {"token_types": types, "padding": real, "attention": attention_of(mode, types, real)}
        return {**masked(self, tokens, chosen, rng), **extra}
