"""The end of a search: what it found, written down; the best job, ready to run."""

from __future__ import annotations

import shutil
from typing import Any

from orchestrator.control.finish import draw
from orchestrator.data.files import Folder
from orchestrator.job.spec import JobSpec, dump
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.mlflow_search import publish
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.space import job_of
from orchestrator.tune.trial_records import TrialRecords


def finish(spec: JobSpec, sweep: RunDir, ledger: TrialRecords, standing: SearchProgress) -> dict[str, Any]:
    """Write sweep.json, best.yaml and report.html, and tell MLflow; what stands in sweep.json."""
    standing.recount()
    found = summarise(spec, sweep, ledger, standing)
    sweep.write_json("sweep.json", found)
    if found["best"] is not None:
        name = f"{spec.name[:50]}-best"
        best = job_of(spec, found["best"]["config"], name=name)
        header = f"# the best of {len(ledger.configs)} trials: {found['best']['trial']}, {found['metric']} "
        sweep.write_text("best.yaml", f"{header}{found['best']['value']:.6g}\n{dump(best)}")
    found["problem"] = draw(sweep, _report)
    found["tracking"] = publish(spec, sweep, found)
    sweep.write_json("sweep.json", found)
    return found


def _report(sweep: RunDir) -> str:
    from orchestrator.tune.report import report

    return report(sweep)


def summarise(spec: JobSpec, sweep: RunDir, ledger: TrialRecords, standing: SearchProgress) -> dict[str, Any]:
    """The search in one document."""
    assert spec.tune is not None
    best = standing.best()
    trials = [_trial(sweep, name, ledger, standing) for name in sorted(ledger.configs)]
    if best is not None:
        config = next(t["config"] for t in trials if t["trial"] == best["trial"])
        best = {**best, "config": config, "run_dir": sweep.at(best["run"])}
    return {
        "name": spec.name,
        "metric": spec.tune.metric,
        "mode": spec.tune.mode,
        "hours": standing.hours,
        "steps": sum(trial["steps"] for trial in trials),
        "cost_usd": standing.cost,
        "exploits": sum(len(trial["runs"]) - 1 for trial in trials),
        "best": best,
        "trials": trials,
    }


def _trial(sweep: RunDir, name: str, ledger: TrialRecords, standing: SearchProgress) -> dict[str, Any]:
    runs = lineage.runs_of(sweep, name)
    ended = ledger.ended.get(name)
    return {
        "trial": name,
        "config": lineage.config_of(sweep, name, ledger.configs[name]),
        "state": ended.state if ended else "not ended",
        "value": ended.value if ended else None,
        "step": ended.step if ended else 0,
        "reason": ended.reason if ended else "",
        "runs": runs,
        "steps": sum(steps for run, (steps, _) in standing.spent.items() if run in runs),
    }


def remove_folder(sweep: RunDir, name: str) -> None:
    """Remove a folder of the sweep's directory, if it is there."""
    if sweep.local:
        shutil.rmtree(sweep.at(name), ignore_errors=True)
        return
    folder = Folder(sweep.at(name))
    for path in folder.sizes(""):
        folder.remove(path)
