"""The page of a benchmark: its table, and pictures of the metric of each export over its size and over its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestrator.config.metric_names import larger_is_better
from orchestrator.observe.formatting import duration
from orchestrator.observe.pages import charts
from orchestrator.observe.pages.charts import Point, Scale, Tick
from orchestrator.observe.pages.page import render, size

WIDTH, HEIGHT = 520.0, 320.0
ABOVE = 24.0
"""Space above the highest point, for its name."""


@dataclass(frozen=True)
class Dot:
    """An export in a picture: its place, its name and the anchor of that, and whether it is on the frontier."""

    x: float
    y: float
    name: str
    anchor: str
    on_frontier: bool


@dataclass(frozen=True)
class Frontier:
    """A metric over a cost, on a logarithmic axis.

    Each export is a dot. The line goes through those that no other export beats in both.
    """

    title: str
    dots: list[Dot]
    line: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    width: float = WIDTH
    height: float = HEIGHT
    frame: tuple[float, float, float, float] = (
        charts.LEFT,
        WIDTH - charts.RIGHT,
        charts.TOP,
        HEIGHT - charts.BOTTOM,
    )


def page(rows: Sequence[Mapping[str, Any]], about: str) -> str:
    """Return the page for the rows of `measure.to_json`. `about` is a line on what was measured."""
    return render("exports", {**drawn(rows), "about": about})


def drawn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the table and the pictures of a page need."""
    bytes_of_weights = Cost("bytes of weights", 2.0**20, size, lambda row: float(row["weights_bytes"]))
    costs = [bytes_of_weights]
    if rows[0]["speeds"]:
        title = f"median time of a batch of {rows[0]['speeds'][0]['batch']}"
        costs.append(Cost(title, 1e-3, duration, lambda row: float(row["speeds"][0]["p50_seconds"])))
    return {
        "rows": rows,
        "metric": rows[0]["metric"],
        "metrics": list(dict.fromkeys(name for row in rows for name in row["metrics"])),
        "pictures": [frontier(rows, cost) for cost in costs],
    }


class Cost(NamedTuple):
    """A cost of an export: its name, the unit of round numbers, the format of a value, and its value for a row."""

    title: str
    unit: float
    text: Callable[[float], str]
    of_row: Callable[[Mapping[str, Any]], float]


def frontier(rows: Sequence[Mapping[str, Any]], cost: Cost) -> Frontier:
    """Return the picture of the metric over a cost."""
    metric = rows[0]["metric"]
    larger = larger_is_better(metric)
    points = [(math.log10(cost.of_row(row) / cost.unit), float(row["metrics"][metric])) for row in rows]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    margin = max(0.1 * (high - low), 0.25 - 0.5 * (high - low), 0.05)
    x = Scale(low - margin, high + margin, charts.LEFT, WIDTH - charts.RIGHT)
    worst, best = sorted([min(y for _, y in points), max(y for _, y in points)])
    room = max(0.1 * (best - worst), 0.01 * abs(best), 1e-9)
    ends = (HEIGHT - charts.BOTTOM, ABOVE) if larger else (ABOVE, HEIGHT - charts.BOTTOM)
    y = Scale(worst - room, best + room, *ends)
    kept = unbeaten(points, larger)
    middle = (x.start + x.end) / 2
    dots = [
        Dot(x(px), y(py), row["export"], "start" if x(px) < middle else "end", (px, py) in kept)
        for row, (px, py) in zip(rows, points, strict=True)
    ]
    stairs: list[Point] = []
    for point in kept:
        if stairs:
            stairs.append((point[0], stairs[-1][1]))
        stairs.append(point)
    return Frontier(
        cost.title,
        dots,
        line=charts.path(stairs, x, y),
        x_ticks=[(x(math.log10(value)), cost.text(value * cost.unit)) for value in round_numbers(x)],
        y_ticks=[(y(value), charts.number(value)) for value in charts.ticks(y.low, y.high, 6)],
    )


def round_numbers(x: Scale) -> list[float]:
    """Return at most about six round numbers on a logarithmic axis."""
    powers = range(math.floor(x.low), math.ceil(x.high) + 1)
    result = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    result = [value for value in result if x.low <= math.log10(value) <= x.high]
    return result[:: max(1, math.ceil(len(result) / 6))]


def unbeaten(points: Sequence[Point], larger: bool) -> list[Point]:
    """Return the points (cost, metric) that no other point beats in one without being worse in the other, by cost."""
    kept: list[Point] = []
    for cost, metric in sorted(points, key=lambda point: (point[0], -point[1] if larger else point[1])):
        if not kept or (metric > kept[-1][1] if larger else metric < kept[-1][1]):
            kept.append((cost, metric))
    return kept
