"""Choose tokens to hide and their replacements (BERT, Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

import numpy as np

from workloads.objectives.sampled import IGNORE
from workloads.objectives.spans import Stretches

MASKED, REPLACED = 0.8, 0.1
"""Shares of the chosen tokens that become <mask> and a random token. The rest stay unchanged."""


def budget(text: np.ndarray, rate: float) -> int:
    """Return how many of the text tokens (bool [length]) to choose: the rate, but at least one if there are any.

    Args:
        text: bool [length], False at special tokens.
        rate: share of the text.
    """
    count = int(text.sum())
    return min(count, max(1, round(rate * count)))


def choose_tokens(text: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Choose single tokens at random, exactly the rate; bool [length].

    Args:
        text: bool [length], False at special tokens.
        rate: share of the text.
        rng: the random numbers of the sample.
    """
    chosen = np.zeros(len(text), dtype=bool)
    chosen[rng.choice(np.flatnonzero(text), size=budget(text, rate), replace=False)] = True
    return chosen


def choose_units(
    units: Stretches, text: np.ndarray, rate: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Choose whole units at random until the rate is met; a unit that would exceed it is skipped.

    Returns chosen, bool [length], and for each token the first token of its unit, int64 [length].

    Args:
        units: first token of each unit and the token after its last one.
        text: bool [length], False at special tokens.
        rate: share of the text.
        rng: the random numbers of the sample.
    """
    starts, stops = units
    left = budget(text, rate)
    chosen = np.zeros(len(text), dtype=bool)
    first = np.arange(len(text))
    sizes = stops - starts
    for unit in rng.permutation(len(starts)):
        # Skipped, not cut, and the next unit is tried: so the rate is met as closely as whole units can.
        if sizes[unit] <= left:
            chosen[starts[unit] : stops[unit]] = True
            first[starts[unit] : stops[unit]] = starts[unit]
            left -= int(sizes[unit])
        if left == 0:
            break
    return chosen, first


def choose_word_spans(
    words: Stretches, text: np.ndarray, rate: float, lengths: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Choose spans of whole words from random beginnings until the rate is met (SpanBERT, section 3.1).

    `lengths` are in words, one for each trial. A span ends early at a special token, at a chosen word, and before a
    word that would exceed the rate. Returns as `choose_units`, with spans as units.

    Args:
        words: first token of each word and the token after its last one.
        text: bool [length], False at special tokens.
        rate: share of the text.
        lengths: in words, int64 [trials].
        rng: the random numbers of the sample.
    """
    starts, stops = words
    left = budget(text, rate)
    chosen = np.zeros(len(text), dtype=bool)
    first = np.arange(len(text))
    # All at once: the number of draws depends on the trials only, and a span that ends early shifts no later draw.
    anchors = rng.integers(max(len(starts), 1), size=len(lengths))
    for anchor, length in zip(anchors, lengths, strict=True):
        for word in range(anchor, min(anchor + length, len(starts))):
            touches = word == anchor or starts[word] == stops[word - 1]
            size = int(stops[word] - starts[word])
            if not touches or chosen[starts[word]] or size > left:
                break
            chosen[starts[word] : stops[word]] = True
            first[starts[word] : stops[word]] = starts[anchor]
            left -= size
        if left == 0:
            break
    return chosen, first


def corrupt(
    tokens: np.ndarray,
    chosen: np.ndarray,
    mask: int,
    text_ids: np.ndarray,
    rng: np.random.Generator,
    first: np.ndarray | None = None,
) -> np.ndarray:
    """Return the tokens with 80 % of the chosen ones masked, 10 % replaced at random, 10 % kept; int64 [length].

    With `first`, int64 [length], all tokens of a unit are treated like its first token.

    Args:
        tokens: int64 [length].
        chosen: bool [length].
        mask: id of <mask>.
        text_ids: ids that replace a token, int64 [n].
        rng: the random numbers of the sample.
        first: first token of each token's unit, int64 [length]; None to treat each token alone.
    """
    fate = rng.random(len(tokens))
    # A span is masked, replaced or kept as a whole (SpanBERT, section 3.1).
    if first is not None:
        fate = fate[first]
    # Drawn for every token and used for few: the number of draws does not depend on which tokens are chosen.
    noise = text_ids[rng.integers(len(text_ids), size=len(tokens))]
    hidden = chosen & (fate < MASKED)
    replaced = chosen & ~hidden & (fate < MASKED + REPLACED)
    return np.where(hidden, mask, np.where(replaced, noise, tokens))


def labels_at(tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the original tokens where chosen, -100 elsewhere; int64 [length].

    Args:
        tokens: int64 [length].
        chosen: bool [length].
    """
    return np.where(chosen, tokens, IGNORE)
