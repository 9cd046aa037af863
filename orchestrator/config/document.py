"""Job files as mappings: read, validated against a model, and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from orchestrator.config.errors import InputError
from orchestrator.config.extensions import with_extensions
from orchestrator.config.overrides import override
from orchestrator.config.validation_messages import refused
from orchestrator.config.yaml_text import read_yaml, yaml_problem

STAGES = "stages"
"""The key that makes a job file that of a chain, see `orchestrator.config.chain`."""
TAB = "indent with spaces; YAML does not allow tabs"
Model = TypeVar("Model", bound=BaseModel)


def read_document(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the mapping in the job file at `path`, with `a.b=c` overrides applied. Raises InputError."""
    path = Path(path)
    try:
        document = parse_yaml(path.read_text("utf-8-sig"), str(path))
    except FileNotFoundError:
        raise InputError(
            "there is no such job file", str(path), "write one with `orchestrator init`"
        ) from None
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 (its byte {error.start + 1} is {error.object[error.start]:#04x})"
        raise InputError(problem, str(path), "save it in that encoding") from None
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror or error})", str(path), "give a job file"
        ) from None
    for text in overrides:
        override(document, text)
    return document


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the mapping in the text of a job file. `where` is for messages. Raises InputError."""
    try:
        document = read_yaml(text)
    except RecursionError:
        raise InputError("is nested too deeply", where, "see `orchestrator schema`") from None
    except (yaml.YAMLError, ValueError) as error:  # an impossible date raises a plain ValueError
        mark = getattr(error, "problem_mark", None)
        line = f"{where}:{mark.line + 1}" if mark else where
        problem = yaml_problem(error)
        raise InputError(f"is not YAML ({problem})", line, TAB if "\\t" in problem else "") from None
    if document is None:
        raise InputError("is empty", where, "write one with `orchestrator init`")
    if not isinstance(document, dict):
        raise InputError("must be a mapping of keys to values", where, "see `orchestrator init`")
    return document


def validated(document: Mapping[str, Any], model: type[Model], where: str) -> Model:
    """Validate the document of one job as a `model`, with the names that packages give to their code.

    Args:
        document: as it was read.
        model: what it must be.
        where: of messages.

    Raises:
        InputError: the document is that of a chain, or has wrong keys.
    """
    if STAGES in document:
        hint = "name one of its stages: the directory of each has a job.yaml"
        raise InputError("is a chain of stages, but one job is wanted", where, hint)
    document = with_extensions(document)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise refused(document, error, where, model) from None


def write_yaml(document: Mapping[str, Any]) -> str:
    """Return a document as YAML, its keys in their order."""
    return yaml.safe_dump(dict(document), sort_keys=False)
