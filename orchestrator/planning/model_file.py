"""YAML files that describe devices and clusters, read into their models."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.job.errors import InputError


class Part(BaseModel):
    """A part of such a file, which has no keys but those of its model."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=Part)


def read_model(path: Path, model: type[Model], what: str, hint: str, unreadable: str = "") -> Model:
    """The model that a file describes. Raises InputError, which says that the file is no `what`, with the hint for a
    file with wrong keys or the one for a file that is no YAML at all."""
    try:
        return model.model_validate(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"is no {what}: {key}: {first['msg'].lower()}", str(path), hint) from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"is no {what} ({reason})", str(path), unreadable) from None
