"""The geometry of the charts in a search's report: parallel coordinates and learning curves, in SVG units. Pure.

The template search_report.html.j2 draws them. The `kind` of a line is its style there: best, full (trained to the end)
or part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.observe.pages.charts import Axes, Point, Scale, Tick, axes, path, thin

WIDTH, HEIGHT = 1040.0, 320.0
SIDE = 40.0
ABOVE = 14.0
BELOW = 34.0
"""The space around the parallel axes. The labels of the last axis are to its right."""
WEAKEST = 0.3
"""The opacity of the worst trial that was trained to the end; the best has 1."""


@dataclass(frozen=True)
class Line:
    """The line of one trial: the `d` of its path, and the text shown when the pointer is on it."""

    kind: str
    path: str
    title: str
    opacity: float = 1.0
    end: Point | None = None


@dataclass(frozen=True)
class ParallelAxis:
    """A vertical axis, for a key of the search or for the metric."""

    x: float
    name: str
    ticks: list[Tick]


@dataclass(frozen=True)
class Parallel:
    """Parallel coordinates (Inselberg, 1985)."""

    axes: list[ParallelAxis]
    lines: list[Line]
    top: float = ABOVE
    bottom: float = HEIGHT - BELOW
    width: float = WIDTH
    height: float = HEIGHT


@dataclass(frozen=True)
class Curves:
    """The metric of each trial over its steps."""

    axes: Axes
    lines: list[Line]


@dataclass(frozen=True)
class Curve:
    """The data of a trial's learning curve: its state, and (step, value) of the metric."""

    trial: str
    state: str
    points: list[Point]


def parallel(
    trials: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], metric: str, mode: str, best: str
) -> Parallel:
    """Return the parallel coordinates: one axis for each key and the metric, one line for each trial.

    Args:
        trials: the trials of sweep.json that have a value.
        kinds: how the values of each key are drawn; loguniform ones get a logarithmic axis.
        metric: the name of the metric.
        mode: min or max.
        best: the name of the best trial.
    """
    keys = [*kinds, metric]
    y = Scale(0.0, 1.0, HEIGHT - BELOW, ABOVE)
    x = Scale(0.0, len(keys) - 1, SIDE, WIDTH - 2 * SIDE)
    columns = [
        _axis([t["value"] if key == metric else t["config"][key] for t in trials], kinds.get(key, ""))
        for key in keys
    ]
    full = sorted((t["value"] for t in trials if t["state"] == "done"), reverse=mode == "max")
    lines = []
    for number, trial in enumerate(trials):
        kind, opacity = _kind(trial["trial"], trial["state"], best), 1.0
        if kind == "full":
            opacity -= (1.0 - WEAKEST) * full.index(trial["value"]) / max(len(full) - 1, 1)
        points = [(float(index), column[0][number]) for index, column in enumerate(columns)]
        title = f"{trial['trial']}: {metric} {trial['value']:.5g}"
        lines.append(Line(kind, path(points, x, y), title, round(opacity, 2)))
    result = [
        ParallelAxis(x(index), short_key(key), [(y(height), text) for height, text in ticks])
        for index, (key, (_, ticks)) in enumerate(zip(keys, columns, strict=True))
    ]
    return Parallel(result, sorted(lines, key=_order))


def curves(shown_curves: Sequence[Curve], best: str) -> Curves | None:
    """Return the metric over steps, the best trial last; None without any finite value."""
    frame = axes([point for curve in shown_curves for point in curve.points], WIDTH, HEIGHT)
    if frame is None:
        return None
    lines = []
    for curve in shown_curves:
        kind = _kind(curve.trial, curve.state, best)
        finite = [point for point in curve.points if math.isfinite(point[1])]
        end = (frame.x(finite[-1][0]), frame.y(finite[-1][1])) if finite else None
        drawn = path(thin(curve.points), frame.x, frame.y)
        lines.append(Line(kind, drawn, f"{curve.trial}: {curve.state}", end=end))
    return Curves(frame, sorted(lines, key=_order))


def short_key(key: str) -> str:
    """Return the last two parts of a dotted key."""
    return ".".join(key.split(".")[-2:])


def _kind(trial: str, state: str, best: str) -> str:
    return "best" if trial == best else "full" if state == "done" else "part"


def _order(line: Line) -> tuple[int, float]:
    """Return the drawing order: later lines lie above earlier ones."""
    return ("part", "full", "best").index(line.kind), line.opacity


def _axis(values: Sequence[Any], kind: str) -> tuple[list[float], list[Tick]]:
    """Return the heights 0 to 1 of the values on their axis, and its labelled ticks."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numbers and kind not in ("choice", "grid"):
        logarithmic = kind == "loguniform"
        at = [math.log(v) if logarithmic else float(v) for v in values]
        low, high = min(at, default=0.0), max(at, default=1.0)
        width = high - low or 1.0
        marks = [low + share * width for share in (0.0, 0.5, 1.0)] if high > low else [low]
        ticks = [((m - low) / width, f"{math.exp(m) if logarithmic else m:.3g}") for m in marks]
        return [(a - low) / width for a in at], ticks
    known = sorted({str(v) for v in values}, key=lambda text: (len(text), text))
    heights = {text: n / max(len(known) - 1, 1) for n, text in enumerate(known)}
    return [heights[str(v)] for v in values], [(height, text) for text, height in heights.items()]
