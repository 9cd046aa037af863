"""Geometry of the charts in a report: numbers in, SVG coordinates out. charts.html.j2 draws them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Point = tuple[float, float]
Tick = tuple[float, str]

LEFT = 54.0
RIGHT = 14.0
TOP = 14.0
BOTTOM = 26.0
POINTS = 900  # about the number of pixels in a chart's width
TIME_TICKS = 8
"""Approximate number of ticks of a time axis."""
TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True)
class Scale:
    """A linear map of [low, high] to [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


@dataclass(frozen=True)
class Axes:
    """An x and a y axis in a drawing of that width and height, in SVG units. y points downwards."""

    width: float
    height: float
    x: Scale
    y: Scale

    @property
    def frame(self) -> tuple[float, float, float, float]:
        """Return left, right, top and bottom of the drawing area."""
        return LEFT, self.width - RIGHT, TOP, self.height - BOTTOM

    @property
    def x_ticks(self) -> list[Tick]:
        """Return positions and labels on the x axis, integers only, because it counts steps."""
        positions = ticks(self.x.low, self.x.high, int(self.width // 90))
        return [(self.x(v), number(v)) for v in positions if v == int(v)]

    @property
    def y_ticks(self) -> list[Tick]:
        """Return positions and labels on the y axis."""
        return [(self.y(v), number(v)) for v in ticks(self.y.low, self.y.high, int(self.height // 45))]


@dataclass(frozen=True)
class Plot:
    """A line over steps with labelled marks, shaded bands, a level and other lines, each with its name and last
    point; in SVG units.
    """

    axes: Axes
    path: str
    last: Point
    marks: list[Tick]
    bands: list[Point]
    level: float | None
    others: list[tuple[str, str, Point]]


def axes(
    points: Iterable[Point],
    width: float,
    height: float,
    *,
    level: float | None = None,
    from_zero: bool = False,
) -> Axes | None:
    """Return axes that contain all these points and the level; None if no point is finite."""
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return None
    xs = [x for x, _ in finite]
    ys = [y for _, y in finite]
    if level is not None:
        ys.append(level)
    low = min(0.0, *ys) if from_zero else min(ys)
    high = max(ys)
    margin = (high - low or abs(high) or 1.0) * 0.06
    low = low if from_zero else low - margin
    x = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, LEFT, width - RIGHT)
    return Axes(width, height, x, Scale(low, high + margin, height - BOTTOM, TOP))


def line_plot(
    points: Iterable[Point],
    width: float,
    height: float,
    *,
    marks: Sequence[Tick] = (),
    bands: Sequence[Point] = (),
    level: float | None = None,
    from_zero: bool = False,
    others: Mapping[str, Sequence[Point]] = MappingProxyType({}),
) -> Plot | None:
    """Return a line with labelled marks and shaded bands on the x axis, a level on the y axis, and other lines by
    name.

    Points that are not finite interrupt the line. None if there is nothing to draw.
    """
    main_line = list(points)
    every = [*main_line, *(point for line in others.values() for point in line)]
    plot_axes = axes(every, width, height, level=level, from_zero=from_zero)
    if plot_axes is None or not any(math.isfinite(value) for _, value in main_line):
        return None
    x = plot_axes.x
    y = plot_axes.y
    last = [point for point in main_line if math.isfinite(point[1])][-1]
    return Plot(
        plot_axes,
        path(thin(main_line), x, y),
        last=(x(last[0]), y(last[1])),
        marks=[(x(v), label) for v, label in marks if x.low <= v <= x.high],
        bands=[(x(max(a, x.low)), x(min(b, x.high))) for a, b in bands if a < x.high and b > x.low],
        level=None if level is None else y(level),
        others=[
            (name, path(thin(line), x, y), (x(line[-1][0]), y(line[-1][1])))
            for name, line in others.items()
            if line and math.isfinite(line[-1][1])
        ],
    )


def path(points: Iterable[Point], x: Scale, y: Scale) -> str:
    """Return the d of an SVG path, interrupted where a value is not finite."""
    parts = []
    pen = "M"
    for px, py in points:
        if math.isfinite(py):
            parts.append(f"{pen}{x(px):g} {y(py):g}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def thin(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """Return at most about `limit` points with every peak and dip: the first, lowest, highest and last of each bin."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit / 4))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        chunk = range(start, min(start + size, len(points)))
        finite = [i for i in chunk if math.isfinite(points[i][1])]
        extremes = {f(finite, key=lambda i: points[i][1]) for f in (min, max)} if finite else set()
        broken = {i for i in chunk if not math.isfinite(points[i][1])}
        kept += [points[i] for i in sorted({chunk[0], chunk[-1], *extremes, *broken})]
    return kept


class Thinned:
    """Collects the points of a line, in any order, and keeps about `POINTS` of them.

    Each of equally wide bins keeps its first, last, lowest and highest point, and one that is not finite.
    """

    def __init__(self) -> None:
        self._width = 1
        self._bins: dict[int, list[Point]] = {}

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        points = self._bins.setdefault(int(x // self._width), [])
        points.append((x, y))
        if len(points) > 16:
            points[:] = _extremes(points)
        while len(self._bins) > 2 * POINTS:
            self._width *= 2
            bins = self._bins
            self._bins = {}
            for number, point in bins.items():
                self._bins.setdefault(number // 2, []).extend(point)
            self._bins = {n: point if len(point) < 6 else _extremes(point) for n, point in self._bins.items()}

    def __iter__(self) -> Iterator[Point]:
        return iter(sorted((p for bin in self._bins.values() for p in bin), key=lambda point: point[0]))


def _extremes(points: Sequence[Point]) -> list[Point]:
    finite = [point for point in points if math.isfinite(point[1])]
    broken = [point for point in points if not math.isfinite(point[1])]
    kept = {min(points, key=lambda p: p[0]), max(points, key=lambda p: p[0]), *broken[:1]}
    if finite:
        kept |= {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
    return sorted(kept, key=lambda point: point[0])


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers within [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if not high > low or count < 1:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, digits) for i in range(first, last + 1)]


def time_ticks(seconds: float, count: int) -> list[float]:
    """Return at most about `count` ticks of a time axis within [0, seconds]: whole seconds, minutes, hours or days."""
    days = 86400 * math.ceil(seconds / count / 86400)
    step = next((s for s in TIME_STEPS if s * count >= seconds), days)
    return [float(i * step) for i in range(int(seconds // step) + 1)]


@dataclass(frozen=True)
class TimeAxis:
    """A time axis below lanes: the scale of its seconds, its labelled ticks, and the drawing's size, in SVG units."""

    x: Scale
    ticks: list[Tick]
    width: float
    height: float
    bottom: float


def time_axis(seconds: float, width: float, left: float, lanes: float) -> TimeAxis:
    """Return the axis of [0, seconds] below lanes of this total height. Names of lanes are left of `left`."""
    x = Scale(0.0, seconds, left, width - RIGHT)
    labelled = [(x(at), clock(at)) for at in time_ticks(seconds, TIME_TICKS)]
    return TimeAxis(x, labelled, width, height=lanes + BOTTOM + 6, bottom=lanes + 6)


def clock(seconds: float) -> str:
    """Return a time tick's label: 0, 30 s, 5 min, 1:30 min, 2 h, 2:30 h."""
    if seconds < 60:
        return f"{seconds:g} s" if seconds else "0"
    big, unit, small = (3600, "h", 60) if seconds >= 3600 else (60, "min", 1)
    big_units, rest = divmod(round(seconds), big)
    return f"{big_units}:{rest // small:02d} {unit}" if rest else f"{big_units} {unit}"


def number(value: float) -> str:
    """Return a tick's label: 0.002, 2.5, 1500, 12k, 3M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


@dataclass(frozen=True)
class Segment:
    """A part of a stacked bar: its name, value and position, in SVG units."""

    name: str
    value: float
    x: float
    width: float


def stacked(bars: Sequence[Mapping[str, float]], width: float) -> list[list[Segment]]:
    """Return bars on one scale, the longest `width` wide, each made of the given parts, in order."""
    longest = max((sum(bar.values()) for bar in bars), default=0.0)
    if not longest > 0 or not math.isfinite(longest):
        return []
    all_bars = []
    for bar in bars:
        at = 0.0
        segments = []
        for name, value in bar.items():
            size = value / longest * width
            segments.append(Segment(name, value, round(at, 2), round(size, 2)))
            at += size
        all_bars.append(segments)
    return all_bars
