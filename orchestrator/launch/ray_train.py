"""Run a job inside a Ray Train (V2) `TorchTrainer`, by Ray Train's public API.

    config = loop_config(load("job.yaml"))
    TorchTrainer(train_func, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()

Ray Train starts the workers, detects failures and restarts all workers. The workers continue from the last commit in
the run directory. The command `orchestrator run` can continue the same directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import code_of, roots_of
from orchestrator.config.paths import absolute, resolve_paths
from orchestrator.config.spec import JobSpec
from orchestrator.controller.events import EventHistory
from orchestrator.data.progress import StageLine
from orchestrator.launch.job_checks import check_job
from orchestrator.launch.ray_train_worker import train_func
from orchestrator.launch.worker import worker_at
from orchestrator.models.continued import continuation_of
from orchestrator.models.kept_config import check_same_config, kept_config
from orchestrator.resolve.commit_model import as_begun
from orchestrator.resolve.precision import as_its_run
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.run_directory import RunDir

__all__ = ["loop_config", "train_func"]


def loop_config(
    spec: JobSpec,
    run_dir: str | None = None,
    report_every: int | None = None,
    faults: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Check a job, prepare its data with Ray Data, and return its `train_loop_config`. Ray must be initialised.

    Args:
        spec: the job.
        run_dir: the run directory, which all nodes must see; runs/<name> by default.
        report_every: steps between two reports to Ray Train; checkpoint.every by default.
        faults: faults to inject, for tests.

    Raises:
        InputError: the job is wrong.
    """
    spec = resolve_paths(spec, Path.cwd())
    if spec.evaluates_beside:
        hint = "set it to gang, or use `orchestrator run`"
        raise InputError("Ray Train reserves no worker besides its own", "evaluate.where", hint)
    if spec.extra_workers:
        part, instead = (
            ("rollout", "leave it out, so that the training workers generate")
            if spec.rollout
            else ("distill", "leave it out, with distill.logits.source stored")
        )
        hint = f"{instead}, or use `orchestrator run`"
        raise InputError("Ray Train reserves no worker besides its own", f"{part}.workers", hint)
    run = RunDir(absolute(run_dir or f"runs/{spec.name}", Path.cwd()))
    spec = spec.with_parts(train=as_its_run(spec.train, run))
    first_commit = continuation_of(spec).begun_from(run, check_same_run(spec.run_identity, run))[1]
    check_same_config(spec.workload, first_commit, run.uri)
    spec = spec.with_parts(workload=as_begun(spec.workload, first_commit))
    spec = check_job(spec, machine_of=worker_at("auto"), folder_config=kept_config(first_commit)).spec
    run.create()
    past = EventHistory(run.rows("events.jsonl"))
    data = prepared(spec, run, PreparedData(past.data, past.sets), StageLine(lambda _: None))
    return {
        "job": spec.model_dump(mode="json"),
        "run": run.uri,
        "data": data.uri,
        "sets": data.sets,
        "report_every": report_every or spec.checkpoint.every,
        "code": code_of(spec.own_code),
        "code_roots": roots_of(spec.own_code),
        "faults": list(faults),
    }
