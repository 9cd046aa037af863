"""Which commit is evaluated beside the run: the part of `decide` that is about a worker which training does not use.

Commits are evaluated one at a time, in order. Training comes first: an evaluation begins only where there is room for
one worker more than training could use, and ends, to be begun again, as soon as training could use its worker.
"""

from __future__ import annotations

import dataclasses

from orchestrator.controller.state import Action, Observation, Policy, State

RETRY = 10.0
"""Seconds after a failed try before the next, and twice as many after each further one."""
LONGEST_PAUSE = 600.0
"""Most seconds between two tries."""
TRIES = 3
"""Failed tries after which a run that is otherwise done fails."""
BEGINS = frozenset({"train", "evaluate"})
"""Phases in which an evaluation may begin."""
GOES_ON = BEGINS | {"start", "stop", "wait"}
"""Phases in which one that was begun may go on."""


def with_evaluation(policy: Policy, state: State, seen: Observation, action: Action) -> State:
    """The state, with what is evaluated now; `state` and `action` are what was decided of training."""
    first = seen.unevaluated[0] if seen.unevaluated else None
    if first is None or state.phase not in GOES_ON or state.outcome is not None:
        return _with(state, None, failures=0 if first is None else state.evaluation_failures)
    failures, after = state.evaluation_failures, state.evaluation_after
    evaluating = state.evaluating
    if seen.evaluation_failed:
        evaluating, failures = None, failures + 1
        after = seen.now + min(RETRY * 2 ** (failures - 1), LONGEST_PAUSE)
    elif evaluating != first:
        failures = 0 if evaluating is not None else failures
        after, evaluating = (0.0, None) if evaluating is not None else (after, None)
    waits = state.evaluation_waits if state.phase not in BEGINS else ""
    if _left(policy, state, seen, action) < 1:
        evaluating = None
        if state.phase in BEGINS:
            waits = f"room for one more worker of {policy.spec.resources.per_worker.bundle}"
    elif state.phase in BEGINS and seen.now >= after:
        evaluating = evaluating if evaluating is not None or state.roomy else first
    since = (state.evaluation_since or seen.now) if waits else 0.0
    return _with(state, evaluating, waits, since, failures, after)


def _left(policy: Policy, state: State, seen: Observation, action: Action) -> int:
    """How many workers there are beside those that training has, or could use."""
    workers, layout = policy.spec.resources.workers, state.layout
    if state.phase == "evaluate":
        return seen.capacity
    between = state.phase in ("stop", "wait") or bool(state.resizing)
    if layout is None or (layout.tp > 1 and (between or action.do == "start")):
        return 0  # a group of workers that must share a node may find none with room beside an evaluation
    training = max(layout.world, action.workers, workers.max if between else 0)
    return seen.room - training - policy.spec.resources.spares


def _with(
    state: State,
    evaluating: int | None,
    waits: str = "",
    since: float = 0.0,
    failures: int = 0,
    after: float = 0.0,
) -> State:
    return dataclasses.replace(
        state,
        evaluating=evaluating,
        evaluation_waits=waits,
        evaluation_since=since,
        evaluation_failures=failures,
        evaluation_after=after,
    )
