"""Where the time went: every second of a run, from its first event on, in exactly one bucket.

Pure arithmetic on the rows of events.jsonl and metrics.jsonl. Seconds are counted as whole microseconds
inside, so that the buckets sum to the wall time exactly and not nearly.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

BUCKETS = (
    "prepare",  # token shards, plan
    "start",  # first gang: processes, mesh, model
    "step",  # optimiser steps that count
    "data_stall",  # a step waited for its samples
    "checkpoint_stall",  # a step waited for its commit
    "lost_work",  # steps rolled back, first execution
    "detection",  # from the last step to the moment the fault was seen
    "re_plan",  # stopping the gang and choosing the next layout
    "restore",  # any later gang: processes, mesh, model, commit read
    "export",  # writing the model for others
    "idle",  # waiting for workers, and the time in training that no step accounts for
    "down",  # nobody ran
)
ENDS = frozenset({"done", "failed", "stopped"})
_PLAIN = {"prepare": "prepare", "wait": "idle", "stop": "re_plan", "export": "export", "down": "down"}


@dataclass(frozen=True)
class Phase:
    """One stretch of the run. `start` and `end` in microseconds since the epoch."""

    name: str
    attempt: int
    start: int
    end: int
    layout: Any = None
    reason: str = ""
    faulted: bool = False  # a fault ended it
    died: bool = False  # its controller died in it
    lost: int = 0  # microseconds of work that the fault threw away, as the controller saw it

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end - self.start) / 1e6


def ledger(events: Sequence[Row], rows: Sequence[Row], now: float | None = None) -> dict[str, Any]:
    """Seconds by bucket, wall time and goodput (Google's ML Goodput: useful step seconds over wall seconds).

    The wall runs from the first event to the last; in a run without an end, to `now`, or to the last row.
    Returns {"wall_seconds", "goodput", "lost_steps", "seconds": {bucket: seconds}}; goodput is None for a run
    of no length.
    """
    useful, lost = split(events, rows)
    phases = timeline(events, rows, now)
    amounts = dict.fromkeys(BUCKETS, 0)
    useful_of, lost_of = _by_phase(phases, useful), _by_phase(phases, lost)
    started = False
    for index, phase in enumerate(phases):
        if phase.name == "train":
            for bucket, amount in _train(phase, useful_of[index], lost_of[index]):
                amounts[bucket] += amount
        elif phase.name == "start":
            for bucket, amount in _start(phase, useful_of[index], lost_of[index]):
                amounts[bucket or ("restore" if started else "start")] += amount
            started = True
        else:
            amounts[_PLAIN.get(phase.name, "idle")] += phase.end - phase.start
    wall = sum(amounts.values())
    return {
        "wall_seconds": wall / 1e6,
        "goodput": amounts["step"] / wall if wall else None,
        "lost_steps": _lost_steps(events, lost),
        "seconds": {bucket: amount / 1e6 for bucket, amount in amounts.items()},
    }


def split(events: Sequence[Row], rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(rows that count, rows whose work was lost), each in the order given.

    A row rolls back every earlier one with its step or a later one. A stop that says how many of the steps
    up to its own were lost marks them too, since nothing may have been run again yet.
    """
    gone: set[int] = set()
    kept: list[int] = []
    for index, row in enumerate(rows):
        while kept and rows[kept[-1]].get("step", 0) >= row.get("step", 0):
            gone.add(kept.pop())
        kept.append(index)
    for event in events:
        if event.get("phase") == "stop" and event.get("lost_steps") and event.get("step") is not None:
            attempt, safe = event.get("attempt"), event["step"] - event["lost_steps"]
            gone |= {i for i, r in enumerate(rows) if r.get("attempt") == attempt and r.get("step", 0) > safe}
    useful = [row for index, row in enumerate(rows) if index not in gone]
    return useful, [row for index, row in enumerate(rows) if index in gone]


def _lost_steps(events: Sequence[Row], lost: Sequence[Row]) -> int:
    """Steps lost by attempt, as the controller told or as rows still show, whichever is more."""
    steps = Counter(row.get("attempt") for row in lost)
    for event in events:
        attempt = event.get("attempt")
        steps[attempt] = max(steps[attempt], event.get("lost_steps") or 0)
    return steps.total()


def timeline(events: Sequence[Row], rows: Sequence[Row], now: float | None = None) -> list[Phase]:
    """The run as phases that touch: each event's lasts until the next. Clocks that went back stand still.

    Where a run was started again ("prepare", reason "resumed ..."), the phase it died in ends at the last
    sign of life: its last row, or the event's `last_seen` (unix seconds). The rest is a phase named "down".
    """
    phases: list[Phase] = []
    signs = sorted(_micros(row.get("time")) for row in rows)
    starts = _forward([_micros(event.get("time")) for event in events])
    for index, event in enumerate(events):
        start = starts[index]
        following = events[index + 1] if index + 1 < len(events) else None
        name = str(event.get("phase"))
        if following:
            end = starts[index + 1]
        elif name in ENDS:
            end = start
        else:
            end = max(start, _micros(now) if now is not None else signs[-1] if signs else start)
        phase = Phase(
            name=name,
            attempt=int(event.get("attempt") or 0),
            start=start,
            end=end,
            layout=event.get("layout_after"),
            reason=str(event.get("reason") or ""),
            faulted=bool(following and following.get("first_fault")),
            lost=_micros(following.get("seconds_lost")) if following else 0,
        )
        phases += _until_death(phase, following, signs)
    return phases


def _until_death(phase: Phase, following: Row | None, signs: list[int]) -> list[Phase]:
    """The phase, cut at the last sign of life if nobody ran until `following`."""
    if phase.name in ENDS:
        return [dataclasses.replace(phase, name="down")] if following else []
    if not following or following.get("phase") != "prepare" or not _resumed(following):
        return [phase]
    seen = _micros(following.get("last_seen"))
    if phase.name == "train":
        seen = max([seen, *(sign for sign in signs if sign <= phase.end)])
    death = min(max(seen, phase.start), phase.end)
    down = Phase("down", phase.attempt, death, phase.end, reason="nobody ran")
    return [dataclasses.replace(phase, end=death, died=True), down]


def _resumed(event: Row) -> bool:
    return str(event.get("reason")).startswith("resumed")


def _by_phase(phases: list[Phase], rows: Iterable[Row]) -> list[list[Row]]:
    """For each phase its rows: a row is of the last start or train of its attempt begun when it ended."""
    found: list[list[Row]] = [[] for _ in phases]
    gangs: dict[Any, list[int]] = {}
    for index, phase in enumerate(phases):
        if phase.name in ("start", "train"):
            gangs.setdefault(phase.attempt, []).append(index)
    for row in rows:
        mine = gangs.get(row.get("attempt"), [])
        begun = [index for index in mine if phases[index].start <= _micros(row.get("time"))]
        if mine:
            found[begun[-1] if begun else mine[0]].append(row)
    return found


def _start(phase: Phase, useful: list[Row], lost: list[Row]) -> Iterator[tuple[str, int]]:
    """A gang is started when its first steps are seen; they are steps all the same. "" is what they leave."""
    length = phase.end - phase.start
    for bucket, amount in _accounted(length, useful):
        yield bucket, amount
        length -= amount
    amount = min(length, sum(_micros(row.get("step_seconds")) for row in lost))
    yield "lost_work", amount
    yield "", length - amount


def _train(phase: Phase, useful: list[Row], lost: list[Row]) -> Iterator[tuple[str, int]]:
    """A training phase is three spans: to the last row that counts, to the last row lost, and the tail.

    Rows of lost steps may be gone, or may never have arrived. After a fault the tail holds them as far as the
    controller counted them; where the controller itself died, nothing after the last row was kept.
    """
    counted = _last(useful, phase.start, phase.end)
    rolled_back = _last(lost, counted, phase.end)
    left = counted - phase.start
    for bucket, amount in _accounted(left, useful):
        yield bucket, amount
        left -= amount
    yield "idle", left
    tail = phase.end - rolled_back
    unseen = tail if phase.died else min(tail, max(0, phase.lost - (rolled_back - counted)))
    yield "lost_work", rolled_back - counted + unseen
    yield "detection" if phase.faulted else "idle", tail - unseen


def _accounted(length: int, rows: list[Row]) -> Iterator[tuple[str, int]]:
    """What the rows account for, never more than `length`; step time is what the two stalls leave of it."""
    keys = {"data_stall": "data_seconds", "checkpoint_stall": "commit_seconds", "step": "step_seconds"}
    for bucket, key in keys.items():
        amount = min(length, sum(_micros(row.get(key)) for row in rows))
        yield bucket, amount
        length -= amount


def _last(rows: list[Row], low: int, high: int) -> int:
    return min(max([low, *(_micros(row.get("time")) for row in rows)]), high)


def _forward(times: list[int]) -> list[int]:
    """The same times, none before an earlier one."""
    latest = times[0] if times else 0
    out = []
    for time in times:
        latest = max(latest, time)
        out.append(latest)
    return out


def _micros(seconds: Any) -> int:
    """Seconds as whole microseconds; what is no length of time is 0."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return 0
    return max(0, round(min(seconds, 1e12) * 1e6))
