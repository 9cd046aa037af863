"""The geometry of the charts in a search's report: parallel coordinates and learning curves, in SVG units. Pure.

The template search_report.html.j2 draws them. The `kind` of a line is its style there: best, full (trained to the end)
or part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.observe.formatting import short
from orchestrator.observe.pages.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axes,
    Point,
    Scale,
    Tick,
    axes,
    number,
    path,
    thin,
    ticks,
)
from orchestrator.observe.pages.exports_page import Dot, Frontier, labelled, round_numbers

WIDTH, HEIGHT = 1040.0, 320.0
FRONTIER_WIDTH = 760.0
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
    for index, trial in enumerate(trials):
        kind, opacity = _kind(trial["trial"], trial["state"], best), 1.0
        if kind == "full":
            opacity -= (1.0 - WEAKEST) * full.index(trial["value"]) / max(len(full) - 1, 1)
        points = [(float(place), column[0][index]) for place, column in enumerate(columns)]
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


def frontier(
    trials: Sequence[Mapping[str, Any]], unbeaten: Sequence[str], metrics: Sequence[str]
) -> Frontier:
    """Return the picture of the first metric over the second. The line goes through the trials that no other one beats.

    Args:
        trials: the trials of sweep.json.
        unbeaten: the names of those on the line, in order of the first metric, the best first.
        metrics: the names of the two metrics.
    """
    shown = {t["trial"]: t for t in trials if None not in (t["value"], t["second"])}
    numbers = [float(t["second"]) for t in shown.values()]
    # The sizes of models differ by factors.
    logarithmic = min(numbers) > 0 and max(numbers) > 4 * min(numbers)
    points = {
        name: (math.log10(t["second"]) if logarithmic else float(t["second"]), float(t["value"]))
        for name, t in shown.items()
    }
    x = _with_room([point[0] for point in points.values()], LEFT, FRONTIER_WIDTH - RIGHT)
    y = _with_room([point[1] for point in points.values()], HEIGHT - BOTTOM, TOP)
    line: list[Point] = []
    for name in unbeaten:
        if line:  # between two trials, only what both reach is known
            line.append((line[-1][0], points[name][1]))
        line.append(points[name])
    dots = [Dot(x(px), y(py), name, name in unbeaten) for name, (px, py) in points.items()]
    corners = [(x(px), y(py)) for px, py in line]
    if logarithmic:
        x_ticks = [(math.log10(value), number(value)) for value in round_numbers(x)]
    else:
        x_ticks = [(value, number(value)) for value in ticks(x.low, x.high, 7)]
    return Frontier(
        metrics[1],
        labelled(
            sorted(dots, key=lambda dot: dot.on_frontier), corners, (x.start, x.end, 0.0, HEIGHT - BOTTOM)
        ),
        line=path(line, x, y),
        x_ticks=[(x(value), text) for value, text in x_ticks],
        y_ticks=[(y(value), number(value)) for value in ticks(y.low, y.high, 6)],
        width=FRONTIER_WIDTH,
        height=HEIGHT,
        frame=(LEFT, FRONTIER_WIDTH - RIGHT, TOP, HEIGHT - BOTTOM),
    )


def _with_room(values: Sequence[float], start: float, end: float) -> Scale:
    """Return the scale of an axis on which no value is at the edge."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - room, high + room, start, end)


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
    known = sorted({short(v) for v in values}, key=lambda text: (len(text), text))
    heights = {text: n / max(len(known) - 1, 1) for n, text in enumerate(known)}
    return [heights[short(v)] for v in values], [(height, text) for text, height in heights.items()]
