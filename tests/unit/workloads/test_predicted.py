"""What planning takes an objective to predict is what its samples have."""

from __future__ import annotations

from typing import Any

import pytest
from traced_cases import vocabulary_of

from orchestrator.planner.trace.sample_batch import SyntheticCorpus, predicted_share
from workloads import objectives
from workloads.load import load
from workloads.predicted import ALL, RATES, Predicted, predicted

LENGTH = 128


def share_of(objective: str, **options: Any) -> float:
    """The share of tokens that the samples of an objective predict."""
    workload = load("bert-tiny", objective, vocabulary_of(400), options=options, sequence_length=LENGTH)
    batch = workload.objective.collate(SyntheticCorpus(workload, LENGTH), range(64), 0)
    return predicted_share(batch)


OTHERS = ("entity_masking", "replaced_token_detection")
"""Whose samples need a lexicon, or name what is predicted otherwise: their rates are compared below."""


@pytest.mark.parametrize("objective", [*(name for name in RATES if name not in OTHERS), "permuted_lm"])
def test_an_encoder_predicts_the_share_that_is_planned_for(objective: str) -> None:
    planned = predicted(objective, {}, LENGTH).share
    assert share_of(objective) == pytest.approx(planned, rel=0.12)


@pytest.mark.parametrize(("objective", "option"), [("masked_lm", {"rate": 0.4}), ("permuted_lm", {"k": 3})])
def test_options_of_the_job_count(objective: str, option: dict[str, Any]) -> None:
    planned = predicted(objective, option, LENGTH).share
    assert planned > 1.5 * predicted(objective, {}, LENGTH).share
    assert share_of(objective, **option) == pytest.approx(planned, rel=0.12)


def test_every_rate_is_that_of_its_objective() -> None:
    for name in objectives.NAMES:
        fields = objectives._CLASSES[name].__dataclass_fields__
        if "encoder" in objectives.architectures(name) and "rate" in fields:
            assert RATES[name] == fields["rate"].default, name
    assert set(RATES) <= set(objectives.NAMES)


@pytest.mark.parametrize("length", [16, 128, 512, 1024])
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("span_corruption", {}),
        ("span_corruption", {"rate": 0.5, "mean_span": 10.0}),
        ("gap_sentences", {}),
        ("denoising", {}),
        ("mass", {}),
        ("seq2seq", {}),
        ("seq2seq", {"target": 9}),
    ],
)
def test_targets_have_the_planned_length(objective: str, options: dict[str, Any], length: int) -> None:
    built: Any = objectives.build(
        objective, vocabulary=vocabulary_of(400), sequence_length=length, seed=0, **options
    )
    assert (predicted(objective, options, length).target_length or length) == built.target_length


def test_what_is_not_known_is_all() -> None:
    assert predicted("causal_lm", {}, LENGTH) == predicted("own:Objective", {"rate": 0.1}, LENGTH) == ALL
    assert Predicted(1.0, 0) == ALL
