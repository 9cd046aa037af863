from __future__ import annotations

import numpy as np
import pytest
import torch
from texts import Corpus

from workloads.errors import WorkloadError
from workloads.objectives import OF_TEXT
from workloads.objectives.sampled import generator


@pytest.fixture
def reader(draw):
    """reader(objective): windows by sample id, with document ends and pairs."""

    def make_reader(objective):
        size = objective.window(objective.sequence_length)

        def read(sample):
            window = draw(1000 + sample, size, 0.04)
            if objective.name == "translation_lm":
                window[5::11] = objective.vocabulary.sep
                window[10::11] = objective.vocabulary.eos
            return window

        return Corpus(read)

    return make_reader


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", OF_TEXT)
def test_a_batch_is_its_samples_whatever_their_order(name, make, reader):
    objective = make(name)
    ids = [5, 2, 9, 2**40]
    batch = objective.collate(reader(objective), ids, 3)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        alone = [make(name).collate(reader(objective), [ids[i]], 3) for i in order]
        joined = {key: torch.cat([one[key] for one in alone]) for key in batch}
        assert equal(joined, {key: value[order] for key, value in batch.items()})


@pytest.mark.parametrize("name", OF_TEXT)
def test_shapes_and_types_do_not_depend_on_the_text(name, make, reader, draw):
    objective = make(name)
    size = objective.window(64)
    batches = [
        objective.collate(reader(objective), [1, 2], 0),
        objective.collate(Corpus(lambda i: draw(i, size)), [1, 2], 0),
        objective.collate(Corpus(lambda i: np.zeros(size, dtype=np.uint16)), [1, 2], 0),
    ]
    for key, value in batches[0].items():
        assert len({(b[key].shape, b[key].dtype) for b in batches}) == 1
        assert value.dtype == (
            torch.bool if key in ("padding", "decoder_padding", "attention", "queries") else torch.int64
        )
        assert value.shape[0] == 2
    assert batches[0]["tokens"].shape == (2, 64)
    if "encoder-decoder" in objective.architectures:
        assert batches[0]["decoder_tokens"].shape == (2, objective.target_length)
        assert batches[0]["labels"].shape == (2, objective.target_length)
    else:
        assert batches[0]["labels"].shape == (2, 64)


@pytest.mark.parametrize("name", [n for n in OF_TEXT if n != "causal_lm"])
def test_epochs_differ_unless_static(name, make, reader):
    ids = range(8)
    for static in (False, True):
        objective = make(name, static=static)
        first, second = (objective.collate(reader(objective), ids, epoch) for epoch in (0, 1))
        # Principal sentences are the same every time: nothing in them is drawn.
        assert equal(first, second) == (static or name == "gap_sentences")


@pytest.mark.parametrize("name", [n for n in OF_TEXT if n not in ("causal_lm", "gap_sentences")])
def test_seeds_differ(name, make, reader):
    one, other = make(name, seed=1), make(name, seed=2)
    assert not equal(one.collate(reader(one), range(8), 0), other.collate(reader(one), range(8), 0))


def test_the_generator_is_the_same_everywhere():
    # Pinned: a change here changes every run's samples.
    assert generator(7, 3, 1, "masked_lm").integers(0, 1000, 4).tolist() == [199, 996, 24, 281]


def test_the_generator_depends_on_each_of_its_keys():
    keys = [(7, 3, 1, "a"), (8, 3, 1, "a"), (7, 4, 1, "a"), (7, 3, 2, "a"), (7, 3, 1, "b"), (73, 1, 1, "a")]
    assert len({generator(*key).integers(2**63) for key in keys}) == len(keys)


def test_a_window_of_another_length_is_refused(make):
    for name, length in (("masked_lm", 63), ("causal_lm", 66)):
        with pytest.raises(WorkloadError, match=r"windows of \d+ tokens but sample 4 has shape"):
            make(name).collate(lambda i, length=length: np.zeros(length, dtype=np.int64), [4], 0)


def test_a_token_beyond_the_vocabulary_is_refused(make):
    with pytest.raises(WorkloadError, match="beyond the vocabulary"):
        make("causal_lm").collate(lambda i: np.full(65, 5000), [4], 0)


def test_the_corpus_is_never_written_to(make, reader):
    for name in OF_TEXT:
        objective = make(name)
        read = reader(objective)
        kept = {i: read(i) for i in range(-1, 3)}
        for window in kept.values():
            window.setflags(write=False)
        batch = objective.collate(Corpus(lambda i, kept=kept: kept[i], 3), [1, 2], 0)
        batch["tokens"][:] = 0
        assert all(np.array_equal(kept[i], read(i)) for i in kept)
