"""Read the text of a job file as a mapping, before it is known whether it is a valid job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.overrides import override
from orchestrator.config.yaml_text import read_yaml, yaml_problem

TAB = "indent with spaces; YAML does not allow tabs"


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
