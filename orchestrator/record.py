"""What is written down of a run, and how it is taken up again: rows, events, commits, and their copy in MLflow."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator import prices
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.replicas import newest, peer_store
from orchestrator.checkpoint.store import Store
from orchestrator.rundir import Row, RunDir
from orchestrator.spec import JobSpec, dump
from orchestrator.stability import Skip, is_before, merged, on_record
from orchestrator.track.ledger import timeline
from orchestrator.track.summary import cost
from orchestrator.track.tracker import Tracker

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
RECENT = 200
"""Rows kept in memory, for a run may have millions."""
LATEST = 20
"""Rows that the longest step of late is taken from."""
COUNT_EVERY = 10.0
"""Seconds between countings of what the job has spent."""


class Record:
    """The history of one run in its directory, from all its controllers. Opening it adds an event."""

    def __init__(self, spec: JobSpec, run: RunDir) -> None:
        self._spec, self._run = spec, run
        self.store = Store(run.at("checkpoints"))
        self._peers: Store | None = None
        self.events = run.rows(EVENTS)
        self.recent: deque[Row] = deque(by_step(run.rows(METRICS)), maxlen=RECENT)
        self.saved = 0
        self._spent, self._counted = (0.0, 0.0), 0.0
        run.write_text("job.yaml", dump(spec))
        last_seen = (run.read_json("status.json") or {}).get("time")
        self.event(
            self.attempts, self.step, "prepare", "resumed" if self.events else "begun", last_seen=last_seen
        )
        self.tracker = Tracker(spec.model_copy(update={"tracking": None}), run)

    @property
    def attempts(self) -> int:
        """Attempts that there have been."""
        return max((event["attempt"] for event in self.events), default=0)

    @property
    def data(self) -> str:
        """The prepared data that the run began with, empty before it has any."""
        return next((event["data"] for event in self.events if event.get("data")), "")

    @property
    def step(self) -> int:
        """The last step on record."""
        return self.recent[-1]["step"] if self.recent else 0

    @property
    def step_seconds(self) -> float:
        """Median of the latest steps, 0 if there are none."""
        return statistics.median(row["step_seconds"] for row in self.recent) if self.recent else 0.0

    @property
    def longest_step(self) -> float:
        """Seconds of the longest of the latest steps of the attempt that runs, 0 if there are none."""
        latest = [row for row in self.recent if row["attempt"] == self.recent[-1]["attempt"]][-LATEST:]
        return max((row["step_seconds"] for row in latest), default=0.0)

    @property
    def restart_seconds(self) -> float:
        """From the end of an attempt to the first step of the next, as last measured; 0 if there was none."""
        began = [n for n, event in enumerate(self.events) if event["phase"] == "train"]
        ends = [e["time"] for e in self.events[: began[-1]] if e["phase"] == "stop"] if began else []
        return float(self.events[began[-1]]["time"] - ends[-1]) if ends else 0.0

    def event(self, attempt: int, step: int, phase: str, reason: str, **more: Any) -> None:
        """Add a row to events.jsonl."""
        row: Row = {"time": time.time(), "attempt": attempt, "phase": phase, "reason": reason, "step": step}
        row |= {
            "seconds_lost": None,
            "layout_before": None,
            "layout_after": None,
            "first_fault": None,
            **more,
        }
        self._run.append(EVENTS, [row])
        self.events.append(row)

    def track(self) -> None:
        """Begin to copy the run to MLflow; from here on it is known to be one that can run."""
        self.tracker = Tracker(self._spec, self._run)

    def training_began(self, attempt: int) -> float:
        """When the first step of the attempt began, unix seconds, as far as it is known."""
        first = next((row for row in self.recent if row["attempt"] == attempt), None)
        began = first["time"] - first["step_seconds"] if first else time.time()
        return max(began, self.events[-1]["time"])

    def take(self, rows: Sequence[Row]) -> None:
        """Add the rows that a gang reported to metrics.jsonl."""
        if rows:
            self._run.append(METRICS, rows)
            self.recent.extend(rows)
            self.saved += len(rows)
            self.tracker.rows(rows)

    def use_holders(self, token: str, addresses: Sequence[str]) -> None:
        """Look for commits in the memory of these holders first."""
        held = [str(address) for address in addresses]
        self._peers = peer_store(token, held, held[:1]) if held else None

    def last_commit(self, bad: frozenset[int] = frozenset()) -> tuple[Manifest | None, list[str]]:
        """The newest commit but those in `bad` and those that have used samples which are to be left out, and a line
        for each bad one."""
        notes = [f"step {step}: a rank found its bytes damaged" for step in sorted(bad)]
        at_most: int | None = None
        skips = on_record(self.events)
        while True:
            found = newest(self._stores, at_most, deep=False)
            told = found[2] if found else [f"step {step}: {why}" for step, why in self.store.skipped]
            notes += [note for note in told if note not in notes]
            if found is None or (found[1].step not in bad and _is_before(found[1], skips)):
                return (found[1] if found else None), notes
            at_most = found[1].step - 1

    def roll_back(self, bad: frozenset[int]) -> tuple[Manifest | None, list[str]]:
        """Return to the last sound commit: what is beyond it never was. As `last_commit`."""
        commit, notes = self.last_commit(bad)
        step = commit.step if commit else 0
        for store in self._stores:
            with contextlib.suppress(OSError) if store is self._peers else contextlib.nullcontext():
                store.rewind(step if commit else -1)
        told = commit.meta["rows"] if commit else []
        rows = [row for row in by_step([*self._run.rows(METRICS), *told]) if row["step"] <= step]
        self._run.replace_rows(METRICS, rows)
        self.recent.clear()
        self.recent.extend(rows)
        self.saved = 0
        self.tracker.rows(told)
        return commit, notes

    def beyond(self, step: int) -> list[Row]:
        """Rows of steps after that one."""
        return [row for row in self._run.rows(METRICS) if row["step"] > step]

    def spent(self, now: float) -> tuple[float, float]:
        """Hours and USD of the whole job so far; counted now and then, and only where there is a ceiling."""
        limits = self._spec.limits
        if (limits.hours or limits.cost_usd) and now - self._counted > COUNT_EVERY:
            rows = list(self.recent)
            phases = timeline(self.events, rows, now)
            hours = sum(phase.seconds for phase in phases if phase.name != "down") / 3600
            self._spent = (hours, cost(phases, rows, self.events, limits.usd_per_worker_hour) or 0.0)
            self._counted = now
        return self._spent

    def near_ceilings(self) -> list[str]:
        """A line for each ceiling of the job that has come near, told once."""
        limits, (hours, usd) = self._spec.limits, self._spent
        told = [event["reason"] for event in self.events]
        spent = {"hours": hours, "cost_usd": usd}
        return prices.near({"hours": limits.hours, "cost_usd": limits.cost_usd}, spent, told)

    def market(self, machines: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """What an event tells of the machines that a gang is on: type, market, zone, and USD an hour if known.

        Raises InputError if limits.prices is no table of prices.
        """
        return {
            "machines": list(machines),
            "usd_per_hour": prices.rate(machines, prices.load(self._spec.limits.prices)),
        }

    @property
    def _stores(self) -> list[Store]:
        return [self._peers, self.store] if self._peers else [self.store]


def _is_before(commit: Manifest, skips: Sequence[Skip]) -> bool:
    return is_before(commit.position, merged(commit.meta.get("skips", ())), skips)


def by_step(rows: Sequence[Row]) -> list[Row]:
    """One row a step, the newest of each, in order."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]
