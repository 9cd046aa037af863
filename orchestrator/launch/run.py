"""One run from the outside: check the job, find or start its controller, watch it to the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.workers.clock import wall
from cluster.workers.interruptions import held_interruptions
from orchestrator.checkpoint.store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import redact_message
from orchestrator.config.spec import JobSpec
from orchestrator.launch import preflight_cache
from orchestrator.launch.active_controller import refuse_if_at_work
from orchestrator.launch.finished import beyond, done_already, finished_line, finished_summary, put_back
from orchestrator.launch.import_prefetch import imports_begun
from orchestrator.launch.machine_checks import gpus_here
from orchestrator.launch.preflight import preflight
from orchestrator.launch.submission import no_cluster
from orchestrator.observe.goodput import with_end
from orchestrator.resolve.precision import choice_of, record_choice
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import RunDir, remove_empty

REFRESH = 0.25
"""Seconds between looks at the controller."""
LOOK = 5.0
"""Seconds for one answer of the controller, after which it is looked whether Ray is there at all."""
FIRST_LOOK = 1.0
"""Seconds for one answer of a controller that may still be starting."""
ENDED_TOGETHER = 0.5
"""Seconds after the end of Ray within which this process may be told to end too."""
SILENCE = 120.0
"""Seconds that a controller may be silent: Ray starts a dead one again meanwhile."""

STOPPED = "stopped by the user"
STOPPING = "Ctrl-C: the run commits and ends; once more, and it ends at once"


@dataclass(frozen=True)
class RunOutcome:
    """How a command ended, the run's summary if there is one, and a line for the user, of which secrets are hidden;
    which process of the Ray that it had started is gone, if that is why."""

    outcome: Outcome
    summary: dict[str, Any] | None
    line: str = ""
    fallen: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "line", redact_message(self.line))


def run(
    spec: JobSpec,
    run_dir: RunDir,
    until: int | None,
    address: str | None,
    show: Callable[[dict[str, Any]], None],
    faults: tuple[str, ...] = (),
    priority: int = 0,
    launched: float = 0.0,
) -> RunOutcome:
    """Drive a run to its end, or on from where it is. `show` gets the status several times a second,
    and before there is one what is waited for. The ledger begins when it was `launched`, unix seconds; now if 0.

    Raises InputError before anything is written if the job is wrong or belongs to another run.
    """
    if address is None:
        refuse_if_at_work(run_dir)
    if found := done_already(spec, run_dir):
        line = finished_line(spec, run_dir)
        put_back(spec, run_dir)
        return RunOutcome(Outcome.DONE, found, line)
    if until is not None and (line := beyond(spec, run_dir, until)):
        return RunOutcome(Outcome.STOPPED, None, line)
    launched = launched or wall()
    shared = ""
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            nonlocal shared
            shared = stack.enter_context(imports_begun(spec, embedded=address is None))

        show({"phase": "check", "note": "reading the job's sources and model"})
        mark = preflight_cache.mark_of(
            spec, run_dir
        )  # before it runs: of code that changes meanwhile it tells nothing
        job = preflight(spec, run_dir, until, address, begin, preflight_cache.is_known(mark))
        if choice := choice_of(spec, job):
            show({"phase": "check", "note": f"precision {choice}"})
        outcome = _run(job, run_dir, until, address, show, faults, priority, launched, shared)
        if outcome.outcome is Outcome.DONE:
            preflight_cache.note(mark)
        return outcome


def _run(
    job: ResolvedJob,
    run_dir: RunDir,
    until: int | None,
    address: str | None,
    show: Callable[[dict[str, Any]], None],
    faults: tuple[str, ...],
    priority: int,
    launched: float,
    shared: str,
) -> RunOutcome:
    """Drive a run that was checked; `shared` names the process that has the imports of ranks, if there is one."""
    from cluster.local.ray_session import NoCluster, NotStarted, connected_ray

    spec, queue = job.spec, None if address is None else priority
    workers, worker = spec.resources.workers, spec.resources.per_worker
    most = workers.max + spec.evaluates_beside
    gpus = gpus_here(spec) if address is None and worker.gpu else workers.max * worker.gpu

    def begin() -> WatchedRun:
        found = attach(spec, run_dir, until, faults, queue, launched, shared)
        record_choice(job, run_dir)
        return found

    made = run_dir.create()
    where = "starting Ray on this machine" if address is None else f"connecting to Ray at {address}"
    show({"phase": "connect", "note": where})
    try:
        for last in (False, False, True):
            with connected_ray(address, most * worker.cpu, gpus):
                show({"phase": "connect", "note": "starting the run's controller"})
                outcome = _watch(begin, show)
            if not outcome.fallen or last:
                break
        return _closed(outcome, run_dir, embedded=address is None)
    except NoCluster as error:
        raise no_cluster(error, address) from None
    except NotStarted as error:
        return RunOutcome(Outcome.FAILED, None, str(error))
    finally:
        remove_empty(made)


def _closed(outcome: RunOutcome, run_dir: RunDir, embedded: bool) -> RunOutcome:
    """The outcome with the seconds in its ledger that the end of Ray took, if that was this command's; they are
    written down too, unless the run goes on already."""
    found = outcome.summary
    if not (embedded and found and found.get("ended") and found.get("ledger")):
        return outcome
    ended = found["ended"] + found["ledger"]["seconds"].get("finish", 0.0)
    found = {**found, "ledger": with_end(found["ledger"], shutdown=wall() - ended)}
    with contextlib.suppress(OSError):  # it is one line of a ledger
        if (finished_summary(run_dir) or {}).get("ended") == found["ended"]:
            run_dir.write_json("summary.json", found)
    return dataclasses.replace(outcome, summary=found)


class WatchedRun:
    """A run that a controller drives, as it is seen from the outside. `status` is the last one that it gave."""

    def __init__(self, controller: Any, run_dir: RunDir, begun_with: str = "") -> None:
        """`begun_with` is the job of a controller that this command has just started, as text. Another command may have
        started it at the same moment with another job: then this is not our run."""
        self.status: dict[str, Any] = {}
        self.stopping = False
        """Whether the user wants it to stop."""
        self.wrong: Exception | None = None
        """What `show` has raised: the run ends with a commit, as after Ctrl-C."""
        self._controller = controller
        self._run_dir = run_dir
        self._unsure = begun_with
        self._began, self._heard = time.time(), time.monotonic()
        self._request: Any = None  # the stop that was asked of the controller since it last was silent

    def look(self) -> RunOutcome | None:
        """How it has ended; None while it is at work, or while Ray starts its controller, once more too."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayError

        from cluster.workers.ray_internals import full_folder

        try:
            if self._unsure:
                if _as_text(ray.get(self._controller.job.remote(), timeout=FIRST_LOOK)) != self._unsure:
                    return RunOutcome(Outcome.WRONG_INPUT, None, str(_another_job(self._run_dir)))
                self._unsure = ""
            if self.stopping and self._request is None:
                self._request = self._controller.request_stop.remote(STOPPED)
            self.status = ray.get(self._controller.status.remote(), timeout=LOOK)
            self._heard = time.monotonic()
            return _outcome(self.status) if self.status["summary"] or self.status["error"] else None
        except (RayActorError, GetTimeoutError) as error:
            self._request = None  # Ray starts a dead controller again, and that one knows of no stop
            if (ended := self._ended()) is not None:
                return ended
            if time.monotonic() - self._heard <= SILENCE:
                return None
            folder = full_folder()
            why = (
                f"the disk of Ray's folder {folder} is full" if folder else " ".join(str(error).split())[:200]
            )
            line = f"the controller is gone: {why}"
            if isinstance(error, GetTimeoutError) and not folder:
                ends = f"`orchestrator stop {self._run_dir.uri}` ends it"
                line = f"the controller has not answered for {SILENCE:.0f} s, and may go on; {ends}"
            return RunOutcome(Outcome.FAILED, None, line)
        except RayError as error:
            why = " ".join(str(error).strip().splitlines()[-1:])[:300]
            line = f"the controller does not answer: {type(error).__name__}: {why}"
            return RunOutcome(Outcome.FAILED, None, line)

    def leave(self) -> None:
        """Watch it no longer. A controller that has heard of the stop ends by itself; one that does not hear of it, as
        it has not even started, is ended."""
        import ray
        from ray.exceptions import RayError

        try:
            ray.get(self._request or self._controller.request_stop.remote(STOPPED), timeout=FIRST_LOOK)
        except RayError:
            with contextlib.suppress(RayError):
                ray.kill(self._controller)

    def left_by_ray(self, gone: str) -> RunOutcome:
        """How a run has ended that was to stop when Ray's process `gone` ended too, as where a job manager ends all
        processes of a job. Raises KeyboardInterrupt if nothing was committed."""
        if (ended := self._ended()) is not None:
            return ended
        commit = Store(self._run_dir.commits).latest(deep=False)
        if commit is None:
            raise KeyboardInterrupt
        line = f"stopped, and Ray's {gone} with it: the newest commit is that of step {commit.step}"
        return RunOutcome(Outcome.STOPPED, None, line)

    def _ended(self) -> RunOutcome | None:
        """How it has ended, if its controller has written that since it is watched."""
        summary = finished_summary(self._run_dir)
        if summary and (summary["ended"] or 0.0) > self._began:
            return RunOutcome(Outcome(summary["state"]), summary, summary["reason"] or "")
        return None


def _watch(begin: Callable[[], WatchedRun], show: Callable[[dict[str, Any]], None]) -> RunOutcome:
    """How a run ends that `begin` gives. It may go on without this process: from its beginning on, an interruption is
    a stop that is waited for."""
    run: WatchedRun | None = None
    while True:
        try:
            if run is None:
                with held_interruptions():
                    run = begin()
            if (outcome := _turn(run, show)) is not None:
                return outcome
            time.sleep(REFRESH)
        except KeyboardInterrupt:
            if run is None:
                raise
            if run.stopping:
                run.leave()
                raise
            run.stopping = True


def _turn(run: WatchedRun, show: Callable[[dict[str, Any]], None]) -> RunOutcome | None:
    """Look at a run once and show it: how it has ended, None while it goes on. Raises what `show` has raised, once the
    run has ended."""
    from cluster.workers.ray_internals import dead_main_process

    if gone := dead_main_process():
        return _fallen(run, gone, show)
    outcome = run.look()
    if run.wrong is None and (run.status or run.stopping):
        try:
            show({"phase": "connect", **run.status, "note": _note(run)})
        except Exception as error:  # whatever the caller's function raises
            run.wrong, run.stopping = error, True
    if outcome is None:
        return None
    if run.wrong is not None:
        raise run.wrong
    if run.stopping and outcome.outcome == Outcome.FAILED and _is_without_commit(outcome):
        raise KeyboardInterrupt  # as before the run had begun: nothing is lost, and nothing has failed
    return outcome


def _fallen(run: WatchedRun, gone: str, show: Callable[[dict[str, Any]], None]) -> RunOutcome:
    """How a run has ended whose Ray on this machine has lost its process `gone`."""
    if run.wrong is not None:
        raise run.wrong
    if not run.stopping:
        time.sleep(
            ENDED_TOGETHER
        )  # what has ended it may be about to end this process: then this is asked again
        show({**run.status, "phase": "wait", "note": f"Ray's {gone} has died; Ray is started again"})
        line = f"Ray's {gone} on this machine has died; the same command goes on from the last commit"
        return RunOutcome(Outcome.FAILED, None, line, fallen=gone)
    return run.left_by_ray(gone)


def _note(run: WatchedRun) -> str:
    """What the run says of itself, such as why it cannot save, after what its user asked for."""
    notes = [STOPPING if run.stopping else "", run.status.get("note") or ""]
    return "; ".join(note for note in notes if note)


def _is_without_commit(outcome: RunOutcome) -> bool:
    """Whether the run was stopped before it had a commit."""
    found = outcome.summary or {}
    return found.get("state") == Outcome.STOPPED and found.get("commit") is None


def _answer(method: Any) -> Any:
    """What a method of a controller returns; one that Ray is starting again is asked until it is there."""
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
    spec: JobSpec,
    run_dir: RunDir,
    until: int | None,
    faults: tuple[str, ...],
    priority: int | None,
    launched: float = 0.0,
    shared: str = "",
) -> WatchedRun:
    """The run by its controller: the one that is at work with the same job, else a new one. `shared` names a process of
    this machine with the imports of ranks, if there is one: see `imports_begun`.

    The new one is not waited for. Whoever asks for it holds interruptions until it is watched."""
    import ray

    from orchestrator.launch.controller_actor import controller_of, start_controller

    job = spec.model_dump(mode="json")
    controller = controller_of(run_dir)
    if controller is not None:
        status = _answer(controller.status)
        same = _as_text(_answer(controller.job)) == _as_text([job, until])
        if same and status["summary"] and status["summary"]["state"] == "done":
            return WatchedRun(controller, run_dir)  # it ended a moment ago, and can tell
        if not (status["summary"] or status["error"]):
            if not same:
                raise _another_job(run_dir)
            return WatchedRun(controller, run_dir)
        ray.kill(controller)
        deadline = time.monotonic() + 10
        while controller_of(run_dir) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
    started = start_controller(job, run_dir, until, faults, priority, launched, shared)
    return WatchedRun(started, run_dir, _as_text([job, until]))


def _as_text(value: Any) -> str:
    """The value as JSON text. Texts are compared because 1, 1.0 and true are equal in Python."""
    return json.dumps(value, sort_keys=True)


def _another_job(run_dir: RunDir) -> InputError:
    hint = "stop it first, or attach with the same job and --until"
    return InputError("this run is at work with another job file", run_dir.uri, hint)


def _outcome(status: dict[str, Any]) -> RunOutcome:
    if error := status["error"]:
        return RunOutcome(Outcome.WRONG_INPUT if error["input"] else Outcome.FAILED, None, error["line"])
    found = status["summary"]
    outcome, line = Outcome(found["state"]), found["reason"] or ""
    if (
        outcome == Outcome.STOPPED and found.get("commit") is None
    ):  # a command ends so with a commit in place only
        return RunOutcome(
            Outcome.FAILED, found, f"{line}; there is no commit yet, and the same command begins anew"
        )
    return RunOutcome(outcome, found, line)
