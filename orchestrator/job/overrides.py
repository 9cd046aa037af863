"""Setting keys of a job file by their dotted names, for `--set` and for a search space."""

from __future__ import annotations

from typing import Any

import yaml

from orchestrator.job.errors import InputError
from orchestrator.job.yaml_text import read_yaml, yaml_problem


def override(document: dict[str, Any], text: str) -> None:
    """Apply one override of the form `a.b=c` to the document, in place. Raises InputError."""
    key, equals, value = text.partition("=")
    where = f"--set {text}"
    if not equals or not key:
        raise InputError("is not of the form a.b=c", where, "write for example --set train.steps=50")
    try:
        found = read_yaml(value)
    except RecursionError:
        raise InputError("the value is nested too deeply", where) from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"the value is not YAML ({yaml_problem(error)})", where) from None
    set_key(document, key, found, where)


def set_key(document: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set the dotted `key`, in place; missing mappings on the way are added. A mapping in a list is named by its name
    or, where they have none, by its place from 0. `where` is for messages. Raises InputError."""
    *parents, last = key.split(".")
    listed = False  # `document` is a list by the names or places of its elements: none can be added
    for parent in parents:
        child = document.get(parent)
        if listed and child is None:
            raise InputError(f"there is no '{parent}'", where, f"choose from {', '.join(document)}")
        if child is None or isinstance(child, str):
            child = document[parent] = {}
        listed = isinstance(child, list) and bool(_in_list(child))
        if isinstance(child, list) and listed:
            child = _in_list(child)
        if not isinstance(child, dict):
            raise InputError(f"'{parent}' is not a mapping", where, "override all of it")
        document = child
    if listed:
        raise InputError(f"'{last}' is one of several", where, "override its keys, one by one")
    document[last] = value


def _in_list(elements: list[Any]) -> dict[str, Any]:
    """The mappings in a list by their names, by their places if not all have one; empty if others are among them."""
    if not all(isinstance(each, dict) for each in elements):
        return {}
    named = {each["name"]: each for each in elements if isinstance(each.get("name"), str)}
    return named if len(named) == len(elements) else {str(place): each for place, each in enumerate(elements)}
