"""End in MLflow the runs that no controller drives any more. A controller that was killed could not do that itself.

Three commands end such a run in MLflow: `status` and `report` of it, and the start of another run in its experiment.
A resume
makes it RUNNING again.
"""

from __future__ import annotations

import contextlib
import threading

from orchestrator.checkpoint.identity import read_job
from orchestrator.observe.last_status import LOST, last_status
from orchestrator.observe.mlflow_delivery import KILLED, born_of, deliver
from orchestrator.observe.mlflow_run import BORN_TAG, URI_TAG, MlflowRun
from orchestrator.storage.run_directory import RunDir

SETTLED = "mlflow.json"
"""The document that says which loss MLflow shows: `lost` is the time of the last status before it."""
PATIENCE = 20.0
"""Seconds that a command waits for MLflow, whose import takes some of them."""
MOST = 100
"""Runs of an experiment that a start looks at."""


def end_dead_run(run: RunDir) -> str:
    """Send to MLflow what it lacks of a lost run, and end the run there, once. Raises InputError if its job is damaged.

    Returns:
        A line for people; empty if there was nothing to do.
    """
    status = last_status(run)
    spec = read_job(run)
    if spec is None or spec.tracking is None or status.get("phase") != LOST:
        return ""
    if run.read_json_or_empty(SETTLED).get("lost") == status["time"] or born_of(run) is None:
        return ""
    if problem := deliver(spec.tracked, run, PATIENCE).problem:
        return f"MLflow may show it as running: {problem}"
    if last_status(run).get("phase") != LOST:  # it was resumed meanwhile
        deliver(spec.tracked, run, PATIENCE)
        return ""
    with contextlib.suppress(
        Exception
    ):  # the directory may belong to another user; the next command asks MLflow again
        run.write_json(SETTLED, {"lost": status["time"], "status": KILLED})
    return f"MLflow shows it as {KILLED} now"


def end_other_dead_runs(run: MlflowRun) -> None:
    """End in a thread the lost runs of the experiment of a `run` that begins, as far as their directories are readable
    here. Errors are ignored."""
    threading.Thread(target=_end_other_dead_runs, args=(run,), name="mlflow-lost", daemon=True).start()


def _end_other_dead_runs(run: MlflowRun) -> None:
    with contextlib.suppress(Exception):  # telemetry
        running = run.client.search_runs([run.experiment], "attributes.status = 'RUNNING'", max_results=MOST)
        for other in running:
            with contextlib.suppress(Exception):  # an unreachable store hides no other run
                if other.info.run_id != run.run_id and (lost_at := _lost_at(other.data.tags)):
                    run.client.set_terminated(other.info.run_id, KILLED, int(lost_at * 1000))


def _lost_at(tags: dict[str, str]) -> float | None:
    """When the run with these tags was last seen, if it is lost. The directory may be that of a later run by now."""
    directory = RunDir(tags[URI_TAG])
    status = last_status(directory)
    born = born_of(directory)
    is_it = born is not None and f"{born:.6f}" == tags[BORN_TAG]
    return status["time"] if is_it and status.get("phase") == LOST else None
