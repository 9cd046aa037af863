"""Masked language models over a packed window: tokens, whole words, spans, entities, and ELECTRA's input.

All frame the window as <cls> text <sep>; document ends stay inside it as separators and are never masked
(FULL-SENTENCES of Liu et al. 2019, RoBERTa, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from workloads.errors import WorkloadError
from workloads.objectives.masking import choose_tokens, choose_units, choose_word_spans, corrupt, labels_at
from workloads.objectives.options import at_least, fraction
from workloads.objectives.sampled import Read, Sample, SampledObjective
from workloads.objectives.spans import Stretches, words

FRAME = 2
"""<cls> and <sep>."""
NEEDS = ("cls", "sep", "mask")


def framed(objective: SampledObjective, window: np.ndarray) -> np.ndarray:
    """Return <cls> window <sep>, int64 [length].

    Args:
        objective: has the special tokens.
        window: int64 [length - 2].
    """
    return np.concatenate(([objective.token("cls")], window, [objective.token("sep")]))


def masked(
    objective: SampledObjective,
    tokens: np.ndarray,
    chosen: np.ndarray,
    rng: np.random.Generator,
    first: np.ndarray | None = None,
) -> Sample:
    """Return the tokens with the chosen ones corrupted, and labels at the chosen ones.

    Args:
        objective: has <mask>, and the tokens that may replace others.
        tokens: int64 [length].
        chosen: bool [length].
        rng: the random numbers of the sample.
        first: as in `corrupt`.
    """
    corrupted = corrupt(
        tokens, chosen, mask=objective.token("mask"), text_ids=objective.text_ids, rng=rng, first=first
    )
    return {"tokens": corrupted, "labels": labels_at(tokens, chosen)}


@dataclass(frozen=True, kw_only=True)
class MaskedLM(SampledObjective):
    """BERT's masked tokens: `rate` of the text is predicted; of it 80 % masked, 10 % random, 10 % unchanged.

    Devlin et al. 2019; a new mask every epoch as in RoBERTa, the same one with static=True.
    """

    name = "masked_lm"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = NEEDS
    begins = "cls"
    ends = "sep"
    rate: float = fraction(0.15)

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = framed(self, self.read_window(read, sample))
        return masked(self, tokens, choose_tokens(self.is_text(tokens), self.rate, rng), rng)


@dataclass(frozen=True, kw_only=True)
class WholeWordMasking(SampledObjective):
    """All tokens of a word or none are predicted (BERT's release of May 2019; Cui et al. 2019).

    Each token of a chosen word is masked, replaced or kept on its own, as in that release.
    """

    name = "whole_word_masking"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = (*NEEDS, "word_start")
    begins = "cls"
    ends = "sep"
    rate: float = fraction(0.15)

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = framed(self, self.read_window(read, sample))
        text = self.is_text(tokens)
        chosen, _ = choose_units(words(tokens, text, self.table("word_start")), text, self.rate, rng)
        return masked(self, tokens, chosen, rng)


@dataclass(frozen=True, kw_only=True)
class SpanMasking(SampledObjective):
    """SpanBERT's spans (Joshi et al. 2020, section 3.1): whole words, length geometric, fate per span.

    Lengths in words follow Geo(`p`) up to `longest`. The span boundary objective (section 3.2) is left out:
    it needs a separate head that reads the two tokens around a span.
    """

    name = "span_masking"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = (*NEEDS, "word_start")
    begins = "cls"
    ends = "sep"
    rate: float = fraction(0.15)
    p: float = fraction(0.2)
    longest: int = at_least(1, 10)

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = framed(self, self.read_window(read, sample))
        text = self.is_text(tokens)
        # Draw more trials than needed; the rate is met long before they run out.
        lengths = rng.geometric(self.p, size=2 * len(tokens))
        lengths = lengths[lengths <= self.longest]
        units = words(tokens, text, self.table("word_start"))
        chosen, first = choose_word_spans(units, text, self.rate, lengths, rng)
        return masked(self, tokens, chosen, rng, first)


@dataclass(frozen=True, kw_only=True)
class EntityMasking(SampledObjective):
    """ERNIE's entities and phrases (Sun et al. 2019, section 3.2): a known entity is hidden whole or not.

    `entities` are token id sequences. The longest one that matches at a token counts, matches do not overlap,
    and every other token is a unit of its own. All tokens of an entity share one fate.
    """

    name = "entity_masking"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = NEEDS
    begins = "cls"
    ends = "sep"
    rate: float = fraction(0.15)
    entities: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        SampledObjective.__post_init__(self)
        special = self.vocabulary.special
        if not self.entities or not all(self.entities):
            raise WorkloadError(
                f"{self.name}: entities is empty or holds an empty one; list the token ids of each entity"
            )
        if any(
            token in special or not 0 <= token < self.vocabulary.size for e in self.entities for token in e
        ):
            raise WorkloadError(
                f"{self.name}: an entity holds a special token or one beyond the vocabulary; "
                "encode the entities with this job's tokenizer, without special tokens"
            )

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = framed(self, self.read_window(read, sample))
        text = self.is_text(tokens)
        chosen, first = choose_units(self._units(tokens, text), text, self.rate, rng)
        return masked(self, tokens, chosen, rng, first)

    @cached_property
    def _trie(self) -> dict[int, Any]:
        """Return the entities nested by token id. The key -1 marks the end of an entity."""
        root: dict[int, Any] = {}
        for entity in self.entities:
            node = root
            for token in entity:
                node = node.setdefault(int(token), {})
            node[-1] = {}
        return root

    def _units(self, tokens: np.ndarray, text: np.ndarray) -> Stretches:
        ids = tokens.tolist()
        starts = []
        stops = []
        at = 0
        while at < len(ids):
            stop = at + 1
            node = self._trie
            for i in range(at, len(ids)):
                if ids[i] not in node:
                    break
                node = node[ids[i]]
                stop = i + 1 if -1 in node else stop
            if text[at]:
                starts.append(at)
                stops.append(stop)
            at = stop
        return np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ReplacedTokenDetection(SampledObjective):
    """ELECTRA's input (Clark et al. 2020, section 2): `rate` of the text masked, always by <mask>.

    Beside tokens and labels: targets, the original tokens, int64 [length], to compare the generator's samples
    with; and sample_seed, int64, from which the model seeds those samples.
    """

    name = "replaced_token_detection"
    architectures = frozenset({"encoder"})
    needs: ClassVar[tuple[str, ...]] = NEEDS
    begins = "cls"
    ends = "sep"
    rate: float = fraction(0.15)

    def window(self, sequence_length: int) -> int:
        return sequence_length - FRAME

    def sample(self, read: Read, sample: int, rng: np.random.Generator) -> Sample:
        tokens = framed(self, self.read_window(read, sample))
        chosen = choose_tokens(self.is_text(tokens), self.rate, rng)
        return {
            "tokens": np.where(chosen, self.token("mask"), tokens),
            "labels": labels_at(tokens, chosen),
            "targets": tokens,
            "sample_seed": rng.integers(2**63, dtype=np.int64),
        }
