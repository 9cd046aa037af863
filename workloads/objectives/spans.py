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
    """Return the runs of `inside`, cut again where `begins` is True; both bool [length]."""
    cuts = (inside & begins) | run_starts(inside)
    starts = np.flatnonzero(cuts)
    edges = np.append(np.flatnonzero(cuts | ~inside), len(inside))
    return starts, edges[np.searchsorted(edges, starts, side="right")]


def words(tokens: np.ndarray, text: np.ndarray, word_start: np.ndarray) -> Stretches:
    """Return whole words: text tokens from the beginning of a word to the next. No word contains a special token."""
    return pieces(text, word_start[tokens])


def documents(tokens: np.ndarray, eos: int) -> Stretches:
    """Return the tokens between document ends, without the ends. Empty documents are left out."""
    return runs(tokens != eos)


def sentences(tokens: np.ndarray, eos: int, sentence_end: np.ndarray) -> Stretches:
    """Return sentences with their closing token. A document's end closes a sentence and belongs to none."""
    after = np.concatenate(([True], sentence_end[tokens[:-1]]))
    return pieces(tokens != eos, after)


def longest_document(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Return the longest stretch of the window within one document, int64 [at most length]."""
    starts, stops = documents(tokens, eos)
    if len(starts) == 0:
        return tokens[:0]
    longest = int(np.argmax(stops - starts))
    return tokens[starts[longest] : stops[longest]]


def composition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Return `parts` lengths of at least 1 that sum to `total`, all ways equally likely; int64 [parts]."""
    cuts = np.sort(rng.choice(total - 1, size=parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def lengths_until(budget: int, drawn: np.ndarray) -> np.ndarray:
    """Return the first of the `drawn` lengths that sum to `budget`, the last one shortened to meet it."""
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
    """
    needed = np.cumsum(lengths + gap) - gap
    lengths = lengths[needed <= size]
    count = len(lengths)
    free = size - int(lengths.sum()) - gap * max(count - 1, 0)
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
    """
    starts, stops = stretches
    room = stops - starts + 1  # a span takes its length and a gap
    held: list[list[int]] = [[] for _ in starts]
    left = 0
    for length in np.sort(lengths)[::-1]:
        fitting = np.where(room > length, room, 0)
        if not fitting.any():
            fitting = np.where(room > 1, room == room.max(initial=0), 0)
        if not fitting.any():
            left += int(length)
            continue
        index = int(rng.choice(len(room), p=fitting / fitting.sum()))
        taken = min(int(length), int(room[index]) - 1)
        held[index].append(taken)
        room[index] -= taken + 1
        left += int(length) - taken
    inside = np.zeros(size, dtype=bool)
    for start, stop, free, spans in zip(starts, stops, room, held, strict=True):
        if spans:
            spans[0] += (more := min(left, int(free)))
            left -= more
            inside[start:stop] = scatter(rng.permutation(spans), int(stop - start), rng)
    return inside


def padded(values: np.ndarray, length: int, fill: int) -> np.ndarray:
    """Return `values` followed by `fill` up to `length`; int64 [length]."""
    result = np.full(length, fill, dtype=np.int64)
    result[: len(values)] = values
    return result
