from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.observe.pages.charts import (
    POINTS,
    Scale,
    clock,
    line_plot,
    number,
    path,
    thin,
    ticks,
    time_ticks,
)

FINITE = st.floats(-1e9, 1e9)


@pytest.mark.parametrize(
    ("low", "high", "count", "found"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.31, 0.59, 3, [0.4, 0.5]),
        (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, 4, [3]),
        (0, 100000, 3, [0, 50000, 100000]),
    ],
)
def test_ticks_are_round(low: float, high: float, count: int, found: list[float]) -> None:
    assert ticks(low, high, count) == pytest.approx(found)


@given(FINITE, st.floats(1e-3, 1e9), st.integers(1, 12))
def test_ticks_are_within_and_not_too_many(low: float, length: float, count: int) -> None:
    found = ticks(low, low + length, count)
    slack = 1e-6 * max(abs(low), length)
    assert all(low - slack <= tick <= low + length + slack for tick in found)
    assert found == sorted(set(found))
    assert len(found) <= count + 2


@given(st.floats(0, 1e8), st.integers(1, 12))
def test_time_ticks_are_within_and_not_too_many(seconds: float, count: int) -> None:
    found = time_ticks(seconds, count)
    assert found[0] == 0
    assert found[-1] <= seconds
    assert len(found) <= count + 1


@given(st.lists(st.one_of(FINITE, st.just(math.nan)), max_size=4000))
def test_thinning_keeps_peaks_dips_and_ends(values: list[float]) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = thin(points, 100)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    finite = [v for v in values if math.isfinite(v)]
    shown = [v for _, v in kept if math.isfinite(v)]
    if finite:
        assert (min(shown), max(shown)) == (min(finite), max(finite))
        assert kept[0][0] == 0
        assert kept[-1][0] == len(values) - 1
        assert len(shown) <= 104


def test_thinning_leaves_a_short_line_alone() -> None:
    points = [(float(i), 0.0) for i in range(POINTS)]
    assert thin(points) == points


def test_a_path_breaks_where_there_is_no_number() -> None:
    x = y = Scale(0, 4, 0, 4)
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, math.nan), (3.0, 3.0), (4.0, math.inf)]
    assert path(points, x, y) == "M0 0L1 1M3 3"


def test_a_plot_stays_in_its_frame() -> None:
    points = [(float(s), 10.0 / s) for s in range(1, 50)]
    plot = line_plot(
        points, 600, 200, marks=[(20, "two"), (99, "out")], bands=[(45, 70), (60, 80)], level=12.0
    )
    assert plot is not None
    left, right, top, bottom = plot.axes.frame
    coordinates = [float(v) for pair in plot.path.replace("M", "L").split("L")[1:] for v in pair.split()]
    assert all(left <= x <= right for x in coordinates[::2])
    assert all(top <= y <= bottom for y in coordinates[1::2])
    assert [label for _, label in plot.marks] == ["two"]
    assert len(plot.bands) == 1
    assert plot.bands[0][1] == right
    assert plot.level is not None
    assert top <= plot.level <= bottom


@pytest.mark.parametrize("points", [[(1.0, 5.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, -3.0), (2.0, math.nan)]])
def test_a_flat_or_single_point_has_a_plot(points: list[tuple[float, float]]) -> None:
    plot = line_plot(points, 600, 200, from_zero=True)
    assert plot is not None
    assert "nan" not in plot.path


def test_nothing_to_draw() -> None:
    assert line_plot([], 600, 200) is None
    assert line_plot([(1.0, math.nan)], 600, 200) is None


def test_labels() -> None:
    assert [number(v) for v in (0, 0.002, 2.5, 1500, 12000, 2e6)] == [
        "0",
        "0.002",
        "2.5",
        "1500",
        "12k",
        "2M",
    ]
    assert [clock(v) for v in (0, 30, 60, 90, 3600, 9000)] == [
        "0",
        "30 s",
        "1 min",
        "1:30 min",
        "1 h",
        "2:30 h",
    ]
