"""Several runs side by side: their figures, their curves in one chart, and the differences of their job files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.identity import read_job
from orchestrator.config.errors import InputError
from orchestrator.config.loss_unit import loss_unit, read_unit
from orchestrator.config.redact import redact
from orchestrator.observe.formatting import count, duration
from orchestrator.observe.last_status import if_lost
from orchestrator.observe.live import BARS
from orchestrator.observe.mlflow_run import flatten
from orchestrator.observe.pages import charts
from orchestrator.observe.pages.page import render
from orchestrator.observe.summary import summary
from orchestrator.observe.totals import CHARTED, totals_of
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import RunDir

MOST = 8
"""Maximum number of runs in a comparison, as many as there are distinguishable colours."""
WIDE = (1040.0, 320.0)
LOW = (508.0, 200.0)
WIDTH = 60
"""Width of a curve on a terminal, in characters."""
UNNAMED = "-"
"""Shown for a key that a run lacks."""
Curve = list[charts.Point]


@dataclass(frozen=True)
class ComparedRun:
    """A run: its label, summary, flat job, and the points of each of its curves."""

    label: str
    found: dict[str, Any]
    job: dict[str, str]
    curves: dict[str, Curve]


def compared(runs: Sequence[RunDir]) -> list[ComparedRun]:
    """Return the runs in the order given. Raises InputError for fewer than two, more than MOST, or a directory
    without a run.
    """
    if not 2 <= len({run.uri for run in runs}) == len(runs) <= MOST:
        raise InputError(
            f"takes 2 to {MOST} different runs", "RUN", "name them, as in `compare runs/a runs/b`"
        )
    names = [run.name for run in runs]
    labels = [run.name if names.count(run.name) == 1 else redact(run.uri) for run in runs]
    return [_read(run, label) for run, label in zip(runs, labels, strict=True)]


def _read(run: RunDir, label: str) -> ComparedRun:
    spec = read_job(run)
    if spec is None:
        raise InputError("there is no run here", run.uri, "give a run directory, such as runs/<name>")
    rows = totals_of(run)
    saved = run.read_json_or_empty("summary.json")
    extra = {"unigram_entropy": saved.get("unigram_entropy")}
    fields = summary(
        spec.summarised, run.read_json_or_empty("plan.json"), redact(run.rows(EVENTS)), rows, **extra
    )
    fields |= if_lost(run)
    curves: dict[str, Curve] = {key: list(rows.points[key]) for key in CHARTED}
    for evaluation in reversed(rows.evaluations):
        for name, metrics in evaluation["sets"].items():
            if "loss" in metrics:
                curves.setdefault(f"loss of {name}", []).append((float(evaluation["step"]), metrics["loss"]))
    flat = {key: str(value) for key, value in flatten(redact(spec.model_dump(mode="json")))}
    return ComparedRun(label, fields, flat, {key: points for key, points in curves.items() if points})


def facts(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the figures of each run, one row a figure, without figures that no run has."""
    sets = dict.fromkeys(name for run in runs for name in (run.found["evaluation"] or {}).get("sets", {}))
    read = " or ".join(dict.fromkeys(read_unit(run.found["objective"]) for run in runs))
    table = [
        ("state", [str(run.found["state"]) for run in runs]),
        ("steps", [f"{run.found['step']} of {run.found['steps']}" for run in runs]),
        (read, [count(run.found["tokens"]) for run in runs]),
        ("loss", [_number(run.found["final_loss"]) for run in runs]),
        *((f"loss of {name}", [_of_set(run, name) for run in runs]) for name in sets),
        (f"{read} per second", [count(run.found["measured"]["tokens_per_second"]) for run in runs]),
        ("a step", [duration(run.found["measured"]["step_seconds"]) for run in runs]),
        ("MFU", ["" if run.found["mfu"] is None else f"{run.found['mfu']:.1%}" for run in runs]),
        ("wall time", [duration(run.found["ledger"]["wall_seconds"]) for run in runs]),
        ("goodput", [_share(run.found["ledger"]["goodput"]) for run in runs]),
        ("attempts", [str(run.found["attempts"]) for run in runs]),
        ("layouts", [", ".join(run.found["layouts"]) for run in runs]),
        (
            "cost",
            ["" if run.found["cost_usd"] is None else f"{run.found['cost_usd']:.2f} USD" for run in runs],
        ),
        ("receipt", [str(run.found["receipt"] or "")[:16] for run in runs]),
    ]
    return [(name, values) for name, values in table if any(values)]


def differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the keys in which the job files differ, with each run's value."""
    keys = dict.fromkeys(key for run in runs for key in run.job)
    values = ((key, [run.job.get(key, UNNAMED) for run in runs]) for key in keys if key != "name")
    return [(key, found) for key, found in values if len(set(found)) > 1]


def on_terminal(runs: Sequence[ComparedRun], key: str = "loss") -> list[str]:
    """Return a curve of each run as a line of bars with common axes: the lowest bar is the minimum over all runs."""
    points = {run.label: run.curves.get(key, []) for run in runs}
    every = [point for curve in points.values() for point in curve if math.isfinite(point[1])]
    if not every:
        return []
    first = min(x for x, _ in every)
    last = max(x for x, _ in every)
    low = min(y for _, y in every)
    high = max(y for _, y in every)
    width = max(map(len, points))
    return [f"{label:<{width}}  {_bars(curve, first, last, low, high)}" for label, curve in points.items()]


def _bars(curve: Curve, first: float, last: float, low: float, high: float) -> str:
    cells: list[list[float]] = [[] for _ in range(WIDTH)]
    for x, y in curve:
        if math.isfinite(y):
            cells[min(int((x - first) / ((last - first) or 1.0) * WIDTH), WIDTH - 1)].append(y)
    shares = [((sum(of) / len(of)) - low) / ((high - low) or 1.0) if of else None for of in cells]
    return "".join(" " if s is None else BARS[round(s * (len(BARS) - 1))] for s in shares).rstrip()


def page(runs: Sequence[ComparedRun]) -> str:
    """Return the comparison as a page."""
    content = {
        "labels": [run.label for run in runs],
        "states": [str(run.found["state"]) for run in runs],
        "facts": facts(runs),
        "differences": differences(runs),
        "plots": list(_plots(runs)),
    }
    return render("compare", content)


def _plots(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    drawn = []
    for key in dict.fromkeys(key for run in runs for key in ("loss", *sorted(run.curves))):
        lines = [(number, run.curves[key]) for number, run in enumerate(runs) if key in run.curves]
        size = WIDE if key == "loss" else LOW
        axes = charts.axes(
            (p for _, line in lines for p in line), *size, from_zero=key in ("tokens_per_second", "grad_norm")
        )
        if axes is not None:
            title, unit = _title(key, [runs[number].found["objective"] for number, _ in lines])
            paths = [(number, charts.path(charts.thin(line), axes.x, axes.y)) for number, line in lines]
            drawn.append({"key": key, "title": title, "unit": unit, "axes": axes, "lines": paths})
    return drawn


def _title(key: str, objectives: Iterable[str]) -> tuple[str, str]:
    """Return the title of a plot, and the unit of its curves, or all units if runs differ."""
    if key == "grad_norm":
        return "Gradient norm", "before clipping"
    if key == "tokens_per_second":
        return "Speed", " or ".join(dict.fromkeys(f"{read_unit(each)} per second" for each in objectives))
    return key.capitalize(), " or ".join(dict.fromkeys(map(loss_unit, objectives)))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _of_set(run: ComparedRun, name: str) -> str:
    sets: Mapping[str, Any] = (run.found["evaluation"] or {}).get("sets", {})
    return _number(sets.get(name, {}).get("loss"))
