from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workloads.model.masks import attends
from workloads.objectives import build
from workloads.objectives.sampled import IGNORE
from workloads.workload import Vocabulary

WINDOW = np.array([110, 111, 0, 112, 113, 0, 0, 114, 115])


def test_packed_text_is_one_stream(make):
    batch = make("causal_lm", 8).collate(lambda i: WINDOW, [0], 0)
    assert set(batch) == {"tokens", "labels"}
    assert batch["tokens"][0].tolist() == WINDOW[:-1].tolist()
    assert batch["labels"][0].tolist() == WINDOW[1:].tolist()


def test_isolated_documents_see_and_predict_themselves_alone(make):
    batch = make("causal_lm", 8, documents="isolate").collate(lambda i: WINDOW, [0], 0)
    assert batch["positions"][0].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert batch["labels"][0].tolist() == [111, 0, -100, 113, 0, -100, -100, 115]
    document = [0, 0, 0, 1, 1, 1, 2, 3]
    expected = [[document[i] == document[j] and j <= i for j in range(8)] for i in range(8)]
    assert attends(batch)[0].tolist() == expected


def test_a_shorter_window_is_filled_up(make):
    for documents in ("pack", "isolate"):
        objective = make("causal_lm", 12, documents=documents)
        whole = make("causal_lm", 8, documents=documents).collate(lambda i: WINDOW, [0], 0)
        batch = objective.collate(lambda i: WINDOW, [0], 0)
        assert batch["tokens"][0, 8:].tolist() == [0] * 4
        assert batch["labels"][0, 8:].tolist() == [-100] * 4
        assert all(batch[key][0, :8].tolist() == whole[key][0].tolist() for key in ("tokens", "labels"))
    assert batch["positions"][0, :8].tolist() == whole["positions"][0].tolist()
    assert attends(batch)[0, :8, :8].tolist() == attends(whole)[0].tolist()
    assert not attends(batch)[0, :8, 8:].any()
    assert attends(batch)[0, range(12), range(12)].all()


@pytest.mark.parametrize("documents", ["pack", "isolate"])
def test_what_stands_before_a_text_is_read_and_not_predicted(documents: str, vocabulary: Vocabulary) -> None:
    """Also where the window begins or ends in the midst of it."""
    eos, one, two = 0, 2, 7
    known = replace(vocabulary, before=(one, two))
    stream = [two, 120, 121, eos, one, two, 122, two, eos, one, two, eos, one]
    objective = build("causal_lm", vocabulary=known, sequence_length=12, seed=1, documents=documents)
    batch = objective.collate(lambda i: np.array(stream), [0], 0)
    ignored = IGNORE
    labels = [120, 121, eos, ignored, ignored, 122, two, eos, ignored, ignored, eos, ignored]
    assert batch["tokens"][0].tolist() == stream[:-1]
    assert batch["labels"][0].tolist() == labels
    if documents == "isolate":
        assert batch["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]


def test_a_token_that_ends_a_document_and_stands_before_one(vocabulary: Vocabulary) -> None:
    """As of OPT: of two in a row the first ends a document, the second begins the next."""
    eos = 0
    known = replace(vocabulary, before=(eos,))
    objective = build("causal_lm", vocabulary=known, sequence_length=8, seed=1, documents="isolate")

    def rows(stream: list[int]) -> tuple[list[int], list[int]]:
        batch = objective.collate(lambda i: np.array(stream), [0], 0)
        return batch["labels"][0].tolist(), batch["positions"][0].tolist()

    whole = [eos, 120, 121, eos, eos, 122, eos, eos, 123]
    assert rows(whole) == ([120, 121, eos, IGNORE, 122, eos, IGNORE, 123], [0, 1, 2, 3, 0, 1, 2, 0])
    cut = [121, eos, eos, 122, 123, eos, eos, 124, 125]
    assert rows(cut) == ([eos, IGNORE, 122, 123, eos, IGNORE, 124, 125], [0, 1, 0, 1, 2, 3, 0, 1])
    between = [eos, eos, 122, 123, 124, 125, eos, eos, eos]  # the last document is empty
    assert rows(between) == ([IGNORE, 122, 123, 124, 125, eos, IGNORE, eos], [0, 0, 1, 2, 3, 4, 5, 0])
