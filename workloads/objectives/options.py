"""Options of an objective: dataclass fields with their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from workloads.errors import WorkloadError

BALANCED = "balanced"
"""Class weights that follow from how often each label occurs."""


def fraction(default: float) -> Any:
    """Return an option strictly between 0 and 1."""
    return field(default=default, metadata={"fits": lambda v: 0 < v < 1, "what": "between 0 and 1"})


def fraction_or_zero(most: float) -> Any:
    """Return an option from 0, the default, to below `most`."""
    return field(
        default=0.0, metadata={"fits": lambda v: 0 <= v < most, "what": f"at least 0 and below {most}"}
    )


def at_least(least: float, default: float) -> Any:
    """Return a numeric option with a lower bound.

    Args:
        least: the bound.
        default: the default.
    """
    return field(default=default, metadata={"fits": lambda v: v >= least, "what": f"at least {least}"})


def zero_or_above(least: float) -> Any:
    """Return a numeric option that is 0, the default, or above `least`."""
    return field(
        default=0.0, metadata={"fits": lambda v: v == 0 or v > least, "what": f"0, or above {least}"}
    )


def choice(default: str, *others: str) -> Any:
    """Return an option that is one of a few strings.

    Args:
        default: the default.
        *others: the other strings.
    """
    words = (default, *others)
    description = "one of " + ", ".join(words)
    return field(default=default, metadata={"fits": lambda v: v in words, "what": description})


def weights_of_labels() -> Any:
    """Return an option that weighs classes: "balanced", or a weight for each label."""

    def fits(setting: Any) -> bool:
        if isinstance(setting, str):
            return setting in ("", BALANCED)
        values = setting.values() if isinstance(setting, Mapping) else setting
        return all(type(value) in (int, float) and value > 0 for value in values)

    description = f'"{BALANCED}", or {{label: weight above 0}}'
    return field(default=(), metadata={"fits": fits, "what": description})


def check(name: str, objective: Any) -> None:
    """Raise WorkloadError for the first field of `objective` that has a wrong type or is out of range.

    Args:
        name: name of the objective, for the message.
        objective: the dataclass.
    """
    for option in fields(objective):
        value = getattr(objective, option.name)
        kind = type(option.default)
        if kind is float and type(value) is int:
            value = float(value)
        if kind in (bool, int, float, str) and type(value) is not kind:
            raise WorkloadError(f"{name}: {option.name} is {value!r}; make it of type {kind.__name__}")
        if "fits" in option.metadata and not option.metadata["fits"](value):
            raise WorkloadError(f"{name}: {option.name} is {value!r}; make it {option.metadata['what']}")
