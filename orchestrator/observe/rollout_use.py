"""How long how many rollout workers ran, from the events of a run. Pure.

Rollout workers come and go within a phase. So events list each change of their number with its time, see `EventFields`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.observe.goodput import BETWEEN_COMMANDS, Phase
from orchestrator.observe.totals import Row, micros, never_back


@dataclass(frozen=True)
class RolloutUse:
    """A period with the same rollout workers.

    Attributes:
        seconds: its length.
        workers: how many ran.
        usd_per_hour: the price of the machines that had rollout workers and no ranks; None if it is unknown.
    """

    seconds: float
    workers: int
    usd_per_hour: float | None = None


def rollout_use(events: Sequence[Row], phases: Sequence[Phase]) -> list[RolloutUse]:
    """Return the periods of a timeline, each with its rollout workers.

    Args:
        events: rows of events.jsonl.
        phases: their timeline. Rollout workers end with their controller, so none ran while no controller did.
    """
    worker_changes = [change for event in events for change in event.get("rollout_workers") or ()]
    if not worker_changes or not phases:
        return []
    times = never_back([micros(change["time"]) for change in worker_changes])
    changes = [
        (at, change["workers"], change["usd_per_hour"])
        for at, change in zip(times, worker_changes, strict=True)
    ]
    changes += [(phase.start, 0, None) for phase in phases if phase.name in ("down", BETWEEN_COMMANDS)]
    changes.sort(key=lambda change: change[0])
    begin, end = phases[0].start, phases[-1].end
    bounds = [*(min(max(at, begin), end) for at, _, _ in changes), end]
    return [
        RolloutUse((bounds[number + 1] - bounds[number]) / 1e6, workers, usd)
        for number, (_, workers, usd) in enumerate(changes)
    ]


def rollout_worker_seconds(events: Sequence[Row], phases: Sequence[Phase]) -> float:
    """Return seconds times rollout workers."""
    return sum(use.seconds * use.workers for use in rollout_use(events, phases))
