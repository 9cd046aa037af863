"""Setting keys of a job file by their dotted names, for `--set` and for a search space."""

from __future__ import annotations

from typing import Any

import yaml

from orchestrator.job.errors import InputError


def override(document: dict[str, Any], text: str) -> None:
    """Apply one override of the form `a.b=c` to the document, in place. Raises InputError."""
    key, equals, value = text.partition("=")
    where = f"--set {text}"
    if not equals or not key:
        raise InputError("is not of the form a.b=c", where, "write for example --set train.steps=50")
    try:
        found = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"the value is not YAML ({error})", where) from None
    set_key(document, key, found, where)


def set_key(document: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set the dotted `key`, in place; missing mappings on the way are added. `where` is for messages. Raises
    InputError."""
    *parents, last = key.split(".")
    for parent in parents:
        child = document.get(parent)
        if child is None or isinstance(child, str):
            child = document[parent] = {}
        if not isinstance(child, dict):
            raise InputError(f"'{parent}' is not a mapping", where, "override all of it")
        document = child
    document[last] = value
