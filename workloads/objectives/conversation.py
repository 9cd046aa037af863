"""Instruction tuning: next-token prediction of the assistant's answers in conversations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.model.masks import SEGMENTS
from workloads.objectives.causal_lm import positions_in
from workloads.objectives.options import choice
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective
from workloads.objectives.spans import padded
from workloads.record_format import CLOSE, MARK, from_end
from workloads.workload import Windowing


@dataclass(frozen=True, kw_only=True)
class Conversation(SampledObjective):
    """Only the assistant's answers are predicted (InstructGPT's demonstrations; Ouyang et al. 2022, section 3.5).

    A sample has as many whole conversations, in order, as fit; with `pack` "no" a single one. Each sees only itself
    (attention, bool [length, length]), and its positions begin at 0. A conversation longer than a sample loses its
    end, or with `truncate` "start" its beginning.
    """

    name = "conversation"
    architectures = frozenset({"decoder"})
    unit = "records"
    framed = True
    pack: str = choice("yes", "no")
    truncate: str = choice("end", "start")

    @property
    def windowing(self) -> Windowing:
        unit = "records" if self.pack == "yes" else "record"
        return Windowing(unit, self.sequence_length, self.sequence_length)  # type: ignore[arg-type]

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        documents = [self.truncated(words) for words in _apart(np.asarray(read(sample), dtype=np.int64))]
        words = np.concatenate(documents)
        number = np.repeat(np.arange(len(documents)), [len(each) for each in documents])
        ids = words & ~MARK
        predicted = (words & MARK) > 0
        follows = np.append(predicted[1:] & (number[1:] == number[:-1]), False)
        labels = np.where(follows, np.roll(ids, -1), IGNORE)
        pad = self.vocabulary.padding
        document = padded(number, self.sequence_length, len(documents))
        return {
            "tokens": padded(ids, self.sequence_length, pad),
            "labels": padded(labels, self.sequence_length, IGNORE),
            "padding": np.arange(self.sequence_length) < len(ids),
            SEGMENTS: document,
            "positions": positions_in(document),
        }

    def truncated(self, words: np.ndarray) -> np.ndarray:
        """Return the part of a conversation that fits a sample."""
        if self.truncate == "end":
            return words[: self.sequence_length]
        return from_end(words, self.sequence_length, self.vocabulary.before)

    def is_cut(self, record: np.ndarray) -> bool:
        return any(len(each) > self.sequence_length for each in _apart(np.asarray(record, dtype=np.int64)))

    def is_lost(self, record: np.ndarray) -> bool:
        return not (np.asarray(self.truncated(record)[1:], dtype=np.int64) & MARK).any()


def _apart(words: np.ndarray) -> list[np.ndarray]:
    """Return the conversations of a sample, which are separated by closing words."""
    closing = words == CLOSE
    return [part[part != CLOSE] for part in np.split(words, np.flatnonzero(closing) + 1) if len(part)]
