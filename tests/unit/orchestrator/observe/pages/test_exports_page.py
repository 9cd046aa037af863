"""The frontier of a benchmark: which exports are on it, for metrics whose largest or smallest value is the best."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from orchestrator.observe.pages.exports_page import drawn, name_box, page, shared_area, unbeaten


def row(name: str, value: float, size: float, metric: str = "accuracy") -> dict[str, Any]:
    return {
        "export": name, "runtime": "transformers", "metrics": {metric: value}, "metric": metric, "share": 1.0,
        "parameters": 1000, "weights_bytes": size, "smaller": 1.0, "memory_bytes": 1e6, "load_seconds": 1.0,
        "speeds": [{"batch": 1, "p50_seconds": 0.01, "p95_seconds": 0.02, "tokens_per_second": 10.0, "faster": 1.0}],
    }  # fmt: skip


def test_points_that_none_beats_in_both() -> None:
    points = [(1.0, 0.5), (2.0, 0.7), (3.0, 0.6), (4.0, 0.9), (4.0, 0.8)]
    assert unbeaten(points, larger=True) == [(1.0, 0.5), (2.0, 0.7), (4.0, 0.9)]
    assert unbeaten(points, larger=False) == [(1.0, 0.5)]


@pytest.mark.parametrize(("metric", "better"), [("accuracy", 0.9), ("loss", 0.1)])
def test_the_better_value_is_drawn_higher(metric: str, better: float) -> None:
    rows = [row("good", better, 4e6, metric), row("bad", 0.5, 1e6, metric), row("worst", 0.5, 2e6, metric)]
    picture = drawn(rows)["pictures"][0]
    good, bad, worst = picture.dots
    assert good.y < bad.y
    assert bad.x < worst.x < good.x
    assert [dot.on_frontier for dot in picture.dots] == [True, True, False]


def test_a_page_has_a_row_and_a_dot_for_each_and_escapes_names() -> None:
    text = page([row("a<b", 0.9, 1e6), row("c", 0.8, 1e6)], "2 samples of x")
    assert text.count("<circle") == 4
    assert "a&lt;b" in text
    assert "a<b" not in text


def test_one_export_is_drawn_too() -> None:
    assert page([row("a", 0.0, 1e6)], "").count("<circle") == 2


def test_names_of_exports_that_are_close_cover_nothing() -> None:
    """Three with nearly equal values: each name is clear of the other names, of all dots, and of the line."""
    close = [
        ("runs/small/export", 0.800, 9e6),
        ("runs/student-int8", 0.802, 12e6),
        ("runs/student", 0.803, 14e6),
    ]
    rows = [row("runs/teacher/export", 0.82, 90e6), *(row(*each) for each in close)]
    (picture, _) = drawn(rows)["pictures"]
    boxes = [name_box(dot.name, dot.label) for dot in picture.dots if dot.label]
    boxes += [(dot.x - 5, dot.x + 5, dot.y - 5, dot.y + 5) for dot in picture.dots]
    corners = [tuple(map(float, each.split())) for each in picture.line[1:].split("L")]
    boxes += [
        (min(a, c) - 1, max(a, c) + 1, min(b, d) - 1, max(b, d) + 1) for (a, b), (c, d) in pairwise(corners)
    ]
    for number, one in enumerate(boxes[: len(rows)]):
        assert 0 < one[0] < one[1] < picture.width
        assert not [other for other in boxes[number + 1 :] if shared_area(one, other)]
