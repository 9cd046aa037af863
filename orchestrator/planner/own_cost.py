"""The user's own planner cost: seconds to add to a layout's prediction, or the reason to refuse it.

It imports neither torch nor Ray, except through the user's module.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.parallel.config import ParallelChoice, cost_of
from orchestrator.parallel.layout import Layout
from orchestrator.planner.simulation.step import StepTime
from workloads.errors import WorkloadError
from workloads.own.object_reference import load

WHERE = "parallel.cost"
MAX_CHECKED_WORKERS = 64
"""Numbers of workers for which the user's function is checked before a run."""


class Cost(Protocol):
    """The user's function `parallel.cost: module:name`. It must be pure; its options are further arguments."""

    def __call__(self, layout: Layout, step: StepTime, memory: float) -> float | str:
        """Return the seconds to add to the predicted step, 0 or more, or a reason, in one line, to refuse the layout.

        It is called for layouts that are legal and fit.

        Args:
            layout: the layout.
            step: the predicted seconds by part.
            memory: bytes of the rank that needs most.
        """


@dataclass(frozen=True)
class Refusal:
    """Why the user's cost refuses a layout."""

    reason: str


def with_own_cost(
    reference: ObjectReference | None, layout: Layout, step: StepTime, memory: float
) -> StepTime | Refusal:
    """Return the step with the seconds that the user's cost adds, or its refusal.

    Raises:
        InputError: if the function fails or returns anything else.

    Args:
        reference: the user's cost; None without one.
        layout: the layout.
        step: its predicted step.
        memory: bytes of the rank that needs most.
    """
    if reference is None:
        return step
    result = _cost(reference, layout, step, memory)
    if isinstance(result, str) and result.strip():
        return Refusal(f"{' '.join(result.split())} (by {reference})")
    if type(result) not in (int, float) or not 0.0 <= result < math.inf:
        problem = (
            f"{reference} returns {str(result)[:40]!r} for {layout}, neither seconds from 0 on nor a reason"
        )
        raise InputError(problem, WHERE, "see orchestrator.planner.own_cost.Cost")
    return dataclasses.replace(step, own=float(result))


def check_own_cost(parallel: ParallelChoice, workers: int) -> None:
    """Raise InputError if the job's own cost does not exist, fails, or returns two results for the same arguments.

    Args:
        parallel: how the job divides the model, which may name a cost.
        workers: the most workers of the job.
    """
    if (reference := cost_of(parallel)) is None:
        return
    step = StepTime(1.0, 0.1, 0.0, 0.1)
    for width in range(1, min(workers, MAX_CHECKED_WORKERS) + 1):
        first, second = (with_own_cost(reference, Layout(dp=width), step, 2.0**30) for _ in range(2))
        if first != second:
            problem = f"{reference} returns different results for the same arguments, so a restart could plan otherwise"
            raise InputError(problem, WHERE, "let it depend on its arguments alone")


def _cost(reference: ObjectReference, layout: Layout, step: StepTime, memory: float) -> Any:
    try:
        function: Cost = load(reference.use)
        return function(layout, step, memory, **reference.options)
    except WorkloadError as error:
        raise InputError(str(error), WHERE) from None
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{reference} failed on {layout} ({reason})", WHERE, "fix it") from None
