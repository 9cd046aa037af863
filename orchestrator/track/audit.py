"""What was predicted of a step beside what was measured, part by part, of one run and of all in a folder. Pure but for
reading run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def measured_parts(means: Mapping[str, float], late: float | None) -> dict[str, float]:
    """Seconds by part, from the mean seconds of the parts that rank 0 has measured and those for which it was ahead of
    the last rank, see `StepParts.late`: it has spent them in communication. Without them there are no `stragglers`."""
    found = {part: math.fsum(means.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    if late is not None:
        found["stragglers"] = min(late, found["communication"])
        found["communication"] -= found["stragglers"]
    return found


def audit(
    plan: Mapping[str, Any] | None, means: Mapping[str, float], late: float | None = None
) -> dict[str, dict[str, float]]:
    """Seconds of a step, predicted and measured, by part; empty unless both are known.

    `plan` is the content of plan.json, `means` and `late` are as of `measured_parts`. Where the last rank is not known,
    waiting for it is part of communication on both sides.
    """
    said = ((plan or {}).get("predicted") or {}).get("seconds_by_part")
    if not isinstance(said, Mapping) or not means:
        return {}
    found: dict[str, dict[str, float]] = {}
    for part, measured in measured_parts(means, late).items():
        predicted = float(said.get("host" if part == "other" else part, 0.0))
        if part == "communication" and late is None:
            predicted += float(said.get("stragglers", 0.0))
        found[part] = {"predicted": predicted, "measured": measured}
    return {part: pair for part, pair in found.items() if any(pair.values())}


def memory_audit(plan: Mapping[str, Any] | None, by_rank: Sequence[float]) -> dict[str, Any]:
    """Bytes that each rank was predicted to need beside those `by_rank` that it has needed; empty unless both are
    known.

    `source` tells whether the prediction is of the trace of the program or of the closed formula. Of a trace there are
    the `parts` of its largest `rank` at the peak, by category, and `formula_error`: how far the formula is off it.
    """
    plan = plan or {}
    said, memory = plan.get("predicted") or {}, plan.get("memory") or {}
    predicted = said.get("memory_bytes_by_rank") or []
    if not by_rank or len(predicted) != len(by_rank):
        return {}
    found: dict[str, Any] = {
        "source": memory.get("source", "formula"),
        "predicted_by_rank": predicted,
        "measured_by_rank": list(by_rank),
        "formula_error": memory.get("formula_error"),
    }
    if ranks := memory.get("ranks"):
        largest = max(ranks, key=lambda each: each["peak"])
        found |= {"rank": largest["rank"], "peak_bytes": largest["peak"], "parts": largest["at_peak"]}
    return found


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
    row["memory"] = found.get("memory_audit") or {}
    if row["memory"]:
        predicted, measured = (max(row["memory"][f"{side}_by_rank"]) for side in ("predicted", "measured"))
        row["memory_bytes"] = {
            "predicted": predicted,
            "measured": measured,
            "ratio": _ratio(predicted, measured),
        }
    return row


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured if predicted and measured else None
