"""Copy a search to an MLflow server: a parent run with its trials nested, and the best model registered."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.redact import redact
from orchestrator.controller.background_export import LONGEST
from orchestrator.observe.config import TrackingSpec
from orchestrator.observe.mlflow_parent import Follower, ParentRun
from orchestrator.observe.mlflow_run import within
from orchestrator.observe.registry import Candidate, register, send
from orchestrator.storage.row_line import TRIALS
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import TuneSpec
from orchestrator.tune.trial_records import TrialRecords

JOB = "job.yaml"
DOCUMENTS = (JOB, "sweep.json", "report.html", "best.yaml")
PATIENCE = 300.0
"""Seconds that the end of a search waits for a server. The same command sends the rest later."""


class LiveSearch:
    """Keeps the MLflow run of a search up to date while the search runs."""

    def __init__(
        self,
        name: str,
        tracking: TrackingSpec | None,
        tune: TuneSpec | None,
        sweep: RunDir,
        records: TrialRecords,
    ) -> None:
        self._name = name
        self._tracking = tracking
        self._tune = tune
        self._sweep = sweep
        self._records = records
        self._news: Mapping[str, Any] = {}
        """The last state of the search."""
        self._settled: set[str] = set()
        """Trials that have ended and whose runs are nested."""

    def tell(self, news: Mapping[str, Any]) -> None:
        """Take the state of the search, as `SearchProgress.to_json` returns it."""
        self._news = news

    def follower(self) -> Follower:
        """Return the thread that keeps the MLflow run up to date."""
        return Follower(self._begin, self._update)

    def _begin(self) -> ParentRun:
        parent = _parent(self._name, self._tracking, self._tune, self._sweep)
        parent.set_status("RUNNING")
        parent.log_documents([JOB])
        return parent

    def _update(self, parent: ParentRun) -> None:
        news = self._news
        if "trials" not in news:
            return
        ended = set(self._records.ended)
        for trial in sorted((ended | set(news["running"])) - self._settled):
            runs = [lineage.at(self._sweep, run) for run in lineage.runs_of(self._sweep, trial)]
            parent.nest(runs)
            if trial in ended and all(run.uri in parent.nested for run in runs):
                self._settled.add(trial)
        assert self._tune is not None
        _log(
            parent,
            self._tune,
            ended=news["ended"],
            failed=news["failed"],
            steps=news["steps"],
            best=news["best"],
        )


def publish(
    name: str, tracking: TrackingSpec | None, tune: TuneSpec | None, sweep: RunDir, search: dict[str, Any]
) -> str | None:
    """Bring the MLflow server up to date with sweep.json. Never raises: returns a line about what failed, or None."""
    if tracking is None:
        return None
    registers = tune is not None and tune.register_as
    timeout = PATIENCE + (LONGEST if registers else 0.0)
    try:
        within(timeout, lambda: _publish(name, tracking, tune, sweep, search))
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except Exception as error:  # whatever MLflow and its transport raise
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return None


def _parent(name: str, tracking: TrackingSpec | None, tune: TuneSpec | None, sweep: RunDir) -> ParentRun:
    """Return the parent run of this search, never that of an earlier search in the same directory."""
    assert tracking is not None
    assert tune is not None
    born = sweep.rows(TRIALS)[0]["time"]
    return ParentRun(tracking, name, sweep, born, tune.model_dump(mode="json"))


def _publish(
    name: str, tracking: TrackingSpec | None, tune: TuneSpec | None, sweep: RunDir, search: dict[str, Any]
) -> None:
    assert tune is not None
    parent = _parent(name, tracking, tune, sweep)
    trials = search["trials"]
    best = search["best"]
    parent.nest(lineage.at(sweep, run) for trial in trials for run in trial["runs"])
    parent.log_documents(DOCUMENTS)
    states = [trial["state"] for trial in trials]
    left = states.count("not ended")
    _log(
        parent,
        tune,
        ended=len(states) - left,
        failed=states.count("failed"),
        steps=search["steps"],
        best=best,
    )
    cut = [run for trial in trials if trial["state"] in ("not ended", "failed") for run in trial["runs"]]
    parent.end_nested(lineage.at(sweep, run) for run in cut)
    parent.set_status("KILLED" if left else "FAILED" if best is None else "FINISHED")
    run_id = best and parent.nested.get(lineage.at(sweep, best["run"]).uri)
    if tune.register_as and not left and run_id:
        _register(parent.client, tune, sweep, best, run_id)


def _log(
    parent: ParentRun, tune: TuneSpec, ended: int, failed: int, steps: int, best: Mapping[str, Any] | None
) -> None:
    """Log the figures of a search. Their step is the number of trials that have ended."""
    figures = {"trials_ended": ended, "trials_failed": failed, "steps": steps}
    chosen = {f"best_{tune.first}": best["value"]} if best else {}
    parent.log_figures(figures | chosen, ended, **({"best_trial": best["trial"]} if best else {}))


def _register(client: Any, tune: TuneSpec, sweep: RunDir, best: dict[str, Any], run_id: str) -> None:
    """Register the model of the best commit as a version, with the metric of the search."""
    from orchestrator.export.hugging_face import export

    def source() -> str:
        with tempfile.TemporaryDirectory() as folder:
            target = str(Path(folder) / "model")
            export(sweep.at(best["run"]), best["step"], target)
            return send(client, run_id, target)

    model = Candidate(best["step"], tune.first, best["value"], larger=tune.direction == "max")
    register(client, str(tune.register_as), run_id, model, source, trial=best["trial"])
