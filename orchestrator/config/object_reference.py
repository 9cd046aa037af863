"""The user's own code in a job file: one type for all keys that may name some."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from orchestrator.config.strict import StrictModel
from workloads.own.object_reference import PATTERN, is_object_reference


class ObjectReference(StrictModel):
    """Own code: `module:name`, or `{use: module:name, options: {...}}` with the arguments that it gets."""

    use: str = Field(
        pattern=PATTERN, description="module:name, found as Python does or in the working directory"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="its arguments by name")

    @model_validator(mode="before")
    @classmethod
    def a_name_may_stand_alone(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) and is_object_reference(given) else given

    def __str__(self) -> str:
        return self.use
