from __future__ import annotations

import numpy as np

from workloads.model.masks import attends

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
