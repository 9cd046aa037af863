"""Drive one run from a command: check the job, find or start its controller, and watch it to the end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.workers.stop_signals import held_interruptions
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import redact_message
from orchestrator.launch.active_controller import STOPPED
from orchestrator.launch.finished import finished_summary
from orchestrator.storage.run_directory import RunDir

REFRESH = 0.25
"""Seconds between two questions to the controller."""
LOOK = 5.0
"""Seconds to wait for one answer of the controller before checking whether Ray still runs."""
FIRST_LOOK = 1.0
"""Seconds to wait for one answer of a controller that may still be starting."""
ENDED_TOGETHER = 0.5
"""Seconds after Ray's end within which the signal that ended Ray may also reach this process."""
SILENCE = 120.0
"""Seconds that a controller may be silent. Ray restarts a dead one within that time."""

STOPPING = "asked to stop: the run commits and ends; another Ctrl-C or SIGTERM ends it at once"
"""Shown whether a key, a job manager or `orchestrator stop` asked for it: a submitted job gets a SIGTERM."""


@dataclass(frozen=True)
class RunOutcome:
    """How a command that drove a run ended."""

    outcome: Outcome
    summary: dict[str, Any] | None
    """The run's summary, None without one."""
    line: str = ""
    """A line for the user, without secrets."""
    dead_ray_process: str = ""
    """The process of this command's own Ray whose death ended the run; empty otherwise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", redact_message(self.line))


class WatchedRun:
    """A run that a command watches while its controller drives it."""

    def __init__(self, controller: Any, run_dir: RunDir, begun_with: str = "") -> None:
        """Watch a run.

        Args:
            controller: the handle of its controller.
            run_dir: the run directory.
            begun_with: the job of a controller that this command has just started, as text; empty for an older one.
                Another command may have started the controller at the same moment with another job.
        """
        self.status: dict[str, Any] = {}
        """The controller's last status, empty before the first."""
        self.stopping = False
        """Whether the user wants the run to stop."""
        self.wrong: Exception | None = None
        """The error that `show` raised. It stops the run with a commit, as Ctrl-C does."""
        self._controller = controller
        self._run_dir = run_dir
        self._unconfirmed_job = begun_with
        """The job that the controller should have, until it has confirmed that; empty then."""
        self._began = time.time()
        """When this object was made, unix seconds."""
        self._answered_at = time.monotonic()
        """The monotonic time of the controller's last answer."""
        self._request: Any = None
        """The request to stop that the controller was sent; None again after it was silent."""

    def look(self) -> RunOutcome | None:
        """Ask the controller once. Return how the run has ended, None while it has not."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError

        from cluster.workers.ray_internals import full_folder

        try:
            if self._unconfirmed_job:
                job = _as_text(ray.get(self._controller.job.remote(), timeout=FIRST_LOOK))
                if job != self._unconfirmed_job:
                    return RunOutcome(Outcome.WRONG_INPUT, None, str(_another_job(self._run_dir)))
                self._unconfirmed_job = ""
            if self.stopping and self._request is None:
                self._request = self._controller.request_stop.remote(STOPPED)
            self.status = ray.get(self._controller.status.remote(), timeout=LOOK)
            self._answered_at = time.monotonic()
            return _outcome(self.status) if self.status["summary"] or self.status["error"] else None
        except (RayActorError, GetTimeoutError) as error:
            self._request = None  # Ray may have restarted the controller, which then knows of no stop
            is_silent = time.monotonic() - self._answered_at > SILENCE
            if (outcome := self._outcome_on_disk(is_complete=not is_silent)) is not None:
                return outcome
            if not is_silent:
                return None
            folder = full_folder()
            why = (
                f"the disk of Ray's folder {folder} is full" if folder else " ".join(str(error).split())[:200]
            )
            line = f"the controller is gone: {why}"
            if isinstance(error, GetTimeoutError) and not folder:
                ends = f"`orchestrator stop {self._run_dir.uri}` ends it"
                line = f"the controller has not answered for {SILENCE:.0f} s, and may still run; {ends}"
            return RunOutcome(Outcome.FAILED, None, line)
        except RayError as error:
            why = " ".join(str(error).strip().splitlines()[-1:])[:300]
            line = f"the controller does not answer: {type(error).__name__}: {why}"
            return RunOutcome(Outcome.FAILED, None, line)

    def leave(self) -> None:
        """Stop watching. A controller that confirms the stop ends by itself; one that does not answer is killed."""
        import ray
        from ray.exceptions import RayError

        try:
            ray.get(self._request or self._controller.request_stop.remote(STOPPED), timeout=FIRST_LOOK)
        except RayError:
            with contextlib.suppress(RayError):
                ray.kill(self._controller)

    def outcome_without_ray(self, process: str) -> RunOutcome:
        """Return how a stopping run has ended after Ray's process `process` died too.

        That happens when a job manager ends all processes of a job. Raises KeyboardInterrupt without any commit.
        """
        if (outcome := self._outcome_on_disk()) is not None:
            return outcome
        commit = Store(self._run_dir.commits).latest(deep=False)
        if commit is None:
            raise KeyboardInterrupt
        line = f"stopped, and Ray's {process} with it: the newest commit is that of step {commit.step}"
        return RunOutcome(Outcome.STOPPED, None, line)

    def _outcome_on_disk(self, is_complete: bool = False) -> RunOutcome | None:
        """How the run has ended, if its controller wrote a summary since this object was made.

        Args:
            is_complete: whether the summary must be the last one. A controller writes one before the report and what
                MLflow lacks, and a busy machine lets it answer late meanwhile: the end of Ray would cut them off.
        """
        summary = finished_summary(self._run_dir)
        if is_complete and summary is not None and "tracking" not in summary:
            return None
        if summary and (summary["ended"] or 0.0) > self._began:
            return _outcome_of(summary)
        return None


def watch(begin: Callable[[], WatchedRun], show: Callable[[dict[str, Any]], None]) -> RunOutcome:
    """Begin a run and watch it to its end.

    The run continues without this process. So from its beginning on, the first interruption asks the run to stop and
    waits for that.
    """
    run: WatchedRun | None = None
    while True:
        try:
            if run is None:
                with held_interruptions():
                    run = begin()
            if (outcome := _poll_once(run, show)) is not None:
                return outcome
            time.sleep(REFRESH)
        except KeyboardInterrupt:
            if run is None:
                raise
            if run.stopping:
                run.leave()
                raise
            run.stopping = True


def _poll_once(run: WatchedRun, show: Callable[[dict[str, Any]], None]) -> RunOutcome | None:
    """Ask for the status of a run and show it. Return how the run has ended; None while it continues.

    Raises what `show` has raised, once the run has ended.
    """
    from cluster.workers.ray_internals import dead_main_process

    if process := dead_main_process():
        return _ray_died(run, process, show)
    outcome = run.look()
    if run.wrong is None and (run.status or run.stopping):
        try:
            show({"phase": "connect", **run.status, "note": _note(run)})
        except Exception as error:  # whatever the caller's function raises
            run.wrong = error
            run.stopping = True
    if outcome is None:
        return None
    if run.wrong is not None:
        raise run.wrong
    if run.stopping and outcome.outcome == Outcome.FAILED and _is_without_commit(outcome):
        raise KeyboardInterrupt  # without a commit nothing is lost, so this is as before the run began
    return outcome


def _ray_died(run: WatchedRun, process: str, show: Callable[[dict[str, Any]], None]) -> RunOutcome:
    """Return how a run has ended after Ray's process `process` on this machine died."""
    if run.wrong is not None:
        raise run.wrong
    if not run.stopping:
        time.sleep(ENDED_TOGETHER)  # a signal that ended Ray may also interrupt this process now
        show({**run.status, "phase": "wait", "note": f"Ray's {process} has died; Ray is started again"})
        line = (
            f"Ray's {process} on this machine has died; the same command continues from the last checkpoint"
        )
        return RunOutcome(Outcome.FAILED, None, line, dead_ray_process=process)
    return run.outcome_without_ray(process)


def _note(run: WatchedRun) -> str:
    """Return the note to show: the stop that the user asked for, and the controller's own note."""
    notes = [STOPPING if run.stopping else "", run.status.get("note") or ""]
    return "; ".join(note for note in notes if note)


def _is_without_commit(outcome: RunOutcome) -> bool:
    """Whether the run was stopped before it had a commit."""
    result = outcome.summary or {}
    return result.get("state") == Outcome.STOPPED and result.get("commit") is None


def _answer(method: Any) -> Any:
    """Return what a method of a controller returns. Asks again while Ray is restarting the controller."""
    import ray
    from ray.exceptions import ActorUnavailableError

    deadline = time.monotonic() + SILENCE
    while True:
        try:
            return ray.get(method.remote(), timeout=SILENCE)
        except ActorUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(REFRESH)


def attach(
    job: dict[str, Any],
    run_dir: RunDir,
    until: int | None,
    faults: tuple[str, ...],
    priority: int | None,
    launched: float = 0.0,
    shared: str = "",
) -> WatchedRun:
    """Attach to the controller that drives the run with the same job, or start a new one without waiting for it.

    The caller must hold interruptions until the run is watched.

    Args:
        job: the job file, as plain data.
        run_dir: the run directory.
        until: a step to stop at, None for none.
        faults: faults to inject, for tests.
        priority: the priority in the cluster's queue, None if the run has the cluster to itself.
        launched: unix time of the command.
        shared: the name of a process on this machine that has the imports of ranks done, see `imports_begun`.

    Raises:
        InputError: the run is running with another job.
    """
    import ray

    from orchestrator.launch.controller_actor import controller_of, start_controller

    controller = controller_of(run_dir)
    if controller is not None:
        status = _answer(controller.status)
        same = _as_text(_answer(controller.job)) == _as_text([job, until])
        if same and status["summary"] and status["summary"]["state"] == "done":
            return WatchedRun(controller, run_dir)  # it has just ended, and still answers
        if not (status["summary"] or status["error"]):
            if not same:
                raise _another_job(run_dir)
            return WatchedRun(controller, run_dir)
        ray.kill(controller)
        deadline = time.monotonic() + 10
        while controller_of(run_dir) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    started = start_controller(
        job, run_dir, until, faults=faults, priority=priority, launched=launched, shared=shared
    )
    return WatchedRun(started, run_dir, _as_text([job, until]))


def _as_text(value: Any) -> str:
    """Return the value as JSON text. Texts are compared, because 1, 1.0 and true are equal in Python."""
    return json.dumps(value, sort_keys=True)


def _another_job(run_dir: RunDir) -> InputError:
    hint = "stop it first, or attach with the same job and --until"
    return InputError("this run is active with another job file", run_dir.uri, hint)


def _outcome(status: dict[str, Any]) -> RunOutcome:
    if error := status["error"]:
        return RunOutcome(Outcome.WRONG_INPUT if error["input"] else Outcome.FAILED, None, error["line"])
    return _outcome_of(status["summary"])


def _outcome_of(summary: dict[str, Any]) -> RunOutcome:
    """Return how a run has ended, by its summary. A stop without a commit is none."""
    outcome = Outcome(summary["state"])
    line = summary["reason"] or ""
    if outcome == Outcome.STOPPED and summary.get("commit") is None:  # "stopped" promises a commit
        line = f"{line}; no checkpoint yet; the same command starts from the beginning"
        return RunOutcome(Outcome.FAILED, summary, line)
    return RunOutcome(outcome, summary, line)
