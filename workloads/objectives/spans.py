"""Spans of a token window: how to find them, and how to place random ones.

A stretch is a half-open range; a set of them is a pair of int64 arrays (starts, stops) in order.
"""

from __future__ import annotations

import numpy as np

Stretches = tuple[np.ndarray, np.ndarray]


def runs(inside: np.ndarray) -> Stretches:
    """Return the maximal runs of True in a bool array [length]."""
    edges = np.diff(inside.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def run_starts(inside: np.ndarray) -> np.ndarray:
    """Return True at the first position of each run of True; bool [length]."""
    return inside & ~np.concatenate(([False], inside[:-1]))


def pieces(inside: np.ndarray, begins: np.ndarray) -> Stretches:
    """Return the runs of `inside`, cut again where `begins` is True; both bool [length].

    Args:
        inside: bool [length].
        begins: bool [length].
    """
    cuts = (inside & begins) | run_starts(inside)
    starts = np.flatnonzero(cuts)
    edges = np.append(np.flatnonzero(cuts | ~inside), len(inside))
    return starts, edges[np.searchsorted(edges, starts, side="right")]


def words(tokens: np.ndarray, text: np.ndarray, word_start: np.ndarray) -> Stretches:
    """Return whole words: text tokens from the beginning of a word to the next. No word contains a special token.

    Args:
        tokens: int64 [length].
        text: bool [length], False at special tokens.
        word_start: bool [vocabulary].
    """
    return pieces(text, word_start[tokens])


def documents(tokens: np.ndarray, eos: int) -> Stretches:
    """Return the tokens between document ends, without the ends. Empty documents are left out.

    Args:
        tokens: int64 [length].
        eos: id of the token that ends a document.
    """
    return runs(tokens != eos)


def sentences(tokens: np.ndarray, eos: int, sentence_end: np.ndarray) -> Stretches:
    """Return sentences with their closing token. A document's end closes a sentence and belongs to none.

    Args:
        tokens: int64 [length].
        eos: id of the token that ends a document.
        sentence_end: bool [vocabulary].
    """
    after = np.concatenate(([True], sentence_end[tokens[:-1]]))
    return pieces(tokens != eos, after)


def longest_document(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Return the longest stretch of the window within one document, int64 [at most length].

    Args:
        tokens: int64 [length].
        eos: id of the token that ends a document.
    """
    starts, stops = documents(tokens, eos)
    if len(starts) == 0:
        return tokens[:0]
    longest = int(np.argmax(stops - starts))
    return tokens[starts[longest] : stops[longest]]


def composition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Return `parts` lengths of at least 1 that sum to `total`, all ways equally likely; int64 [parts].

    Args:
        total: sum of the lengths.
        parts: number of lengths.
        rng: the random numbers of the sample.
    """
    # Stars and bars: parts - 1 distinct cuts between `total` tokens, each set of cuts equally likely.
    cuts = np.sort(rng.choice(total - 1, size=parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def lengths_until(budget: int, drawn: np.ndarray) -> np.ndarray:
    """Return the first of the `drawn` lengths that sum to `budget`, the last one shortened to meet it.

    Args:
        budget: the sum to reach.
        drawn: more lengths than needed, int64 [n].
    """
    if budget <= 0:
        return drawn[:0]
    reached = np.cumsum(drawn)
    last = int(np.searchsorted(reached, budget))
    if last == len(drawn):
        return drawn
    lengths = drawn[: last + 1].copy()
    lengths[-1] -= reached[last] - budget
    return lengths


def scatter(lengths: np.ndarray, size: int, rng: np.random.Generator, gap: int = 1) -> np.ndarray:
    """Place spans of these lengths, in this order, at random over `size` positions; bool [size].

    At least `gap` positions stay free between two spans; all such placements are equally likely. Spans at the end of
    `lengths` that do not fit are left out.

    Args:
        lengths: of the spans, int64 [spans].
        size: number of positions.
        rng: the random numbers of the sample.
        gap: free positions between two spans.
    """
    needed = np.cumsum(lengths + gap) - gap
    lengths = lengths[needed <= size]
    count = len(lengths)
    free = size - int(lengths.sum()) - gap * max(count - 1, 0)
    # The free positions and the spans form a row of free + count items, of which `count` are spans: every choice is one
    # placement. Each slot then moves right by what the spans before it and their gaps take beyond one item each.
    slots = np.sort(rng.choice(free + count, size=count, replace=False))
    before = np.concatenate(([0], np.cumsum(lengths)))[:count].astype(np.int64)
    starts = slots + before + (gap - 1) * np.arange(count)
    change = np.zeros(size + 1, dtype=np.int64)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + lengths, -1)
    return np.cumsum(change[:-1]) > 0


def scatter_within(
    stretches: Stretches, lengths: np.ndarray, size: int, rng: np.random.Generator
) -> np.ndarray:
    """Place spans of these lengths at random over `size` positions, each within one of the `stretches`; bool [size].

    A stretch is drawn for each span, the longest first, in proportion to its remaining room. Within a stretch, all
    placements are equally likely. Length that fits no stretch is added to the other spans as far as possible.

    Args:
        stretches: first position of each stretch and the one after its last.
        lengths: of the spans, int64 [spans].
        size: number of positions.
        rng: the random numbers of the sample.
    """
    starts, stops = stretches
    room = stops - starts + 1  # a span takes its length and a gap
    lengths_by_stretch: list[list[int]] = [[] for _ in starts]
    left = 0
    for length in np.sort(lengths)[::-1]:
        fitting = np.where(room > length, room, 0)
        if not fitting.any():
            # No stretch has room for the whole span: it is shortened to the largest room.
            fitting = np.where(room > 1, room == room.max(initial=0), 0)
        if not fitting.any():
            left += int(length)
            continue
        index = int(rng.choice(len(room), p=fitting / fitting.sum()))
        placed = min(int(length), int(room[index]) - 1)
        lengths_by_stretch[index].append(placed)
        room[index] -= placed + 1
        left += int(length) - placed
    inside = np.zeros(size, dtype=bool)
    for start, stop, free, spans in zip(starts, stops, room, lengths_by_stretch, strict=True):
        if spans:
            spans[0] += (more := min(left, int(free)))
            left -= more
            inside[start:stop] = scatter(rng.permutation(spans), int(stop - start), rng)
    return inside


def padded(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    """Return `values` followed by `fill` up to `length`; int64 [length].

    Args:
        values: int64 [length or fewer].
        length: of the result.
        fill: the padding.
    """
    result = np.full(length, fill, dtype=np.int64)
    result[: len(values)] = values
    return result
