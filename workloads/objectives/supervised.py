"""Supervised objectives over records: the data contains the labels.

Each surrounds its texts with the tokenizer's special tokens (`Vocabulary.frame`), and cuts long texts at the end, the
longer text of a pair first, as tokenizers do by default ("longest first"). Prepared data holds whole records, so the
length may change. Before rule 6, the first of two equally long texts kept the odd token, which `tokenizers` gives to
the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.model.transformer import LABEL_WEIGHTS
from workloads.objectives.options import BALANCED, at_least, choice, weights_of_labels
from workloads.objectives.sampled import IGNORE, SHORTEST, Read, Sample, SampledObjective
from workloads.objectives.seq2seq import source_and_target
from workloads.objectives.spans import padded
from workloads.record_format import from_bits, unpack
from workloads.workload import COUNTED, Frame

MULTI_LABEL = "multi_label_classification"
"""The objective of texts with several labels."""
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
    """Return two texts with at most `room` tokens together. The longer one is cut first, at its end.

    Args:
        first: int64 [tokens].
        second: int64 [tokens].
        room: tokens of both together.
    """
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
    """Return tokens, padding and token_types, each [length], and where the second text begins.

    Args:
        objective: has the special tokens and the length.
        first: token ids.
        second: token ids; None for a single text.
        cut: shortens a pair; None to cut the longer text first.
    """
    frame = frame_of(objective)
    length = objective.sequence_length
    before, *between, after = frame.single if second is None else frame.pair
    middle = between[0] if between else ()
    # Special tokens are never cut: the texts share what is left.
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
        position = np.arange(length)
        typed = bool(frame.typed and between)
        batch["token_types"] = ((position >= start) & (position < len(tokens)) & typed).astype(np.int64)
    return batch, start


def is_longer(objective: SampledObjective, texts: Sequence[np.ndarray]) -> bool:
    """Return whether texts with their special tokens are longer than a sample.

    Args:
        objective: has the special tokens and the length.
        texts: one or two.
    """
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


def weights_by_number(objective: Any) -> np.ndarray | None:
    """Return the weight of each of an objective's labels, fp32 [labels]; None if all weigh the same.

    `balanced` weights are 1 until the labels have been counted, see `balanced`. Raises WorkloadError for a label that
    the job does not have.
    """
    class_weights = objective.class_weights
    if not class_weights or class_weights == BALANCED:
        return None if not class_weights else np.ones(max(len(objective.labels), 1), dtype=np.float32)
    if isinstance(class_weights, Mapping):
        names = {str(name): float(weight) for name, weight in class_weights.items()}
        if unknown := names.keys() - set(objective.labels):
            raise WorkloadError(
                f"{objective.name}: class_weights names {min(unknown)!r}, which is not one of the labels "
                f"{', '.join(objective.labels[:8])}"
            )
        class_weights = [names.get(name, 1.0) for name in objective.labels]
    if len(class_weights) != len(objective.labels):
        raise WorkloadError(
            f"{objective.name}: class_weights has {len(class_weights)} weights for {len(objective.labels)} labels"
        )
    return np.asarray(class_weights, dtype=np.float32)


def balanced(objective: Any, records: Sequence[np.ndarray] | Any) -> Any:
    """Return the objective with the weights that make each label count as much as any other.

    samples / (labels x samples with that label), as scikit-learn's "balanced" (King and Zeng, 2001). For texts with
    several labels: texts without a label / texts with it, the `pos_weight` of torch.nn.BCEWithLogitsLoss.

    Args:
        objective: has `class_weights` "balanced".
        records: the records of training, an iterable.

    Raises WorkloadError if a label occurs in no record.
    """
    counts = np.zeros(len(objective.labels), dtype=np.int64)
    samples = 0
    for record in records:
        numbers = objective.label_numbers(record)
        np.add.at(counts, numbers, 1)
        samples += 1 if objective.name == MULTI_LABEL else len(numbers)
    if not counts.all():
        missing = objective.labels[int(counts.argmin())]
        raise WorkloadError(
            f"{objective.name}: class_weights {BALANCED} needs every label, and no record is {missing!r}"
        )
    if objective.name == MULTI_LABEL:
        # At least 1 / count: a label that every text has would otherwise weigh 0 and never be learnt.
        weights = np.maximum(samples - counts, 1) / counts
    else:
        weights = samples / (len(counts) * counts)
    return replace(objective, class_weights=tuple(float(np.float32(weight)) for weight in weights))


@dataclass(frozen=True, kw_only=True)
class WeightedLabels:
    """The options, besides those of `SampledObjective`, of objectives that may weigh labels in the loss."""

    class_weights: Any = weights_of_labels()  # noqa: RUF009  (a field)

    @cached_property
    def weights(self) -> np.ndarray | None:
        """See `weights_by_number`."""
        return weights_by_number(self)

    def label_numbers(self, record: np.ndarray) -> np.ndarray:
        """Return the numbers of a record's labels."""
        return unpack(record)[-1]


@dataclass(frozen=True, kw_only=True)
class SequenceClassification(WeightedLabels, SampledObjective):
    """One label for a text, or for a pair of texts: sequence_labels int64.

    `class_weights` weigh each label in the loss, which stays a mean: the sum of weighted losses over the weights,
    as torch.nn.CrossEntropyLoss(weight=...).
    """

    name = "sequence_classification"
    architectures = frozenset({"encoder", "decoder", "encoder-decoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    is_cut = _are_texts_cut

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        weights_by_number(self)

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        batch, label = _with_label(self, np.asarray(read(sample)))
        weighed = {} if self.weights is None else {LABEL_WEIGHTS: self.weights[label]}
        return {**batch, "sequence_labels": np.int64(label), **weighed}


@dataclass(frozen=True, kw_only=True)
class MultiLabelClassification(WeightedLabels, SampledObjective):
    """Any number of labels for a text, or for a pair of texts: sequence_labels fp32 [labels], 1 where a label applies.

    The loss is the mean over samples and labels of the binary cross-entropy. `class_weights` weigh the samples to which
    a label applies, as `pos_weight` of torch.nn.BCEWithLogitsLoss.
    """

    name = MULTI_LABEL
    architectures = frozenset({"encoder", "decoder", "encoder-decoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    is_cut = _are_texts_cut

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        weights_by_number(self)

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        record = np.asarray(read(sample))
        labels = np.zeros(max(len(self.labels), 1), dtype=np.float32)
        labels[self.label_numbers(record)] = 1.0
        batch = {**framed(self, *texts_of(record))[0], "sequence_labels": labels}
        if self.weights is None:
            return batch
        # `pos_weight`: only positive labels are weighed, so negatives keep their scale.
        return {**batch, LABEL_WEIGHTS: np.where(labels > 0, self.weights, 1.0).astype(np.float32)}


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
class TokenClassification(WeightedLabels, SampledObjective):
    """One label for a word, predicted at its first token: labels int64 [length].

    `class_weights` are as in `SequenceClassification`.
    """

    name = "token_classification"
    architectures = frozenset({"encoder", "decoder", "encoder-decoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    is_cut = _are_texts_cut

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        weights_by_number(self)

    def label_numbers(self, record: np.ndarray) -> np.ndarray:
        """See `WeightedLabels.label_numbers`."""
        labels = unpack(record)[-1]
        return labels[labels > 0] - 1

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        text, labels = unpack(read(sample))
        batch, _ = framed(self, text)
        before, after = frame_of(self).single
        # 0 in records is a token that is not the first of its word.
        word_labels = labels[: self.sequence_length - len(before) - len(after)] - 1
        token_labels = np.full(self.sequence_length, IGNORE, dtype=np.int64)
        token_labels[len(before) : len(before) + len(word_labels)] = np.where(
            word_labels < 0, IGNORE, word_labels
        )
        weighed = {} if self.weights is None else {LABEL_WEIGHTS: self.weights[np.maximum(token_labels, 0)]}
        return {**batch, "labels": token_labels, **weighed}

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
        # `start` and `end` count from 1 in records, because 0 means no answer; `at` is where the context begins in the
        # row.
        bounds = np.array([at + start - 1, at + end - 1], dtype=np.int64)
        lost = self.is_lost(read(sample))
        return {**batch, "labels": np.full(2, IGNORE, dtype=np.int64) if lost else bounds}

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


@dataclass(frozen=True, kw_only=True)
class SentenceEmbeddings(SampledObjective):
    """An anchor and its positive, perhaps with negatives: texts that belong together get vectors that are close.

    The loss compares each anchor with the positives and negatives of the whole global batch: of all these texts its own
    positive must be the nearest (in-batch negatives; Henderson et al. 2017, section 4.4; Reimers and Gurevych 2019). It
    is MultipleNegativesRankingLoss of sentence-transformers, over all ranks and micro-batches.

    A row has all texts of a sample, one after the other. Each has an equal part of the row, with its padding at the end
    of that. Batch: tokens, token_types, padding [B, L], counted bool [B].

    Options: `pooling` of the hidden states of a text, "mean" over its tokens or "cls", its first; `scale` of the cosine
    similarities; `negatives`, how many each sample has in its columns.
    """

    name = "sentence_embeddings"
    architectures = frozenset({"encoder"})
    unit = "record"
    begins = "cls"
    ends = "sep"
    pooling: str = choice("mean", "cls")
    scale: float = at_least(1e-6, 20.0)
    negatives: int = at_least(0, 0)

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        if self.sequence_length % self.parts or self.sequence_length // self.parts < SHORTEST:
            raise WorkloadError(
                f"{self.name}: sequence_length is {self.sequence_length}, and each of {self.parts} texts has an equal "
                f"part of it; make it a multiple of {self.parts}, at least {SHORTEST * self.parts}"
            )

    @property
    def parts(self) -> int:
        """Return the number of texts of a sample."""
        return 2 + self.negatives

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        texts = self._texts(read(sample))
        alone = self._alone
        rows = [framed(alone, text)[0] for text in texts]
        return {
            **{name: np.concatenate([each[name] for each in rows]) for name in rows[0]},
            COUNTED: np.True_,
        }

    def is_cut(self, record: np.ndarray) -> bool:
        return any(is_longer(self._alone, [text]) for text in self._texts(record))

    @cached_property
    def _alone(self) -> SampledObjective:
        """An objective that frames one text of a sample."""
        return SequenceClassification(
            vocabulary=self.vocabulary,
            sequence_length=self.sequence_length // self.parts,
            seed=self.seed,
            rule=self.rule,
            typed=self.typed,
        )

    def _texts(self, record: np.ndarray) -> list[np.ndarray]:
        texts = [text for text in unpack(record) if len(text)]
        if len(texts) != self.parts:
            raise WorkloadError(
                f"{self.name}: a record has {max(len(texts) - 2, 0)} negatives, and options.negatives is "
                f"{self.negatives}; set it to the number of columns that every row has"
            )
        return texts

    def among(self, features: Tensor, counted: Tensor) -> Tensor:
        """Return the loss of each sample, fp32 [G], among all counted samples of the global batch.

        Args:
            features: fp32 [G, parts x hidden], the vectors of a sample's texts.
            counted: bool [G], False for rows that only fill up the batch, which are no candidates either.
        """
        anchors, *others = F.normalize(features.view(len(features), self.parts, -1), dim=-1).unbind(1)
        scores = anchors @ torch.cat(others).T * self.scale
        scores = scores.masked_fill(~counted.repeat(len(others))[None], -torch.inf)
        targets = torch.arange(len(features), device=features.device)
        # A row that does not count has no finite score; its loss is masked by whoever sums.
        return F.cross_entropy(scores.masked_fill(~counted[:, None], 0.0), targets, reduction="none")
