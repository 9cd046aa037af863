"""Where the time went: every second of a run, from its first event on, belongs to exactly one bucket.

The time between an end of a run, such as a stop, and the command that resumes it is not a time of the run.

Pure arithmetic on the rows of events.jsonl and the totals of metrics.jsonl. Seconds are counted as integer
microseconds, so that the buckets sum exactly to the wall time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.outcome import ENDED
from orchestrator.observe.totals import ROLLOUT, PhaseTime, Row, RunTotals, micros, never_back

BUCKETS = (
    "launch",  # from the command to its controller: Python, imports, checks, Ray
    "prepare",  # making token shards, planning the layout
    "start",  # the first gang starts: processes, process groups, model
    "step",  # optimizer steps that count
    "transfer",  # a step's rollout: weights on their way to those that generate with them
    "generate",  # waiting for generated answers
    "reward",  # computing their rewards
    "data_stall",  # a step waited for its samples
    "checkpoint_stall",  # a step waited for its commit
    "evaluate",  # evaluation of held-out text between two steps, or after the last one while the run waited
    "lost_work",  # the first execution of steps that were rolled back
    "detection",  # from the last step to the detection of the fault
    "re_plan",  # stopping the gang and choosing the next layout
    "restore",  # later gangs start: processes, process groups, model, reading the commit
    "export",  # exporting the model
    "queue",  # waiting in the queue of a shared cluster
    "idle",  # waiting for workers, and training time outside of steps
    "down",  # no controller ran, although the run had not ended
    "finish",  # after the last event: summary, report, remaining MLflow uploads
    "shutdown",  # from there to the end of the command: Ray and its processes
)
USEFUL = ("step", *ROLLOUT)
"""Buckets that count for goodput."""
AFTER_THE_END = ("finish", "shutdown")
"""Buckets that no event records. Code that knows them adds them to the ledger, see `with_end`."""
BETWEEN_COMMANDS = "ended"
"""The name of a phase after an end of the run, until a later command resumes it. It counts in no bucket."""
_PLAIN = {
    "launch": "launch",
    "prepare": "prepare",
    "queue": "queue",
    "wait": "idle",
    "stop": "re_plan",
    "evaluate": "evaluate",
    "export": "export",
    "down": "down",
}


@dataclass(frozen=True)
class Phase:
    """A period of the run in one phase. `start` and `end` are microseconds since the epoch."""

    name: str
    attempt: int
    start: int
    end: int
    layout: Any = None
    reason: str = ""
    faulted: bool = False  # a fault ended the phase
    died: bool = False  # its controller died during the phase
    lost: int = 0  # microseconds of work that the fault discarded, as the controller saw it
    event: int = -1  # the number of the event that began the phase

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return (self.end - self.start) / 1e6


def ledger(events: Sequence[Row], rows: RunTotals, now: float | None = None) -> dict[str, Any]:
    """Return seconds by bucket, wall time and goodput (Google's ML Goodput: useful step seconds over wall seconds).

    The wall time runs from the command that began the run to the last event; in an unfinished run, to `now`, or to
    the last row. It leaves out the time for which the run had ended, before a later command resumed it.

    Returns {"wall_seconds", "stopped_seconds", "goodput", "lost_steps", "overlapped_seconds", "seconds": {bucket:
    seconds}}. stopped_seconds is the time that the wall time leaves out. overlapped_seconds is how long answers were
    generated during training, which no bucket has. goodput is None for a run of zero length.
    """
    amounts = dict.fromkeys(BUCKETS, 0)
    started = False
    stopped = 0
    for phase in timeline(events, rows, now):
        useful = rows.useful.get(phase.event, PhaseTime())
        lost = rows.lost.get(phase.event, PhaseTime())
        if phase.name == "train":
            for bucket, amount in _train(phase, useful, lost):
                amounts[bucket] += amount
        elif phase.name == "start":
            for bucket, amount in _start(phase, useful, lost):
                amounts[bucket or ("restore" if started else "start")] += amount
            started = True
        elif phase.name == BETWEEN_COMMANDS:
            stopped += phase.end - phase.start
        else:
            amounts[_PLAIN.get(phase.name, "idle")] += phase.end - phase.start
    wall = sum(amounts.values())
    return {
        "wall_seconds": wall / 1e6,
        "stopped_seconds": stopped / 1e6,
        "goodput": sum(amounts[bucket] for bucket in USEFUL) / wall if wall else None,
        "lost_steps": _lost_steps(events, rows.lost_steps),
        "overlapped_seconds": sum(each.overlapped for each in rows.useful.values()) / 1e6,
        "seconds": {bucket: amount / 1e6 for bucket, amount in amounts.items()},
    }


def with_end(ledger: dict[str, Any], **seconds: float) -> dict[str, Any]:
    """Return a ledger without AFTER_THE_END with these seconds added. Its goodput remains that of the run."""
    added = {bucket: max(amount, 0.0) for bucket, amount in seconds.items()}
    known = {**ledger["seconds"], **added}
    more = sum(amount - ledger["seconds"].get(bucket, 0.0) for bucket, amount in added.items())
    return {**ledger, "wall_seconds": ledger["wall_seconds"] + more, "seconds": known}


def with_end_of(ledger: dict[str, Any], before: Mapping[str, Any], ended: float | None) -> dict[str, Any]:
    """Return the ledger with the AFTER_THE_END of the summary `before`, if that belongs to the same end of the run."""
    seconds_before = (before.get("ledger") or {}).get("seconds") or {}
    if ended is None or before.get("ended") != ended:
        return ledger
    return with_end(
        ledger, **{bucket: seconds_before[bucket] for bucket in AFTER_THE_END if bucket in seconds_before}
    )


def _lost_steps(events: Sequence[Row], lost: Counter[Any]) -> int:
    """Return the lost steps over all attempts: for each the larger of the controller's count and the rows' count."""
    steps = lost.copy()
    for event in events:
        attempt = event.get("attempt")
        steps[attempt] = max(steps[attempt], event.get("lost_steps") or 0)
    return steps.total()


def timeline(events: Sequence[Row], rows: RunTotals, now: float | None = None, since: int = 0) -> list[Phase]:
    """Return the run as contiguous phases, each from its event to the next.

    If a clock was set back, no time passes; `since`, in microseconds, is the latest time of earlier events. If a
    run was restarted ("prepare", reason "resumed ..."), the phase in which it died ends at the last sign of "
    "activity: its
    last row, or the event's `last_seen` (unix seconds). The rest is a phase named "down". If the run had ended, the
    time until the restart is a phase named BETWEEN_COMMANDS.
    """
    phases: list[Phase] = []
    starts = never_back([micros(event.get("time")) for event in events], since)
    for index, event in enumerate(events):
        start = starts[index]
        following = events[index + 1] if index + 1 < len(events) else None
        name = str(event.get("phase"))
        if following:
            end = starts[index + 1]
        elif name in ENDED:
            end = start
        else:
            end = max(start, micros(now) if now is not None else rows.latest)
        phase = Phase(
            name=name,
            attempt=int(event.get("attempt") or 0),
            start=start,
            end=end,
            layout=event.get("layout_after"),
            reason=str(event.get("reason") or ""),
            faulted=bool(following and following.get("first_fault")),
            lost=micros(following.get("seconds_lost")) if following else 0,
            event=index,
        )
        if not index:
            phases += _launch(phase, event)
        phases += _until_death(phase, following, rows)
        if following and phases[-1].name in ("down", BETWEEN_COMMANDS):
            phases[-1:] = _launched(phases[-1], following)
    return phases


def _launch(first: Phase, event: Row) -> list[Phase]:
    """Return the time from the command that began the run to its first event, if that event records it."""
    began = micros(event.get("launched")) if event.get("launched") else first.start
    return [Phase("launch", first.attempt, began, first.start)] if began < first.start else []


def _launched(down: Phase, event: Row) -> list[Phase]:
    """Split a time without a controller at the launch of the command behind `event`."""
    began = micros(event.get("launched")) if event.get("launched") else down.end
    at = min(max(began, down.start), down.end)
    launch = Phase("launch", down.attempt, at, down.end)
    return [dataclasses.replace(down, end=at), *([launch] if at < down.end else [])]


def _until_death(phase: Phase, following: Row | None, rows: RunTotals) -> list[Phase]:
    """Return the phase, split at the last sign of activity if no controller ran from there until the event
    `following`."""
    if phase.name in ENDED:
        return [dataclasses.replace(phase, name=BETWEEN_COMMANDS)] if following else []
    if not following or following.get("phase") != "prepare" or not _resumed(following):
        return [phase]
    last_seen = micros(following.get("last_seen"))
    if phase.name == "train":
        last_seen = max(last_seen, rows.last_row_before(phase.end))
    death = min(max(last_seen, phase.start), phase.end)
    down = Phase("down", phase.attempt, death, phase.end, reason="no controller ran")
    return [dataclasses.replace(phase, end=death, died=True), down]


def _resumed(event: Row) -> bool:
    return str(event.get("reason")).startswith("resumed")


def _start(phase: Phase, useful: PhaseTime, lost: PhaseTime) -> Iterator[tuple[str, int]]:
    """Return the buckets of a start phase, which lasts until the controller sees the first steps. "" is the time
    outside of steps.
    """
    length = phase.end - phase.start
    for bucket, amount in _accounted(length, useful):
        yield bucket, amount
        length -= amount
    amount = min(length, lost.whole)
    yield "lost_work", amount
    yield "", length - amount


def _train(phase: Phase, useful: PhaseTime, lost: PhaseTime) -> Iterator[tuple[str, int]]:
    """Return the buckets of a training phase, in three spans: to the last row that counts, to the last lost row, and
    the rest.

    Rows of lost steps may be missing. After a fault, the rest contains as much lost work as the controller counted.
    If the controller itself died, everything after the last row was lost.
    """
    counted = min(max(phase.start, useful.last), phase.end)
    rolled_back = min(max(counted, lost.last), phase.end)
    left = counted - phase.start
    for bucket, amount in _accounted(left, useful):
        yield bucket, amount
        left -= amount
    yield "idle", left
    tail = phase.end - rolled_back
    unseen = tail if phase.died else min(tail, max(0, phase.lost - (rolled_back - counted)))
    yield "lost_work", rolled_back - counted + unseen
    yield "detection" if phase.faulted else "idle", tail - unseen


def _accounted(length: int, rows: PhaseTime) -> Iterator[tuple[str, int]]:
    """Return the buckets of the time that rows account for, at most `length` in total: first the stalls, then step
    time.
    """
    for bucket, spent in (
        ("data_stall", rows.data),
        ("checkpoint_stall", rows.commit),
        ("evaluate", rows.evaluation),
        *((part, getattr(rows, part)) for part in ROLLOUT),
        ("step", rows.step),
    ):
        amount = min(length, spent)
        yield bucket, amount
        length -= amount
