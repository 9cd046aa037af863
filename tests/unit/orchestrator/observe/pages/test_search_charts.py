"""The geometry of the charts of a search."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.observe.pages.search_charts import Curve, curves, parallel

KINDS = {"a.b.lr": "loguniform", "a.b.kind": "choice"}


def trials(*values: float) -> list[dict[str, Any]]:
    return [
        {
            "trial": f"{n:04d}",
            "state": "done" if n % 2 == 0 else "stopped",
            "value": value,
            "config": {"a.b.lr": 10.0 ** -(n + 1), "a.b.kind": ("x", "y")[n % 2]},
        }
        for n, value in enumerate(values)
    ]


def test_parallel_coordinates_have_an_axis_a_key_and_a_line_a_trial() -> None:
    found = parallel(trials(3.0, 5.0, 4.0), KINDS, "loss", "min", "0000")
    assert [axis.name for axis in found.axes] == ["b.lr", "b.kind", "loss"]
    assert [line.kind for line in found.lines] == ["part", "full", "best"], "the best is drawn last"
    assert [label for _, label in found.axes[0].ticks] == ["0.001", "0.01", "0.1"]
    middle = (found.top + found.bottom) / 2
    assert found.axes[0].ticks[1][0] == pytest.approx(middle), "a logarithmic axis"


@pytest.mark.parametrize(("mode", "strongest"), [("min", "0002"), ("max", "0004")])
def test_the_better_trial_is_drawn_stronger(mode: str, strongest: str) -> None:
    found = parallel(trials(1.0, 9.0, 2.0, 9.0, 3.0), KINDS, "loss", mode, "0000")
    full = [line for line in found.lines if line.kind == "full"]
    assert max(full, key=lambda line: line.opacity).title.startswith(strongest)


def test_one_trial_has_lines_too() -> None:
    found = parallel(trials(3.0), KINDS, "loss", "min", "0000")
    assert "nan" not in found.lines[0].path
    assert found.lines[0].kind == "best"


def test_curves_stay_in_their_frame_and_end_where_the_trial_did() -> None:
    found = curves(
        [
            Curve("0000", "done", [(1.0, 5.0), (2.0, math.nan), (3.0, 3.0)]),
            Curve("0001", "stopped", [(1.0, 6.0), (2.0, 5.5)]),
            Curve("0002", "stopped", []),
        ],
        "0000",
    )
    assert found is not None
    assert [line.kind for line in found.lines] == ["part", "part", "best"]
    assert found.lines[-1].path.count("M") == 2, "the line breaks where there is no number"
    left, right, _, _ = found.axes.frame
    ends = {line.title.split(":")[0]: line.end for line in found.lines}
    assert ends["0000"] is not None
    assert ends["0000"][0] == right
    assert ends["0001"] is not None
    assert left < ends["0001"][0] < right
    assert ends["0002"] is None


def test_nothing_finite_has_no_curves() -> None:
    assert curves([Curve("0000", "done", [(1.0, math.nan)])], "0000") is None
