"""YAML files that describe devices and clusters, read into their models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import Field, ValidationError

from orchestrator.config.errors import InputError
from orchestrator.config.strict import StrictModel
from orchestrator.config.yaml_text import read_yaml

MIN_AMOUNT, MAX_AMOUNT = 1e-15, 1e30
"""Real measurements are within these bounds, and within them no step overflows."""
PositiveAmount = Annotated[float, Field(ge=MIN_AMOUNT, le=MAX_AMOUNT)]
"""A divisor in SI units."""
Amount = Annotated[float, Field(ge=0, le=MAX_AMOUNT)]
"""A number in SI units that may be nothing."""

Model = TypeVar("Model", bound=StrictModel)


def read_model(path: Path, model: type[Model], kind: str, hint: str, unreadable: str = "") -> Model:
    """Return the model that a YAML file describes.

    Args:
        path: the file.
        model: the model's class.
        kind: what the file should be, for messages.
        hint: what to do about wrong keys.
        unreadable: what to do about a file that cannot be read as YAML.

    Raises:
        InputError: if the file cannot be read, or does not fit the model.
    """
    try:
        return model.model_validate(read_yaml(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(
            f"is not a {kind}: {key}: {first['msg'].removeprefix('Value error, ').lower()}", str(path), hint
        ) from None
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        # an impossible date is a ValueError
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"is not a {kind} ({reason})", str(path), unreadable) from None
