"""The drawings of a search's report, as SVG: parallel coordinates, learning curves, importance."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

GREY, BEST = "#c4c8cc", "#c1121f"
"""Trials that did not go to the end, and the best one."""
Curve = tuple[str, str, list[int], list[float]]
"""Trial, state, steps, values of the metric."""


def parallel(
    trials: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], metric: str, mode: str, best: str
) -> str:
    """A line a trial over one axis a key, the metric last; those that did not end well are grey.

    `kinds` says by key how its values are drawn from; loguniform ones have a logarithmic axis.
    """
    from matplotlib import colormaps

    keys = [*kinds, metric]
    shown = [t for t in trials if t["value"] is not None]
    figure, axis = _figure(10.4, 3.6)
    columns = [
        _axis([t["value"] if key == metric else t["config"][key] for t in shown], kinds.get(key, ""))
        for key in keys
    ]
    full = sorted((t["value"] for t in shown if t["state"] == "done"), reverse=mode == "max")
    for number, trial in enumerate(shown):
        points = [column[0][number] for column in columns]
        if trial["trial"] == best:
            style: dict[str, Any] = {"color": BEST, "linewidth": 2.4, "zorder": 4}
        elif trial["state"] == "done":
            share = full.index(trial["value"]) / max(len(full) - 1, 1)
            style = {"color": colormaps["viridis"](0.9 * share), "linewidth": 1.3, "zorder": 3}
        else:
            style = {"color": GREY, "linewidth": 0.9, "zorder": 2}
        axis.plot(range(len(keys)), points, **style)
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
    for place, (_, ticks) in enumerate(columns):
        axis.axvline(place, color="#444", linewidth=0.8, zorder=1)
        for height, text in ticks:
            axis.annotate(
                text,
                (place, height),
                (4, 0),
                textcoords="offset points",
                fontsize=8,
                va="center",
                zorder=5,
                bbox=behind,
            )
    axis.set_xticks(range(len(keys)), [_short(key) for key in keys], fontsize=9)
    axis.set_yticks([])
    axis.set_xlim(-0.03 * len(keys), (len(keys) - 1) * 1.08)
    axis.set_ylim(-0.06, 1.06)
    for side in ("top", "left", "right", "bottom"):
        axis.spines[side].set_visible(False)
    return _svg(figure)


def curves(found: Sequence[Curve], metric: str, best: str) -> str:
    """The metric over steps; trials that were stopped or failed are grey, the best is drawn last."""
    figure, axis = _figure(10.4, 3.8)
    order = {"done": 1}
    labelled: set[str] = set()
    for trial, state, steps, values in sorted(found, key=lambda c: (c[0] == best, order.get(c[1], 0))):
        if trial == best:
            style: dict[str, Any] = {"color": BEST, "linewidth": 2.0, "label": f"best ({trial})"}
        elif state == "done":
            style = {"color": "#3a6ea5", "linewidth": 1.1, "alpha": 0.8, "label": "to the end"}
        else:
            style = {"color": GREY, "linewidth": 1.0, "label": "stopped early"}
        if style["label"] in labelled:
            style.pop("label")
        else:
            labelled.add(style["label"])
        axis.plot(steps, values, **style)
        if trial != best and state != "done" and steps:
            axis.plot(steps[-1:], values[-1:], "o", color=GREY, markersize=3)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel(metric, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(axis="y", color="#eee")
    axis.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return _svg(figure)


def bars(shares: Mapping[str, float]) -> str:
    """A bar a key, from 0 to 1."""
    figure, axis = _figure(10.4, 0.5 + 0.36 * len(shares))
    names = [_short(key) for key in reversed(list(shares))]
    values = list(reversed(list(shares.values())))
    axis.barh(names, values, color="#3a6ea5", height=0.6)
    for place, value in enumerate(values):
        axis.annotate(
            f"{value:.2f}", (value, place), (4, 0), textcoords="offset points", fontsize=8, va="center"
        )
    axis.set_xlim(0, 1.06)
    axis.tick_params(labelsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return _svg(figure)


def _axis(values: Sequence[Any], kind: str) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights 0 to 1 of the values on their axis, and its labelled ticks."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values) and kind not in (
        "choice",
        "grid",
    ):
        logarithmic = kind == "loguniform"
        at = [math.log(v) if logarithmic else float(v) for v in values]
        low, high = min(at, default=0.0), max(at, default=1.0)
        width = high - low or 1.0
        marks = [low + share * width for share in (0.0, 0.5, 1.0)] if high > low else [low]
        ticks = [((m - low) / width, f"{math.exp(m) if logarithmic else m:.3g}") for m in marks]
        return [(a - low) / width for a in at], ticks
    known = sorted({str(v) for v in values}, key=lambda text: (len(text), text))
    places = {text: n / max(len(known) - 1, 1) for n, text in enumerate(known)}
    return [places[str(v)] for v in values], [(height, text) for text, height in places.items()]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _short(key: str) -> str:
    return ".".join(key.split(".")[-2:])


def _svg(figure: Any) -> str:
    """The <svg> element, of a size that follows the page's."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    found = text.getvalue()
    found = found[found.index("<svg") :]
    return re.sub(
        r'<svg ([^>]*?)width="[^"]*" ?',
        r'<svg \1width="100%" ',
        re.sub(r' height="[^"]*"', "", found, count=1),
        count=1,
    )
