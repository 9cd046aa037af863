"""The table of statistics by layer in a report: the last values, and how they came about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.observe.live import BARS
from orchestrator.storage.row_line import OF_LAYERS, Row

TITLES = dict(
    zip(
        OF_LAYERS,
        ("norm of the weights", "norm of the gradient", "root mean square of the output"),
        strict=True,
    )
)
HISTOGRAMS = {
    "weight_histogram": "weights by power of two",
    "gradient_histogram": "gradients by power of two",
}


def layer_table(newest_first: Sequence[tuple[int, Row]]) -> dict[str, Any] | None:
    """Return the table of the statistics of some steps: a row for each parameter and layer; None without any.

    A cell has the last value and a bar for each step, from the row's lowest value to its highest. A histogram is that
    of the last step.
    """
    if not newest_first:
        return None
    last_step, last = newest_first[0]
    oldest_first = [layers for _, layers in reversed(newest_first)]
    names = [name for name, statistics in last.items() if isinstance(statistics, Mapping)]
    kinds = [kind for kind in TITLES if any(kind in last[name] for name in names)]
    histograms = [kind for kind in HISTOGRAMS if any(kind in last[name] for name in names)]
    rows = []
    for name in names:
        cells = []
        for kind in kinds:
            values = [_number((layers.get(name) or {}).get(kind)) for layers in oldest_first]
            cells.append((values[-1], _bars([value for value in values if value is not None])))
        rows.append(
            {
                "name": name,
                "cells": cells,
                "histograms": [_histogram(last[name].get(kind)) for kind in histograms],
            }
        )
    return {
        "first": newest_first[-1][0],
        "last": last_step,
        "titles": [TITLES[kind] for kind in kinds] + [HISTOGRAMS[kind] for kind in histograms],
        "rows": rows,
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _bars(values: Sequence[float]) -> str:
    """Return a bar for each value, from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(BARS[round((value - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for value in values)


def _histogram(histogram: Any) -> str:
    """Return the bars of the powers of two from the first with an element to the last, with these two powers."""
    if not isinstance(histogram, Mapping):
        return ""
    counts = {int(key): count for key, count in histogram.items() if key.lstrip("-").isdecimal()}
    others = "".join(f", {histogram[key]} {key}" for key in ("zero", "not finite") if histogram.get(key))
    if not counts:
        return others.removeprefix(", ")
    low, high = min(counts), max(counts)
    bars = _bars([0.0, *(float(counts.get(power, 0)) for power in range(low, high + 1))])[1:]
    return f"2^{low} {bars} 2^{high}{others}"
