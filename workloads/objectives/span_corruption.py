"""Span corruption (Raffel et al. 2020, T5, section 3.1.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.errors import WorkloadError
from workloads.objectives.options import at_least, fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.seq2seq import source_and_target
from workloads.objectives.spans import composition, run_starts, runs, scatter, scatter_within
from workloads.predicted import corrupted, noise_of

SENTINELS = 100
"""Maximum number of sentinel tokens, as in T5's vocabulary."""


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(SampledObjective):
    """T5: random spans give way to a sentinel each; the target is the sentinels, each with its span, and eos.

    `rate` of the window is noise, in spans of `mean_span` tokens on average. The window is as long as makes
    the encoder input, with its eos, exactly sequence_length; targets are then of one length too
    (`target_length`). Spans may stand anywhere, all placements equally likely, where the released code always
    ends on one. A document end is never noise, so that in a window of several documents each span stands in one of
    them. Only where all of a window's documents are shorter than a span or two are the noise less and the last tokens
    of the window left out. Under rule 1 a span that met a document end was split there, and as many tokens left out.
    The decoder starts from pad.
    """

    name = "span_corruption"
    architectures = frozenset({"encoder-decoder"})
    needs: ClassVar[tuple[str, ...]] = ("pad",)
    begins = ""
    ends = "eos"
    sentinels: ClassVar[int] = SENTINELS
    rate: float = fraction(0.15)
    mean_span: float = at_least(1.0, 3.0)

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        noise, spans = self._noise(self.window(self.sequence_length))
        if spans > len(self.vocabulary.sentinels):
            raise WorkloadError(
                f"{self.name}: sequences of {self.sequence_length} have {spans} spans but the tokenizer has "
                f"{len(self.vocabulary.sentinels)} sentinels; shorten data.sequence_length or raise mean_span"
            )
        if noise + spans > self.window(self.sequence_length):
            raise WorkloadError(f"{self.name}: rate {self.rate} leaves no text between spans; lower it")

    @property
    def decoder_start(self) -> int:
        """The token that the decoder begins with."""
        return self.begins_decoder(self.token("pad"))

    @property
    def target_length(self) -> int:
        """Length of decoder_tokens and labels."""
        return corrupted(self.sequence_length, self.rate, self.mean_span)[1]

    def window(self, sequence_length: int) -> int:
        return corrupted(sequence_length, self.rate, self.mean_span)[0]

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = self.read_window(read, sample)
        noise, spans = self._noise(len(tokens))
        lengths = composition(noise, spans, rng)
        if self.rule > 1 and not self.is_text(tokens).all():
            hidden = scatter_within(runs(self.is_text(tokens)), lengths, len(tokens), rng)
        else:
            hidden = scatter(lengths, len(tokens), rng) & self.is_text(tokens)
        begins = run_starts(hidden)
        sentinels = np.array(self.vocabulary.sentinels)
        # The number of the span at each token, which chooses its sentinel.
        number = np.cumsum(begins) - 1
        hidden &= number < len(sentinels)
        begins &= hidden
        # As much of the window as fills the input when its eos is added.
        visible = np.cumsum(~hidden | begins)
        used = int(np.searchsorted(visible, self.sequence_length - 1, side="right"))
        tokens = tokens[:used]
        hidden = hidden[:used]
        begins = begins[:used]
        number = number[:used]
        marked = np.where(begins, sentinels[np.minimum(number, len(sentinels) - 1)], tokens)
        eos = [self.vocabulary.eos]
        source = np.concatenate((marked[~hidden | begins], eos))
        target = np.insert(tokens[hidden], np.flatnonzero(begins[hidden]), marked[begins])
        target = np.concatenate((target, eos))
        sizes = (self.sequence_length, self.target_length)
        return source_and_target(source, target, sizes, self.decoder_start, self.token("pad"))

    def _noise(self, window: int) -> tuple[int, int]:
        return noise_of(window, self.rate, self.mean_span)
