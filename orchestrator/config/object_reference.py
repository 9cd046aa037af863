"""The user's own code in a job file: one type for all keys that may name some."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from orchestrator.config.strict import StrictModel
from workloads.own.object_reference import PATTERN, is_built_in, is_object_reference


class ObjectReference(StrictModel):
    """Own code: `module:name`, or `{use: module:name, options: {...}}` with the arguments that it gets."""

    use: str = Field(
        pattern=PATTERN, description="module:name, found as Python does or in the working directory"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="its arguments by name")

    @model_validator(mode="before")
    @classmethod
    def a_name_may_stand_alone(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) and is_object_reference(value) else value

    def __str__(self) -> str:
        return self.use


def users_code(*named: tuple[str, str | ObjectReference | None]) -> dict[str, str]:
    """Return those of the names that are code of the user's, by `module:name` the first key that names it.

    Args:
        named: keys of a job file, each with its value. Built-in names and modules of this program are left out.
    """
    result: dict[str, str] = {}
    for key, value in named:
        name = str(value)
        if value is not None and is_object_reference(name) and not is_built_in(name):
            result.setdefault(name, key)
    return result
