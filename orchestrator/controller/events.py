"""The events of a run, and what is asked of them again and again: known without reading all of them each time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.workers.clock import wall
from orchestrator.checkpoint.identity import CONTINUED
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError
from orchestrator.config.limits import LimitSpec
from orchestrator.config.outcome import ENDED
from orchestrator.config.spec import JobSpec
from orchestrator.controller.health import Failure
from orchestrator.controller.hints import hint_for
from orchestrator.controller.state import State
from orchestrator.data.samples.skips import Skip, on_record
from orchestrator.observe.goodput import timeline
from orchestrator.observe.notifier import Notifier
from orchestrator.observe.summary import cost
from orchestrator.observe.totals import is_number, micros, tally
from orchestrator.parallel.layout import Layout
from orchestrator.planner import prices
from orchestrator.storage.row_line import Row
from orchestrator.storage.row_log import missing_numbers
from orchestrator.storage.row_types import EventFields

COUNT_EVERY = 10.0
"""Seconds between countings of what the job has spent."""


def start_event(
    spec: JobSpec,
    layout: Layout,
    layout_before: Layout | None,
    commit: CommitManifest | None,
    refused: int = 0,
) -> tuple[str, EventFields]:
    """The reason and the fields of the event with which a gang of that layout starts, from a commit or anew; so many
    layouts were `refused` since their traces do not fit."""
    gang = f"{layout.world} workers in {spec.train.dtype}"
    old = str(layout_before) if layout_before else None
    fields: EventFields = {"layout": layout.to_json(), "layout_after": str(layout), "layout_before": old}
    fields["precision"] = spec.train.dtype
    layouts = f"{refused} layout{'s do' if refused > 1 else ' does'}"
    why = f"; {layouts} not fit by the trace, see plan.json" if refused else ""
    if commit is None:
        return f"{gang} from the beginning{why}", fields
    told = commit.meta.get(CONTINUED)
    place = f" of {told['run']}" if told and told["step"] == commit.step else ""
    fields |= {"continued": told} if told else {}
    return f"{gang} from the commit at step {commit.step}{place}{why}", fields


class EventHistory:
    """Events in order, the newest last."""

    def __init__(self, events: Sequence[Row], notifier: Notifier | None = None) -> None:
        """`notifier` is told of what is recorded from now on."""
        self.notifier = notifier
        self.events: list[Row] = []
        self.attempts = 0
        """Attempts that there have been."""
        self.data = ""
        """The prepared data that the run began with, empty before it has any."""
        self.sets: dict[str, str] = {}
        """The prepared data of each set of held-out text of its own, as first read."""
        self.base: dict[str, Any] = {}
        """The weights that the run began with, empty if it began anew or has not begun."""
        self.restart_seconds = 0.0
        """From the end of an attempt to the first step of the next, as last measured; 0 if there was none."""
        self.skips: tuple[Skip, ...] = ()
        """Samples that are left out."""
        self.missing: list[list[int]] = []
        """Steps whose rows are lost: the first and the last of each gap."""
        self.number = 0
        """The number of the newest event, counted from 1."""
        self.missing_told: list[list[int]] = []
        """Numbers of lost events that another event tells of: the first and the last of each gap."""
        self.ceilings: set[tuple[str, float]] = set()
        """Ceilings, by key and limit, that are recorded to be near."""
        self.length: int | None = None
        """Steps of the run since it was last extended, None before."""
        self.begun = 0
        """The number of the event with which the last attempt began."""
        self._stopped: float | None = None
        for event in events:
            self.add(event)

    def add(self, event: Row) -> None:
        """What happened."""
        self.events.append(event)
        self.attempts = max(self.attempts, event["attempt"])
        self.data = self.data or event.get("data") or ""
        self.sets = {**(event.get("sets") or {}), **self.sets}
        self.base = self.base or event.get("base") or {}
        self.skips = on_record([event], self.skips)
        if event.get("missing_rows") is not None:
            self.missing = event["missing_rows"]
        self.number = max(self.number, event.get("number") or self.number + 1)
        self.missing_told = event.get("missing_events") or self.missing_told
        if extended := event.get("extended"):
            self.length = extended["after"]
        if ceiling := event.get("ceiling"):
            self.ceilings.add((ceiling["key"], ceiling["limit"]))
        if event["phase"] == "start" and not event.get("stopping"):
            self.begun = len(self.events) - 1
        elif event["phase"] == "stop":
            self._stopped = event["time"]
        elif event["phase"] == "train" and self._stopped is not None:  # later ones tell of saves
            self.restart_seconds, self._stopped = max(event["time"] - self._stopped, 0.0), None

    def record(self, attempt: int, step: int, phase: str, reason: str, more: EventFields) -> Row:
        """Add what happens now; returns its row."""
        row: Row = {"time": wall(), "attempt": attempt, "phase": phase, "reason": reason, "step": step}
        row |= {"number": self.number + 1, "seconds_lost": None, "layout_before": None, "layout_after": None}
        row |= {"first_fault": None, **more}
        self.add(row)
        if self.notifier is not None:
            self.notifier.event(row)
        return row

    def untold(self) -> list[list[int]]:
        """Numbers of lost events, the first and the last of each gap; empty if another event tells of them."""
        lost = missing_numbers(self.events)
        return lost if lost != self.missing_told else []

    def failures(self, window: float, date: float, now: float, commit: int = 0) -> tuple[Failure, ...]:
        """The faults of the last `window` seconds, at the unix time `date` and the monotonic time `now`. What an
        earlier command ended with does not count against the next one, nor does a death of the controller since which
        there was a `commit`, the step of the newest one."""
        found = []
        for event in reversed(self.events):
            if event["phase"] in ENDED:
                break
            if date - event["time"] > window:
                continue
            if event.get("first_fault"):
                found.append(Failure.on_record(event, date - event["time"], now))
            elif event.get("controller_died") == commit:
                since = now - max(date - event["time"], 0.0)
                found.append(Failure(since, event["step"], "", event["reason"].removeprefix("resumed: ")))
        return tuple(reversed(found))

    @property
    def stop_asked(self) -> str:
        """Why the run is to end, as its controllers were told since somebody gave the command; empty if they were
        not."""
        for event in reversed(self.events):
            anew = "last_seen" in event and event.get("controller_died") is None
            if anew or event["phase"] in ENDED:
                break
            if event.get("stopping"):
                return str(event["stopping"])
        return ""

    @property
    def died_last(self) -> bool:
        """Whether the last that happened is that the controller died."""
        return bool(self.events) and self.events[-1].get("controller_died") is not None


def fault_event(
    before: State, after: State, fault: Failure, lost: Sequence[Row], printed: Sequence[str]
) -> tuple[str, EventFields]:
    """Reason and fields of the event of a fault that took a run from state `before` to `after`.

    `lost` are the rows of steps that must be done again, `printed` the last lines of the rank at fault.
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
    """What an event tells of the machines that a gang is on: type, market, zone, and USD an hour if known, of all and
    by zone and market, and when training on them `began`, unix seconds. And what is wrong with limits.prices, which
    was a table of prices when the run began: training goes on without it."""
    try:
        table, told = prices.load(limits.prices), ""
    except InputError as error:
        table, told = {}, f"; what its machines cost is not known: {error}"
    zones = prices.by_zone(machines, table)
    fields: EventFields = {
        "machines": list(machines),
        "zones": zones,
        "usd_per_hour": prices.rate(machines, table),
        "time": began,
    }
    return fields, told


def memory_seen(status: Mapping[str, Any]) -> str:
    """How full its node was, as the controller said last: Ray's monitor may end it in the place of a rank."""
    percent = status.get("memory_percent")
    return f"with {percent:.0f} % of its node's memory in use" if is_number(percent) else "and nobody saw how"


class Spending:
    """Hours and USD of a job, counted now and then."""

    def __init__(self, limits: LimitSpec, history: EventHistory) -> None:
        self._limits, self._history = limits, history
        self._counted = 0.0
        # Of the events before that number, which change no more; and the latest time of theirs, in microseconds.
        self._before, self._from, self._latest = (0.0, 0.0), 0, 0
        self.spent = (0.0, 0.0)

    def count(self, recent: Sequence[Row], now: float) -> tuple[float, float]:
        """Hours and USD so far, as of at most some seconds ago. A clock that was set back counts nothing twice."""
        limits, history = self._limits, self._history
        every = min(COUNT_EVERY, 36.0 * (limits.hours or 1.0))  # a hundredth of the ceiling at the latest
        if not 0 <= now - self._counted <= every:
            if history.begun > self._from:
                closed = history.events[self._from : history.begun + 1]
                hours, usd = self._of(closed, recent, None)
                self._before = (self._before[0] + hours, self._before[1] + usd)
                self._from = history.begun
                self._latest = max([self._latest, *(micros(event["time"]) for event in closed[:-1])])
            open_ = self._of(history.events[self._from :], recent, now)
            self.spent = (self._before[0] + open_[0], self._before[1] + open_[1])
            self._counted = now
        return self.spent

    def near(self) -> list[prices.Ceiling]:
        """Each ceiling of the job that has come near and is not yet recorded to be so."""
        limits, (hours, usd) = self._limits, self.spent
        if not (limits.hours or limits.cost_usd):
            return []
        spent = {"hours": hours, "cost_usd": usd}
        ceilings = {"hours": limits.hours, "cost_usd": limits.cost_usd}
        return prices.near(ceilings, spent, self._history.ceilings)

    def _of(self, events: Sequence[Row], recent: Sequence[Row], now: float | None) -> tuple[float, float]:
        """Of these events: up to `now`, or without the last one."""
        rows = tally(events, reversed(recent))
        phases = timeline(events, rows, now, self._latest)
        phases = phases if now is not None else phases[:-1]
        hours = sum(phase.seconds for phase in phases if phase.name not in ("launch", "down", "queue")) / 3600
        return hours, cost(phases, rows, events, self._limits.usd_per_worker_hour) or 0.0
