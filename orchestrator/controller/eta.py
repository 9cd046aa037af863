"""The seconds until a run reaches a step, with the evaluations before it."""

from __future__ import annotations

from cluster.workers.worker_context import Work
from orchestrator.controller.state import State
from orchestrator.evaluate.config import EvaluateSpec


def eta_seconds(state: State, until: int, step_seconds: float, evaluations: float) -> float | None:
    """Return the seconds left until step `until`: the remaining steps times the median time of recent steps, plus the
    seconds of `evaluations` until then. None while the run does not train, or before its first step.
    """
    seconds = (until - state.step) * step_seconds
    return seconds + evaluations if seconds and state.phase == "train" else None


def evaluation_seconds(
    evaluate: EvaluateSpec | None,
    step: int,
    until: int,
    last_step: int,
    latest: float | None,
    work: Work | None,
) -> float:
    """Return the seconds that ranks will evaluate between two steps, after `step` and up to `until`.

    Args:
        evaluate: the job's evaluation.
        step: the last step that was reported.
        until: the last step to train to.
        last_step: the last step of the job.
        latest: seconds of the latest evaluation, None before the first.
        work: the evaluation in progress, None without one.
    """
    if evaluate is None or evaluate.where != "gang":
        return 0.0
    count = evaluate.due_between(step, until, last_step)
    if work is None or not work.done:
        return count * (latest or 0.0)
    full_seconds = latest or work.seconds + work.seconds_left
    return work.seconds_left + max(count - 1, 0) * full_seconds
