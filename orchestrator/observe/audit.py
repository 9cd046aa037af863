"""Predicted and measured parts of a step, for one run and for all runs in a folder. Pure, except that it reads run
directories.
"""

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
    "transfer": ("transfer",),
    "generate": ("generate",),
    "reward": ("reward",),
    "commit": ("commit",),
    "other": ("other",),
}
"""The compared parts of a step, each with its measured parts (see `step_parts.PARTS`). Only offload is predicted of
`other`.
"""


def measured_parts(means: Mapping[str, float], late: float | None) -> dict[str, float]:
    """Return seconds by part.

    Args:
        means: mean seconds of the parts that rank 0 has measured.
        late: seconds by which rank 0 was ahead of the last rank, see `StepParts.late`. It spent them in
            communication. None if unknown; then there are no `stragglers`.
    """
    seconds = {part: math.fsum(means.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    if late is not None:
        seconds["stragglers"] = min(late, seconds["communication"])
        seconds["communication"] -= seconds["stragglers"]
    return seconds


def audit(
    plan: Mapping[str, Any] | None, means: Mapping[str, float], late: float | None = None
) -> dict[str, dict[str, float]]:
    """Return the seconds of a step by part, predicted and measured; empty unless both are known.

    `plan` is the content of plan.json, `means` and `late` are as in `measured_parts`. If the last rank is unknown,
    waiting for it counts as communication on both sides.
    """
    predicted_parts = ((plan or {}).get("predicted") or {}).get("seconds_by_part")
    if not isinstance(predicted_parts, Mapping) or not means:
        return {}
    compared: dict[str, dict[str, float]] = {}
    for part, measured in measured_parts(means, late).items():
        predicted = float(predicted_parts.get("host" if part == "other" else part, 0.0))
        if part == "communication" and late is None:
            predicted += float(predicted_parts.get("stragglers", 0.0))
        compared[part] = {"predicted": predicted, "measured": measured}
    return {part: pair for part, pair in compared.items() if any(pair.values())}


def memory_audit(plan: Mapping[str, Any] | None, by_rank: Sequence[float]) -> dict[str, Any]:
    """Return the memory in bytes that each rank was predicted to need, beside the measured `by_rank`; empty unless
    both are known.

    `source` says whether the prediction comes from the program's trace or from the closed formula. A trace also gives
    the `parts` of its largest `rank` at the peak, by category, and `formula_error`, the error of the formula relative
    to it.
    """
    plan = plan or {}
    predictions = plan.get("predicted") or {}
    memory = plan.get("memory") or {}
    predicted = predictions.get("memory_bytes_by_rank") or []
    if not by_rank or len(predicted) != len(by_rank):
        return {}
    result: dict[str, Any] = {
        "source": memory.get("source", "formula"),
        "predicted_by_rank": predicted,
        "measured_by_rank": list(by_rank),
        "formula_error": memory.get("formula_error"),
    }
    if ranks := memory.get("ranks"):
        largest = max(ranks, key=lambda each: each["peak"])
        result |= {"rank": largest["rank"], "peak_bytes": largest["peak"], "parts": largest["at_peak"]}
    return result


class _Figures(BaseModel):
    """The fields of summary.json that the audit of a run reads."""

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
    """Return predictions and measurements of the run in this directory; None without any. Raises InputError if its
    files are damaged.
    """
    summary = _read(run, "summary.json", _Summary, run.read_json_or_empty("summary.json"))
    predicted_figures = summary.predicted or _Figures()
    measured = summary.measured or _Figures()
    if not predicted_figures.step_seconds or not measured.step_seconds:
        return None
    plan = _read(run, "plan.json", _Plan, run.read_json_or_empty("plan.json"))
    row = {
        "name": summary.name,
        "layout": (plan.chosen or _Named()).text,
        "machine": (plan.machine or _Named()).name,
        "parts": summary.audit or {},
        "step_seconds": _pair(predicted_figures.step_seconds, measured.step_seconds),
        "memory_bytes": _pair(predicted_figures.memory_bytes, measured.memory_bytes),
        "memory": {},
    }
    if summary.memory_audit:
        memory = _read(run, "summary.json", _Memory, summary.memory_audit)
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
