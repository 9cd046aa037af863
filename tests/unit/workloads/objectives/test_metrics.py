"""Metrics against values worked out by hand and by their papers."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from workloads.errors import WorkloadError
from workloads.objectives.metrics import METRICS, measure


@pytest.mark.parametrize(
    ("name", "predictions", "references", "wanted"),
    [
        ("accuracy", [0, 1, 1, 2], [0, 1, 2, 2], 0.75),
        ("accuracy", ["yes", "no"], ["yes", "yes"], 0.5),
        ("f1", [1, 1, 0, 0], [1, 0, 1, 0], 0.5),
        ("f1", [0, 0], [0, 0], 0.0),  # of class 1, which is nowhere
        ("f1", [0, 1, 2, 2], [0, 1, 1, 2], (1 + 2 / 3 + 2 / 3) / 3),
        ("f1", ["a", "b"], ["a", "a"], (2 / 3 + 0) / 2),
        ("precision", [1, 1, 1, 0], [1, 0, 0, 1], 1 / 3),
        ("recall", [1, 1, 1, 0], [1, 0, 0, 1], 1 / 2),
        ("precision", [0, 0], [1, 0], 0.0),  # class 1 is never said
        ("precision", [0, 1, 2, 2], [0, 1, 1, 2], (1 + 1 + 1 / 2) / 3),
        ("recall", [0, 1, 2, 2], [0, 1, 1, 2], (1 + 1 / 2 + 1) / 3),
        ("matthews", [1, 1, 0, 0], [1, 1, 0, 0], 1.0),
        ("matthews", [0, 0, 1, 1], [1, 1, 0, 0], -1.0),
        ("matthews", [1, 1, 1, 1], [1, 1, 0, 0], 0.0),
        ("spearman", [1.0, 2.0, 3.0, 10.0], [1, 4, 9, 16], 1.0),
        ("spearman", ["3", "2", "1"], ["1.5", "2", "2.5"], -1.0),
        ("spearman", [5, 5, 5], [1, 2, 3], 0.0),
        ("exact_match", ["a b", "c"], ["a b", "C"], 0.5),
        ("exact_match", ["c", "d"], [["b", "c"], "d"], 1.0),
        ("rouge1", ["the cat sat"], ["the cat ran"], 100 * 2 / 3),
        ("rouge2", ["the cat sat"], ["the cat ran"], 50.0),
        ("rougeL", ["a x b"], ["a b"], 80.0),
        ("rouge1", ["the cat"], [["a dog", "the cat"]], 100.0),
        ("rougeLsum", ["a\nb"], ["b\na"], 100.0),
        ("bleu", ["the cat sat on the mat"], ["the cat sat on the mat"], 100.0),
        ("bleu", ["the cat sat on the mat"], [["a dog", "the cat sat on the mat"]], 100.0),
        ("chrf", ["abc", "xyz"], ["abc", ["xyz", "abc"]], 100.0),
    ],
)  # fmt: skip
def test_values(name: str, predictions: list[Any], references: list[Any], wanted: float) -> None:
    if name[:4] in ("roug", "bleu", "chrf"):
        pytest.importorskip("lm_eval")
    assert measure(name, predictions, references) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_metrics_of_a_class_are_scikit_learns(classes: int) -> None:
    from sklearn.metrics import f1_score, precision_score, recall_score

    drawn = random.Random(classes)
    said, wanted = ([drawn.randrange(classes) for _ in range(50)] for _ in range(2))
    average = "binary" if classes == 2 else "macro"
    for name, of in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        assert measure(name, said, wanted, classes) == of(wanted, said, average=average)


def test_every_metric_is_in_the_table_of_the_docstring() -> None:
    import workloads.objectives.metrics as module

    assert all(name in str(module.__doc__) for name in METRICS)


def test_bad_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkloadError, match="no metric 'mathews'; did you mean matthews"):
        measure("mathews", [1], [1])
    with pytest.raises(WorkloadError, match="accuracy of 1 predictions and 2 references"):
        measure("accuracy", [1], [1, 2])
    with pytest.raises(WorkloadError, match="accuracy of 0 predictions and 0 references"):
        measure("accuracy", [], [])
    with pytest.raises(WorkloadError, match="spearman ranks numbers, and 'red' is not a number"):
        measure("spearman", ["red", "1"], [1, 2])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(WorkloadError, match=r"bleu needs sacrebleu; pip install -e '\.\[eval\]'"):
        measure("bleu", ["a"], ["a"])
