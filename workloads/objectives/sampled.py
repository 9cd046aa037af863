"""The base class of all objectives: one sample at a time, with separate random numbers.

A sample depends only on (seed, sample id, turn), never on its batch. Each sample draws from a counter-based generator
(Philox; Salmon et al. 2011) keyed by a hash of these three and the objective's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from workloads.errors import WorkloadError
from workloads.objectives import options
from workloads.workload import IGNORED, Batch, Text, Vocabulary, Windowing

IGNORE = IGNORED
"""The label of a position that is not predicted."""

SHORTEST = 8
"""Shortest sequence. In shorter ones, some objectives have nothing to predict."""

RULE = 6
"""The sampling rule of new runs: how objectives read text and draw random numbers. It is the format of the run's
prepared data (`orchestrator.data.store.manifest.FORMATS`), so a run keeps its rule when it resumes. Under rule 1, all
objectives read a stream with a stride of sequence_length tokens, and some text between two windows was never read.
"""

Read = Text
Sample = Mapping[str, ArrayLike]


def generator(seed: int, sample: int, turn: int, name: str) -> np.random.Generator:
    """Return the random numbers of one sample: the same on every machine, rank and batch size.

    Args:
        seed: of the run.
        sample: id of the sample.
        turn: how often the sample was read before.
        name: of the objective.
    """
    digest = blake2b(f"{seed}/{sample}/{turn}/{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))


@dataclass(frozen=True, kw_only=True)
class SampledObjective(ABC):
    """Base class of all objectives. Fields after `seed` are the options of `workloads.objectives.build`.

    With `static`, every turn sees the same corruption of a sample (BERT); otherwise each turn draws another
    (RoBERTa). `labels` are the names of the labels, `typed` says whether the model has two token types; both matter
    only for records. `rule` is that of the run's data, see RULE. Raises WorkloadError if the vocabulary lacks what
    `needs` names, or if an option is invalid.
    """

    name = ""
    architectures: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of Vocabulary that must not be None."""
    sentinels: ClassVar[int] = 0
    """Number of `<extra_id_i>` tokens that a tokenizer for this objective has."""
    begins, ends = "", ""
    """The roles of the tokens around each text that the model reads, as an exported tokenizer adds them."""
    unit: ClassVar[Literal["stream", "document", "documents", "record", "records"]] = "stream"
    """How a sample reads the text; see `Windowing`."""
    overlap: ClassVar[int] = 0
    """Number of tokens at the end of a stream's window that the next window repeats."""
    least_documents: ClassVar[int] = 1
    """Minimum number of documents of the text."""
    partial: ClassVar[bool] = False
    """Whether a window of a stream may be shorter, see `Windowing`."""

    framed: ClassVar[bool] = False
    """Whether the tokenizer's special tokens surround each text in prepared data, see `Vocabulary.before`. Other
    objectives add tokens around a text themselves, if any.
    """

    predicts_every_token: ClassVar[bool] = False
    """Whether about every token has a label, so that it is not worth finding those without one."""

    compares: ClassVar[bool] = False
    """Whether a sample is two answers, see `workloads.objectives.preferences`. Then `compare` is its loss."""

    vocabulary: Vocabulary
    sequence_length: int
    seed: int
    rule: int = RULE
    static: bool = False
    labels: tuple[str, ...] = ()
    typed: bool = False

    def __post_init__(self) -> None:
        if self.sequence_length < SHORTEST:
            raise WorkloadError(
                f"{self.name}: sequence_length is {self.sequence_length}; make it at least {SHORTEST}"
            )
        if self.compares and self.sequence_length % 2:
            raise WorkloadError(
                f"{self.name}: sequence_length is {self.sequence_length}, of which each answer has half; make "
                "it even"
            )
        options.check(self.name, self)
        self._check_vocabulary()

    def window(self, sequence_length: int) -> int:
        """Return the tokens of raw text that a sample reads, for model inputs of `sequence_length`; for two answers,
        the tokens of each.
        """
        return sequence_length // 2 if self.compares else sequence_length

    @abstractmethod
    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        """Return the arrays of one sample, without the batch dimension. Keys and shapes are the same for every
        sample.

        Args:
            read: returns the raw tokens of a sample.
            sample: id of the sample.
            rng: the random numbers of this sample and turn.
        """

    @property
    def windowing(self) -> Windowing:
        """Return how the text is divided into samples: without gaps, except under rule 1."""
        window = self.window(self.sequence_length)
        if self.rule == 1:
            return Windowing("stream", window, self.sequence_length, partial=self.partial)
        return Windowing(self.unit, window, window - self.overlap, self.least_documents, self.partial)

    def collate(self, read: Read, ids: Sequence[int], turn: int) -> Batch:
        """Return a batch of the samples `ids`, stacked, each independent of the others.

        Args:
            read: returns the raw tokens of a sample.
            ids: of the samples, in the order of the batch.
            turn: how often the samples were read before.

        Returns:
            Arrays by name, [B, ...] each.
        """
        # A static mask is that of the first turn in every turn.
        drawn = 0 if self.static else turn
        samples = [self.sample(read, int(i), generator(self.seed, int(i), drawn, self.name)) for i in ids]
        return {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}

    def begins_decoder(self, default_start: int) -> int:
        """Return the first token of a decoder: the pretrained folder's, else the objective's `default_start`."""
        return default_start if self.vocabulary.decoder_start is None else self.vocabulary.decoder_start

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens before and after a text that the model reads."""
        known = (getattr(self.vocabulary, role, None) for role in (self.begins, self.ends))
        before, after = (() if token is None else (token,) for token in known)
        return before, after

    def is_cut(self, record: np.ndarray) -> bool:
        """Return whether a record is longer than a sample, so that a part of it is not read."""
        return False

    def is_lost(self, record: np.ndarray) -> bool:
        """Return whether nothing to predict is left of a record after cutting."""
        return False

    def read_window(self, read: Read, sample: int) -> np.ndarray:
        """Return the raw tokens of a sample, int64 [window or fewer]. Raises WorkloadError if they do not fit.

        Args:
            read: returns the raw tokens of a sample.
            sample: id of the sample.
        """
        tokens = np.asarray(read(sample), dtype=np.int64)
        requirement = self.windowing
        expected = requirement.window
        least = expected if requirement.unit == "stream" and not requirement.partial else 1
        fits = least <= len(tokens) <= expected
        if tokens.ndim != 1 or not fits:
            raise WorkloadError(
                f"{self.name} reads windows of {expected} tokens but sample {sample} has shape "
                f"{tokens.shape}; cut the corpus by objective.window(sequence_length)"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocabulary.size:
            raise WorkloadError(
                f"sample {sample} holds the token {tokens.max()} beyond the vocabulary of "
                f"{self.vocabulary.size}; prepare the corpus with the tokenizer of this job"
            )
        return tokens

    def token(self, name: str) -> int:
        """Return the id of the special token `name`. `needs` must list it."""
        return int(getattr(self.vocabulary, name))

    def table(self, name: str) -> np.ndarray:
        """Return the boolean mask `name` over the vocabulary, [vocabulary size]. `needs` must list it."""
        return np.asarray(getattr(self.vocabulary, name), dtype=bool)

    def is_text(self, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens are text and not special; bool of the shape of `tokens`."""
        return ~self._special[tokens]

    @cached_property
    def _special(self) -> np.ndarray:
        table = np.zeros(self.vocabulary.size, dtype=bool)
        table[list(self.vocabulary.special)] = True
        return table

    @cached_property
    def text_ids(self) -> np.ndarray:
        """Return all ids that are neither special nor reserved, in order. Random replacements are drawn from them."""
        table = self._special.copy()
        table[list(self.vocabulary.reserved)] = True
        return np.flatnonzero(~table)

    def _check_vocabulary(self) -> None:
        missing = [n for n in self.needs if getattr(self.vocabulary, n) is None]
        tables = [n for n in missing if n in ("word_start", "sentence_end")]
        tokens = [f"<{n}>" for n in missing if n not in tables]
        tokens += [f"<extra_id_{i}>" for i in range(len(self.vocabulary.sentinels), self.sentinels)]
        if tokens:
            named = ", ".join(tokens) if len(tokens) < 6 else f"{tokens[0]} to {tokens[-1]}"
            raise WorkloadError(
                f"{self.name} needs the special tokens {named}, which the tokenizer lacks; "
                "add them to the tokenizer or train one with data.tokenizer.train_bpe"
            )
        if tables:
            raise WorkloadError(
                f"{self.name} needs the tables {' and '.join(tables)} of the vocabulary; "
                "build the Vocabulary from the tokenizer with them"
            )
        for name in set(self.needs) & {"word_start", "sentence_end"}:
            if self.table(name).shape != (self.vocabulary.size,):
                raise WorkloadError(
                    f"the table {name} has shape {self.table(name).shape} for a vocabulary of "
                    f"{self.vocabulary.size}; give it one entry a token"
                )
