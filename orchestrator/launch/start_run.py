"""Drive a run from a command: check the job, connect to Ray, start the controller, and watch it to the end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from cluster.workers.clock import wall
from orchestrator.config.outcome import Outcome
from orchestrator.config.packages import PACKAGES
from orchestrator.config.spec import JobSpec
from orchestrator.launch import preflight_cache
from orchestrator.launch.active_controller import refuse_if_active
from orchestrator.launch.finished import PastRun, finished_summary
from orchestrator.launch.import_prefetch import imports_begun
from orchestrator.launch.machine_checks import local_gpus
from orchestrator.launch.own_sources import make_own_sources
from orchestrator.launch.preflight import preflight
from orchestrator.launch.submission import no_cluster
from orchestrator.launch.watched_run import RunOutcome, WatchedRun, attach, watch
from orchestrator.observe.goodput import with_end
from orchestrator.resolve.precision import choice_of, record_choice
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.storage.run_directory import RunDir, remove_empty


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
    """Drive a run to its end, from the beginning or from its last commit.

    Args:
        spec: the job.
        run_dir: the run directory.
        until: a step to stop at, None for none.
        address: the cluster to run on, None to start Ray on this machine.
        show: gets the status several times a second, and before the first one what the command waits for.
        faults: faults to inject, for tests.
        priority: the priority in the cluster's queue; higher ones run first.
        launched: unix time at which the run's ledger begins, 0 for now.

    Raises:
        InputError: the job is wrong or belongs to another run. Nothing has been written in that case.
    """
    if address is None:
        refuse_if_active(run_dir)
    if result := PastRun(spec, run_dir).done():
        line = PastRun(spec, run_dir).line()
        PastRun(spec, run_dir).put_back()
        return RunOutcome(Outcome.DONE, result, line)
    if until is not None and (line := PastRun(spec, run_dir).beyond(until)):
        return RunOutcome(Outcome.STOPPED, None, line)
    launched = launched or wall()
    make_own_sources(spec.data, address, lambda line: show({"phase": "prepare", "note": line}))
    show({"phase": "check", "note": "reading the job's sources and model"})
    # Made before the checks, so it does not cover code that changes meanwhile.
    mark = preflight_cache.mark_of(spec, run_dir)
    # Before the checks, because they import as much and take as long.
    with imports_begun(spec.parallel, spec.workload.model, embedded=address is None) as shared:
        job = preflight(spec, run_dir, until=until, address=address, is_known=preflight_cache.is_known(mark))
        if choice := choice_of(spec.train, job):
            show({"phase": "check", "note": f"precision {choice}"})
        outcome = _run(
            job,
            run_dir,
            until,
            address,
            show,
            faults=faults,
            priority=priority,
            launched=launched,
            shared=shared,
        )
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
    """Drive a run after its checks. `shared` names the process with the imports of ranks, empty without one."""
    from cluster.local.ray_session import NoCluster, NotStarted, connected_ray

    spec = job.spec
    queue = None if address is None else priority
    workers, worker = spec.resources.workers, spec.resources.per_worker
    max_workers = spec.all_workers.max
    gpus = local_gpus(spec.all_workers) if address is None and worker.gpu else workers.max * worker.gpu

    def begin() -> WatchedRun:
        watched = attach(
            spec.document(), run_dir, until, faults=faults, priority=queue, launched=launched, shared=shared
        )
        record_choice(job, run_dir)
        return watched

    made = run_dir.create()
    where = "starting Ray on this machine" if address is None else f"connecting to Ray at {address}"
    show({"phase": "connect", "note": where})
    try:
        for last in (False, False, True):
            with connected_ray(address, max_workers * worker.cpu, gpus, packages=PACKAGES):
                show({"phase": "connect", "note": "starting the run's controller"})
                outcome = watch(begin, show)
            if not outcome.dead_ray_process or last:
                break
        return _closed(outcome, run_dir, embedded=address is None)
    except NoCluster as error:
        raise no_cluster(error, address) from None
    except NotStarted as error:
        return RunOutcome(Outcome.FAILED, None, str(error))
    finally:
        remove_empty(made)


def _closed(outcome: RunOutcome, run_dir: RunDir, embedded: bool) -> RunOutcome:
    """Add the seconds that Ray took to end to the ledger, if this command had started Ray.

    They are also written to summary.json, unless another command has resumed the run already.
    """
    summary = outcome.summary
    if not (embedded and summary and summary.get("ended") and summary.get("ledger")):
        return outcome
    finished = summary["ended"] + summary["ledger"]["seconds"].get("finish", 0.0)
    summary = {**summary, "ledger": with_end(summary["ledger"], shutdown=wall() - finished)}
    with contextlib.suppress(OSError):  # a missing line in the ledger is not a failure
        if (finished_summary(run_dir) or {}).get("ended") == summary["ended"]:
            run_dir.write_json("summary.json", summary)
    return dataclasses.replace(outcome, summary=summary)
