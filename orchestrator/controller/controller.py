"""Observe, decide, act, record: the life of one run from job file to summary.

The controller decides nothing itself (`decide` does, which owns the run's state) and computes nothing (the gang does).
All that it needs to go on after its own death stands in the run directory.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import psutil

from cluster.workers.clock import wall
from cluster.workers.cluster import Cluster
from cluster.workers.gang import RankStatus
from cluster.workers.injected_faults import remaining_faults
from cluster.workers.rank_process import describe
from orchestrator.checkpoint.identity import CODE
from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED
from orchestrator.config.own_code import check_same_code, code_of, roots_of
from orchestrator.config.redact import redact_message
from orchestrator.config.spec import JobSpec
from orchestrator.controller import finish
from orchestrator.controller.background_evaluation import EvaluationBeside
from orchestrator.controller.background_export import BackgroundExport
from orchestrator.controller.controller_log import ControllerLog
from orchestrator.controller.data_preparation import DataPreparation, StorageWait
from orchestrator.controller.decide import decide, resume
from orchestrator.controller.events import fault_event, market, start_event
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.state import (
    FIRST_RESTART,
    WORKERS,
    Action,
    Observation,
    Phase,
    Policy,
    State,
    Stop,
)
from orchestrator.controller.workers import POLL, Workers
from orchestrator.observe.step_parts import StepParts, latest, why_slow
from orchestrator.parallel.layout import Layout
from orchestrator.planner.machines import told
from orchestrator.planner.planner import Planner
from orchestrator.resolve.base import NO_BASE, base_json, same_base
from orchestrator.resolve.continued import begun_from, take_over
from orchestrator.resolve.kept_config import config_json, kept_config
from orchestrator.resolve.pinned_base import bases_of
from orchestrator.resolve.prepared_data import PreparedData, is_whole, keep_excerpt
from orchestrator.storage.row_line import Row
from orchestrator.storage.row_types import EventFields
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.task import Task
from workloads.hf.hf_config import FolderConfig

if TYPE_CHECKING:
    from cluster.jobs.job_queue import QueueClient


EVENTS_SHOWN = 3
STATUS_EVERY = 1.0
"""Seconds between writings of status.json."""


def status_of(
    spec: JobSpec,
    state: State,
    history: RunHistory | None,
    ranks: tuple[RankStatus, ...],
    until: int,
    note: str,
    evaluation: str = "",
) -> dict[str, Any]:
    """Phase, step, attempt, layout and ranks, what is evaluated beside them, the time left in seconds while the run
    trains up to `until`, and what the run has cost so far."""
    rows = history.recent if history else ()
    last, recent = rows[-1] if rows else {}, latest(rows)
    parts = StepParts(recent)
    left = (until - state.step) * (history.step_seconds if history else 0.0)
    return {
        "name": spec.name,
        "objective": spec.workload.objective,
        "phase": state.phase,
        "step": state.step,
        "steps": spec.train.steps,
        "attempt": state.attempt,
        "layout": str(state.layout) if state.layout else None,
        "loss": last.get("loss"),
        "tokens_per_second": last.get("tokens_per_second"),
        "mfu": last.get("mfu"),
        "step_parts": parts.means,
        "why_slow": why_slow(parts, recent),
        "validation": _validation(history) if history else None,
        "memory_bytes": last.get("memory_bytes"),
        "predicted_memory_bytes": history.predicted_memory if history else None,
        "goodput": _goodput(history) if history else None,
        "usd": history.spending.spent[1] or None if history else None,
        "latest_events": [_shown(event) for event in history.events[-EVENTS_SHOWN:]] if history else [],
        "eta_seconds": left if left and state.phase == "train" else None,
        "note": redact_message(note),
        "evaluation": evaluation,
        "missing_rows": history.event_history.missing if history else [],
        "rows": history.mark if history else None,
        "events": history.events_stored if history else 0,
        "time": time.time(),
        "pid": os.getpid(),
        "memory_percent": psutil.virtual_memory().percent,
        "nodes": history.nodes.latest if history else {},
        "ranks": [
            {"rank": r.rank, "node": r.node, "pid": r.pid, "state": r.state, "step": r.step} for r in ranks
        ],
    }


def _validation(history: RunHistory) -> dict[str, Any] | None:
    """The step and the losses of the last evaluation that this controller knows of."""
    row = history.evaluations.latest
    if row is None:
        return None
    losses = {name: metrics["loss"] for name, metrics in row["sets"].items() if "loss" in metrics}
    return {"step": row["step"], "loss": losses} if losses else None


def _goodput(history: RunHistory) -> float | None:
    """About the share of the time since the run began that its steps took: the summary has it exactly."""
    events = history.events
    until = events[-1]["time"] if events and events[-1]["phase"] in ENDED else wall()
    passed = until - events[0]["time"] if events else 0.0
    return min(history.step * history.step_seconds / passed, 1.0) if passed > 0 and history.step else None


def _shown(event: Row) -> dict[str, Any]:
    fault = event.get("first_fault")
    return {
        "time": event["time"],
        "phase": event["phase"],
        "reason": f"{event.get('reason')}: {fault}" if fault else event.get("reason"),
    }


def training_task(
    spec: JobSpec, run: RunDir, data: PreparedData, state: State, commit: CommitManifest | None, **more: Any
) -> Task:
    """The task of the attempt that `state` is at, from that commit; `more` are other fields of it. Raises InputError if
    the user's own code has changed."""
    assert state.layout is not None
    if commit is not None:  # the files may have been edited since the last attempt
        check_same_code(spec, commit.meta.get(CODE) or {}, run.uri)
    return Task(
        job=spec.model_dump(mode="json"),
        layout=state.layout.to_json(),
        run=run.uri,
        data=data.uri,
        attempt=state.attempt,
        restore=commit.step if commit else None,
        token=secrets.token_hex(6),
        skips=tuple(skip.to_json() for skip in state.skips),
        sets=data.sets,
        code=code_of(spec),
        code_roots=tuple(roots_of(spec)),
        **more,
    )


RATIO = 1.5
"""Times the lower median of all ranks that one must take to be slow."""
LEAST = 0.02
"""Seconds by which it must be slower: less is noise."""
STEADY = 5
"""Steps in a row after which it is told."""


class Stragglers:
    """Looks at step after step."""

    def __init__(self) -> None:
        self._rank, self._steps = -1, 0

    def see(self, busy: Sequence[float]) -> tuple[int, float] | None:
        """The rank that has been slowest for STEADY steps, and how many times the median it took; told once.

        Args:
            busy: seconds of each rank in one step; empty or zeros where the layout does not tell.
        """
        middle = statistics.median_low(busy) if len(busy) > 1 else 0.0
        slowest = max(busy, default=0.0)
        if not middle or slowest < RATIO * middle or slowest - middle < LEAST:
            self._rank, self._steps = -1, 0
            return None
        rank = list(busy).index(slowest)
        self._steps = self._steps + 1 if rank == self._rank else 1
        self._rank = rank
        return (rank, slowest / middle) if self._steps == STEADY else None


class Controller:
    """Drives one run in the calling thread; `status` and `request_stop` may be called from others."""

    def __init__(
        self,
        spec: JobSpec,
        run: RunDir,
        until: int | None,
        cluster: Cluster,
        faults: tuple[str, ...] = (),
        queue: QueueClient | None = None,
        died: bool = False,
        launched: float = 0.0,
    ) -> None:
        """`faults` are injected, for tests. With a `queue` the run shares its cluster with others. `died` says that
        this controller takes the place of one that died, `launched` when the command was given, unix seconds."""
        self._spec, self._run, self._faults, self._died, self._queue = spec, run, faults, died, queue
        self._until = min(until or spec.train.steps, spec.train.steps)
        self.log = ControllerLog(run.uri)
        self._opened = lambda: RunHistory(spec, run, died, self.log, launched)
        self._workers = Workers(spec, cluster, run)
        self._useful, self._stragglers = spec.resources.workers.max, Stragglers()
        self._history: RunHistory | None = None
        self._state = State(phase="queue" if queue else "prepare")
        self._policy = Policy(spec, lambda workers: None)
        self._planner: Planner | None = None
        self._data, self._shards, self._base = PreparedData(), "", NO_BASE
        self._kept: FolderConfig | None = None
        self._stored = StorageWait(spec, lambda: self._stop is not None, self._tell)
        self._preparing = DataPreparation(spec, run, self._stored, self._tell)
        self._exports = BackgroundExport(cluster, spec, run, self._tell_export)
        self._beside = EvaluationBeside(cluster, spec, run, faults)
        self._stop: Stop | None = None
        self._restored: int | None = None
        self._placement_failed, self._note, self._written = "", "", 0.0

    def request_stop(self, reason: str) -> None:
        """Commit at the next step boundary and end."""
        self._stop = Stop("request", reason)
        if self._workers.running:  # at once: the controller itself may be waiting for storage
            self._workers.request_stop()

    def status(self) -> dict[str, Any]:
        """Phase, step, attempt, layout and ranks, as `orchestrator status` shows them."""
        ranks, beside = self._workers.ranks, self._beside.text
        return status_of(self._spec, self._state, self._history, ranks, self._until, self._note, beside)

    def drive(self) -> dict[str, Any]:
        """Run to an end. Returns the summary; whatever happens, no gang is left behind.

        Raises InputError if the job turns out to be wrong once its data is seen.
        """
        history = self._history = self._stored(self._opened)
        past = history.event_history
        self._state = resume(self._spec.limits, history.state(self._state.phase), past.died_last)
        if self._died and past.stop_asked:  # who asked may be gone
            self._stop = Stop("request", past.stop_asked)
        self._write_status(force=True)
        try:
            while self._state.phase not in ENDED:
                self._advance(history)
            self._workers.stop()
            rows = self._stored(lambda: history.counted(self._state.attempt, self._state.step))
            self._event(self._state.phase, self._note)
            ended = self._spec, self._run, history, self._data.uri, self._exports.done, rows
            summary = self._stored(lambda: finish.finish(*ended))
            self._write_status(force=True)
            return summary
        except Exception as error:
            self._workers.stop()
            if isinstance(error, InputError) and history.withdraw():
                raise
            self._note = str(error) if isinstance(error, InputError) else describe(error)
            observation = Observation(now=time.monotonic(), crashed=self._note)
            self._state, _ = decide(self._policy, self._state, observation)
            self._event("failed", self._note)
            self._write_status(force=True)
            raise
        finally:
            self._preparing.close()
            self._exports.stop()
            self._beside.stop()
            self._workers.close()
            history.close()

    def _advance(self, history: RunHistory) -> None:
        """One turn of the loop: observe, decide, act, record."""
        before, observation = self._state, self._observe(history)
        self._state, action = decide(self._policy, before, observation)
        self._placement_failed, self._restored = "", None
        self._workers.want(WORKERS.get(self._state.phase, self._useful))
        self._evaluate(history, before)
        self._act(history, action, before)
        self._write_status(force=self._state.phase != before.phase)

    def _observe(self, history: RunHistory) -> Observation:
        workers, growing = self._workers, self._preparing.goes_on(self._workers.running, self.request_stop)
        self._record(history, workers.poll(history.saved))
        if self._queue is not None:
            self._queue.report_nodes([rank.node for rank in workers.ranks])
        now = workers.status.at if workers.running else time.monotonic()
        capacity = workers.capacity(self._state.phase, self._state.failures, now, self._beside.held)
        may_start = self._state.phase == "wait" and capacity >= self._spec.resources.workers.min
        if may_start and not (growing or is_whole(self._data)):  # a wait may be long, its files many
            self._data = PreparedData()
        hours, usd = history.spending.count(history.recent, wall())
        self._beside.look(history)
        stops_export = self._stop is not None and self._state.phase == "export"
        is_exported = self._exports.settle if stops_export else self._exports.has_last
        for ceiling in history.spending.near():
            self._event(self._state.phase, str(ceiling), ceiling=dataclasses.asdict(ceiling))
        return Observation(
            now=now,
            admission=self._queue.admission if self._queue else None,
            restored=self._restored,
            recorded=history.step,
            prepared=bool(self._data.uri),
            data_moved=self._preparing.moved if growing else 0.0,
            exported=is_exported(self._state.step),
            tasks_done=self._exports.tasks.done,
            export_failed=self._exports.failed(self._state.step) if self._state.phase == "export" else "",
            capacity=capacity,
            ready=workers.ready(),
            ranks=workers.ranks,
            gap=workers.status.gap,
            placement_failed=self._placement_failed,
            stop=self._stop or history.saves.stop(),
            step_seconds=history.step_seconds,
            longest_step=history.longest_step,
            restart_seconds=history.event_history.restart_seconds or FIRST_RESTART,
            spent_hours=hours,
            spent_usd=usd,
            unevaluated=self._beside.waiting,
            evaluation_failed=self._beside.failed,
        )

    def _record(self, history: RunHistory, rows: tuple[Row, ...]) -> None:
        """Store rows, report stragglers and saves that failed, and export beside training what was published."""
        history.take(rows)
        history.nodes.add(self._workers.take_readings(), self._state.attempt)
        for slow in filter(None, [self._stragglers.see(row.get("busy_seconds", ())) for row in rows]):
            where = f"rank {slow[0]} on {self._workers.ranks[slow[0]].node}"
            self._event("train", f"{where} is slow: {slow[1]:.1f} times the median of the ranks")
        for save in (save for row in rows for save in row.get("saves", ())):
            if line := history.saves.note(save):
                self._note = f"saving pauses: {save['reason']}" if save["state"] == "failed" else ""
                self._event("train", line, saving=save["state"])
            if save["state"] == "published":
                history.tracker.committed()
                self._exports.published(save["step"])
                self._beside.published(save["step"], self._state)

    def _evaluate(self, history: RunHistory, before: State) -> None:
        """Evaluate beside the run what was decided on, and tell of it in a phase that goes on."""
        phase = self._state.phase
        self._beside.follow(
            self._state, self._data, self._shards, base_json(self._base), config_json(self._kept)
        )
        for line in self._beside.news(phase):
            self._event(phase, line)
        if phase != before.phase and "evaluate" in (phase, before.phase):
            self._stored(lambda: self._beside.settle(history))

    def _act(self, history: RunHistory, action: Action, before: State) -> None:
        match action.do:
            case "queue" | "evaluate":
                self._pause(history, action.do, action.reason)
            case "leave_queue":
                self._make_room(action.reason)
            case "prepare":
                self._prepare(history, action.reason)
            case "wait":
                begun: EventFields = {"data": self._data.uri, "base": base_json(self._base)}
                self._pause(history, "wait", action.reason, **begun | {"sets": self._data.sets})
            case "start":
                assert action.layout is not None
                self._start(history, action.layout, before.layout)
            case "watch" if before.phase == "start" and self._state.phase == "train":
                self._note_first_step(history)
            case "prewarm" | "finish":
                self._note = action.reason
                if action.do == "prewarm":
                    self._workers.prewarm(action.workers)
            case "ask_stop":
                self._note = f"stopping: {action.reason}"
                self._event(self._state.phase, self._note, stopping=action.reason)
                self._workers.request_stop()
            case "halt":
                self._halt(history, action, before)
            case "export" | "tasks":
                (self._exports if action.do == "export" else self._exports.tasks).advance(self._state.step)
                self._pause(history, "export", action.reason)

    def _pause(self, history: RunHistory, phase: Phase, reason: str, **more: Unpack[EventFields]) -> None:
        """Nothing to do but wait; the first time, it is recorded."""
        self._note = reason
        if history.events[-1]["phase"] == phase:
            time.sleep(POLL)
        else:
            self._event(phase, reason, **more)

    def _make_room(self, reason: str) -> None:
        """Give back all that the run holds on the cluster, and queue behind those that wait already."""
        assert self._queue is not None
        self._event("queue", reason)
        self._workers.give_back()
        self._queue.requeue()

    def _prepare(self, history: RunHistory, reason: str) -> None:
        """Data first, in a thread, so that a stop is heard; then what can be planned only over its vocabulary."""
        if history.events[-1]["phase"] != "prepare":
            self._note = reason
            self._event("prepare", reason)
            self._workers.give_back_processors()  # of the last gang: data that is made again needs them
        self._data = self._preparing.look(history, POLL)
        if not self._data.uri:
            return
        self._workers.prewarm_first(self._useful)  # what follows takes seconds
        source, commit = self._stored(lambda: begun_from(self._spec, self._run, history.newest))
        self._base, needed = self._stored(lambda: bases_of(self._spec, history.base, commit, self._run))
        kept = kept_config(commit) or self._kept
        shape, self._kept, shards, notes = self._stored(
            lambda: self._workers.resolved(self._data, needed, source, kept)
        )
        self._shards = history.same_shards(shards, self._data.uri)
        first = self._planner is None
        planner = self._planner = self._workers.planner(shape, lambda: self._stop is not None)
        for line in (*notes, *told(planner.machine, planner.spec.train.dtype)):
            self._event(self._state.phase, line)
        planner.plan(self._spec.resources.workers.max)  # what is illegal is told before anything starts
        self._policy = Policy(self._spec, planner.choose, planner.seconds)
        if widest := self._policy.choose(self._useful):
            self._useful = widest.world
        if first:
            history.track()
            keep_excerpt(self._run, self._data.uri)

    def _start(self, history: RunHistory, layout: Layout, layout_before: Layout | None) -> None:
        """Roll back to the last sound commit, write the plan, start a gang from there."""
        assert self._planner is not None
        state, begun = self._state, (self._run, self._shards, self._data, self._base, self._kept)
        commit, notes = self._stored(lambda: history.roll_back(state.bad_commits, state.attempt))
        for note in notes:
            self._event("wait", note)
        commit = commit or self._stored(lambda: take_over(self._spec, *begun))
        self._stored(lambda: self._beside.find(history))
        self._restored = commit.step if commit else 0
        history.trace.begin(self._planner, state.attempt, layout.world)
        reason, fields = start_event(self._spec, layout, layout_before, commit, self._planner.refused)
        self._note = f"starting {reason}"
        self._event("start", reason, step=self._restored, **fields)
        self._write_status(force=True)
        try:
            self._workers.start(layout, self._task(history, commit))
        except TimeoutError as error:
            self._placement_failed = str(error)

    def _task(self, history: RunHistory, commit: CommitManifest | None) -> Task:
        assert self._planner is not None
        told = self._workers.snapshots(self._planner.shape)
        history.use_holders(told["snapshot_token"], told["snapshot_servers"])
        told |= {"until": self._until, "faults": self._faults, "shards": self._shards, **self._planner.flops}
        told["base"] = base_json(self._stored(lambda: same_base(self._spec, self._base)))
        told["folder_config"] = config_json(self._kept)
        return training_task(self._spec, self._run, self._data, self._state, commit, **told)

    def _note_first_step(self, history: RunHistory) -> None:
        self._note, attempt = "", self._state.attempt
        here, unpriced = market(self._spec.limits, self._workers.machines(), history.training_began(attempt))
        self._event("train", f"the first step of attempt {attempt} is done{unpriced}", **here)

    def _halt(self, history: RunHistory, action: Action, before: State) -> None:
        """End the gang; after a fault, count what must be done again."""
        self._record(history, self._workers.poll(history.saved, wait=0.0))
        step, printed = max(self._state.step, history.step), self._workers.printed(action.fault)
        self._workers.stop()
        if action.fault is None:
            self._note = action.reason
            self._event("stop", action.reason, step=step)
            if self._state.phase in ("evaluate", "export"):
                self._exports.try_again()
                self._workers.free()  # what it occupied is for others while the model is evaluated and written
                if self._queue is not None:
                    self._queue.leave()
            return
        self._note = f"recovering: {action.fault.text}"
        self._write_status(force=True)
        # A rank may be a step further than the last row that was seen.
        self._faults = remaining_faults(self._faults, step + 2)
        history.leave_out(self._workers.lost_nodes())
        commit, _ = self._stored(lambda: history.last_commit(self._state.bad_commits))
        lost = self._stored(lambda: history.beyond(commit.step if commit else 0))
        reason, fields = fault_event(before, self._state, action.fault, lost, printed)
        self._event("stop", reason, step=step, **fields)

    def _tell(self, note: str) -> None:
        self._note = self._note if self._state.phase in ENDED else note

    def _tell_export(self, line: str, **more: Unpack[EventFields]) -> None:
        self._event("export" if self._state.phase == "export" else "train", line, **more)

    def _event(self, phase: str, reason: str, step: int | None = None, **more: Unpack[EventFields]) -> None:
        assert self._history is not None
        at = self._state.step if step is None else step
        self._history.event(self._state.attempt, at, phase, reason, **more)

    def _write_status(self, force: bool = False) -> None:
        assert self._history is not None
        if force or time.monotonic() - self._written > STATUS_EVERY:
            self._written = time.monotonic()
            self._history.document("status.json", self.status())
