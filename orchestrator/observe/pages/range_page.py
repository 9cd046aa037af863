"""The page of a learning-rate range test: the loss over the rate, with the suggested rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from orchestrator.observe.live import BARS
from orchestrator.observe.pages import charts
from orchestrator.observe.pages.page import render

WIDE = (1040.0, 360.0)
WIDTH = 60
"""Width of the curve on a terminal, in characters."""


def page(name: str, unit: str, result: dict[str, Any], line: str) -> str:
    """Return the page.

    Args:
        name: of the job.
        unit: of the loss.
        result: the rates, losses and smoothed losses, and the suggested rate.
        line: the finding as a sentence.
    """
    exponents = [math.log10(rate) for rate in result["rates"]]
    smoothed = list(zip(exponents, result["smoothed"], strict=False))
    # Losses after the end of the smoothed curve have diverged, and would flatten it.
    raw = list(zip(exponents, result["losses"], strict=True))[: len(smoothed)]
    axes = charts.axes([*smoothed, *raw], *WIDE)
    assert axes is not None
    decades = range(math.ceil(axes.x.low), math.floor(axes.x.high) + 1)
    suggested = result["suggested"]
    content = {
        "name": name,
        "unit": unit,
        "line": line,
        "axes": axes,
        "ticks": [(axes.x(decade), f"1e{decade}") for decade in decades],
        "raw": charts.path(raw, axes.x, axes.y),
        "smoothed": charts.path(smoothed, axes.x, axes.y),
        "mark": None if suggested is None else axes.x(math.log10(suggested)),
        "suggested": "" if suggested is None else f"{suggested:.2g}",
    }
    return render("lr_range", content)


def on_terminal(result: dict[str, Any]) -> str:
    """Return the smoothed loss as bars from the first rate to where it ends."""
    smoothed: Sequence[float] = result["smoothed"]
    low, high = min(smoothed), max(smoothed)
    width = min(WIDTH, len(smoothed))
    cells: list[list[float]] = [[] for _ in range(width)]
    for n, loss in enumerate(smoothed):
        cells[n * width // len(smoothed)].append((loss - low) / ((high - low) or 1.0))
    bars = "".join(BARS[round(sum(cell) / len(cell) * (len(BARS) - 1))] for cell in cells)
    first, last = result["rates"][0], result["rates"][len(smoothed) - 1]
    return f"loss, by lr from {first:.2g} to {last:.2g}\n  {bars}"
