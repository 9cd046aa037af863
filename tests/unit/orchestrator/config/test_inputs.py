"""Each component says which of its keys change inputs, and every key of the data says so or is known to change none."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.inputs import Input, changed_by
from orchestrator.config.spec import JobSpec
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.evaluate.config import EvaluateSpec


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("workload.model", {Input.WEIGHTS, Input.FOLDER}),
        ("workload.init_from", {Input.WEIGHTS}),
        ("workload.changes.hidden", {Input.FOLDER}),
        ("workload.objective", {Input.TEXT}),
        ("workload.dropout", set()),
        ("workload.adapter.rank", set()),
        ("data.sources.0.uri", {Input.TEXT}),
        ("data.tokenizer", {Input.TEXT}),
        ("data.sequence_length", set()),
        ("data.validation.share", {Input.TEXT, Input.SAMPLES}),
        ("evaluate.sets.wiki.sources", {Input.TEXT}),
        ("evaluate.batches", set()),
        ("seed", {Input.SAMPLES}),
        ("train.optimizer.lr", set()),
        ("parallel", set()),
        ("workload", {Input.WEIGHTS, Input.FOLDER, Input.TEXT}),
        ("unknown.key", set()),
    ],
)
def test_a_key_changes_what_its_component_says(key: str, changes: set[Input]) -> None:
    assert changed_by(JobSpec, key) == changes


@pytest.mark.parametrize("component", [JobSpec, WorkloadSpec, DataSpec, EvaluateSpec])
def test_a_declared_key_exists(component: Any) -> None:
    assert {key for keys in component.CHANGES.values() for key in keys} <= component.model_fields.keys()


def test_every_key_of_the_data_is_known_to_change_inputs_or_not() -> None:
    """A new key of the data must be declared, or added here: most of them decide tokens."""
    changes_none = {
        "encode_with",
        "sequence_length",
        "max_rejected",
        "mixture",
        "packing",
        "cache",
        "node_cache",
    }
    declared = {key for keys in DataSpec.CHANGES.values() for key in keys}
    assert declared | changes_none == DataSpec.model_fields.keys()
    assert not declared & changes_none
