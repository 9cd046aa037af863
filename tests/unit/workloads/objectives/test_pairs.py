from __future__ import annotations

import numpy as np
import pytest
from texts import Corpus

LENGTH = 64


def segments(tokens, labels, padding):
    """The two segments of a sample with the hidden tokens put back."""
    real = np.where(labels != -100, labels, tokens)[padding]
    cuts = np.flatnonzero(real == 4)
    return real[1 : cuts[0]], real[cuts[0] + 1 : -1]


@pytest.fixture
def corpus():
    """400 samples, each a document of 15 to 40 tokens that shares no token with its neighbours."""
    rng, documents = np.random.default_rng(0), []
    for number in range(400):
        size = int(rng.integers(15, 40))
        document = 110 + number % 10 * 19 + rng.integers(0, 18, size=size)
        document[7::8] = 300 + number % 10
        documents.append(document)
    return Corpus(lambda sample: documents[sample], len(documents))


def document_numbers(segment):
    """Which tenth of the vocabulary the tokens are from: the document, up to multiples of ten."""
    return set(np.where(segment >= 300, segment - 300, (segment - 110) // 19).tolist())


@pytest.mark.parametrize("name", ["next_sentence", "sentence_order"])
def test_half_are_true_and_the_masks_are_those_of_bert(name, make, corpus):
    batch = make(name).collate(corpus, range(400), 0)
    assert batch["sequence_labels"].float().mean() == pytest.approx(0.5, abs=0.08)
    text = batch["padding"].sum() - 3 * 400
    chosen = batch["labels"] != -100
    assert chosen.sum() / text == pytest.approx(0.15, abs=0.01)
    assert (batch["tokens"][chosen] == 5).float().mean() == pytest.approx(0.8, abs=0.04)


def test_the_next_sentence_is_of_the_document_or_of_another(make, corpus):
    batch = {k: v.numpy() for k, v in make("next_sentence").collate(corpus, range(400), 0).items()}
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


@pytest.mark.parametrize("per_document", [1, 3, 50])
def test_a_random_segment_is_of_any_other_document_and_never_of_the_same(make, per_document):
    read = Corpus(lambda sample: np.full(61, 110 + sample // per_document), 100, per_document)
    seen = set()
    for turn in range(30):
        batch = {k: v.numpy() for k, v in make("next_sentence").collate(read, range(100), turn).items()}
        for i, label in enumerate(batch["sequence_labels"]):
            first, second = segments(batch["tokens"][i], batch["labels"][i], batch["padding"][i])
            assert first[0] == 110 + i // per_document
            assert (first[0] != second[0]) == bool(label)
            seen |= {(int(first[0]), int(second[0]))} if label else set()
        assert batch["sequence_labels"].mean() == pytest.approx(0.5, abs=0.2)
    documents = len({first for first, _ in seen})
    assert documents == -(-100 // per_document)
    assert len(seen) > 0.1 * documents * (documents - 1)


def test_a_text_of_one_token_is_a_continuation(make):
    batch = make("next_sentence").collate(Corpus(lambda i: np.full(1, 150), 9), range(9), 0)
    assert batch["sequence_labels"].sum() == 0
    assert batch["padding"].sum() == 4 * 9


def test_a_random_segment_begins_at_any_sentence_with_room(make):
    # Another document of sentences of four tokens, the first of which counts them.
    other = np.where(np.arange(61) % 4 == 3, 300, 110 + np.arange(61) // 4)
    present = np.where(np.arange(61) % 4 == 3, 301, 150)

    begins = set()
    for turn in range(60):
        read = Corpus(lambda i: present if i == 3 else other, 9)
        batch = make("next_sentence").collate(read, [3], turn)
        batch = {k: v[0].numpy() for k, v in batch.items()}
        if batch["sequence_labels"]:
            first, second = segments(batch["tokens"], batch["labels"], batch["padding"])
            assert len(first) + len(second) in (60, 61)
            at = (second[0] - 110) * 4
            assert np.array_equal(second, other[at : at + len(second)])
            begins.add(at)
    assert len(begins) > 5


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
