"""What was predicted of a step beside what was measured, part by part, of one run and of all in a folder. Pure but for
reading run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.storage.run_directory import RunDir

PARTS = {
    "compute": ("forward", "backward"),
    "communication": ("communication", "agreement"),
    "bubble": ("pipeline",),
    "optimizer": ("optimizer",),
    "data": ("data",),
    "commit": ("commit",),
    "other": ("other",),
}
"""The parts of a step that are compared, each with the measured ones (see `step_parts.PARTS`) that it is.
Of `other` offload is predicted alone."""


def audit(plan: Mapping[str, Any] | None, means: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Seconds of a step, predicted and measured, by part; empty unless both are known.

    `plan` is the content of plan.json, `means` the mean seconds of the parts that were measured.
    """
    said = ((plan or {}).get("predicted") or {}).get("seconds_by_part")
    if not isinstance(said, Mapping) or not means:
        return {}
    found: dict[str, dict[str, float]] = {}
    for part, measured in PARTS.items():
        predicted = float(said.get("host" if part == "other" else part, 0.0))
        found[part] = {
            "predicted": predicted,
            "measured": math.fsum(means.get(name, 0.0) for name in measured),
        }
    return {part: pair for part, pair in found.items() if any(pair.values())}


def audit_of(run: RunDir) -> dict[str, Any] | None:
    """What was predicted and measured of the run in this directory; None if it is none, or nothing was measured."""
    found = run.read_json_or_empty("summary.json")
    plan = run.read_json_or_empty("plan.json")
    said, real = found.get("predicted") or {}, found.get("measured") or {}
    if not said.get("step_seconds") or not real.get("step_seconds"):
        return None
    row = {
        "name": found.get("name"),
        "layout": (plan.get("chosen") or {}).get("text"),
        "machine": (plan.get("machine") or {}).get("name"),
        "parts": found.get("audit") or {},
    }
    for key in ("step_seconds", "memory_bytes"):
        predicted, measured = said.get(key), real.get(key)
        row[key] = {"predicted": predicted, "measured": measured, "ratio": _ratio(predicted, measured)}
    return row


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured if predicted and measured else None
