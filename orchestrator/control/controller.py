"""Observe, decide, act, write down: the life of one run from job file to summary.

The controller decides nothing itself (`decide` does) and computes nothing (the gang does). All that it needs to
go on after its own death stands in the run directory.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.cluster import Cluster
from cluster.workers.gang import Gang, GangStatus
from cluster.workers.injected_faults import still_to_come
from cluster.workers.rank_process import describe
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.control import finish
from orchestrator.control.background_export import BackgroundExport
from orchestrator.control.capacity import Capacity
from orchestrator.control.data_preparation import DataPreparation, StorageWait
from orchestrator.control.decide import Action, Observation, Policy, State, decide
from orchestrator.control.hints import explain
from orchestrator.control.resumption import taken_up
from orchestrator.control.run_history import RunHistory
from orchestrator.control.snapshot_servers import SnapshotServers
from orchestrator.control.status import status_of
from orchestrator.control.stragglers import Stragglers
from orchestrator.job.errors import InputError
from orchestrator.job.outcome import ENDED
from orchestrator.job.spec import JobSpec
from orchestrator.planning.layout import Layout
from orchestrator.planning.machines import machine_for
from orchestrator.planning.plan import Planner
from orchestrator.resolve import parts as assemble
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.track.totals import RunTotals
from orchestrator.train.task import ENTRY_OF, NOTICES, Task

POLL = 0.1
"""Seconds between looks at a gang that has no news."""
FIRST_RESTART = 10.0
"""Seconds that a change of the gang is taken to cost before one has been measured."""
STATUS_EVERY = 1.0
"""Seconds between writings of status.json."""
NO_WORKERS = ENDED | {"export"}  # phases in which a run has no use for workers


class Controller:
    """Drives one run in the calling thread; `status` and `request_stop` may be called from others. `died` says that it
    is in the place of one that has died."""

    def __init__(
        self,
        spec: JobSpec,
        run: RunDir,
        until: int | None,
        cluster: Cluster,
        faults: tuple[str, ...] = (),
        died: bool = False,
    ) -> None:
        self._spec, self._run, self._cluster, self._faults, self._died = spec, run, cluster, faults, died
        self._until = min(until or spec.train.steps, spec.train.steps)
        self._bundle, self._useful = spec.resources.per_worker.bundle, spec.resources.workers.max
        self._holders, self._stragglers = SnapshotServers(spec, cluster), Stragglers()
        self._notices = cluster.services(NOTICES, s) if (s := spec.resources.notices) else None
        self._record: RunHistory | None = None
        self._state = State()
        self._rules = Policy(spec, lambda workers: None)
        self._planner: Planner | None = None
        self._data = self._shards = ""
        self._stored = StorageWait(spec, lambda: bool(self._stop), self._tell)
        self._preparing = DataPreparation(spec, run, self._stored, self._tell)
        self._gang: Gang = cluster.gang()
        self._running, self._beat = False, GangStatus()
        self._room = Capacity(self._gang, self._bundle, spec.resources.workers.min)
        self._exports = BackgroundExport(cluster, spec, run, self._tell_export)
        self._placement_failed = self._stop = self._note = ""
        self._written = 0.0

    def request_stop(self, reason: str) -> None:
        """Commit at the next step boundary and end."""
        self._stop = reason
        if self._running:  # at once: the controller itself may be waiting for storage
            self._gang.request_stop()

    def status(self) -> dict[str, Any]:
        """Phase, step, attempt, layout and ranks, as `orchestrator status` shows them."""
        ranks = self._beat.ranks if self._running else ()
        return status_of(self._spec, self._state, self._record, ranks, self._until, self._note)

    def drive(self) -> dict[str, Any]:
        """Run to an end. Returns the summary; whatever happens, no gang is left behind.

        Raises InputError if the job turns out to be wrong once its data is seen.
        """
        record = self._record = self._stored(lambda: RunHistory(self._spec, self._run, self._died))
        self._state = taken_up(record, self._spec.limits)
        self._write_status(force=True)
        try:
            while self._state.phase not in ENDED:
                self._turn(record)
            self._stop_gang()
            rows = self._stored(lambda: record.counted(self._state.attempt, self._state.step))
            self._event(self._state.phase, self._note)
            return self._stored(lambda: self._summarise(record, rows))
        except Exception as error:
            self._stop_gang()
            if isinstance(error, InputError) and record.withdraw():
                raise
            self._note = str(error) if isinstance(error, InputError) else describe(error)
            self._state = dataclasses.replace(self._state, phase="failed", outcome="failed")
            self._event("failed", self._note)
            self._write_status(force=True)
            raise
        finally:
            self._exports.stop()
            self._gang.close()
            self._holders.stop()
            if self._notices is not None:
                self._notices.stop()
            record.close()

    def _summarise(self, record: RunHistory, rows: RunTotals) -> dict[str, Any]:
        record.settle()
        commit = record.store.latest(deep=False)  # not of the memory of nodes, which ends with the run
        exported = self._exports.done
        summary = finish.finish(self._spec, self._run, commit, self._data, exported, rows, record.tracker)
        self._write_status(force=True)
        return summary

    def _turn(self, record: RunHistory) -> None:
        before = self._state
        seen = self._observe(record)
        self._state, action = decide(self._rules, before, seen)
        self._placement_failed = ""
        self._cluster.want(self._bundle, 0 if self._state.phase in NO_WORKERS else self._useful)
        act = {
            "prepare": self._prepare,
            "wait": self._wait,
            "start": self._start,
            "watch": self._watch,
            "hold": self._hold,
            "ask_stop": self._ask_stop,
            "halt": self._halt,
            "export": self._export,
            "finish": lambda *_: None,
        }[action.do]
        act(record, action, before)
        self._note = action.reason if action.do == "finish" else self._note
        self._write_status(force=self._state.phase != before.phase)

    def _observe(self, record: RunHistory) -> Observation:
        if self._running:
            self._beat = self._gang.poll(record.saved, POLL)
            self._take(record, self._beat.rows)
        now = self._beat.at if self._running else time.monotonic()
        hours, usd = record.spending.count(record.recent, wall())
        for line in record.spending.near():
            self._event(self._state.phase, line)
        return Observation(
            now=now,
            prepared=bool(self._data),
            exported=self._exports.has(self._state.step),
            export_failed=self._exports.failed(self._state.step) if self._state.phase == "export" else "",
            capacity=self._room.count(self._state.phase, self._state.failures, now),
            ready=self._gang.ready(),
            ranks=self._beat.ranks if self._running else (),
            gap=self._beat.gap,
            placement_failed=self._placement_failed,
            stop=self._stop or record.unsaved(),
            step_seconds=record.step_seconds,
            longest_step=record.longest_step,
            restart_seconds=record.history.restart_seconds or FIRST_RESTART,
            spent_hours=hours,
            spent_usd=usd,
        )

    def _take(self, record: RunHistory, rows: tuple[Row, ...]) -> None:
        """Write rows down, tell of saves that failed, and export beside training what was published."""
        record.take(rows)
        for slow in filter(None, [self._stragglers.see(row.get("busy_seconds", ())) for row in rows]):
            place = f"rank {slow[0]} on {self._beat.ranks[slow[0]].node}"
            self._event("train", f"{place} is slow: {slow[1]:.1f} times the median of the ranks")
        for outcome in (outcome for row in rows for outcome in row.get("saves", ())):
            if told := record.note_save(outcome):
                self._note = f"saving pauses: {outcome['reason']}" if outcome["state"] == "failed" else ""
                self._event("train", told)
            if outcome["state"] == "published":
                self._exports.published(outcome["step"])

    def _prepare(self, record: RunHistory, action: Action, _: State) -> None:
        """Data first, in a thread, so that a stop is heard; then what can be planned only over its vocabulary."""
        self._data = self._preparing.look(record.data, POLL)
        if not self._data:
            return
        shape, shards = self._stored(lambda: assemble.check_data(self._spec, self._data))
        self._shards = record.same_shards(shards, self._data)
        for line in assemble.notes_of(self._spec):
            self._event(self._state.phase, line)
        machine = machine_for(self._cluster.offer(self._bundle), self._bundle)
        first, self._planner = self._planner is None, (planner := Planner(self._spec, shape, machine))
        planner.plan(self._spec.resources.workers.max)  # what is illegal is told before anything starts
        self._rules = Policy(self._spec, planner.choose, planner.seconds)
        widest = self._rules.choose(self._useful)
        self._useful = widest.world if widest else self._useful
        if first:
            record.track()
            assemble.keep_excerpt(self._run, self._data)

    def _wait(self, record: RunHistory, action: Action, before: State) -> None:
        self._note = action.reason
        if before.phase == "wait":
            return time.sleep(POLL)
        return self._event("wait", action.reason, data=self._data)

    def _start(self, record: RunHistory, action: Action, before: State) -> None:
        """Roll back to the last sound commit, write the plan, start a gang from there."""
        layout = action.layout
        assert layout is not None
        assert self._planner is not None
        if not assemble.is_whole(self._data):
            self._data, self._state = "", dataclasses.replace(before, phase="prepare")
            return
        bad, attempt = self._state.bad_commits, self._state.attempt
        restored, notes = self._stored(lambda: record.roll_back(bad, attempt))
        for note in notes:
            self._event("wait", f"a commit is passed over: {note}")
        self._state = dataclasses.replace(self._state, step=restored.step if restored else 0)
        plan = self._planner.plan(layout.world)
        record.document("plan.json", {"attempt": self._state.attempt, **plan.to_json()})
        record.tracker.document("plan.json")
        source = f"from the commit at step {restored.step}" if restored else "from the beginning"
        change = {"layout_before": str(before.layout) if before.layout else None, "layout_after": str(layout)}
        self._note = f"starting {layout.world} workers {source}"
        self._event("start", self._note.removeprefix("starting "), layout=layout.to_json(), **change)
        self._write_status(force=True)
        self._beat = GangStatus()
        if self._notices is not None:
            self._notices.everywhere()
        task, entry = self._task(record, layout, restored).to_json(), ENTRY_OF[layout.engine]
        try:
            self._gang.start(layout.world, self._bundle, entry, task, layout.tp, self._room.avoid)
            self._running = True
            self._gang.hold(layout.world + self._spec.resources.spares)
        except TimeoutError as error:
            self._stop_gang()
            self._placement_failed = str(error)

    def _task(self, record: RunHistory, layout: Layout, restored: CommitManifest | None) -> Task:
        assert self._planner is not None
        holders = self._holders.places(self._planner.shape, self._gang.lost())
        record.use_holders(self._holders.token, holders)
        return Task(
            job=self._spec.model_dump(mode="json"),
            layout=layout.to_json(),
            run=self._run.uri,
            data=self._data,
            attempt=self._state.attempt,
            restore=restored.step if restored else None,
            until=self._until,
            token=secrets.token_hex(6),
            holders=tuple(holders),
            holder_token=self._holders.token,
            faults=self._faults,
            skips=tuple(skip.to_json() for skip in self._state.skips),
            shards=self._shards,
        )

    def _watch(self, record: RunHistory, action: Action, before: State) -> None:
        if before.phase == "start" and self._state.phase == "train":
            self._note = ""
            began = record.training_began(self._state.attempt)
            market = record.market(self._cluster.machines(sorted({r.node for r in self._beat.ranks})))
            self._event(
                "train", f"the first step of attempt {self._state.attempt} is done", time=began, **market
            )

    def _hold(self, record: RunHistory, action: Action, before: State) -> None:
        self._note = action.reason
        self._gang.hold(action.workers + self._spec.resources.spares)

    def _ask_stop(self, record: RunHistory, action: Action, before: State) -> None:
        self._note = f"stopping: {action.reason}"
        self._gang.request_stop()

    def _halt(self, record: RunHistory, action: Action, before: State) -> None:
        """End the gang; after a fault, count what must be done again."""
        if self._running:
            self._take(record, self._gang.poll(record.saved).rows)
            self._state = dataclasses.replace(self._state, step=max(self._state.step, record.step))
        self._stop_gang()
        if not action.first_fault:
            if self._state.phase == "export":
                self._exports.try_again()
                self._gang.close()  # what it occupied is free for others while the model is written
            self._note = action.reason
            self._event("stop", action.reason)
            return
        fault = self._state.failures[-1]
        self._note = f"recovering: {action.first_fault}"
        self._faults = still_to_come(self._faults, self._state.step + 2)
        record.leave_out(self._gang.lost())
        bad = self._state.bad_commits
        commit, _ = self._stored(lambda: record.last_commit(bad))
        lost = self._stored(lambda: record.beyond(commit.step if commit else 0))
        told: dict[str, Any] = {
            **fault.to_json(),
            "explained": explain(fault.cause, fault.why),
            "seen": wall() - (time.monotonic() - fault.time),
            "still_seconds": time.monotonic() - before.moved if before.phase == "train" else 0.0,
            "lost_steps": len(lost),
            "seconds_lost": sum(row["step_seconds"] for row in lost),
        }
        reason = "a fault ended the attempt"
        for skip in self._state.skips[len(before.skips) :]:
            reason += f"; {skip.count} samples from position {skip.start} are left out"
            told["skipped"] = skip.to_json()
        self._event("stop", reason, **told)

    def _export(self, record: RunHistory, action: Action, before: State) -> None:
        """Wait for an export under way, then export the last commit."""
        if record.events[-1]["phase"] != "export":
            self._event("export", f"the commit at step {self._state.step}, in the Hugging Face format")
        self._note = "exporting the model"
        self._exports.advance(self._state.step)
        time.sleep(POLL)

    def _tell(self, note: str) -> None:
        self._note = note

    def _tell_export(self, line: str) -> None:
        self._event("export" if self._state.phase == "export" else "train", line)

    def _event(self, phase: str, reason: str, **more: Any) -> None:
        assert self._record is not None
        self._record.event(self._state.attempt, self._state.step, phase, reason, **more)

    def _write_status(self, force: bool = False) -> None:
        assert self._record is not None
        if force or time.monotonic() - self._written > STATUS_EVERY:
            self._written = time.monotonic()
            self._record.document("status.json", self.status())

    def _stop_gang(self) -> None:
        self._running = False
        self._gang.stop()
