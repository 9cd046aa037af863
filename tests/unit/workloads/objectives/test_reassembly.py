"""For every objective and any text: what was hidden can be put back, and nothing else was touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import Corpus

from workloads.objectives import OF_TEXT
from workloads.objectives.spans import longest_document, sentences

Row = dict[str, np.ndarray]


def predicted(row: Row) -> np.ndarray:
    return row["labels"] != -100


def restored(row: Row) -> np.ndarray:
    """tokens with every label put back in place."""
    return np.where(predicted(row), row["labels"], row["tokens"])


def reachable(attention: np.ndarray) -> np.ndarray:
    """Whose content can reach whom through any number of layers; bool [to, from]."""
    reach = attention
    for _ in range(len(attention).bit_length()):
        reach = (reach.astype(np.float32) @ reach.astype(np.float32)) > 0
    return reach


def check_in_place(objective: Any, row: Row, original: np.ndarray) -> None:
    assert np.array_equal(restored(row), original)
    assert objective.is_text(original)[predicted(row)].all()
    changed = row["tokens"][row["tokens"] != original]
    assert all(objective.is_text(changed) | (changed == objective.vocabulary.mask))


def check_causal(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    assert np.array_equal(row["tokens"], window[:-1])
    assert np.array_equal(row["labels"], window[1:])


def check_framed(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    v = objective.vocabulary
    check_in_place(objective, row, np.concatenate(([v.cls], window, [v.sep])))


def check_detection(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    check_framed(objective, row, window, other)
    assert np.array_equal(row["targets"], restored(row))
    assert (row["tokens"][predicted(row)] == objective.vocabulary.mask).all()


def check_pair(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    v, original = objective.vocabulary, restored(row)
    assert objective.is_text(original)[predicted(row)].all()
    real = original[row["padding"]]
    assert (original[~row["padding"]] == v.pad).all()
    cuts = np.flatnonzero(real == v.sep)
    assert real[0] == v.cls
    assert cuts[1] == len(real) - 1
    first, second = real[1 : cuts[0]], real[cuts[0] + 1 : -1]
    assert np.array_equal(row["token_types"][: len(real)], np.arange(len(real)) > cuts[0])
    text, label = longest_document(window, v.eos), int(row.get("sequence_labels", 0))
    if objective.name == "next_sentence" and label:
        assert np.array_equal(first, text[: len(first)])
        assert bytes(second) in bytes(other)
        assert len(second) <= len(text) - len(first)
    else:
        assert np.array_equal(np.concatenate((second, first) if label else (first, second)), text)


def check_translation(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    assert (row["tokens"][len(window) :] == objective.vocabulary.pad).all()
    assert not row["padding"][len(window) :].any()
    check_in_place(objective, {k: v[: len(window)] for k, v in row.items()}, window)
    assert row["padding"][predicted(row)].all()


def check_permuted(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    size, queries = len(window), np.flatnonzero(predicted(row))
    assert np.array_equal(row["tokens"][:size], window)
    assert np.array_equal(row["positions"][:size], np.arange(size))
    targets = row["positions"][queries]
    assert np.array_equal(row["labels"][queries], window[targets])
    assert len(set(targets)) == len(targets)
    assert objective.is_text(window[targets]).all()
    reach = reachable(row["attention"])
    assert not reach[queries, targets].any()
    assert not reach[:, queries][np.arange(64)[:, None] != queries].any()


def check_infilling(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    v, (outer, inner) = objective.vocabulary, row["positions"]
    start, end = v.sentinels[:2]
    spans = {}
    for first in np.flatnonzero((row["tokens"] == start) & (inner == 1)):
        last = first
        while row["labels"][last] != end:
            assert row["labels"][last] == row["tokens"][last + 1]
            assert inner[last + 1] == inner[last] + 1
            assert outer[last + 1] == outer[first]
            last += 1
        spans[int(outer[first])] = row["labels"][first:last]
    part_a = row["tokens"][(inner == 0) & row["padding"]]
    whole = [spans.pop(i) if token == v.mask else [token] for i, token in enumerate(part_a)]
    assert not spans
    assert np.array_equal(np.concatenate(whole), np.concatenate(([v.cls], window)))
    assert not np.triu(reachable(row["attention"]), 1)[predicted(row)].any()
    assert not reachable(row["attention"])[: len(part_a), len(part_a) :].any()


def decoder_follows_labels(row: Row, start: int) -> np.ndarray:
    """The target, after checking that the decoder reads it shifted by one."""
    target = row["labels"][predicted(row)]
    assert np.array_equal(row["decoder_tokens"][: len(target)], np.concatenate(([start], target))[:-1])
    assert row["decoder_padding"].sum() == max(len(target), 1)
    assert not predicted(row)[len(target) :].any()
    return target


def check_corruption(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    v = objective.vocabulary
    target = decoder_follows_labels(row, v.pad)
    spans: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token in v.sentinels:
            spans[int(token)] = latest = []
        else:
            latest.append(int(token))
    assert list(spans) == list(v.sentinels[: len(spans)])
    assert row["padding"].all()
    assert target[-1] == row["tokens"][-1] == v.eos
    whole = [spans.pop(int(t)) if t in v.sentinels else [t] for t in row["tokens"][:-1]]
    read = np.concatenate(whole)
    assert not spans
    assert np.array_equal(read, window[: len(read)])
    if (window != v.eos).all():
        assert len(read) == len(window)
        assert len(target) == objective.target_length


def check_denoising(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    v = objective.vocabulary
    target = decoder_follows_labels(row, v.eos)
    assert np.array_equal(target, np.concatenate((window, [v.eos])))
    source = row["tokens"][row["padding"]]
    assert source[0] == v.bos
    assert source[-1] == v.eos
    # Document by document, what is left of the text comes from that document.
    documents = np.split(window, np.flatnonzero(window == v.eos))
    left = np.split(source[1:-1], np.flatnonzero(source[1:-1] == v.eos))
    assert len(documents) == len(left)
    for document, part in zip(documents, left, strict=True):
        ids, counts = np.unique(part[part != v.mask], return_counts=True)
        assert all((document == i).sum() >= n for i, n in zip(ids, counts, strict=True))


def check_mass(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    check_in_place(objective, row, window)
    inside = predicted(row)
    follows = inside & np.concatenate(([False], inside[:-1]))
    assert np.array_equal(row["decoder_tokens"][follows], window[np.flatnonzero(follows) - 1])
    assert (row["decoder_tokens"][~follows] == objective.vocabulary.mask).all()


def check_gaps(objective: Any, row: Row, window: np.ndarray, other: np.ndarray) -> None:
    v = objective.vocabulary
    text, source = longest_document(window, v.eos), row["tokens"][row["padding"]]
    target = decoder_follows_labels(row, v.pad)[:-1]
    gaps = iter([target[a:b] for a, b in zip(*sentences(target, v.eos, v.sentence_end), strict=True)])
    whole = [next(gaps) if token == v.mask else [token] for token in source[:-1]]
    assert next(gaps, None) is None
    assert np.array_equal(np.concatenate([*whole, []]), text)


CHECKS: dict[str, Callable[[Any, Row, np.ndarray, np.ndarray], None]] = {
    "causal_lm": check_causal,
    "masked_lm": check_framed,
    "whole_word_masking": check_framed,
    "span_masking": check_framed,
    "entity_masking": check_framed,
    "next_sentence": check_pair,
    "sentence_order": check_pair,
    "unified_lm": check_pair,
    "replaced_token_detection": check_detection,
    "translation_lm": check_translation,
    "permuted_lm": check_permuted,
    "blank_infilling": check_infilling,
    "span_corruption": check_corruption,
    "denoising": check_denoising,
    "mass": check_mass,
    "gap_sentences": check_gaps,
}


def text_for(objective: Any, draw: Any, seed: int, ends: float, data: Any) -> np.ndarray:
    """A sample of the unit that the objective reads."""
    size, unit = objective.window(64), objective.windowing.unit
    if unit == "document":
        return draw(seed, data.draw(st.integers(1, size)))
    window = draw(seed, size, ends)
    if unit == "documents":
        for place in data.draw(st.lists(st.integers(0, size - 1), max_size=6)):
            window[place] = objective.vocabulary.sep
        closing = np.flatnonzero(window == objective.vocabulary.eos)
        return window[: closing[-1] + 1] if len(closing) else window
    return window


@pytest.mark.parametrize("name", OF_TEXT)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**40), ends=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]), data=st.data())
def test_the_text_can_be_put_back(name, make, draw, seed, ends, data):
    objective = make(name)
    window, other = (text_for(objective, draw, seed + i, ends, data) for i in (0, 1))
    read = Corpus(lambda i: window if i == 1 else other, 2)
    batch = objective.collate(read, [1], data.draw(st.integers(0, 99)))
    CHECKS[name](objective, {key: value[0].numpy() for key, value in batch.items()}, window, other)


@pytest.mark.parametrize("name", OF_TEXT)
def test_rows_of_attention_are_never_empty(name, samples):
    for options in [{"documents": "isolate"}] if name == "causal_lm" else [{}]:
        _, _, batch = samples(name, 4, 64, 0.1, **options)
        if "attention" in batch:
            assert batch["attention"].any(axis=2).all()
