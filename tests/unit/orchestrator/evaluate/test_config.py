"""What a job may say of evaluations, and when one is due."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.evaluate.config import EvaluateSpec

SOURCES = {"sources": [{"uri": "b.txt"}]}


def with_(evaluate: dict[str, Any] | None, validation: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    document = job("a.txt") | ({} if evaluate is None else {"evaluate": evaluate}) | more
    document["data"] |= {} if validation is None else {"validation": validation}
    return document


SHARE = {"share": 0.1}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (with_({}, None), "evaluate has no text; hold some out"),
        (with_({"tasks": "quiz.yaml"}, None), "evaluate.tasks"),
        (
            with_({"tasks": ["quiz.yaml"], "where": "beside"}, None),
            "evaluate.where beside needs held-out text",
        ),
        (with_(None, {}), "either share, as in 0.01, or separate sources"),
        (with_(None, SHARE | SOURCES), "either share, as in 0.01, or separate sources"),
        (with_({"sets": {"validation": SOURCES}}, SHARE), "give the one in evaluate.sets another name"),
        (with_({"sets": {"a.b": SOURCES}}, None), "a.b"),
        (
            with_({"metrics": ["rouge"]}, SHARE),
            "'loss', 'perplexity', 'bits_per_byte', 'accuracy', 'reward_margin'",
        ),
        (with_(None, SHARE, stop_when={}), "stop_when.metric validation.loss is not measured; add evaluate"),
        (with_({}, SHARE, stop_when={"metric": "wiki.loss"}), "name one of validation.loss, "),
        (
            with_({"metrics": ["loss"]}, SHARE, checkpoint={"keep_best": "validation.accuracy"}),
            "checkpoint.keep_best validation.accuracy is not measured; add it to evaluate.metrics, as in [loss, acc",
        ),
        (
            with_(
                {}, SHARE, tune={"space": {"seed": {"choice": [1, 2]}}, "trials": 2, "metric": "code.loss"}
            ),
            "tune.metric code.loss is not measured",
        ),
        (with_({"where": "beside"}, SHARE, stop_when={}), "stop_when decides by a value at its step"),
        (
            with_({"where": "beside"}, SHARE, tune={"space": {"seed": {"choice": [1, 2]}}, "trials": 2}),
            "set evaluate.where to gang",
        ),
        (
            with_(
                {"metrics": ["bits_per_byte"]},
                SHARE,
                workload={"model": "bert-tiny", "objective": "masked_lm"},
            ),
            "bits_per_byte is not a metric of masked_lm, which has loss, perplexity, accuracy",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(document: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(document)
    assert told in str(caught.value)


def test_what_is_evaluated_is_no_part_of_the_identity() -> None:
    """But for the share, whose documents training lacks."""
    plain = parse(with_(None, None)).identity()
    assert parse(with_({"sets": {"wiki": SOURCES}}, SOURCES)).identity() == plain
    assert parse(with_({}, SHARE)).identity() != plain
    assert parse(with_({}, SHARE)).identity() == parse(with_(None, SHARE)).identity()


def test_when_an_evaluation_is_due() -> None:
    def due(**given: Any) -> list[int]:
        spec = EvaluateSpec(every=4, **given)
        return [step for step in range(11) if spec.is_due(step, 10)]

    assert due() == [4, 8, 10]
    assert due(at_start=True, at_end=False) == [0, 4, 8]
    assert not EvaluateSpec(every=5, at_end=False).is_due(10, 10)


def test_further_steps_are_due_and_no_regular_ones() -> None:
    spec = EvaluateSpec(every=10, at=[4, 12], at_end=False)
    assert [step for step in range(13) if spec.is_due(step, 12)] == [4, 10, 12]
    assert [step for step in range(13) if spec.is_regular(step, 12)] == [10]
