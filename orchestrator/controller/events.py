"""The events of a run: what each event stores, and facts that follow from all of them.

`EventHistory` updates these facts with every event, so that no caller has to read all events again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.gang import workers_text
from orchestrator.checkpoint.identity import CONTINUED
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED
from orchestrator.controller.config import LimitSpec
from orchestrator.controller.health import Failure
from orchestrator.controller.hints import hint_for
from orchestrator.controller.state import State
from orchestrator.data.samples.skips import Skip, on_record
from orchestrator.observe.goodput import BETWEEN_COMMANDS, timeline
from orchestrator.observe.notifier import Notifier
from orchestrator.observe.summary import cost
from orchestrator.observe.totals import is_number, micros, tally
from orchestrator.parallel.layout import Layout
from orchestrator.planner import prices
from orchestrator.storage.row_line import Row
from orchestrator.storage.row_log import missing_numbers
from orchestrator.storage.row_types import EventFields
from orchestrator.train.config import TrainSpec

COUNT_EVERY = 10.0
"""Seconds between two updates of what the job has spent."""


def start_event(
    train: TrainSpec,
    layout: Layout,
    layout_before: Layout | None,
    commit: CommitManifest | None,
    refused: int = 0,
) -> tuple[str, EventFields]:
    """Return the reason and the fields of the event with which a gang starts.

    Args:
        train: how the job trains.
        layout: the layout of the gang.
        layout_before: the layout of the previous gang, None for the first.
        commit: the commit that the gang starts from, None to start from the beginning.
        refused: number of layouts that were rejected because their traces do not fit in memory.
    """
    reason = f"{workers_text(layout.world)} in {train.dtype}"
    fields: EventFields = {
        "layout": layout.to_json(),
        "layout_after": str(layout),
        "layout_before": str(layout_before) if layout_before else None,
        "precision": train.dtype,
    }
    if commit is None:
        reason += " from the beginning"
    else:
        reason += f" from the commit at step {commit.step}"
        if continued := commit.meta.get(CONTINUED):
            fields["continued"] = continued
            if continued["step"] == commit.step:
                reason += f" of {continued['run']}"
    if refused:
        layouts = f"{refused} layouts do" if refused > 1 else f"{refused} layout does"
        reason += f"; {layouts} not fit by the trace, see plan.json"
    return reason, fields


class EventHistory:
    """All events of a run in order, and facts that follow from them."""

    def __init__(self, events: Sequence[Row], notifier: Notifier | None = None) -> None:
        """Start from `events`. The `notifier` hears of each event that is recorded after them."""
        self.notifier = notifier
        self.events: list[Row] = []
        """All events, the newest last."""
        self.number = 0
        """The number of the newest event, counted from 1."""
        self.attempts = 0
        """The number of attempts so far."""
        self.attempt_start = 0
        """The index in `events` of the last start of an attempt, 0 before the first."""
        self.length: int | None = None
        """The steps of the run since it was last extended, None if it never was."""

        self.data = ""
        """The URI of the run's prepared data, empty before it has any."""
        self.sets: dict[str, str] = {}
        """The URI of the prepared data of each held-out set with its own text, as first read."""
        self.base: dict[str, Any] = {}
        """The pretrained weights that the run began with; empty without any, or before the run begins."""
        self.teacher: dict[str, Any] = {}
        """The weights of the teacher that the run learns from; empty without one, or before the run begins."""
        self.skips: tuple[Skip, ...] = ()
        """Samples that are left out after an instability."""
        self.doubtful_after: int | None = None
        """The step after which commits may be wrong; None once an attempt has started from an earlier one."""
        self.wrong_nodes: frozenset[str] = frozenset()
        """Nodes that have computed wrongly since the last end of the run."""

        self.restart_seconds = 0.0
        """Seconds from the end of an attempt to the first step of the next, as last measured; 0 before that."""
        self._stopped_at: float | None = None
        """When the last attempt ended, unix seconds; None once the next one has made a step."""

        self.missing: list[list[int]] = []
        """Steps whose rows are lost: the first and the last step of each gap."""
        self.missing_reported: list[list[int]] = []
        """Numbers of lost events that an event reports: the first and the last of each gap."""
        self.ceilings: set[tuple[str, float]] = set()
        """Ceilings, by key and limit, that an event already reports as near."""
        for event in events:
            self.add(event)

    def add(self, event: Row) -> None:
        """Update everything with one more event."""
        self.events.append(event)
        self.number = max(self.number, event.get("number") or self.number + 1)
        self.attempts = max(self.attempts, event["attempt"])
        self.data = self.data or event.get("data") or ""
        self.sets = {**(event.get("sets") or {}), **self.sets}
        self.base = self.base or event.get("base") or {}
        self.teacher = self.teacher or event.get("teacher") or {}
        self.skips = on_record([event], self.skips)
        if event.get("wrong_nodes"):
            self.wrong_nodes |= frozenset(event["wrong_nodes"])
            self.doubtful_after = event["cause"]["step"]
        elif event["phase"] in ENDED:  # somebody starts the run again, who has looked at its machines
            self.wrong_nodes = frozenset()
        if event.get("missing_rows") is not None:
            self.missing = event["missing_rows"]
        self.missing_reported = event.get("missing_events") or self.missing_reported
        if extended := event.get("extended"):
            self.length = extended["after"]
        if ceiling := event.get("ceiling"):
            self.ceilings.add((ceiling["key"], ceiling["limit"]))
        if event["phase"] == "start" and not event.get("stopping"):
            self.attempt_start = len(self.events) - 1
            self.doubtful_after = None
        elif event["phase"] == "stop":
            self._stopped_at = event["time"]
        elif event["phase"] == "train" and self._stopped_at is not None:
            # Only the first event of the phase counts; later ones report saves.
            self.restart_seconds = max(event["time"] - self._stopped_at, 0.0)
            self._stopped_at = None

    def record(self, attempt: int, step: int, phase: str, reason: str, more: EventFields) -> Row:
        """Add an event that happens now.

        Args:
            attempt: the attempt that it belongs to.
            step: the step that it belongs to.
            phase: the phase that starts or continues.
            reason: a line for people.
            more: further fields, which replace those that every event has.

        Returns:
            The row to store.
        """
        row: Row = {
            "time": wall(),
            "attempt": attempt,
            "phase": phase,
            "reason": reason,
            "step": step,
            "number": self.number + 1,
            "seconds_lost": None,
            "layout_before": None,
            "layout_after": None,
            "first_fault": None,
            **more,
        }
        self.add(row)
        if self.notifier is not None:
            self.notifier.event(row)
        return row

    def untold(self) -> list[list[int]]:
        """Return the numbers of lost events, the first and the last of each gap; empty if an event reports them."""
        lost = missing_numbers(self.events)
        return lost if lost != self.missing_reported else []

    def failures(self, window: float, date: float, now: float, commit: int = 0) -> tuple[Failure, ...]:
        """Return the recent faults that count against `limits.restarts`, oldest first.

        Faults before the end of an earlier command do not count. A death of the controller counts only until the next
        commit.

        Args:
            window: seconds before `date` that count as recent.
            date: the present unix time.
            now: the present monotonic time, in seconds.
            commit: the step of the newest commit.
        """
        failures = []
        for event in reversed(self.events):
            if event["phase"] in ENDED:
                break
            ago = date - event["time"]
            if ago > window:
                continue
            if event.get("first_fault"):
                failures.append(Failure.on_record(event, ago, now))
            elif event.get("controller_died") == commit:
                reason = event["reason"].removeprefix("resumed: ")
                failures.append(Failure(now - max(ago, 0.0), event["step"], where="", why=reason))
        return tuple(reversed(failures))

    @property
    def requested_stop(self) -> str:
        """Why the run was asked to stop since the last command began; empty if it was not."""
        for event in reversed(self.events):
            is_new_command = "last_seen" in event and event.get("controller_died") is None
            if is_new_command or event["phase"] in ENDED:
                break
            if event.get("stopping"):
                return str(event["stopping"])
        return ""

    @property
    def died_last(self) -> bool:
        """Whether the newest event is the death of a controller."""
        return bool(self.events) and self.events[-1].get("controller_died") is not None


def fault_event(
    before: State, after: State, fault: Failure, lost: Sequence[Row], printed: Sequence[str]
) -> tuple[str, EventFields]:
    """Return the reason and the fields of the event that ends an attempt after a fault.

    Args:
        before: the state in which the fault was seen.
        after: the state that was decided on.
        fault: the fault.
        lost: the rows of the steps that must be repeated.
        printed: the last lines that the rank at fault printed.
    """
    fields: EventFields = {
        **fault.to_json(),
        "explained": hint_for(fault.cause),
        "output": list(printed),
        "seen": wall() - (time.monotonic() - fault.time),
        "still_seconds": time.monotonic() - before.moved if before.phase == "train" else 0.0,
        "lost_steps": len(lost),
        "seconds_lost": sum(row["step_seconds"] for row in lost),
    }
    reason = "a fault ended the attempt"
    for skip in after.skips[len(before.skips) :]:
        reason += f"; {skip.count} samples from position {skip.start} are left out"
        fields["skipped"] = skip.to_json()
    return reason, fields


def market(limits: LimitSpec, machines: Sequence[Mapping[str, str]], began: float) -> tuple[EventFields, str]:
    """Return the fields that describe the machines of a gang and their price, and a problem with the price table.

    The table at limits.prices was valid when the run began. If it no longer is, training continues without prices.

    Args:
        limits: the limits of the job.
        machines: the type, market and zone of each machine.
        began: unix time at which training on them began.

    Returns:
        The fields, with USD per hour where it is known, in all and by zone and market; and the problem as a clause for
        the event's reason, empty without one.
    """
    problem = ""
    try:
        table = prices.load(limits.prices)
    except InputError as error:
        table = {}
        problem = f"; the price of the machines is unknown: {error}"
    fields: EventFields = {
        "machines": list(machines),
        "zones": prices.by_zone(machines, table),
        "usd_per_hour": prices.rate(machines, table),
        "time": began,
    }
    return fields, problem


def memory_seen(status: Mapping[str, Any]) -> str:
    """Return how full the memory of a dead controller's node was, from its last status.json.

    Ray's memory monitor may kill the controller instead of a rank, so this hints at the cause of its death.
    """
    percent = status.get("memory_percent")
    return (
        f"with {percent:.0f} % of its node's memory in use" if is_number(percent) else "for an unknown reason"
    )


class Spending:
    """Counts the hours and the USD of a job, at intervals.

    Attributes:
        spent: hours and USD at the last count.
    """

    def __init__(self, limits: LimitSpec, history: EventHistory) -> None:
        self._limits = limits
        self._history = history
        self._counted_at = 0.0
        """Unix time of the last count."""
        # The events of ended attempts no longer change, so their sum is kept.
        self._closed_spending = (0.0, 0.0)
        """Hours and USD of the events before index `_closed_events`."""
        self._closed_events = 0
        self._closed_until = 0
        """The latest time of those events, in microseconds."""
        self.spent = (0.0, 0.0)

    def count(self, recent: Sequence[Row], now: float) -> tuple[float, float]:
        """Return hours and USD so far, at most some seconds old. A clock that is set back counts no time twice.

        Args:
            recent: the latest rows of metrics.jsonl.
            now: the present unix time.
        """
        limits, history = self._limits, self._history
        interval = min(COUNT_EVERY, 36.0 * (limits.hours or 1.0))  # at most a hundredth of the ceiling
        if 0 <= now - self._counted_at <= interval:
            return self.spent
        if history.attempt_start > self._closed_events:
            closed = history.events[self._closed_events : history.attempt_start + 1]
            hours, usd = self._spent_in(closed, recent, None)
            self._closed_spending = (self._closed_spending[0] + hours, self._closed_spending[1] + usd)
            self._closed_events = history.attempt_start
            self._closed_until = max([self._closed_until, *(micros(event["time"]) for event in closed[:-1])])
        hours, usd = self._spent_in(history.events[self._closed_events :], recent, now)
        self.spent = (self._closed_spending[0] + hours, self._closed_spending[1] + usd)
        self._counted_at = now
        return self.spent

    def near(self) -> list[prices.Ceiling]:
        """Return each ceiling of the job that is near and that no event reports yet."""
        limits = self._limits
        if not (limits.hours or limits.cost_usd):
            return []
        hours, usd = self.spent
        spent = {"hours": hours, "cost_usd": usd}
        ceilings = {"hours": limits.hours, "cost_usd": limits.cost_usd}
        return prices.nearly_reached(ceilings, spent, self._history.ceilings)

    def _spent_in(
        self, events: Sequence[Row], recent: Sequence[Row], now: float | None
    ) -> tuple[float, float]:
        """Return the hours and USD of these events: up to `now`, or up to the last event if `now` is None."""
        rows = tally(events, reversed(recent))
        phases = timeline(events, rows, now, self._closed_until)
        if now is None:
            phases = phases[:-1]
        hours = (
            sum(
                phase.seconds
                for phase in phases
                if phase.name not in ("launch", "down", BETWEEN_COMMANDS, "queue")
            )
            / 3600
        )
        return hours, cost(phases, rows, events, self._limits.usd_per_worker_hour) or 0.0
