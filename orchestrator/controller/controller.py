"""The controller of one run: it observes, decides, acts and records, from job file to summary.

`decide` makes every decision and owns the run's state; the gang does all computation. Everything that the next
controller needs after the death of this one is in the run directory.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from cluster.workers.cluster import Cluster
from cluster.workers.injected_faults import remaining_faults
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED
from orchestrator.config.spec import JobSpec
from orchestrator.controller import finish
from orchestrator.controller.background_evaluation import BackgroundEvaluation
from orchestrator.controller.background_export import BackgroundExport
from orchestrator.controller.controller_log import ControllerLog
from orchestrator.controller.data_preparation import StorageWait
from orchestrator.controller.decide import decide, resume
from orchestrator.controller.events import fault_event, market, start_event
from orchestrator.controller.rollout_workers import RolloutWorkers
from orchestrator.controller.run_history import RunHistory
from orchestrator.controller.run_inputs import DataCheck, RunInputs, accept
from orchestrator.controller.state import (
    FIRST_RESTART,
    WORKERS,
    Action,
    Observation,
    Policy,
    State,
    Stop,
    policy_of,
)
from orchestrator.controller.status_writer import StatusWriter
from orchestrator.controller.stop_file import StopRequests
from orchestrator.controller.workers import POLL, Workers
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from cluster.jobs.job_queue import QueueClient


class Controller:
    """Drives one run in the calling thread. Other threads may call `status` and `request_stop`."""

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
        until_reason: str = Policy.until_reason,
        check_data: DataCheck = accept,
    ) -> None:
        """Prepare to drive a run. Nothing is written before `drive`.

        Args:
            spec: the job.
            run: the run directory.
            until: a step to stop at before the job's last one, None for none.
            cluster: where to run.
            faults: faults to inject, for tests.
            queue: the queue of a cluster that the run shares with other jobs, None if it has the cluster to itself.
            died: whether this controller replaces one that died.
            launched: unix time of the command that started the run, 0 if unknown.
            until_reason: why it stops at that step, for people.
            check_data: called with the prepared data before training. It may raise InputError.
        """
        self._spec = spec
        self._run = run
        self._until = min(until or spec.train.steps, spec.train.steps)
        self._faults = faults
        self._queue = queue
        self._died = died
        self._launched = launched
        self._status_writer = StatusWriter(
            spec.name, spec.workload.objective, spec.train.steps, self._until, spec.evaluate
        )
        self._stop_requests = StopRequests(run, self._status_writer.processes[0])
        self.log = ControllerLog(run.uri)
        self._state = State(phase="queue" if queue else "prepare")
        self._policy = policy_of(spec, lambda workers: None, until_reason=until_reason)
        """The planner of `decide`. Has no layouts before the data is prepared."""
        self._most_rollout_workers = rollout.max if (rollout := self._policy.rollout_workers) else 0
        self._useful_workers = spec.resources.workers.max
        """The most workers that any layout of the job uses."""
        self._stop: Stop | None = None
        """Why the run was asked to stop."""
        self._restored: int | None = None
        """The step of the commit that the gang started from; None except in the pass after a start."""
        self._placement_failed = ""
        """Why the gang could not be placed; empty except in the pass after that."""

        self._retry_storage = StorageWait(spec.limits.unsaved, give_up=self._hears_stop, tell=self._set_note)
        """Calls a function that needs storage, again and again until storage answers."""
        self._inputs = RunInputs(
            spec, run, cluster, check=check_data, stored=self._retry_storage, tell=self._set_note
        )
        generating = spec.all_workers.min - spec.resources.workers.min
        self._workers = Workers(
            cluster,
            run,
            self._inputs.demand,
            spec.checkpoint,
            model=spec.workload.model,
            generating=generating,
        )
        self._exports = BackgroundExport(
            cluster, spec.checkpoint, spec.evaluate, run, tell=self._export_event
        )
        self._evaluations = BackgroundEvaluation(
            cluster,
            run,
            job=spec.model_dump(mode="json"),
            bundle=spec.resources.per_worker.bundle,
            evaluate=spec.evaluate,
            steps=spec.train.steps,
            checkpoint=spec.checkpoint,
            decay_from=spec.train.decay_from,
            faults=faults,
        )
        self._rollouts = RolloutWorkers(
            cluster,
            run.uri,
            requested=self._policy.rollout_workers,
            bundle=spec.resources.per_worker.bundle,
            limits=self._policy.device_limits,
            prices=spec.limits,
            kind=self._policy.worker_kind,
        )
        if self._policy.rollout_workers is not None:
            self._status_writer.rollout_changes = self._rollouts.changes

    def request_stop(self, reason: str) -> None:
        """Ask the run to commit at the next step boundary and end."""
        self._stop = Stop("request", reason)
        # The gang is asked directly, because the controller may be waiting for storage.
        if self._workers.running:
            self._workers.request_stop()

    def status(self) -> dict[str, Any]:
        """Return the phase, step, attempt, layout and ranks, as `orchestrator status` shows them."""
        return self._status_writer.status(
            self._state, self._workers.ranks, self._evaluations.text, self._rollouts.running
        )

    def drive(self) -> dict[str, Any]:
        """Drive the run to its end and return the summary. No gang is left behind, whatever happens.

        Raises:
            InputError: the job turns out to be wrong once its data is read.
        """
        history = self._status_writer.history = self._retry_storage(self._open_history)
        events = history.event_history
        self._state = resume(self._spec.limits, history.state(self._state.phase), events.died_last)
        if self._died and events.requested_stop:  # the process that asked the dead controller may be gone
            self._stop = Stop("request", events.requested_stop)
        self._write_status(force=True)
        try:
            while self._state.phase not in ENDED:
                self._advance(history)
            self._workers.stop()
            rows = self._retry_storage(lambda: history.counted(self._state.attempt, self._state.step))
            self._event(self._state.phase, self._status_writer.note)
            summary = self._retry_storage(
                lambda: finish.finish(
                    self._spec.summarised,
                    self._run,
                    history,
                    data=self._inputs.data.uri,
                    exported=self._exports.done,
                    rows=rows,
                    tracked=self._spec.tracked,
                    checkpoint=self._spec.checkpoint,
                    evaluate=self._spec.evaluate,
                    needs_base=self._spec.needs_base,
                )
            )
            self._write_status(force=True)
            return summary
        except Exception as error:
            self._workers.stop()
            if isinstance(error, InputError) and history.withdraw():
                raise
            self._status_writer.note_error(error)
            observation = Observation(now=time.monotonic(), crashed=self._status_writer.note)
            self._state, _ = decide(self._policy, self._state, observation)
            self._event("failed", self._status_writer.note)
            self._write_status(force=True)
            raise
        finally:
            self._stop_requests.close()
            self._inputs.preparation.close()
            self._exports.stop()
            self._evaluations.stop()
            self._workers.close()
            self._rollouts.close()
            history.close()

    def _open_history(self) -> RunHistory:
        return RunHistory(self._spec, self._run, died=self._died, log=self.log, launched=self._launched)

    def _hears_stop(self) -> bool:
        """Look for a request of another process, and return whether the run was asked to stop."""
        if self._stop is None and (reason := self._stop_requests.look()):
            self.request_stop(reason)
        return self._stop is not None

    def _advance(self, history: RunHistory) -> None:
        """Run one pass of the loop: observe, decide, act, record."""
        before = self._state
        self._hears_stop()
        observation = self._observe(history)
        state, action = decide(self._policy, before, observation)
        if (suspected := action.fault) is not None and suspected.is_hang:
            # Decided again with the answers, so that every text about the fault names the ranks that are missing, and
            # a rank that a busy machine held up is no fault if it goes on meanwhile.
            seen = self._workers.ask_what_hangs(lambda: self._record(history))
            observation = dataclasses.replace(observation, now=seen.at, ranks=seen.ranks, gap=seen.gap)
            state, action = decide(self._policy, before, observation)
            if action.fault is None and state.phase == "train":
                self._event("train", f"{suspected.text}; then it went on")
        self._state = state
        self._placement_failed = ""
        self._restored = None
        most = 0 if self._rollouts.are_finished else self._most_rollout_workers
        self._workers.want(WORKERS.get(self._state.phase, self._useful_workers + most))
        self._evaluate(history, before)
        rank_nodes = {rank.node for rank in self._workers.ranks}
        workers = self._workers
        self._rollouts.follow(
            self._state.rollout_workers, workers.avoid, rank_nodes, lost=workers.lost_nodes()
        )
        for line in self._rollouts.take_news(rank_nodes, self._state.phase):
            self._event(self._state.phase, line)
        self._act(history, action, before)
        self._drain_wrong_nodes(history)
        self._release_surplus(before)
        self._write_status(force=self._state.phase != before.phase)

    def _observe(self, history: RunHistory) -> Observation:
        workers, exports, state = self._workers, self._exports, self._state
        is_preparing = self._inputs.preparation.goes_on(workers.running, self.request_stop)
        self._record(history)
        if self._queue is not None:
            self._queue.report_nodes([rank.node for rank in workers.ranks])
        now = workers.status.at if workers.running else time.monotonic()
        failures = self._rollouts.with_failures(state.failures, now - self._spec.limits.restart_window)
        capacity = workers.capacity(state.phase, failures, now, self._workers_outside_gang, state.wrong_nodes)
        may_start = self._state.phase == "wait" and capacity >= self._spec.all_workers.min
        if may_start and not is_preparing:  # files may be lost during a long wait
            self._inputs.forget_lost_data()
        hours, usd = history.spent()
        self._evaluations.look(history)
        rollout_failures = self._rollouts.look()
        for ceiling in history.spending.near():
            self._event(self._state.phase, str(ceiling), ceiling=dataclasses.asdict(ceiling))
        step = self._state.step
        if self._stop is not None and self._state.phase == "export":
            is_exported = exports.stop_export(step)
        else:
            is_exported = exports.has_last(step)
        return Observation(
            now=now,
            admission=self._queue.admission if self._queue else None,
            restored=self._restored,
            recorded=history.step,
            prepared=bool(self._inputs.data.uri),
            data_moved=self._inputs.preparation.moved if is_preparing else 0.0,
            exported=is_exported,
            tasks_done=exports.tasks.done,
            export_failed=exports.failed(step) if self._state.phase == "export" else "",
            capacity=capacity,
            ready=workers.ready(),
            ranks=workers.ranks,
            gap=workers.status.gap,
            rollout_workers=len(self._rollouts.running),
            rollout_failures=rollout_failures,
            rollouts_moved=self._rollouts.moved,
            rollouts_done=self._rollouts.done,
            rollouts_finished=self._rollouts.are_finished,
            placement_failed=self._placement_failed,
            stop=self._stop or history.saves.stop(),
            step_seconds=history.step_seconds,
            longest_step=history.longest_step,
            restart_seconds=history.event_history.restart_seconds or FIRST_RESTART,
            spent_hours=hours,
            spent_usd=usd,
            unevaluated=self._evaluations.waiting,
            evaluation_failed=self._evaluations.failed,
        )

    def _workers_outside_gang(self, avoid: Set[str]) -> int:
        """Return how many workers the run occupies besides those of its gang, without rollout workers on `avoid`."""
        return self._evaluations.occupied_workers() + self._rollouts.occupied_workers(avoid)

    def _record(self, history: RunHistory, wait: float = POLL) -> None:
        """Poll the gang, report stragglers and failed saves, and pass on new commits for export and evaluation."""
        rows = self._workers.poll(history.files.saved, wait)
        history.take(rows)
        history.files.nodes.add(self._workers.take_node_metrics(), self._state.attempt)
        for line in self._workers.stragglers_in(rows):
            self._event("train", line)
        for save in (save for row in rows for save in row.get("saves", ())):
            if line := history.saves.note(save):
                paused = f"saving to {self._run.uri} pauses and is tried again: {save['reason']}"
                self._status_writer.note = paused if save["state"] == "failed" else ""
                self._event("train", line, saving=save["state"])
            if save["state"] == "published":
                history.copies.tracker.committed()
                self._exports.published(save["step"])
                self._evaluations.published(save["step"], self._state)

    def _evaluate(self, history: RunHistory, before: State) -> None:
        """Follow the decision on background evaluations, and report their outcomes."""
        phase = self._state.phase
        self._evaluations.follow(
            self._state,
            self._inputs.data,
            self._inputs.shards,
            base=self._inputs.base_json,
            folder_config=self._inputs.folder_config_json,
        )
        for line in self._evaluations.news.take(phase):
            self._event(phase, line)
        if phase != before.phase and "evaluate" in (phase, before.phase):
            self._retry_storage(lambda: self._evaluations.store_results(history))

    def _act(self, history: RunHistory, action: Action, before: State) -> None:
        match action.do:
            case "queue" | "evaluate":
                self._status_writer.wait(self._state, action.do, action.reason)
            case "leave_queue":
                self._make_room(action.reason)
            case "prepare":
                self._prepare(history, action.reason)
            case "wait":
                self._status_writer.wait(
                    self._state,
                    "wait",
                    action.reason,
                    data=self._inputs.data.uri,
                    base=self._inputs.base_json,
                    teacher=self._inputs.teacher_json,
                    sets=self._inputs.data.sets,
                )
            case "start":
                self._start(history, action, before)
            case "watch" if before.phase == "start" and self._state.phase == "train":
                self._note_first_step(history)
            case "prewarm":
                self._status_writer.note = action.reason
                self._workers.prewarm(action.workers)
            case "finish":
                self._status_writer.note = action.reason
            case "ask_stop":
                self._status_writer.note = f"stopping: {action.reason}"
                self._event(self._state.phase, self._status_writer.note, stopping=action.reason)
                self._workers.request_stop()
            case "halt":
                self._halt(history, action, before)
            case "export" | "tasks":
                job = self._exports if action.do == "export" else self._exports.tasks
                job.advance(self._state.step)
                self._status_writer.wait(self._state, "export", action.reason)

    def _release_surplus(self, before: State) -> None:
        """Release prewarmed workers that the gang will not use, or that rollout workers need more."""
        state = self._state
        if not self._workers.running or state.layout is None or state.resizing or state.roomy:
            return
        if before.roomy or state.no_rollouts:
            self._workers.prewarm(state.layout.world)

    def _drain_wrong_nodes(self, history: RunHistory) -> None:
        """Drain the nodes that compute wrongly, and report how that went."""
        wrong, phase = self._state.wrong_nodes, self._state.phase
        # Another event would look like the beginning of a phase that has not begun, or of an attempt.
        if not wrong or phase in ENDED or phase == "start" or history.events[-1]["phase"] != phase:
            return
        self._rollouts.leave(wrong)
        for line in self._workers.drain(wrong):
            self._event(phase, line)

    def _make_room(self, reason: str) -> None:
        """Free everything that the run holds on the cluster, and join the end of the queue."""
        assert self._queue is not None
        self._event("queue", reason)
        self._workers.give_back()
        self._rollouts.give_back()
        self._queue.requeue()

    def _prepare(self, history: RunHistory, reason: str) -> None:
        """Prepare the data, and then the plan, which needs the size of the vocabulary.

        The data is prepared in a thread, so this returns soon and a stop is noticed in time.
        """
        if history.events[-1]["phase"] != "prepare":
            self._status_writer.note = reason
            self._event("prepare", reason)
            self._workers.give_back_processors()  # the preparation needs the CPUs that the last gang occupied
        if not self._inputs.look(history, POLL):
            return
        self._workers.prewarm_first(self._useful_workers)  # imports overlap with the seconds that follow
        is_first = self._inputs.planner is None
        notes = self._inputs.resolve(history, self._hears_stop, lambda: self._workers.running)
        planner = self._inputs.planner
        assert planner is not None
        for line in notes:
            self._event(self._state.phase, line)
        # Raises InputError if no layout is legal, before anything starts.
        planner.plan(self._spec.resources.workers.max)
        self._policy = dataclasses.replace(self._policy, choose=planner.choose, predict=planner.seconds)
        if widest := self._policy.choose(self._useful_workers):
            self._useful_workers = widest.world
        if is_first:
            history.track()
            self._inputs.keep_excerpt()

    def _start(self, history: RunHistory, action: Action, before: State) -> None:
        """Roll back to the last sound commit, write the plan, and start a gang from there."""
        planner = self._inputs.planner
        layout = action.layout
        assert planner is not None
        assert layout is not None
        state = self._state
        commit, notes = self._retry_storage(
            lambda: history.roll_back(state.bad_commits, state.attempt, state.doubtful_after)
        )
        if state.without_workers:
            lacks = "there is no room for a teacher worker"
            notes = [*notes, f"{lacks}: the training workers compute any missing logits before they train"]
        for note in notes:
            self._event("wait", note)
        if commit is None:  # the job may begin with the commit of another run
            commit = self._inputs.first_commit()
        self._retry_storage(lambda: self._evaluations.find(history))
        self._restored = commit.step if commit else 0
        history.trace.begin(planner, state.attempt, layout.world)
        reason, fields = start_event(self._spec.train, layout, before.layout, commit, planner.refused)
        self._status_writer.note = f"starting {reason}"
        self._event("start", reason, step=self._restored, **fields)
        self._write_status(force=True)
        try:
            snapshots = self._workers.snapshots(planner.shape)
            history.commits.use_snapshot_servers(snapshots["snapshot_token"], snapshots["snapshot_servers"])
            services = snapshots if state.without_workers else {**snapshots, **self._rollouts.task_fields()}
            task = self._inputs.task(state, commit, until=self._until, faults=self._faults, **services)
            self._workers.start(layout, task)
            self._rollouts.begin(task)
        except TimeoutError as error:
            self._placement_failed = str(error)

    def _note_first_step(self, history: RunHistory) -> None:
        self._status_writer.note = ""
        attempt = self._state.attempt
        machines = self._workers.machines()
        fields, problem = market(self._spec.limits, machines, history.training_began(attempt))
        self._event("train", f"the first step of attempt {attempt} is done{problem}", **fields)
        self._exports.check_push()

    def _halt(self, history: RunHistory, action: Action, before: State) -> None:
        """Stop the gang. After a fault, also record which steps must be repeated."""
        self._record(history, wait=0.0)
        step = max(self._state.step, history.step)
        printed = self._workers.printed(action.fault)
        self._workers.stop()
        self._rollouts.forget(before.attempt + 1)
        if action.fault is None:
            self._status_writer.note = action.reason
            self._event("stop", action.reason, step=step)
            if self._state.phase in ("evaluate", "export"):
                self._exports.try_again()
                self._rollouts.give_back()
                self._workers.free()  # other jobs may use the workers while the model is evaluated and exported
                if self._queue is not None:
                    self._queue.leave()
            return
        self._status_writer.note = f"recovering: {action.fault.text}"
        self._write_status(force=True)
        # A rank may be a step ahead of the last row that arrived.
        self._faults = remaining_faults(self._faults, step + 2)
        state = self._state
        history.commits.leave_out(self._workers.lost_nodes() | state.wrong_nodes)
        commit, _ = self._retry_storage(lambda: history.last_commit(state.bad_commits, state.doubtful_after))
        lost = self._retry_storage(lambda: history.files.after(commit.step if commit else 0))
        reason, fields = fault_event(before, self._state, action.fault, lost, printed)
        self._event("stop", reason, step=step, **fields)

    def _set_note(self, note: str) -> None:
        if self._state.phase not in ENDED:
            self._status_writer.note = note

    def _export_event(self, line: str, **more: Any) -> None:
        phase = "export" if self._state.phase == "export" else "train"
        self._event(phase, line, **more)

    def _event(self, phase: str, reason: str, step: int | None = None, **more: Any) -> None:
        self._status_writer.event(self._state, phase, reason, step, **more)

    def _write_status(self, force: bool = False) -> None:
        """Write status.json if that is due, or if `force` is set."""
        if force or self._status_writer.is_status_due:
            self._status_writer.write_status(self.status())
