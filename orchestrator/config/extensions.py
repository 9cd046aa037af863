"""Names that installed packages give to their code: `ext:NAME` in a job file is an entry point of such a package.

A package declares what it offers in its pyproject.toml, one group for each kind of component:

    [project.entry-points."training_orchestrator.optimizers"]
    sign_sgd = "sign_sgd:SignSGD"

A job file that says `train.optimizer.name: ext:sign_sgd` then means `sign_sgd:SignSGD`. Storage has no group here:
fsspec finds file systems by its own, `fsspec.specs`.

An entry point may name an extra of its package, as in `images = "module:Images [image]"`. A job that uses it then needs
the libraries of that extra, and a missing one is a line that says what to install.

Commands have a group whose names are the words of the command line, see `orchestrator/cli/extension_commands.py`.
This project's own pyproject.toml offers what `orchestrator/extensions` has in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packaging.requirements import Requirement

from orchestrator.config.errors import InputError
from workloads.own.object_reference import present_name

PREFIX = "ext:"
GROUP = "training_orchestrator."
"""The prefix of the name of every group of entry points."""
KEYS = {
    ("workload", "model"): "models",
    ("workload", "objective"): "objectives",
    ("data", "samples"): "samples",
    ("evaluate", "metrics"): "metrics",
    ("train", "optimizer", "name"): "optimizers",
    ("train", "optimizer", "schedule"): "schedules",
    ("parallel", "cost"): "costs",
    ("sinks", "own"): "sinks",
}
"""The keys of a job file that take `ext:NAME`, and the group of each."""


def with_extensions(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document with each `ext:NAME` replaced by its `module:name`.

    Raises:
        InputError: no installed package has an entry point of that name, or several have.
    """
    for path, group in KEYS.items():
        document = _replaced(document, path, group, ".".join(path))
    return document


def points(group: str) -> list[EntryPoint]:
    """Return what installed packages offer in a group, such as "commands", in the order of the names."""
    return sorted(entry_points(group=GROUP + group), key=lambda point: (point.name, point.value))


def reference_of(point: EntryPoint) -> str:
    """Return the `module:name` of an entry point, without extras."""
    return f"{point.module}:{point.attr}"


def extra_libraries(reference: str) -> dict[str, str]:
    """Return the libraries that an installed package's object needs: the extra of each, by the library's name.

    Args:
        reference: the object as `module:name`, an old name too.
    """
    result: dict[str, str] = {}
    for group in sorted(set(KEYS.values())):
        for point in entry_points(group=GROUP + group):
            if point.extras and point.dist and reference_of(point) == present_name(reference):
                for required in map(Requirement, point.dist.requires or ()):
                    for extra in point.extras:
                        if required.marker and required.marker.evaluate({"extra": extra}):
                            result[required.name] = extra
    return result


def offered() -> dict[str, dict[str, str]]:
    """The entry points of installed packages: by group, `module:name` by name."""
    groups = sorted(set(KEYS.values()))
    return {
        group: {point.name: reference_of(point) for point in entry_points(group=GROUP + group)}
        for group in groups
    }


def _replaced(value: Any, path: tuple[str, ...], group: str, key: str) -> Any:
    """The value at `path`, whose end is a name, a mapping with `use`, or a list of them."""
    if path:
        if not isinstance(value, Mapping) or path[0] not in value:
            return value
        part = value[path[0]]
        new = _replaced(part, path[1:], group, key)
        return value if new is part else {**value, path[0]: new}
    if isinstance(value, list):
        parts = [_replaced(part, (), group, key) for part in value]
        return value if all(new is part for new, part in zip(parts, value, strict=True)) else parts
    if isinstance(value, Mapping):
        return _replaced(value, ("use",), group, key)
    if isinstance(value, str) and value.startswith(PREFIX):
        return _entry_point(value.removeprefix(PREFIX), group, key)
    return value


def _entry_point(name: str, group: str, key: str) -> str:
    values = sorted({reference_of(point) for point in entry_points(group=GROUP + group, name=name)})
    if len(values) > 1:
        problem = f"several installed packages offer {name}: {', '.join(values)}"
        raise InputError(problem, key, "name one of them as module:name")
    if not values:
        names = sorted(offered()[group])
        close = get_close_matches(name, names, 1)
        known = (
            f"did you mean {close[0]}?"
            if close
            else f"they offer {', '.join(names) or 'nothing of the kind'}"
        )
        raise InputError(f"no installed package offers {name} in {GROUP}{group}", key, known)
    return values[0]
