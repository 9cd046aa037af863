from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workloads.errors import WorkloadError
from workloads.objectives import build


def test_lengths_are_those_of_the_published_recipe(make):
    # t5's helper gives 568 and 114 for inputs of 512, 15 % noise and spans of 3.
    objective = make("span_corruption", 512)
    assert objective.window(512) == 568
    assert objective.target_length == 114


@pytest.mark.parametrize("length", [8, 9, 16, 33, 64, 127, 128, 250])
@pytest.mark.parametrize("options", [{}, {"rate": 0.5, "mean_span": 8.0}, {"rate": 0.3, "mean_span": 1.0}])
def test_the_input_is_full_and_the_target_of_one_length(length, options, make, draw):
    objective = make("span_corruption", length, **options)
    size = objective.window(length)
    batch = objective.collate(lambda i: draw(i, size), range(5), 0)
    assert batch["padding"].all()
    assert batch["decoder_padding"].all()
    assert (batch["labels"] != -100).all()
    assert batch["labels"].shape == (5, objective.target_length)


def test_noise_rate_mean_span_and_place(samples):
    _, windows, batch = samples("span_corruption", 200)
    text = batch["labels"] >= 110
    assert text.sum() / windows.size == pytest.approx(0.15, abs=0.005)
    spans = ((batch["labels"] >= 10) & (batch["labels"] < 110)).sum()
    assert text.sum() / spans == pytest.approx(3.0, abs=0.15)
    # All ways to cut the noise into spans are equally likely: one in three is a single token.
    marks = (batch["labels"][:, :-2] < 110) & (batch["labels"][:, 2:] < 110) & text[:, 1:-1]
    assert marks.sum() / spans == pytest.approx(1 / 3, abs=0.04)
    # Spans stand anywhere: first and last tokens are noise as often as others, give or take the edges.
    first, last = batch["tokens"][:, 0] == 10, (batch["tokens"][:, -2] >= 10) & (batch["tokens"][:, -2] < 110)
    assert 0.02 < first.mean() < 0.25
    assert 0.02 < last.mean() < 0.25


def test_document_ends_are_kept_and_the_input_stays_full(samples):
    _, windows, batch = samples("span_corruption", 200, ends=0.1)
    assert batch["padding"].all()
    assert (batch["labels"] == 0).sum() == 200
    kept = (batch["tokens"] == 0).sum(axis=1) - 1
    assert (kept == (windows == 0).sum(axis=1)).all()
    assert ((batch["labels"] >= 110).sum(axis=1) == round(0.15 * windows.shape[1])).all()


def test_the_version_before_left_spans_beyond_the_sentinels_visible(vocabulary, draw):
    # There document ends split spans, here into more than the vocabulary has sentinels for.
    length = 880
    objective = build(
        "span_corruption",
        vocabulary=vocabulary,
        sequence_length=length,
        seed=0,
        rule=1,
        rate=0.5,
        mean_span=8.0,
    )
    size = objective.window(length)
    batch = objective.collate(lambda i: draw(i, size, 0.3), range(5), 0)
    labels = batch["labels"].numpy()
    sentinels = (labels >= 10) & (labels < 110)
    assert (sentinels.sum(axis=1) == 100).all()
    assert batch["padding"].all()


def test_too_few_sentinels_are_refused_with_the_mend(vocabulary):
    with pytest.raises(WorkloadError, match=r"sentinels; shorten data\.sequence_length or raise mean_span"):
        build("span_corruption", vocabulary=vocabulary, sequence_length=2048, seed=0)
    longer = replace(
        vocabulary, size=600, sentinels=tuple(range(400, 600)), word_start=None, sentence_end=None
    )
    assert build("span_corruption", vocabulary=longer, sequence_length=2048, seed=0).window(2048) > 2048


def test_the_decoder_starts_from_pad(samples):
    objective, _, batch = samples("span_corruption", 3)
    assert (batch["decoder_tokens"][:, 0] == 1).all()
    assert objective.decoder_start == 1
    assert np.array_equal(batch["decoder_tokens"][:, 1:], batch["labels"][:, :-1])
