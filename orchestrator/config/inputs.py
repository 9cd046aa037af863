"""Which keys of a job change the inputs of its training.

Each component declares its keys in a class variable `CHANGES`. A search compares inputs between trials, except those
that its own keys change.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel


class Input(Enum):
    """An input that is a file or follows from files, so that it can change although the job does not."""

    TEXT = "the token shards of training and held-out text"
    SAMPLES = "the user's own samples"
    WEIGHTS = "the initial weights"
    FOLDER = "the configuration of a pretrained folder"


Changes = dict[Input, tuple[str, ...]]
"""The keys of a component that change each input."""


def changed_by(component: type[BaseModel], key: str) -> frozenset[Input]:
    """Return the inputs that a key changes, such as `workload.model` of the whole job."""
    name, _, rest = key.partition(".")
    declared: Changes = getattr(component, "CHANGES", {})
    result = {each for each, names in declared.items() if name in names}
    for inner in (
        _components(component.model_fields[name].annotation) if name in component.model_fields else ()
    ):
        if rest:
            result |= changed_by(inner, rest)
        else:
            result |= {each for part in inner.model_fields for each in changed_by(inner, part)}
    return frozenset(result)


def _components(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the components that a field holds, itself or as an alternative to null."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
