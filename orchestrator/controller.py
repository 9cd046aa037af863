"""Observe, decide, act, write down: the life of one run from job file to summary.

The controller decides nothing itself (`decide` does) and computes nothing (the gang does). All that it needs to
go on after its own death stands in the run directory.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cluster.gang import FINISHED, Beat, Bundle, Gang
from cluster.machine import Offer
from orchestrator import assemble, export, finish
from orchestrator import plan as planning
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.store import Store
from orchestrator.decide import ENDED, Action, Failure, Rules, Seen, State, decide
from orchestrator.layout import ModelShape
from orchestrator.rundir import Row, RunDir
from orchestrator.spec import JobSpec, dump
from orchestrator.track.ledger import timeline
from orchestrator.track.summary import worker_seconds
from orchestrator.track.tracker import Tracker
from orchestrator.train.task import ENTRY, Task

POLL = 0.1
"""Seconds between looks at a running gang; a look itself waits a little for answers."""
STATUS_EVERY = 1.0
"""Seconds between writings of status.json."""
COUNT_EVERY = 10.0
"""Seconds between countings of what the job has spent."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What the controller needs of a cluster.

    `gang` makes a gang that is not started, `capacity` tells how many workers would fit now, `offer` what the
    least of them has, and `call` runs a function in another process of the cluster and returns its result.
    """

    gang: Callable[[], Gang]
    capacity: Callable[[Bundle], int]
    offer: Callable[[Bundle], Offer | None]
    call: Callable[..., Any]


class Controller:
    """Drives one run in the calling thread; `status` and `request_stop` may be called from others."""

    def __init__(
        self, spec: JobSpec, run: RunDir, until: int | None, cluster: Cluster, faults: tuple[str, ...] = ()
    ) -> None:
        self._spec, self._run, self._cluster, self._faults = spec, run, cluster, faults
        self._until = min(until or spec.train.steps, spec.train.steps)
        self._store = Store(run.at("checkpoints"))
        worker = spec.resources.per_worker
        self._bundle = Bundle(worker.cpu, worker.gpu)
        self._tracker: Tracker | None = None
        self._state = State()
        self._rules = Rules(spec, lambda workers: None)
        self._shape: ModelShape | None = None
        self._machine: planning.Machine | None = None
        self._data = ""
        self._gang: Gang | None = None
        self._beat = Beat()
        self._saved = 0
        self._recent: deque[Row] = deque(maxlen=20)
        self._events: list[Row] = []
        self._spent = (0.0, 0.0)
        self._counted = 0.0
        self._exported: dict[str, Any] = {}
        self._placement_failed = ""
        self._stop = ""
        self._note = ""
        self._written = 0.0

    def request_stop(self, reason: str) -> None:
        """Commit at the next step boundary and end."""
        self._stop = reason

    def status(self) -> dict[str, Any]:
        """Phase, step, attempt, layout and ranks, as `orchestrator status` shows them."""
        state, last = self._state, self._recent[-1] if self._recent else {}
        seconds = self._step_seconds()
        left = self._until - state.step
        ranks = [
            {"rank": r.rank, "node": r.node, "pid": r.pid, "state": r.state, "step": r.step}
            for r in self._beat.ranks
        ]
        return {
            "name": self._spec.name,
            "phase": state.phase,
            "step": state.step,
            "steps": self._spec.train.steps,
            "attempt": state.attempt,
            "layout": str(state.layout) if state.layout else None,
            "loss": last.get("loss"),
            "tokens_per_second": last.get("tokens_per_second"),
            "eta_seconds": left * seconds if seconds and state.phase in ("start", "train") else None,
            "note": self._note,
            "time": time.time(),
            "pid": os.getpid(),
            "ranks": ranks if self._gang is not None else [],
        }

    def drive(self) -> dict[str, Any]:
        """Run to an end. Returns the summary; whatever happens, no gang is left behind.

        Raises InputError if the job turns out to be wrong once its data is seen.
        """
        self._recover()
        try:
            while self._state.phase not in ENDED:
                self._turn()
            return self._finish()
        finally:
            self._stop_gang()

    def _turn(self) -> None:
        before = self._state
        seen = self._observe()
        self._state, action = decide(self._rules, before, seen)
        self._placement_failed = ""
        act = {
            "prepare": self._prepare,
            "wait": self._wait,
            "start": self._start,
            "watch": self._watch,
            "ask_stop": self._ask_stop,
            "halt": self._halt,
            "export": self._export,
            "finish": self._note_reason,
        }[action.do]
        act(action, before)
        self._write_status(force=self._state.phase != before.phase)

    # -- observe

    def _observe(self) -> Seen:
        now = time.time()
        if self._gang is not None:
            self._beat = self._gang.poll(self._saved)
            self._take_rows(self._beat.rows)
        heard = [r.heard for r in self._beat.ranks if r.state not in FINISHED]
        hours, usd = self._count_spending(now)
        return Seen(
            now=now,
            prepared=bool(self._data),
            exported=bool(self._exported),
            capacity=self._cluster.capacity(self._bundle) if self._state.phase == "wait" else 0,
            ranks=self._beat.ranks if self._gang is not None else (),
            silent=time.monotonic() - min(heard) if heard else 0.0,
            placement_failed=self._placement_failed,
            stop=self._stop,
            step_seconds=self._step_seconds(),
            spent_hours=hours,
            spent_usd=usd,
        )

    def _count_spending(self, now: float) -> tuple[float, float]:
        """Hours and USD of the whole job so far; counted now and then, and only where there is a ceiling."""
        limits = self._spec.limits
        if (limits.hours or limits.cost_usd) and now - self._counted > COUNT_EVERY:
            rows = self._run.rows("metrics.jsonl")
            phases = timeline(self._events, rows, now)
            hours = sum(phase.seconds for phase in phases if phase.name != "down") / 3600
            self._spent = (hours, worker_seconds(phases, rows) / 3600 * limits.usd_per_worker_hour)
            self._counted = now
        return self._spent

    def _take_rows(self, rows: tuple[Row, ...]) -> None:
        if rows:
            self._run.append("metrics.jsonl", rows)
            self._recent.extend(rows)
            self._saved += len(rows)
            self._track(lambda tracker: tracker.rows(rows))

    def _step_seconds(self) -> float:
        recent = [row["step_seconds"] for row in self._recent]
        return statistics.median(recent) if recent else 0.0

    # -- act

    def _prepare(self, action: Action, before: State) -> None:
        """Data first, then what can be planned only once the vocabulary is known."""
        self._data = assemble.prepare(self._spec, self._run, self._tell)
        self._shape = assemble.check_data(self._spec, self._data)
        self._machine = planning.machine_for(self._cluster.offer(self._bundle), self._bundle)
        workers = self._spec.resources.workers
        planning.plan(
            self._spec, self._shape, workers.max, self._machine
        )  # what is illegal is told before any start
        self._rules = Rules(self._spec, planning.chooser(self._spec, self._shape, self._machine))

    def _wait(self, action: Action, before: State) -> None:
        self._note = action.reason
        if before.phase == "wait":
            time.sleep(POLL)
        else:
            self._event("wait", action.reason)

    def _start(self, action: Action, before: State) -> None:
        """Roll back to the last sound commit, write the plan, start a gang from there."""
        layout, restored = action.layout, self._roll_back()
        assert layout is not None
        assert self._shape is not None
        assert self._machine is not None
        self._state = dataclasses.replace(self._state, step=restored.step if restored else 0)
        plan = planning.plan(self._spec, self._shape, layout.world, self._machine)
        self._run.write_json("plan.json", {"attempt": self._state.attempt, **plan.to_json()})
        self._track(lambda tracker: tracker.document("plan.json"))
        source = f"from the commit at step {restored.step}" if restored else "from the beginning"
        was = str(before.layout) if before.layout else None
        self._note = f"starting {layout.world} workers {source}"
        self._event(
            "start",
            f"{layout.world} workers {source}",
            layout_before=was,
            layout_after=str(layout),
            layout=layout.to_json(),
        )
        self._write_status(force=True)
        task = Task(
            job=self._spec.model_dump(mode="json"),
            layout=layout.to_json(),
            run=self._run.uri,
            data=self._data,
            attempt=self._state.attempt,
            restore=restored.step if restored else None,
            until=self._until,
            faults=self._faults,
        )
        self._saved, self._beat = 0, Beat()
        self._gang = self._cluster.gang()
        try:
            self._gang.start(layout.world, self._bundle, ENTRY, task.to_json())
        except TimeoutError as error:
            self._stop_gang()
            self._placement_failed = str(error)

    def _watch(self, action: Action, before: State) -> None:
        if before.phase == "start" and self._state.phase == "train":
            self._note = ""
            first = next((row for row in self._recent if row["attempt"] == self._state.attempt), None)
            began = first["time"] - first["step_seconds"] if first else time.time()
            began = max(began, self._events[-1]["time"])
            self._event("train", f"the first step of attempt {self._state.attempt} is done", time=began)
        time.sleep(POLL)

    def _ask_stop(self, action: Action, before: State) -> None:
        self._note = f"stopping: {action.reason}"
        if self._gang is not None:
            self._gang.request_stop()

    def _halt(self, action: Action, before: State) -> None:
        """End the gang; after a fault, count what must be done again."""
        if self._gang is not None:
            self._take_rows(self._gang.poll(self._saved).rows)
        self._stop_gang()
        if not action.first_fault:
            self._note = action.reason
            self._event("stop", action.reason)
            return
        self._note = f"recovering: {action.first_fault}"
        commit = self._last_commit()
        lost = [
            row for row in self._run.rows("metrics.jsonl") if row["step"] > (commit.step if commit else 0)
        ]
        self._event(
            "stop",
            "a fault ended the attempt",
            first_fault=action.first_fault,
            lost_steps=len(lost),
            seconds_lost=sum(row["step_seconds"] for row in lost),
        )

    def _export(self, action: Action, before: State) -> None:
        self._note = "exporting the model"
        self._event("export", f"the commit at step {self._state.step}, in the Hugging Face format")
        self._write_status(force=True)
        self._exported = self._cluster.call(
            export.export, self._run.uri, self._state.step, self._run.at("export")
        )

    def _note_reason(self, action: Action, before: State) -> None:
        self._note = action.reason

    def _tell(self, what: str, done: int, total: int) -> None:
        self._note = f"preparing {what}: {done} of {total} parts"
        self._write_status()

    # -- write down

    def _recover(self) -> None:
        """Take up what earlier controllers of this run left."""
        self._events = self._run.rows("events.jsonl")
        self._recent.extend(by_step(self._run.rows("metrics.jsonl")))
        faults = [e for e in self._events if e.get("first_fault")]
        self._state = State(
            since=time.time(),
            attempt=max((e["attempt"] for e in self._events), default=0),
            failures=tuple(Failure(e["time"], e["step"], "", e["first_fault"], told=False) for e in faults),
            step=self._recent[-1]["step"] if self._recent else 0,
        )
        self._run.write_text("job.yaml", dump(self._spec))
        last_seen = (self._run.read_json("status.json") or {}).get("time")
        self._event("prepare", "resumed" if self._events else "begun", last_seen=last_seen)
        self._write_status(force=True)
        self._tracker = Tracker(self._spec, self._run)

    def _last_commit(self) -> Manifest | None:
        """The newest commit that no rank found corrupt."""
        commit = self._store.latest(deep=False)
        while commit is not None and commit.step in self._state.bad_commits:
            commit = self._store.latest(at_most=commit.step - 1, deep=False)
        return commit

    def _roll_back(self) -> Manifest | None:
        """Return to the last sound commit: what is beyond it never was."""
        commit = self._last_commit()
        bad = [(step, "a rank found its bytes damaged") for step in sorted(self._state.bad_commits)]
        for step, why in [*self._store.skipped, *bad]:
            if step > (commit.step if commit else -1):
                self._event("wait", f"the commit at step {step} is passed over: {why}")
        step = commit.step if commit else 0
        self._store.rewind(step if commit else -1)
        told = commit.meta["rows"] if commit else []
        rows = [row for row in by_step([*self._run.rows("metrics.jsonl"), *told]) if row["step"] <= step]
        self._run.replace_rows("metrics.jsonl", rows)
        self._recent.clear()
        self._recent.extend(rows)
        self._track(lambda tracker: tracker.rows(told))
        return commit

    def _finish(self) -> dict[str, Any]:
        self._stop_gang()
        self._event(self._state.phase, self._note)
        assert self._tracker is not None
        summary = finish.finish(
            self._spec, self._run, self._last_commit(), self._data, self._exported, self._tracker
        )
        self._write_status(force=True)
        return summary

    def _event(self, phase: str, reason: str, **more: Any) -> None:
        row: Row = {"time": time.time(), "attempt": self._state.attempt, "phase": phase, "reason": reason}
        row |= {"step": self._state.step, "seconds_lost": None, "layout_before": None, "layout_after": None}
        row |= {"first_fault": None, **more}
        self._run.append("events.jsonl", [row])
        self._events.append(row)

    def _write_status(self, force: bool = False) -> None:
        if force or time.monotonic() - self._written > STATUS_EVERY:
            self._written = time.monotonic()
            self._run.write_json("status.json", self.status())

    def _track(self, tell: Callable[[Tracker], None]) -> None:
        if self._tracker is not None:
            tell(self._tracker)

    def _stop_gang(self) -> None:
        if self._gang is not None:
            self._gang.stop()
            self._gang = None


def by_step(rows: list[Row]) -> list[Row]:
    """One row a step, the newest of each, in order."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]
