"""Supervised objectives over records: the data contains the labels.

Each surrounds its texts with the tokenizer's special tokens (`Vocabulary.frame`), and cuts long texts at the end, the
longer text of a pair first, as tokenizers do by default ("longest first"). Prepared data holds whole records, so the
length may change. Before rule 6, the first of two equally long texts kept the odd token, which `tokenizers` gives to
the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from workloads.errors import WorkloadError
from workloads.objectives.options import at_least
from workloads.objectives.records import from_bits, unpack
from workloads.objectives.sampled import IGNORE, Read, Sample, SampledObjective
from workloads.objectives.seq2seq import source_and_target
from workloads.objectives.spans import padded
from workloads.workload import Frame

Cut = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""Shortens two texts to a total number of tokens."""


def frame_of(objective: SampledObjective) -> Frame:
    """Return the tokens around texts: the tokenizer's, or as much of <cls> text <sep> text <sep> as exists."""
    known = objective.vocabulary
    if known.frame is not None:
        return known.frame
    cls, sep = ((i,) if i is not None else () for i in (known.cls, known.sep))
    return Frame((cls, sep), (cls, sep or (known.eos,), sep), objective.typed)


def shortened(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two texts with at most `room` tokens together. The longer one is cut first, at its end."""
    return _shortened(first, second, room, len(first) > len(second))


def _shortened_before_6(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Like `shortened`, but the first of two equally long texts keeps an odd token."""
    return _shortened(first, second, room, len(first) >= len(second))


def _shortened(
    first: np.ndarray, second: np.ndarray, room: int, is_first_longer: bool
) -> tuple[np.ndarray, np.ndarray]:
    a = len(first)
    b = len(second)
    if a + b > room:
        if is_first_longer:
            b = min(b, room // 2)
            a = room - b
        else:
            a = min(a, room // 2)
            b = room - a
    return first[:a], second[:b]


def framed(
    objective: SampledObjective,
    first: np.ndarray,
    second: np.ndarray | None = None,
    *,
    cut: Cut | None = None,
) -> tuple[dict[str, np.ndarray], int]:
    """Return tokens, padding and token_types, each [length], and where the second text begins."""
    frame = frame_of(objective)
    length = objective.sequence_length
    before, *between, after = frame.single if second is None else frame.pair
    middle = between[0] if between else ()
    room = max(length - len(before) - len(middle) - len(after), 0)
    cut = cut or (shortened if objective.rule > 5 else _shortened_before_6)
    first, second = (first[:room], first[:0]) if second is None else cut(first, second, room)
    tokens = np.concatenate([before, first, middle, second, after]).astype(np.int64)[:length]
    start = len(before) + len(first) + len(middle)
    batch = {
        "tokens": padded(tokens, length, objective.vocabulary.padding),
        "padding": np.arange(length) < len(tokens),
    }
    if objective.typed:
        place = np.arange(length)
        typed = bool(frame.typed and between)
        batch["token_types"] = ((place >= start) & (place < len(tokens)) & typed).astype(np.int64)
    return batch, start


def is_longer(objective: SampledObjective, texts: Sequence[np.ndarray]) -> bool:
    """Return whether texts with their special tokens are longer than a sample."""
    frame = frame_of(objective)
    return (
        sum(map(len, (*texts, *(frame.pair if len(texts) > 1 else frame.single)))) > objective.sequence_length
    )


def texts_of(record: np.ndarray) -> list[np.ndarray]:
    """Return the texts of a record whose last section is the label."""
    first, *rest = unpack(record)[:-1]
    return [first, *(part for part in rest if len(part))]


def _with_label(objective: SampledObjective, record: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
    """Return the texts of a record with their special tokens, and its label."""
    (label,) = unpack(record)[-1]
    return framed(objective, *texts_of(record))[0], int(label)


def _are_texts_cut(self: SampledObjective, record: np.ndarray) -> bool:
    """`SampledObjective.is_cut` for records whose texts get special tokens."""
    return is_longer(self, texts_of(record))


@dataclass(frozen=True, kw_only=True)
class SequenceClassification(SampledObjective):
    """One label for a text, or for a pair of texts: sequence_labels int64."""

    name = "sequence_classification"
    architectures = frozenset({"encoder", "decoder", "encoder-decoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    is_cut = _are_texts_cut

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        batch, label = _with_label(self, np.asarray(read(sample)))
        return {**batch, "sequence_labels": np.int64(label)}


@dataclass(frozen=True, kw_only=True)
class Regression(SampledObjective):
    """One number for a text, or for a pair of texts: sequence_labels fp32. The loss is the squared error."""

    name = "regression"
    architectures = frozenset({"encoder", "decoder", "encoder-decoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    is_cut = _are_texts_cut

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        batch, label = _with_label(self, np.asarray(read(sample)))
        return {**batch, "sequence_labels": from_bits(label)}


@dataclass(frozen=True, kw_only=True)
class TokenClassification(SampledObjective):
    """One label for a word, predicted at its first token: labels int64 [length]."""

    name = "token_classification"
    architectures = frozenset({"encoder", "decoder", "encoder-decoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    is_cut = _are_texts_cut

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        text, labels = unpack(read(sample))
        batch, _ = framed(self, text)
        before, after = frame_of(self).single
        kept = labels[: self.sequence_length - len(before) - len(after)] - 1
        found = np.full(self.sequence_length, IGNORE, dtype=np.int64)
        found[len(before) : len(before) + len(kept)] = np.where(kept < 0, IGNORE, kept)
        return {**batch, "labels": found}

    def is_lost(self, record: np.ndarray) -> bool:
        labels = unpack(record)[1]
        return not labels[: self.sequence_length - sum(map(len, frame_of(self).single))].any()


def _context_first(question: np.ndarray, context: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Return both texts with at most `room` tokens, at most half of them the question's. The context loses its end."""
    question = question[: room // 2]
    return question, context[: room - len(question)]


@dataclass(frozen=True, kw_only=True)
class SpanExtraction(SampledObjective):
    """The answer to a question is a span of a context: labels int64 [2], its first and its last token.

    A question without an answer points at the first token. If the answer is cut off, nothing is predicted.
    """

    name = "span_extraction"
    architectures = frozenset({"encoder", "decoder", "encoder-decoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    is_cut = _are_texts_cut

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        question, context, (start, end) = unpack(read(sample))
        batch, at = framed(self, question, context, cut=_context_first)
        if start == 0:
            return {**batch, "labels": np.zeros(2, dtype=np.int64)}
        place = np.array([at + start - 1, at + end - 1], dtype=np.int64)
        lost = self.is_lost(read(sample))
        return {**batch, "labels": np.full(2, IGNORE, dtype=np.int64) if lost else place}

    def is_lost(self, record: np.ndarray) -> bool:
        question, context, (start, end) = unpack(record)
        room = self.sequence_length - sum(map(len, frame_of(self).pair))
        return bool(start and end > len(_context_first(question, context, max(room, 0))[1]))


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(SampledObjective):
    """A target text from a source text. Both have the length of a sample, or the target has `target_length`."""

    name = "seq2seq"
    architectures = frozenset({"encoder-decoder"})
    unit = "record"
    begins = ""
    ends = "eos"
    target: int = at_least(0, 0)
    start: int = at_least(-1, -1)

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        around = sum(map(len, self.around_target))
        least = around + 1 if self.rule > 5 else around
        if self.target_length < least:
            raise WorkloadError(
                f"{self.name}: target is {self.target}, and {around} tokens stand around each target; "
                f"make it at least {least}"
            )

    @property
    def decoder_start(self) -> int:
        """Return the first token of the decoder: `start`, by default the pretrained folder's, else the padding."""
        return self.begins_decoder(self.vocabulary.padding) if self.start < 0 else self.start

    @property
    def target_length(self) -> int:
        """Length of decoder_tokens and labels."""
        return self.target or self.sequence_length

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens before and after a source: the tokenizer's, by default eos after it."""
        known = self.vocabulary
        return ((), (known.eos,)) if known.frame is None else known.frame.single

    @property
    def around_target(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens before and after a target: those of a source, in the language of the target."""
        return self.around if self.vocabulary.target is None else self.vocabulary.target

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        source, target = unpack(read(sample))
        lengths = (self.sequence_length, self.target_length)
        parts = [
            np.concatenate([before, text[: length - len(before) - len(after)], after]).astype(np.int64)
            for text, length, (before, after) in zip((source, target), lengths, self._frames, strict=True)
        ]
        start = self.decoder_start
        return source_and_target(parts[0], parts[1], lengths, start, self.vocabulary.padding)

    def is_cut(self, record: np.ndarray) -> bool:
        lengths = (self.sequence_length, self.target_length)
        return any(
            len(before) + len(text) + len(after) > length
            for text, length, (before, after) in zip(unpack(record), lengths, self._frames, strict=True)
        )

    @property
    def _frames(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        return self.around, self.around_target
