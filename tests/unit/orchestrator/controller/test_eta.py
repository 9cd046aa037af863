"""How long the rest of a run takes."""

from __future__ import annotations

import pytest

from cluster.workers.worker_context import Work
from orchestrator.controller.eta import evaluation_seconds
from orchestrator.evaluate.config import EvaluateSpec


@pytest.mark.parametrize(
    ("evaluate", "latest", "done", "seconds"),
    [
        ({"every": 10}, 60.0, None, 3 * 60.0),
        ({"every": 10}, None, None, 0.0),
        ({"every": 10}, 60.0, 0, 3 * 60.0),
        ({"every": 10}, 60.0, 10, 2 * 60.0 + 15.0),
        ({"every": 10}, None, 10, 2 * 20.0 + 15.0),
        ({"every": 10, "where": "beside"}, 60.0, None, 0.0),
    ],
)
def test_the_time_left_has_the_evaluations_that_are_to_come(
    evaluate: dict[str, object], latest: float | None, done: int | None, seconds: float
) -> None:
    """From step 9 to step 30: after 10, 20 and 30. A quarter of the first is done in five seconds."""
    work = None if done is None else Work("evaluation", "batches", done=done, of=40, seconds=5.0)
    spec = EvaluateSpec.model_validate(evaluate)
    found = evaluation_seconds(spec, 9, until=30, last_step=30, latest=latest, work=work)
    assert found == pytest.approx(seconds)
    assert evaluation_seconds(None, 9, until=30, last_step=30, latest=latest, work=None) == 0.0


@pytest.mark.parametrize("every", [1, 4, 7, 50])
@pytest.mark.parametrize("at", [[], [3, 8, 8, 20]])
@pytest.mark.parametrize("at_end", [False, True])
def test_evaluations_are_counted_as_they_are_due(every: int, at: list[int], at_end: bool) -> None:
    spec = EvaluateSpec(every=every, at=at, at_end=at_end)
    last = 20
    for after in range(last + 1):
        for until in range(after, last + 1):
            due = sum(spec.is_due(step, last) for step in range(after + 1, until + 1))
            assert spec.due_between(after, until, last) == due
