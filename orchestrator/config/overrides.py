"""Set keys of a job file by their dotted names, for `--set` and for search spaces."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.yaml_text import read_yaml, yaml_problem


def override(document: dict[str, Any], text: str) -> None:
    """Apply one override of the form `a.b=c` to the document in place. Raises InputError."""
    key, equals, value = text.partition("=")
    option = f"--set {text}"
    if not equals or not key:
        raise InputError("is not of the form a.b=c", option, "write for example --set train.steps=50")
    try:
        parsed = read_yaml(value)
    except RecursionError:
        raise InputError("the value is nested too deeply", option) from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"the value is not YAML ({yaml_problem(error)})", option) from None
    set_key(document, key, parsed, option)


def set_key(document: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set the dotted `key` in place, and add missing mappings on the way.

    A mapping in a list is named by its `name` or, without names, by its position from 0. Containers on the way are
    copied, because a YAML alias puts one object in several places. `where` is for messages. Raises InputError.
    """
    *parents, last = key.split(".")
    holder: dict[str, Any] | list[Any] = document
    # The keys or positions of the values in `holder`, by their names.
    index_by_name: dict[str, Any] = {name: name for name in document}
    for parent in parents:
        listed = isinstance(holder, list)
        if listed and parent not in index_by_name:
            raise InputError(f"there is no '{parent}'", where, f"choose from {', '.join(index_by_name)}")
        index: Any = index_by_name.get(parent, parent)
        child = holder[index] if parent in index_by_name else None
        if child is None or isinstance(child, str):
            child = {}
        if isinstance(child, list) and _in_list(child):
            positions = _in_list(child)
        elif isinstance(child, dict):
            positions = {name: name for name in child}
        else:
            raise InputError(f"'{parent}' is not a mapping", where, "override all of it")
        holder[index] = child = copy.copy(child)
        holder = child
        index_by_name = positions
    if isinstance(holder, list):
        raise InputError(f"'{last}' is one of several", where, "override its keys, one by one")
    holder[last] = value


def _in_list(elements: list[Any]) -> dict[str, int]:
    """Return the positions of the mappings in a list by name, or by position if some have no name; empty if other
    values are among them.
    """
    if not all(isinstance(each, dict) for each in elements):
        return {}
    named = {each["name"]: index for index, each in enumerate(elements) if isinstance(each.get("name"), str)}
    return named if len(named) == len(elements) else {str(index): index for index in range(len(elements))}
