"""Two segments of text in one input: next sentence (BERT) and sentence order (ALBERT), with masked tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.masked_lm import NEEDS, masked
from workloads.objectives.masking import choose_tokens
from workloads.objectives.options import fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.spans import documents, longest_document, padded, sentences

FRAME = 3
"""<cls>, and a <sep> after each segment."""
PAIR_NEEDS = (*NEEDS, "pad", "sentence_end")

TRIES = 10
"""Rule 1: number of samples searched for a segment of another document."""
NEIGHBOURS = 10_000
"""Rule 1: how many samples back the segment of another document may come from."""


def sentence_starts(objective: SampledObjective, text: np.ndarray) -> np.ndarray:
    """Return where sentences begin in a stretch of one document, int64; the first is 0.

    Args:
        objective: has the table of tokens that end a sentence.
        text: int64 [tokens].
    """
    return sentences(text, objective.vocabulary.eos, objective.table("sentence_end"))[0]


def two_segments(
    objective: SampledObjective, window: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a sample reads of a document, cut in two at a random sentence.

    Under rule 1 it reads its window's longest stretch of one document. A single sentence is cut anywhere. Text of
    fewer than two tokens is not cut.

    Args:
        objective: has the table of tokens that end a sentence.
        window: int64 [window or fewer].
        rng: the random numbers of the sample.
    """
    text = longest_document(window, objective.vocabulary.eos)
    if len(text) < 2:
        return text, text[:0]
    cuts = sentence_starts(objective, text)[1:]
    cut = int(rng.choice(cuts)) if len(cuts) else int(rng.integers(1, len(text)))
    return text[:cut], text[cut:]


def framed_pair(
    objective: SampledObjective, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return <cls> first <sep> second <sep> and padding: tokens, token_types (0 and 1), padding, each [length].

    Args:
        objective: has the special tokens.
        first: int64, the first segment.
        second: int64, the second segment; it may be empty.
    """
    length = objective.sequence_length
    sep = [objective.token("sep")]
    tokens = np.concatenate(([objective.token("cls")], first, sep, second, sep))
    # <cls> and the first <sep> belong to the first segment, the last <sep> to the second (BERT, figure 2).
    types = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
    return (
        padded(tokens, length, objective.token("pad")),
        padded(types, length, 0),
        np.arange(length) < len(tokens),
    )


@dataclass(frozen=True, kw_only=True)
class NextSentence(SampledObjective):
    """BERT's next sentence prediction with masked tokens (Devlin et al. 2019, section 3.1, task 2).

    Half of the second segments continue the first, from the same document (sequence_labels 0). Half come from another
    document (1), with the same length if it has enough text. Any sample of another document may provide it, all with
    equal probability (within its section and source, if the text is read section by section). Under rule 1 it is text
    of an earlier sample that contains a document's end; if ten of them contain none, it may be text of the same
    document.
    """

    name = "next_sentence"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = PAIR_NEEDS
    begins = "cls"
    ends = "sep"
    unit = "document"
    least_documents = 2
    rate: float = fraction(0.15)

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        first, second = two_segments(self, self.read_window(read, sample), rng)
        random = bool(rng.random() < 0.5) and (sample > 0 or self.rule > 1) and len(second) > 0
        other = self._from_another_document(read, sample, len(second), rng) if random else second[:0]
        random = len(other) > 0
        if random:
            second = other
        tokens, types, real = framed_pair(self, first, second)
        chosen = choose_tokens(self.is_text(tokens), self.rate, rng)
        pair: Sample = {"token_types": types, "padding": real, "sequence_labels": int(random)}
        return {**masked(self, tokens, chosen, rng), **pair}

    def _from_another_document(
        self, read: Read, sample: int, length: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return up to `length` tokens from the beginning of a sentence of another document."""
        if self.rule == 1:
            return self._earlier(read, sample, length, rng)
        siblings = read.siblings(sample)
        every = read.companions(sample)
        if len(siblings) == len(every):  # the section has a single document
            return np.empty(0, dtype=np.int64)
        # One draw among the samples of other documents: numbers from this document's first sample on are shifted past
        # it.
        number = int(rng.integers(len(every) - len(siblings)))
        before = every.index(siblings.start)
        text = self.read_window(read, every[number if number < before else number + len(siblings)])
        return self._of(text, length, rng)

    def _earlier(self, read: Read, sample: int, length: int, rng: np.random.Generator) -> np.ndarray:
        window = np.empty(0, dtype=np.int64)
        for other in rng.integers(max(0, sample - NEIGHBOURS), sample, size=TRIES):
            window = self.read_window(read, int(other))
            ends = np.flatnonzero(window == self.vocabulary.eos)
            if len(ends) and ends[-1] > 0:
                window = window[: ends[-1]]
                break
        starts, stops = documents(window, self.vocabulary.eos)
        if len(starts) == 0:
            return window[:0]
        pick = int(rng.integers(len(starts)))
        return self._of(window[starts[pick] : stops[pick]], length, rng)

    def _of(self, text: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
        begins = sentence_starts(self, text)
        roomy = begins[begins + length <= len(text)]
        begin = int(rng.choice(roomy)) if len(roomy) else 0
        return text[begin : begin + length]


@dataclass(frozen=True, kw_only=True)
class SentenceOrder(SampledObjective):
    """ALBERT's sentence order prediction with masked tokens (Lan et al. 2020, section 3.1).

    Two consecutive segments of one document, in order (sequence_labels 0) or swapped (1), half and half.
    """

    name = "sentence_order"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = PAIR_NEEDS
    begins = "cls"
    ends = "sep"
    unit = "document"
    rate: float = fraction(0.15)

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        first, second = two_segments(self, self.read_window(read, sample), rng)
        swapped = bool(rng.random() < 0.5) and len(second) > 0
        if swapped:
            first, second = second, first
        tokens, types, real = framed_pair(self, first, second)
        chosen = choose_tokens(self.is_text(tokens), self.rate, rng)
        pair: Sample = {"token_types": types, "padding": real, "sequence_labels": int(swapped)}
        return {**masked(self, tokens, chosen, rng), **pair}
