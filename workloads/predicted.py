"""The number of tokens that an objective predicts, and the target length of an encoder-decoder.

This module imports neither torch nor the objectives, which takes seconds, so that planning starts quickly. A test
compares both.
"""

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
"""The default share of the text that objectives for encoders predict, if the job gives no `rate`."""


@dataclass(frozen=True)
class Predicted:
    """The tokens for which a model computes predictions.

    Attributes:
        share: the share of the tokens of a sequence (of an encoder) or of a target for which the head computes outputs.
        target_length: tokens that the decoder of an encoder-decoder writes; 0 for as many as are read.
    """

    share: float = 1.0
    target_length: int = 0


GAP_RATE = 0.3
"""The default share of sentences that gap-sentence generation takes out (Zhang et al., 2020, PEGASUS, section 6.1)."""
ALL = Predicted()
"""Predictions for every token."""


def predicted(objective: str, options: Mapping[str, Any], sequence_length: int) -> Predicted:
    """Return what is predicted of samples of `sequence_length` tokens, by the objective's options in the job."""
    if objective in RATES:
        return Predicted(share=float(options.get("rate", RATES[objective])))
    if objective == "permuted_lm":  # the queries of the targets follow the text in the same sequence
        return Predicted(share=1.0 / (1.0 + float(options.get("k", 6))))
    if objective == "span_corruption":
        rate, mean_span = float(options.get("rate", 0.15)), float(options.get("mean_span", 3.0))
        return Predicted(target_length=corrupted(sequence_length, rate, mean_span)[1])
    if objective == "gap_sentences":
        target_length = sequence_length // 2
        hidden = float(options.get("rate", GAP_RATE)) * sequence_length
        return Predicted(share=min(hidden / target_length, 1.0), target_length=target_length)
    return Predicted(target_length=int(options.get("target", 0))) if objective == "seq2seq" else ALL


def corrupted(sequence_length: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Return the text window and the target length of span corruption (Raffel et al., 2020, section 3.1.4).

    The window is the longest whose remaining text, with sentinels and eos, fits in `sequence_length`. The targets are
    the removed spans with their sentinels.
    """
    window = sequence_length - 1
    while _source_length(window + 1, rate, mean_span) <= sequence_length:
        window += 1
    return window, sum(noise_of(window, rate, mean_span)) + 1


def noise_of(window: int, rate: float, mean_span: float) -> tuple[int, int]:
    """Return the numbers of noise tokens and of spans in a window."""
    noise = min(max(round(window * rate), 1), window - 1)
    return noise, max(round(noise / mean_span), 1)


def _source_length(window: int, rate: float, mean_span: float) -> int:
    noise, spans = noise_of(window, rate, mean_span)
    return window - noise + spans + 1
