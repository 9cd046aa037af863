"""Gap sentence generation (Zhang et al. 2020, PEGASUS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workloads.objectives.options import choice, fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.seq2seq import source_and_target
from workloads.objectives.spans import Stretches, longest_document, sentences
from workloads.predicted import GAP_RATE


def rouge1(text: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return ROUGE-1 F1 of each sentence against the rest of the text, repeated tokens counted; float64 [sentences].

    With c the count of a token in the sentence and n in the text: overlap = sum of min(c, n - c), and F1 = 2 *
    overlap / (tokens of the sentence + tokens of the rest).

    Args:
        text: token ids, int64 [tokens].
        starts: first token of each sentence.
        stops: token after the last one of each sentence.
    """
    ids, token = np.unique(text, return_inverse=True)
    sentence = np.repeat(np.arange(len(starts)), stops - starts)
    counts = np.zeros((len(starts), len(ids)), dtype=np.int64)
    # [sentences, distinct tokens]. `add.at` counts repeated tokens, where `counts[...] += 1` would count them once.
    np.add.at(counts, (sentence, token), 1)
    # The tokens of a sentence and of the rest add up to the text, so the denominator of F1 is the same for all
    # sentences.
    rest = counts.sum(axis=0) - counts
    return 2 * np.minimum(counts, rest).sum(axis=1) / len(text)


@dataclass(frozen=True, kw_only=True)
class GapSentences(SampledObjective):
    """PEGASUS: whole sentences give way to one <mask> each; the target is these sentences in order, and eos.

    `rate` of the sentences of a document, or of the part of it that a sample reads, are taken out (gap sentences
    ratio, section 3.1); under rule 1, of the longest stretch of one document in the window. choose="principal" takes
    those with the highest ROUGE-1 F1 against the rest, each scored on its own and repeated tokens counted (Ind-Orig);
    "random" any; "lead" the first ones. Targets have half the sequence length: a sentence that would not fit is
    passed over. Text of one sentence has no gap and predicts nothing. The masked language model of the paper's
    smaller model is left out, as in its large one. The decoder starts from pad.
    """

    name = "gap_sentences"
    architectures = frozenset({"encoder-decoder"})
    needs: ClassVar[tuple[str, ...]] = ("pad", "mask", "sentence_end")
    begins = ""
    ends = "eos"
    unit = "document"
    rate: float = fraction(GAP_RATE)
    choose: str = choice("principal", "random", "lead")

    @property
    def decoder_start(self) -> int:
        """The token that the decoder begins with."""
        return self.begins_decoder(self.token("pad"))

    @property
    def target_length(self) -> int:
        """Length of decoder_tokens and labels."""
        return self.sequence_length // 2

    def window(self, sequence_length: int) -> int:
        return sequence_length - 1

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        text = longest_document(self.read_window(read, sample), self.vocabulary.eos)
        hidden, begins = self._gaps(text, rng)
        eos = [self.vocabulary.eos]
        marked = np.where(begins, self.token("mask"), text)
        source = np.concatenate((marked[~hidden | begins], eos))
        target = np.concatenate((text[hidden], eos)) if hidden.any() else text[:0]
        lengths = (self.sequence_length, self.target_length)
        return source_and_target(source, target, lengths, self.decoder_start, self.token("pad"))

    def _gaps(self, text: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the gap sentences and the first token of each, bool [text]."""
        starts, stops = sentences(text, self.vocabulary.eos, self.table("sentence_end"))
        hidden = np.zeros(len(text), dtype=bool)
        begins = np.zeros(len(text), dtype=bool)
        left = round(self.rate * len(starts))
        room = self.target_length - 1
        # At least one gap, and at least one sentence to read.
        left = min(max(left, 1), len(starts) - 1)
        for i in self._ranked(text, (starts, stops), rng):
            if left > 0 and stops[i] - starts[i] <= room:
                hidden[starts[i] : stops[i]], begins[starts[i]] = True, True
                left = left - 1
                room = room - int(stops[i] - starts[i])
        return hidden, begins

    def _ranked(self, text: np.ndarray, sentences: Stretches, rng: np.random.Generator) -> np.ndarray:
        starts, stops = sentences
        if self.choose == "principal" and len(text):
            return np.argsort(-rouge1(text, starts, stops), kind="stable")
        return np.arange(len(starts)) if self.choose == "lead" else rng.permutation(len(starts))
