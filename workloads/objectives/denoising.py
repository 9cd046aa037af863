"""Denoising a shuffled and infilled text (Lewis et al. 2020, BART)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.options import at_least, fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.seq2seq import source_and_target
from workloads.objectives.spans import documents, lengths_until, run_starts, scatter, sentences

FRAME = 2
"""<bos> and eos around the encoder input."""


@dataclass(frozen=True, kw_only=True)
class Denoising(SampledObjective):
    """BART: sentences in random order, then spans of them infilled; the target is the original text and eos.

    Text infilling (section 2.2): spans with lengths from Poisson(`mean_span`), `rate` of the window in all,
    each replaced by a single <mask>; a span of length 0 inserts one. Sentences are shuffled within their
    document, document ends stay where they are. The decoder starts from eos.
    """

    name = "denoising"
    architectures = frozenset({"encoder-decoder"})
    needs: ClassVar[tuple[str, ...]] = ("bos", "pad", "mask", "sentence_end")
    begins = "bos"
    ends = "eos"
    rate: float = fraction(0.3)
    mean_span: float = at_least(1.0, 3.0)
    permute: bool = True

    @property
    def decoder_start(self) -> int:
        """The token that the decoder begins with."""
        return self.begins_decoder(self.vocabulary.eos)

    @property
    def target_length(self) -> int:
        """Length of decoder_tokens and labels."""
        return self.sequence_length

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = self.read_window(read, sample)
        shuffled = self._shuffled(tokens, rng) if self.permute else tokens
        eos = [self.vocabulary.eos]
        length = self.sequence_length
        source = np.concatenate(([self.token("bos")], self._infilled(shuffled, rng), eos))
        target = np.concatenate((tokens, eos))
        return source_and_target(source, target, (length, length), self.decoder_start, self.token("pad"))

    def _shuffled(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The sentences of each document in random order."""
        starts, stops = sentences(tokens, self.vocabulary.eos, self.table("sentence_end"))
        result = tokens.copy()
        for start, stop in zip(*documents(tokens, self.vocabulary.eos), strict=True):
            first, last = np.searchsorted(starts, (start, stop))
            order = first + rng.permutation(last - first)
            result[start:stop] = np.concatenate([tokens[starts[i] : stops[i]] for i in order])
        return result

    def _infilled(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The tokens with each random span as one <mask>, at most as many as there were."""
        size = len(tokens)
        drawn = lengths_until(round(self.rate * size), rng.poisson(self.mean_span, size=4 * size))
        hidden = scatter(drawn[drawn > 0], size, rng) & self.is_text(tokens)
        begins = run_starts(hidden)
        room = int(hidden.sum() - begins.sum())
        # An empty span stands between two visible tokens, or it would run into another span.
        between = ~hidden & ~np.concatenate(([False], hidden[:-1]))
        gaps = np.flatnonzero(between)
        count = min(int((drawn == 0).sum()), room, len(gaps))
        inserts = rng.choice(gaps, size=count, replace=False)
        filled = np.insert(np.where(begins, self.token("mask"), tokens), inserts, self.token("mask"))
        return filled[np.insert(~hidden | begins, inserts, True)]
