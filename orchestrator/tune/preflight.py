"""All checks of a search before anything is started or written."""

from __future__ import annotations

import sys
from functools import partial

from orchestrator.checkpoint.config import CheckpointSpec
from orchestrator.config.spec import JobSpec
from orchestrator.launch.active_controller import refuse_if_active
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.machine_checks import check_labels
from orchestrator.launch.own_sources import make_own_sources
from orchestrator.launch.path_checks import check_all_uris, check_written
from orchestrator.launch.worker import worker_at
from orchestrator.planner.choose_precision import in_precision
from orchestrator.resolve.precision import as_its_run
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import TuneSpec
from orchestrator.tune.same_search import check_same_sweep
from orchestrator.tune.space import check as check_space
from orchestrator.tune.space import drawn, grid, job_of
from workloads.own.object_reference import is_object_reference


def checked_search(spec: JobSpec, sweep: RunDir, address: str | None) -> JobSpec:
    """Check a search completely. Return its job, with a precision if it names none.

    Args:
        spec: the job with its search.
        sweep: the directory of the search.
        address: the cluster to run on, None to start Ray on this machine.

    Raises:
        InputError: the job or its search is wrong, or the directory belongs to another.
    """
    spec = spec.with_parts(train=as_its_run(spec.train, sweep))
    search = check_space(spec)
    check_all_uris(spec, sweep)
    check_written(spec.checkpoint, spec.data, sweep, address)
    refuse_if_active(sweep, *_active_runs(sweep))
    make_own_sources(spec.data, address, partial(print, file=sys.stderr))
    first = grid(search)[0] if search.sampler == "grid" else drawn(search, spec.seed, 0)
    trial = job_of(spec, first)
    committed = _registered(search, trial.checkpoint, trial.workload.model)
    job = check_job(trial.with_parts(checkpoint=committed), machine_of=worker_at(address))
    if spec.train.precision == "auto":  # once, so that no trial differs from others in it
        spec = spec.with_parts(train=in_precision(spec.train, job.spec.train.dtype))
    check_labels(spec.resources, address)
    check_same_sweep(spec, sweep)
    return spec


def _registered(tune: TuneSpec, checkpoint: CheckpointSpec, model: str) -> CheckpointSpec:
    """Return how a trial commits, for the checks. It has an export if the best model is to be registered."""
    if tune.register_as is None or checkpoint.export:
        return checkpoint
    return checkpoint.model_copy(update={"export": "safetensors" if is_object_reference(model) else "hf"})


def _active_runs(sweep: RunDir) -> list[RunDir]:
    """Return the runs of the trials that have not ended. Running ones keep their status up to date."""
    rows = sweep.rows(TRIALS)
    ended = {row["trial"] for row in rows if row["event"] == "ended"}
    names = [row["trial"] for row in rows if row["event"] == "drawn" and row["trial"] not in ended]
    return [lineage.at(sweep, lineage.runs_of(sweep, name)[-1]) for name in names]
