"""The page of a benchmark: its table, and pictures of the metric of each export over its size and over its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from orchestrator.config.metric_names import larger_is_better
from orchestrator.observe.formatting import duration
from orchestrator.observe.pages import charts
from orchestrator.observe.pages.charts import Point, Scale, Tick
from orchestrator.observe.pages.page import render, size

WIDTH, HEIGHT = 520.0, 320.0
ABOVE = 24.0
"""Space above the highest point, for its name."""


LETTER, LINE = 6.6, 13.0
"""About the width and the height of a letter of a name."""
RADIUS = 6.0


class Label(NamedTuple):
    """The place of a name: x, y of its baseline, and whether it starts or ends there."""

    x: float
    y: float
    anchor: str


@dataclass(frozen=True)
class Dot:
    """An export in a picture: its place, its name and the place of that, and whether it is on the frontier."""

    x: float
    y: float
    name: str
    on_frontier: bool
    label: Label | None = None


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
    dots = [
        Dot(x(px), y(py), row["export"], (px, py) in kept) for row, (px, py) in zip(rows, points, strict=True)
    ]
    stairs: list[Point] = []
    for point in kept:
        if stairs:
            stairs.append((point[0], stairs[-1][1]))
        stairs.append(point)
    corners = [(x(px), y(py)) for px, py in stairs]
    return Frontier(
        cost.title,
        labelled(dots, corners, (x.start, x.end, 0.0, HEIGHT - charts.BOTTOM)),
        line=charts.path(stairs, x, y),
        x_ticks=[(x(math.log10(value)), cost.text(value * cost.unit)) for value in round_numbers(x)],
        y_ticks=[(y(value), charts.number(value)) for value in charts.ticks(y.low, y.high, 6)],
    )


Box = tuple[float, float, float, float]
"""Left, right, top and bottom."""


def labelled(dots: Sequence[Dot], corners: Sequence[Point], frame: Box) -> list[Dot]:
    """Return the dots with their names beside them, where each covers least of other names, dots and the line.

    Args:
        dots: the dots. Those on the frontier choose first.
        corners: of the line.
        frame: where names may be.
    """
    taken: list[Box] = [(dot.x - RADIUS, dot.x + RADIUS, dot.y - RADIUS, dot.y + RADIUS) for dot in dots]
    for (ax, ay), (bx, by) in pairwise(corners):
        taken.append((min(ax, bx) - 1, max(ax, bx) + 1, min(ay, by) - 1, max(ay, by) + 1))
    names: dict[int, Label] = {}
    for index in sorted(range(len(dots)), key=lambda n: not dots[n].on_frontier):
        dot = dots[index]
        places = [
            Label(round(dot.x + side * 9, 2), round(dot.y + down, 2), anchor)
            for down in (-7.0, 16.0, -7.0 - LINE, 16.0 + LINE, -7.0 - 2 * LINE, 16.0 + 2 * LINE)
            for side, anchor in ((1, "start"), (-1, "end"))
        ]
        boxes = [name_box(dot.name, place) for place in places]
        covered = [_outside(box, frame) + sum(shared_area(box, other) for other in taken) for box in boxes]
        best = covered.index(min(covered))
        names[index] = places[best]
        taken.append(boxes[best])
    return [replace(dot, label=names[index]) for index, dot in enumerate(dots)]


def name_box(name: str, place: Label) -> Box:
    """Return the box that a name covers at a place."""
    width = LETTER * len(name)
    left = place.x if place.anchor == "start" else place.x - width
    return left, left + width, place.y - LINE + 3, place.y + 3


def shared_area(one: Box, other: Box) -> float:
    """Return the area that two boxes share."""
    width = min(one[1], other[1]) - max(one[0], other[0])
    return max(width, 0.0) * max(min(one[3], other[3]) - max(one[2], other[2]), 0.0)


def _outside(box: Box, frame: Box) -> float:
    """Return the area of a box that is outside a frame."""
    return (box[1] - box[0]) * (box[3] - box[2]) - shared_area(box, frame)


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
