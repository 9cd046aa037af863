"""Write the report of a chain: one self-contained HTML page with links to the reports of its stages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.redact import redact
from orchestrator.observe.formatting import run_name
from orchestrator.observe.pages import charts
from orchestrator.observe.pages.exports_page import drawn
from orchestrator.observe.pages.page import render
from orchestrator.storage.file_names import CHAIN
from orchestrator.storage.run_directory import REPORT, RunDir

WIDTH = 1040.0
LANE = 30.0
LABEL = 190.0
"""Width of the timeline, height of a stage's lane, and the space for names, in SVG units."""


def report(root: RunDir) -> str:
    """Return the page for the chain in a directory. Raises InputError if the directory has none."""
    stored = root.read_json_or_empty(CHAIN)
    if not stored:
        raise InputError("there is no chain here", root.uri, "give the directory of one")
    stages = stored["stages"]
    content = {
        "name": run_name(stored["name"], root.name),
        "found": redact(stored),
        "run": redact(root.uri),
        "stages": [
            {**redact(stage), "report": _report_of(root, stage), **_described(stage)} for stage in stages
        ],
        "done": sum(stage["state"] == Outcome.DONE for stage in stages),
        "steps": sum(stage["step"] for stage in stages),
        "seconds": _covered(stages),
        "timeline": _timeline(stages),
        "exports": drawn(stored["exports"]) if stored.get("exports") else None,
        "job": redact(root.read_text("job.yaml") or ""),
    }
    return render("chain_report", content)


def _report_of(root: RunDir, stage: Mapping[str, Any]) -> str:
    """The path of a stage's own report, relative to this one; empty without one."""
    name = f"{stage['stage']}/{REPORT}"
    return name if root.exists(name) else ""


def _described(stage: Mapping[str, Any]) -> dict[str, str]:
    """The start of a stage and its measured values, as text."""
    base = stage["begins_with"]
    begins = "" if base is None else f"{base['stage']} @{base['tag']}"
    if base and base["step"] is not None:
        begins += "" if base["tag"] == str(base["step"]) else f", step {base['step']}"
    others = [name for name in stage["needs"] if base is None or name != base["stage"]]
    tokenizers = f"tokenizer of {', '.join(others)}" if others else ""
    measured = [
        f"{name}.{metric} {value:.4g}"
        for name, metrics in stage["evaluation"].items()
        for metric, value in metrics.items()
        if metric in ("loss", "accuracy", "bits_per_byte")
    ]
    return {
        "begins": "; ".join(filter(None, (begins, tokenizers))) or "random weights",
        "measured": ", ".join(measured),
    }


def _spans(stages: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """The number, start and end (unix seconds) of each stage that has begun."""
    now = time.time()
    return [
        (number, stage["started"], max(stage["ended"] or now, stage["started"]))
        for number, stage in enumerate(stages)
        if stage["started"] is not None
    ]


def _covered(stages: Sequence[Mapping[str, Any]]) -> float:
    """The seconds during which at least one stage was running."""
    seconds = 0.0
    until = 0.0
    for _, start, end in sorted(_spans(stages), key=lambda span: span[1]):
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    return seconds


def _timeline(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A lane for each stage with a bar from its start to its end, and a link from each needed stage to its start."""
    spans = _spans(stages)
    if not spans:
        return None
    first, last = min(start for _, start, _ in spans), max(end for _, _, end in spans)
    length = max(last - first, 1.0)
    axis = charts.time_axis(length, WIDTH, LABEL, len(stages) * LANE)
    x = axis.x
    bars = {
        stages[number]["stage"]: {
            "x": x(start - first),
            "end": x(end - first),
            "y": number * LANE + 7,
            "width": max(2.0, x(end - first) - x(start - first)),
            "state": stages[number]["state"],
        }
        for number, start, end in spans
    }
    links = [
        {"x0": bars[other]["end"], "y0": bars[other]["y"] + 8, "x1": bar["x"], "y1": bar["y"] + 8}
        for name, bar in bars.items()
        for other in next(stage["needs"] for stage in stages if stage["stage"] == name)
        if other in bars
    ]
    return {
        "bars": bars,
        "links": links,
        "lanes": [(number * LANE + 19, stage["stage"]) for number, stage in enumerate(stages)],
        "axis": axis,
        "left": LABEL,
    }
