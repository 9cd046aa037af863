"""A search as one HTML page without anything outside it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.identity import job_in
from orchestrator.job.errors import InputError
from orchestrator.storage.run_directory import Row, RunDir
from orchestrator.track.redact import redact
from orchestrator.tune import charts as pictures
from orchestrator.tune import lineage
from orchestrator.tune.importance import importance


def report(sweep: RunDir) -> str:
    """The page for what stands in the directory of a search. Raises InputError if there is none."""
    import jinja2

    job, found = job_in(sweep), sweep.told("sweep.json")
    if job is None or job.tune is None or not found:
        raise InputError("there is no search here", sweep.uri, "give its job file or directory")
    tune = job.tune
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    sign = 1 if tune.mode == "min" else -1
    ranked = sorted(found["trials"], key=lambda t: (t["value"] is None, sign * (t["value"] or 0.0)))
    content: dict[str, Any] = {
        "found": redact(found),
        "tune": tune,
        "keys": list(tune.space),
        "ranked": redact(ranked),
    }
    content |= {"best_job": redact(sweep.read_text("best.yaml") or ""), **_drawn(sweep, tune, found)}
    return environment.get_template("report.html.j2").render(content)


def _drawn(sweep: RunDir, tune: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The drawings; none where nothing was trained."""
    nothing = {"parallel": "", "curves": "", "bars": "", "compared_at": 0, "compared": 0}
    trained = [trial for trial in found["trials"] if trial["value"] is not None]
    if not trained or found["best"] is None:
        return nothing
    best = found["best"]["trial"]
    rows = {t["trial"]: _with_metric(lineage.history(sweep, t["runs"][-1]), tune.metric) for t in trained}
    lines = [
        (
            t["trial"],
            t["state"],
            [row["step"] for row in rows[t["trial"]]],
            _smooth([row[tune.metric] for row in rows[t["trial"]]], tune.window),
        )
        for t in trained
    ]
    shared = min(t["step"] for t in trained)
    values = [
        _smooth([r[tune.metric] for r in rows[t["trial"]] if r["step"] <= shared], tune.window)[-1]
        for t in trained
    ]
    shares = importance([t["config"] for t in trained], values)
    kinds = {key: dimension.kind for key, dimension in tune.space.items()}
    return {
        "parallel": pictures.parallel(trained, kinds, tune.metric, tune.mode, best),
        "curves": pictures.curves(lines, tune.metric, best),
        "bars": pictures.bars(shares) if shares else "",
        "compared_at": shared,
        "compared": len(trained),
    }


def _with_metric(rows: list[Row], metric: str) -> list[Row]:
    return [row for row in rows if isinstance(row.get(metric), int | float)]


def _smooth(values: list[float], window: int) -> list[float]:
    """The mean of the last values at each place, as trials are judged."""
    return [statistics.fmean(values[max(0, n + 1 - window) : n + 1]) for n in range(len(values))]
