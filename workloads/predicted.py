"""How many tokens an objective predicts, and how long an encoder-decoder's targets are. No torch, so that planning need
not import the objectives, which takes seconds; a test compares both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

RATES: Mapping[str, float] = MappingProxyType(
    dict.fromkeys(
        (
            *("masked_lm", "whole_word_masking", "span_masking", "entity_masking", "next_sentence"),
            *("sentence_order", "replaced_token_detection", "translation_lm", "unified_lm"),
        ),
        0.15,
    )
)
"""Share of the text that is predicted, where the job gives no `rate`, of objectives that train encoders."""


@dataclass(frozen=True)
class Predicted:
    """What a model computes a prediction of.

    Attributes:
        share: of a sequence's tokens, those that an encoder's head gets: it computes no others.
        target_length: tokens that a decoder beside an encoder writes; 0 is as many as are read.
    """

    share: float = 1.0
    target_length: int = 0


ALL = Predicted()
"""Every token."""


def predicted(objective: str, options: Mapping[str, Any], sequence_length: int) -> Predicted:
    """What is predicted of samples of `sequence_length` tokens, by the objective's options in the job."""
    if objective in RATES:
        return Predicted(share=float(options.get("rate", RATES[objective])))
    if objective == "permuted_lm":  # the targets' queries stand behind the text, in one sequence with it
        return Predicted(share=1.0 / (1.0 + float(options.get("k", 6))))
    if objective == "span_corruption":
        rate, mean_span = float(options.get("rate", 0.15)), float(options.get("mean_span", 3.0))
        return Predicted(target_length=corrupted(sequence_length, rate, mean_span)[1])
    if objective == "gap_sentences":
        return Predicted(target_length=sequence_length // 2)
    return Predicted(target_length=int(options.get("target", 0))) if objective == "seq2seq" else ALL


def corrupted(sequence_length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Span corruption's window of text, of which as much is left as fills `sequence_length` with its sentinels and eos,
    and the length of its targets, which are the spans with theirs (Raffel et al., 2020, section 3.1.4)."""
    window = sequence_length - 1
    while _source_length(window + 1, rate, mean_span) <= sequence_length:
        window += 1
    return window, sum(noise_of(window, rate, mean_span)) + 1


def noise_of(window: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Noise tokens and spans in a window."""
    noise = min(max(round(window * rate), 1), window - 1)
    return noise, max(round(noise / mean_span), 1)


def _source_length(window: int, rate: float, mean_span: float) -> int:
    noise, spans = noise_of(window, rate, mean_span)
    return window - noise + spans + 1
