from __future__ import annotations

import numpy as np
import pytest


def test_one_in_k_is_predicted_at_any_place(samples):
    for k in (2, 6):
        _, windows, batch = samples("permuted_lm", 300, 64, k=k)
        size = windows.shape[1]
        assert size + size // k in (63, 64)
        chosen = batch["labels"] != -100
        assert (chosen.sum(axis=1) == size // k).all()
        share = np.bincount(batch["positions"][chosen], minlength=size) / 300
        assert share == pytest.approx(np.full(size, 1 / k), abs=0.13)


def test_the_streams_see_what_the_order_allows(samples):
    _, windows, batch = samples("permuted_lm", 20, 64)
    size = windows.shape[1]
    for attention, labels, positions in zip(
        batch["attention"], batch["labels"], batch["positions"], strict=True
    ):
        queries = np.flatnonzero(labels != -100)
        targets = positions[queries]
        given = np.setdiff1d(np.arange(size), targets)
        # The content stream: what is given sees what is given; a target also itself and earlier targets.
        assert attention[np.ix_(given, given)].all()
        assert not attention[np.ix_(given, targets)].any()
        order = np.argsort(attention[np.ix_(targets, targets)].sum(axis=1))
        assert np.array_equal(
            attention[np.ix_(targets[order], targets[order])], np.tri(len(targets), dtype=bool)
        )
        # A query sees what its target sees, less the target; and of the queries itself alone.
        expected = attention[targets].copy()
        expected[np.arange(len(targets)), targets] = False
        expected[np.arange(len(targets)), queries] = True
        assert np.array_equal(attention[queries], expected)


def test_spans_are_predicted_in_a_random_order(samples):
    _, windows, batch = samples("permuted_lm", 300, 64, span=5)
    size, k = windows.shape[1], 6
    counts, runs, in_order = [], [], 0
    for labels, positions, queries in zip(batch["labels"], batch["positions"], batch["queries"], strict=True):
        assert np.array_equal(queries, labels != -100)
        targets = positions[queries]
        assert len(set(targets)) == len(targets)
        in_order += np.array_equal(targets, np.sort(targets))
        chosen = np.isin(np.arange(size), targets)
        counts.append(len(targets))
        runs.append(len(targets) / (chosen[0] + (chosen[1:] & ~chosen[:-1]).sum()))
    assert in_order < 30
    assert max(counts) <= size // k
    assert np.mean(counts) == pytest.approx(size / k, rel=0.2)
    assert 2.0 < np.mean(runs) < 4.0  # spans of 1 to 5, weighted by nothing but chance


def test_document_ends_are_given_and_padding_fills(samples):
    _, windows, batch = samples("permuted_lm", 20, 64, ends=0.9)
    used = windows.shape[1] + (batch["labels"] != -100).sum(axis=1)
    assert np.array_equal(batch["padding"].sum(axis=1), used)
    assert used.min() < 63
    assert not (batch["labels"] == 0).any()
