"""What was predicted of a step beside what was measured, part by part, of one run and of all in a folder. Pure but for
reading run directories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.config.validation_messages import input_error
from orchestrator.planner.model_file import Amount
from orchestrator.storage.run_directory import RunDir

Read = TypeVar("Read", bound=BaseModel)
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
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
    said = plan.get("predicted") or {}
    memory = plan.get("memory") or {}
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


class _Figures(BaseModel):
    """What the audit of a run reads of the predicted and the measured figures in its summary.json."""

    model_config = STRICT

    step_seconds: Amount | None = None
    memory_bytes: Amount | None = None


class _Memory(BaseModel):
    model_config = STRICT | ConfigDict(extra="allow")

    source: str = "formula"
    predicted_by_rank: list[Amount] = Field(min_length=1)
    measured_by_rank: list[Amount] = Field(min_length=1)


class _Summary(BaseModel):
    model_config = STRICT

    name: str | None = None
    predicted: _Figures | None = None
    measured: _Figures | None = None
    audit: dict[str, dict[str, float]] | None = None
    memory_audit: dict[str, Any] | None = None


class _Named(BaseModel):
    model_config = STRICT

    text: str | None = None
    name: str | None = None


class _Plan(BaseModel):
    model_config = STRICT

    chosen: _Named | None = None
    machine: _Named | None = None


def audit_of(run: RunDir) -> dict[str, Any] | None:
    """What was predicted and measured of the run in this directory; None if nothing was. Raises InputError if what is
    written there of it is damaged."""
    found = _read(run, "summary.json", _Summary, run.read_json_or_empty("summary.json"))
    said = found.predicted or _Figures()
    real = found.measured or _Figures()
    if not said.step_seconds or not real.step_seconds:
        return None
    plan = _read(run, "plan.json", _Plan, run.read_json_or_empty("plan.json"))
    row = {
        "name": found.name,
        "layout": (plan.chosen or _Named()).text,
        "machine": (plan.machine or _Named()).name,
        "parts": found.audit or {},
        "step_seconds": _pair(said.step_seconds, real.step_seconds),
        "memory_bytes": _pair(said.memory_bytes, real.memory_bytes),
        "memory": {},
    }
    if found.memory_audit:
        memory = _read(run, "summary.json", _Memory, found.memory_audit)
        row["memory"] = memory.model_dump()
        row["memory_bytes"] = _pair(max(memory.predicted_by_rank), max(memory.measured_by_rank))
    return row


def _read(run: RunDir, name: str, kind: type[Read], value: dict[str, Any]) -> Read:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise input_error(error, f"{run.uri}/{name}", kind) from None


def _pair(predicted: float | None, measured: float | None) -> dict[str, float | None]:
    return {"predicted": predicted, "measured": measured, "ratio": _ratio(predicted, measured)}


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured if predicted and measured else None
