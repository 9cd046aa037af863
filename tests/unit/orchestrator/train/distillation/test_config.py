"""What a job file may say of distillation, and which layers are compared."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.train.distillation.config import pairs_of, rows_of_pass


def document(distill: dict[str, Any], **parts: Any) -> dict[str, Any]:
    found = job("text.txt")
    for key, value in parts.items():
        found[key] = {**found.get(key, {}), **value}
    return {**found, "distill": {"teacher": "runs/large", **distill}}


def test_a_teacher_alone_is_enough() -> None:
    spec = parse(document({})).distill
    assert spec is not None
    assert spec.logits is not None
    assert (spec.labels, spec.logits.weight, spec.logits.temperature) == (0.5, 0.5, 2.0)
    assert not spec.looks_inside
    assert spec.stored is None


def test_what_is_learnt_makes_another_run_and_no_teacher_changes_no_identity() -> None:
    plain = job("text.txt")
    assert "distill" not in parse(plain).identity()
    one, other = (parse(document({"labels": weight})).identity() for weight in (0.5, 0.6))
    assert one["distill"] != other["distill"]


def test_the_number_of_teacher_workers_changes_no_identity() -> None:
    """They count among the workers of the run, and so do those that it cannot do without."""
    specs = [
        parse(document({"logits": {"source": "workers"}, "workers": bounds}))
        for bounds in ({"max": 2}, 1, None)
    ]
    assert specs[0].identity() == specs[1].identity() == specs[2].identity()
    assert [(spec.all_workers.min, spec.all_workers.max) for spec in specs] == [(1, 4), (2, 3), (1, 3)]
    assert specs[0].distill is not None
    assert specs[0].distill.stored == specs[0].distill.logits


def test_a_pass_of_a_teacher_worker_depends_on_the_job_alone() -> None:
    assert rows_of_pass(8, 0, sequence_length=32) == 8
    assert rows_of_pass(512, 0, sequence_length=128) == 32
    assert rows_of_pass(512, 0, sequence_length=10_000) == 1
    assert rows_of_pass(512, 8, sequence_length=10_000) == 64  # the micro-batch of every layout


SAMPLES = {"workload": {"objective": "sequence_classification"}}
MASKED = {"workload": {"model": "bert-tiny", "objective": "masked_lm"}}
REGRESSION = {"workload": {"objective": "regression"}}
STORED = {"logits": {"source": "stored"}}
BY_WORKERS = {"logits": {"source": "workers"}}
HIDDEN: dict[str, Any] = {"hidden": {}}


@pytest.mark.parametrize(
    ("distill", "parts", "says"),
    [
        ({"logits": None}, {}, "learns nothing from the teacher; give logits, hidden or relations"),
        ({"logits": {"k": 5}}, {}, "k is for source stored and workers, but this is online; leave it out"),
        ({"workers": 2}, {}, "workers are for logits.source workers; set it, or leave workers out"),
        ({**BY_WORKERS, "workers": {"max": 0}}, {}, "workers.max: should be greater than or equal to 1"),
        ({**BY_WORKERS, "workers": {"min": 3, "max": 2}}, {}, "min 3 is above max 2; swap them"),
        (
            {**BY_WORKERS, "workers": 1, **HIDDEN},
            {},
            "in every step, but logits.source is workers; set it to online",
        ),
        ({**BY_WORKERS, "workers": 1}, MASKED, "masked_lm predicts other tokens in every epoch"),
        ({**BY_WORKERS, "workers": 1}, {"data": {"packing": "best_fit"}}, "data.packing makes them later"),
        ({**BY_WORKERS, "workers": 1}, {"data": {"streaming": True}}, "data.shuffle makes them later"),
        (
            {**BY_WORKERS, "workers": 1},
            {"train": {"continue_from": {"run": "runs/other"}}},
            "begins within another run's order of samples",
        ),
        ({**STORED, **HIDDEN}, {}, "hidden needs the teacher in every step, but logits.source is stored"),
        ({"relations": {"of": ["values", "values"]}}, {}, "of names values twice"),
        ({"relations": {"of": ["scores"], "heads": 4}}, {}, "heads divides queries, keys and values"),
        ({"logits": {"temperature": 0}}, {}, "temperature"),
        ({}, REGRESSION, "distill has no loss for regression: a number has no distribution over classes"),
        (STORED, MASKED, "masked_lm predicts other tokens in every epoch, so that logits cannot be stored"),
        (STORED, {"data": {"packing": "best_fit"}}, "data.packing makes them later"),
        (HIDDEN, {"train": {"compile": True}}, "look into layers, which train.compile fuses"),
        ({}, {"workload": {"model": "my.models:Net", "changes": {}}}, "this one is your own"),
    ],
)
def test_what_cannot_be_is_told(distill: dict[str, Any], parts: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        parse(document(distill, **parts))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("layers", "student", "teacher", "pairs"),
    [
        ("last", 2, 12, ((2, 12),)),
        ("uniform", 4, 12, ((1, 3), (2, 6), (3, 9), (4, 12))),  # TinyBERT's g(m) = 3 m
        ("uniform", 4, 6, ((1, 2), (2, 3), (3, 5), (4, 6))),
        ("uniform", 3, 3, ((1, 1), (2, 2), (3, 3))),
        ([[0, 0], [2, 11]], 2, 12, ((0, 0), (2, 11))),
    ],
)
def test_layers_are_mapped(layers: Any, student: int, teacher: int, pairs: Any) -> None:
    assert pairs_of(layers, student, teacher) == pairs


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([[3, 4]], "names layer 3 of the student, which has 2"),
        ([[1, 13]], "names layer 13 of the teacher, which has 12"),
        ([[0, 1]], "compares layer 0 with layer 1"),
    ],
)
def test_layers_that_are_not_there_are_told(layers: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pairs_of(layers, 2, 12)
