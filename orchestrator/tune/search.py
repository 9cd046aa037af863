"""Run a search: check it, draw its trials, let Ray Tune drive them, and write the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import holds_secret, redact_message
from orchestrator.config.spec import JobSpec, dump
from orchestrator.data.progress import StageLine
from orchestrator.launch.submission import on_cluster
from orchestrator.resolve import prepared_data
from orchestrator.storage.run_directory import RunDir, remove_empty
from orchestrator.tune.config import TuneSpec
from orchestrator.tune.drive_trials import drive_trials
from orchestrator.tune.preflight import checked_search
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.rung_steps import early_decision, longest_warmup
from orchestrator.tune.same_inputs import check_same_inputs
from orchestrator.tune.space import drawn, grid, job_of
from orchestrator.tune.trial_records import TrialRecords

SUMMARY = "sweep.json"


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended, the content of sweep.json, and a line for the user."""

    outcome: Outcome
    summary: dict[str, Any]
    line: str = ""


def tune(
    spec: JobSpec, sweep: RunDir, address: str | None, show: Callable[[dict[str, Any]], None]
) -> SearchOutcome:
    """Run a search, or continue one from its records.

    Args:
        spec: the job with its search.
        sweep: the directory of the search.
        address: the cluster to run on, None to start Ray on this machine.
        show: gets `SearchProgress.to_json()` when it changes.

    Raises:
        InputError: the job or its search is wrong, or the directory belongs to another. Nothing is written in that
        case.
    """
    spec = checked_search(spec, sweep, address)
    search = spec.tune
    assert search is not None
    made = sweep.create()
    worker = spec.resources.per_worker
    workers = (search.concurrency or 1) * spec.all_workers.max
    try:
        with on_cluster(address, workers * worker.cpu, workers * worker.gpu):
            with sweep.lock():
                sweep.write_text("job.yaml", text := dump(spec), private=holds_secret(text))
                return _search(spec, search, sweep, show)
    finally:
        remove_empty(made)


def _search(
    spec: JobSpec, search: TuneSpec, sweep: RunDir, show: Callable[[dict[str, Any]], None]
) -> SearchOutcome:
    from orchestrator.tune.mlflow_search import LiveSearch
    from orchestrator.tune.results import finish

    records = TrialRecords(sweep)
    records.begin()
    wanted = len(grid(search)) if search.sampler == "grid" else search.trials or 0
    if search.sampler == "grid":
        records.draw(grid(search)[len(records.configs) :])
    elif search.sampler == "random":
        records.draw(drawn(search, spec.seed, n) for n in range(len(records.configs), wanted))
    before = sweep.read_json(SUMMARY) or {}
    live = LiveSearch(spec.name, spec.tracking, spec.tune, sweep, records)

    def tell(news: dict[str, Any]) -> None:
        live.tell(news)
        show(news)

    progress = SearchProgress(
        spec.tune,
        spec.train.steps,
        sweep=sweep,
        records=records,
        wanted=wanted,
        hours=before.get("hours") or 0.0,
        show=tell,
    )
    if line := early_decision(search, spec.train.steps, longest_warmup(search, spec.train)):
        show({"warning": line})
    if len(records.ended) < wanted and not progress.limit():
        with live.follower() if spec.tracking else contextlib.nullcontext():
            stage_line = StageLine(lambda text: show({"note": f"preparing {text}"}))
            # Once, before all trials. A trial with other data keys prepares its own.
            data = prepared_data.prepared(spec, sweep, prepared_data.PreparedData(), stage_line)
            check_same_inputs(
                sweep,
                data,
                identity=spec.run_identity,
                workload=spec.workload,
                data=spec.data,
                searched=search.space,
            )
            drive_trials(
                spec.train,
                spec.resources,
                spec.seed,
                search,
                sweep=sweep,
                records=records,
                progress=progress,
                wanted=wanted,
            )
    result = finish(
        spec.name,
        search,
        sweep,
        records,
        progress,
        tracking=spec.tracking,
        job_with=lambda values, name: dump(job_of(spec, values, name=name)),
    )
    if len(records.ended) < wanted:
        line = progress.limit() or "interrupted"
        return SearchOutcome(Outcome.STOPPED, result, f"{line}; the same command continues")
    if result["best"] is None:
        reason = next(iter(records.ended.values())).reason
        return SearchOutcome(
            Outcome.FAILED, result, redact_message(f"every trial failed; the first: {reason}")
        )
    return SearchOutcome(Outcome.DONE, result)
