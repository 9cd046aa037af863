"""Write the report of a search: one self-contained HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.checkpoint.identity import read_job
from orchestrator.config.errors import InputError
from orchestrator.config.metric_names import by_name
from orchestrator.config.redact import redact
from orchestrator.observe.formatting import run_name
from orchestrator.observe.pages import search_charts
from orchestrator.observe.pages.page import render
from orchestrator.storage.row_line import evaluations_in
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.tune import lineage
from orchestrator.tune.config import Dimension, TuneSpec
from orchestrator.tune.space import Config, distribution_of

LEAST_TRIALS = 4
"""Importance is computed from this many trials on."""


def importance(
    space: Mapping[str, Dimension], configs: Sequence[Config], values: Sequence[float]
) -> dict[str, float]:
    """Return the share of the variance of the values, 0 to 1, that each key explains alone. The shares sum to 1.

    fANOVA (Hutter et al., 2014, "An Efficient Approach for Assessing Hyperparameter Importance") as Optuna computes
    it, most important key first. Empty for too few trials, or if all values are equal.
    """
    if len(values) < LEAST_TRIALS or len(set(values)) < 2:
        return {}
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {key: distribution_of(dimension) for key, dimension in space.items()}
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.trial.create_trial(params=config, distributions=distributions, value=value)
            for config, value in zip(configs, values, strict=True)
        ]
    )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(share) for key, share in shares.items()}


def report(sweep: RunDir) -> str:
    """Return the page for the search in a directory. Raises InputError if the directory has none."""
    job = read_job(sweep)
    stored = sweep.read_json_or_empty("sweep.json")
    if job is None or job.tune is None or not stored:
        raise InputError("there is no search here", sweep.uri, "give its job file or directory")
    tune = job.tune
    sign = 1 if tune.direction == "min" else -1
    ranked = sorted(stored["trials"], key=lambda t: (t["value"] is None, sign * (t["value"] or 0.0)))
    content: dict[str, Any] = {
        "name": run_name(job.name, sweep.name),
        "found": redact(stored),
        "tune": tune,
        "keys": list(tune.space),
        "ranked": redact(ranked),
        "best_job": redact(sweep.read_text("best.yaml") or ""),
        "frontier": None,
        "parallel": None,
        "curves": None,
        "shares": [],
    }
    trained = [trial for trial in stored["trials"] if trial["value"] is not None]
    if trained and stored["best"] is not None:
        content |= _charts(sweep, tune, trained, stored["best"]["trial"])
    if stored.get("frontier"):
        content["frontier"] = search_charts.frontier(stored["trials"], stored["frontier"], tune.metrics)
    return render("search_report", content)


def _charts(sweep: RunDir, tune: TuneSpec, trained: list[dict[str, Any]], best: str) -> dict[str, Any]:
    """Return the template's charts of the trials that have a value."""
    rows = {t["trial"]: _with_metric(_history(sweep, t["runs"][-1]), tune.first) for t in trained}
    trained = [t for t in trained if rows[t["trial"]]]
    if not trained:
        return {}
    window = 1 if "." in tune.first else tune.window  # the last evaluation counts
    lines = []
    for trial in trained:
        mine = rows[trial["trial"]]
        means = _smooth([row[tune.first] for row in mine], window)
        points = [(float(row["step"]), mean) for row, mean in zip(mine, means, strict=True)]
        lines.append(search_charts.Curve(trial["trial"], trial["state"], points))
    shared = max(min(t["step"] for t in trained), *(mine[0]["step"] for mine in rows.values() if mine))
    values = [
        _smooth([r[tune.first] for r in rows[t["trial"]] if r["step"] <= shared], window)[-1] for t in trained
    ]
    several = len(tune.space) > 1  # one key explains everything
    shares = importance(tune.space, [t["config"] for t in trained], values) if several else {}
    kinds = {key: dimension.kind for key, dimension in tune.space.items()}
    return {
        "parallel": search_charts.parallel(trained, kinds, tune.first, tune.direction, best),
        "curves": search_charts.curves(lines, best),
        "shares": [(search_charts.short_key(key), share) for key, share in shares.items()],
        "compared_at": shared,
        "compared": len(trained),
    }


def _history(sweep: RunDir, run: str) -> list[Row]:
    """Return the rows behind a run's weights. Empty for an unreadable run, so that the others keep their curves."""
    try:
        return lineage.history(sweep, run)
    except (InputError, OSError):
        return []


def _with_metric(rows: list[Row], metric: str) -> list[Row]:
    """Return the rows that have the metric, including those of evaluations."""
    every = [*rows, *({**row, **by_name(row.get("sets") or {})} for row in evaluations_in(rows))]
    return [row for row in every if isinstance(row.get(metric), int | float)]


def _smooth(values: list[float], window: int) -> list[float]:
    """Return the mean of the last `window` values at each step, which schedulers compare."""
    return [statistics.fmean(values[max(0, n + 1 - window) : n + 1]) for n in range(len(values))]
