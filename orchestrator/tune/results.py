"""Write the results of a search: sweep.json, report.html, and best.yaml, which is the best job ready to run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.config.redact import holds_secret
from orchestrator.controller.finish import draw
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.observe.config import TrackingSpec
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import SECOND, TuneSpec
from orchestrator.tune.mlflow_search import publish
from orchestrator.tune.progress import SearchProgress
from orchestrator.tune.space import Config
from orchestrator.tune.trial_records import TrialRecords

ENDED = ("done", "stopped")
"""The states of trials that have a result."""


def finish(
    name: str,
    tune: TuneSpec,
    sweep: RunDir,
    records: TrialRecords,
    progress: SearchProgress,
    *,
    tracking: TrackingSpec | None,
    job_with: Callable[[Config, str], str],
) -> dict[str, Any]:
    """Write sweep.json, best.yaml and report.html, bring MLflow up to date, and return the content of sweep.json.

    Args:
        name: the name of the search.
        tune: the search.
        sweep: its directory.
        records: the records of its trials.
        progress: its progress.
        tracking: the tracking server; None without one.
        job_with: returns the job of a trial as YAML, given its values and a name.
    """
    progress.recount()
    result = summarise(name, tune, sweep, records, progress)
    sweep.write_json("sweep.json", result)
    for trial in result["trials"] if "frontier" in result else ():
        file = f"frontier-{trial['trial']}.yaml"
        if trial["trial"] in result["frontier"]:
            text = job_with(trial["config"], f"{name[:50]}-{trial['trial']}")
            sweep.write_text(file, text, private=holds_secret(text))
        elif sweep.exists(file):  # a better trial has ended since
            sweep.remove(file)
    if result["best"] is not None:
        best = job_with(result["best"]["config"], f"{name[:50]}-best")
        by = "" if len(tune.metrics) == 1 else f" by {tune.first} alone"
        header = (
            f"# the best of {len(records.configs)} trials{by}: {result['best']['trial']}, {result['metric']} "
        )
        text = f"{header}{result['best']['value']:.6g}\n{best}"
        sweep.write_text("best.yaml", text, private=holds_secret(text))
    result["problem"] = draw(sweep, _report)
    result["tracking"] = publish(name, tracking, tune, sweep, result)
    sweep.write_json("sweep.json", result)
    return result


def _report(sweep: RunDir) -> str:
    from orchestrator.tune.report import report

    return report(sweep)


def summarise(
    name: str, tune: TuneSpec | None, sweep: RunDir, records: TrialRecords, progress: SearchProgress
) -> dict[str, Any]:
    """Return the content of sweep.json: the best trial, all trials with values and outcomes, and the cost.

    With two metrics, the best trial is the best by the first metric, and `frontier` names the trials that no other
    trial beats in one metric without being worse in the other.
    """
    assert tune is not None
    best = progress.best()
    trials = [_trial(sweep, name, records, progress) for name in sorted(records.configs)]
    if best is not None:
        config = next(t["config"] for t in trials if t["trial"] == best["trial"])
        best = {**best, "config": config, "run_dir": sweep.at(best["run"])}
    two: dict[str, Any] = (
        {"second": tune.metrics[1], "second_mode": tune.directions[1]} if len(tune.metrics) > 1 else {}
    )
    if two:
        two["frontier"] = frontier(trials, tune.directions)
    return {
        "name": name,
        "metric": tune.first,
        "mode": tune.direction,
        **two,
        "hours": progress.hours,
        "steps": sum(trial["steps"] for trial in trials),
        "cost_usd": progress.cost,
        "exploits": sum(len(trial["runs"]) - 1 for trial in trials),
        "best": best,
        "trials": trials,
    }


def frontier(trials: Sequence[Mapping[str, Any]], directions: Sequence[str]) -> list[str]:
    """Return the names of the ended trials that no other one beats in one metric without being worse in the other.

    They are in order of the first metric, the best first. Of equal trials the first is named.
    """
    signs = [1.0 if direction == "min" else -1.0 for direction in directions]
    ended = [
        (signs[0] * trial["value"], signs[1] * trial["second"], trial["trial"])
        for trial in trials
        if trial["state"] in ENDED and None not in (trial["value"], trial["second"])
    ]
    kept: list[str] = []
    least = math.inf
    for _, second, name in sorted(ended):
        if second < least:
            kept.append(name)
            least = second
    return kept


def _trial(sweep: RunDir, name: str, records: TrialRecords, progress: SearchProgress) -> dict[str, Any]:
    runs = lineage.runs_of(sweep, name)
    ended = records.ended.get(name)
    last = records.reported.get(runs[-1], {})
    value = last.get("value")
    if value is not None and not math.isfinite(value):
        value = None
    return {
        "trial": name,
        "config": lineage.config_of(sweep, name, records.configs[name]),
        "state": ended.state if ended else "not ended",
        "value": ended.value if ended else value,
        "second": ended.second if ended else last.get(SECOND),
        "step": ended.step if ended else last.get("step", 0),
        "reason": ended.reason if ended else "",
        "runs": runs,
        "steps": sum(steps for run, (steps, _) in progress.spent.items() if run in runs),
    }


def remove_folder(sweep: RunDir, name: str) -> None:
    """Remove a folder of the search's directory, if it exists."""
    if sweep.local:
        shutil.rmtree(sweep.at(name), ignore_errors=True)
        return
    folder = DataFolder(sweep.at(name))
    for path in folder.sizes(""):
        folder.remove(path)
