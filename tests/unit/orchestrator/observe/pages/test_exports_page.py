"""The frontier of a benchmark: which exports are on it, for metrics whose largest or smallest value is the best."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.observe.pages.exports_page import drawn, page, unbeaten


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
