"""At which steps a run commits, and whether the best of its evaluations can be one of them."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from orchestrator.config.commit_steps import check_best
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.launch.job_checks import JobChecks


def evaluated(evaluations: int, commits: int, steps: int = 40, **parts: dict[str, Any]) -> dict[str, Any]:
    document = job("none.txt", steps=steps)
    document["checkpoint"] |= {"every": commits, "keep_best": "held.loss"}
    document["evaluate"] = {"every": evaluations, "sets": {"held": {"sources": [{"uri": "none"}]}}}
    for name, part in parts.items():
        document[name] |= part
    return document


@pytest.mark.parametrize(
    ("evaluations", "commits", "parts"),
    [
        (10, 64, {}),
        (10, 7, {"train": {"steps": 70}}),
        (10, 100, {"train": {"optimizer": {"schedule": "wsd", "decay": 5}}}),
    ],
)
def test_a_best_commit_that_would_be_the_last_is_refused(
    evaluations: int, commits: int, parts: dict[str, Any]
) -> None:
    spec = parse(evaluated(evaluations, commits, **parts))
    with pytest.raises(InputError) as found:
        check_best(spec.checkpoint, spec.train, spec.evaluate)
    assert str(found.value) == (
        "checkpoint.keep_best: no evaluation before the last falls on a checkpoint (evaluations every 10 steps, "
        f"checkpoints every {commits}), so the best would always be the last; set checkpoint.every to 10"
    )
    with pytest.raises(InputError) as all_found:  # beside the text that is not there
        JobChecks(spec).without_model()
    assert str(found.value) in map(str, all_found.value.each())


@pytest.mark.parametrize(
    ("evaluations", "commits", "parts"),
    [
        (10, 5, {}),
        (5, 10, {}),
        (10, 15, {}),
        (40, 100, {}),  # there is but one
        (10, 64, {"checkpoint": {"keep_best": True}}),
        (10, 64, {"evaluate": {"where": "beside"}}),
        (10, 7, {"evaluate": {"at": [21]}}),
        (10, 100, {"train": {"optimizer": {"schedule": "wsd", "decay": 10}}}),
    ],
)
def test_one_that_may_be_another_is_not(evaluations: int, commits: int, parts: dict[str, Any]) -> None:
    spec = parse(evaluated(evaluations, commits, **parts))
    check_best(spec.checkpoint, spec.train, spec.evaluate)
