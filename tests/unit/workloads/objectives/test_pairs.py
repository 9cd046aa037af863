from __future__ import annotations

import numpy as np
import pytest

LENGTH = 64


def segments(tokens, labels, padding):
    """The two segments of a sample with the hidden tokens put back."""
    real = np.where(labels != -100, labels, tokens)[padding]
    cuts = np.flatnonzero(real == 4)
    return real[1 : cuts[0]], real[cuts[0] + 1 : -1]


@pytest.fixture
def corpus():
    """read(id) over documents of 15 to 40 tokens that share no token with their neighbours."""
    rng, text = np.random.default_rng(0), []
    number = 0
    while len(text) < 61 * 400:
        size = int(rng.integers(15, 40))
        base = 110 + number % 10 * 19
        document = base + rng.integers(0, 18, size=size)
        document[7::8] = 300 + number % 10
        text += [*document, 0]
        number += 1
    stream = np.array(text)

    def read(sample):
        return stream[sample * 61 : (sample + 1) * 61]

    return read


def document_numbers(segment):
    """Which tenth of the vocabulary the tokens are from: the document, up to multiples of ten."""
    return set(np.where(segment >= 300, segment - 300, (segment - 110) // 19).tolist())


@pytest.mark.parametrize("name", ["next_sentence", "sentence_order"])
def test_half_are_true_and_the_masks_are_those_of_bert(name, make, corpus):
    batch = make(name).collate(corpus, range(1, 400), 0)
    assert batch["sequence_labels"].float().mean() == pytest.approx(0.5, abs=0.08)
    text = batch["padding"].sum() - 3 * 399
    chosen = batch["labels"] != -100
    assert chosen.sum() / text == pytest.approx(0.15, abs=0.01)
    assert (batch["tokens"][chosen] == 5).float().mean() == pytest.approx(0.8, abs=0.04)


def test_the_next_sentence_is_of_the_document_or_of_another(make, corpus):
    batch = {k: v.numpy() for k, v in make("next_sentence").collate(corpus, range(1, 400), 0).items()}
    same = 0
    for i, label in enumerate(batch["sequence_labels"]):
        first, second = segments(batch["tokens"][i], batch["labels"][i], batch["padding"][i])
        one, two = document_numbers(first), document_numbers(second)
        assert len(one) == len(two) == 1
        if label:
            same += one == two
        else:
            assert one == two
    # Another document carries the same number one time in ten.
    assert same / batch["sequence_labels"].sum() == pytest.approx(0.1, abs=0.06)


def test_foreign_text_of_the_same_tokens_comes_from_an_earlier_document(make, draw):
    # Windows of one document each but for the end of another: only the text before the end is foreign.
    def read(sample):
        window = np.full(61, 110 + sample % 180)
        window[:30] = 110 + (sample + 179) % 180
        window[30] = 0
        return window

    batch = {k: v.numpy() for k, v in make("next_sentence").collate(read, range(1, 170), 0).items()}
    for i, label in enumerate(batch["sequence_labels"]):
        first, second = segments(batch["tokens"][i], batch["labels"][i], batch["padding"][i])
        assert (first[0] != second[0]) == bool(label)


def test_the_first_sample_and_empty_text_are_continuations(make, corpus):
    objective = make("next_sentence")
    labels = [objective.collate(corpus, [0], epoch)["sequence_labels"].item() for epoch in range(20)]
    assert labels == [0] * 20
    empty = objective.collate(lambda i: np.zeros(61, dtype=np.int64), range(1, 20), 0)
    assert empty["sequence_labels"].sum() == 0
    assert empty["padding"].sum() == 3 * 19


def test_without_foreign_text_the_pair_is_a_continuation(make, draw):
    def read(sample):
        return draw(0, 61) if sample == 5 else np.zeros(61, dtype=np.int64)

    for epoch in range(10):
        batch = make("next_sentence").collate(read, [5], epoch)
        assert batch["sequence_labels"].item() == 0
        assert batch["padding"].all()


def test_foreign_text_begins_at_any_sentence_with_room(make):
    # An earlier document of sentences of four tokens, the first of which counts them.
    earlier = np.where(np.arange(61) % 4 == 3, 300, 110 + np.arange(61) // 4)
    earlier[60] = 0
    present = np.where(np.arange(61) % 4 == 3, 301, 150)

    begins = set()
    for epoch in range(60):
        batch = make("next_sentence").collate(lambda i: present if i == 3 else earlier, [3], epoch)
        batch = {k: v[0].numpy() for k, v in batch.items()}
        if batch["sequence_labels"]:
            first, second = segments(batch["tokens"], batch["labels"], batch["padding"])
            assert len(first) + len(second) in (60, 61)
            at = (second[0] - 110) * 4
            assert np.array_equal(second, earlier[at : at + len(second)])
            begins.add(at)
    assert len(begins) > 5


def test_foreign_text_without_any_document_end_still_comes(make, draw):
    batch = make("next_sentence").collate(lambda i: draw(i, 61), range(1, 100), 0)
    assert batch["sequence_labels"].float().mean() == pytest.approx(0.5, abs=0.15)


def test_segments_are_cut_at_sentences(make, corpus):
    batch = {k: v.numpy() for k, v in make("sentence_order").collate(corpus, range(200), 0).items()}
    cut = []
    for i, swapped in enumerate(batch["sequence_labels"]):
        first, second = segments(batch["tokens"][i], batch["labels"][i], batch["padding"][i])
        assert document_numbers(first) == document_numbers(second)
        cut.append((second if swapped else first)[-1] >= 300)
    assert np.mean(cut) == 1.0


def test_a_pair_has_types_and_padding(make, corpus):
    batch = {k: v.numpy() for k, v in make("sentence_order").collate(corpus, [3], 0).items()}
    first, second = segments(batch["tokens"][0], batch["labels"][0], batch["padding"][0])
    expected = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert batch["token_types"][0].tolist() == expected + [0] * (LENGTH - len(expected))
    assert batch["padding"][0].sum() == len(expected)
    assert (batch["tokens"][0][len(expected) :] == 1).all()
