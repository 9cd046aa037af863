"""What the parts of a job file have in common: no unknown keys, no change after reading, no NaN, no yes for a 1."""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

LARGEST = 2**53
"""The largest whole number that JSON, and whoever reads it, keeps whole."""
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def web_address(value: str) -> str:
    """The value. Raises ValueError if it is no http or https URL."""
    place = urlsplit(value)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ValueError("is no http or https URL")
    return value


WebAddress = Annotated[str, AfterValidator(web_address)]
"""An http or https URL."""


def _takes_bool(annotation: Any) -> bool:
    """Whether true and false are among the values of an annotation, or are left to others to judge."""
    if annotation in (bool, Any):
        return True
    parts = typing.get_args(annotation)
    return any(isinstance(part, bool) or _takes_bool(part) for part in parts if not isinstance(part, str))


def _is_of_words(annotation: Any) -> bool:
    """Whether an annotation takes some words alone, or none: pydantic takes no truth value for one, and lists them."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return all(isinstance(part, str) for part in parts)
    return annotation is type(None) or (bool(parts) and all(_is_of_words(part) for part in parts))


class StrictModel(BaseModel):
    """A part of a job file."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def a_number_is_no_truth_value(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse true where a number is wanted, for which pydantic takes 1: YAML reads yes, on and true so."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(given, bool) and not (_takes_bool(annotation) or _is_of_words(annotation)):
            raise ValueError("should not be true or false")
        return given

    def at_default(self, *names: str) -> set[str]:
        """Those of the keys that have their default."""
        known = type(self).model_fields
        return {
            name
            for name in names
            if getattr(self, name) == known[name].get_default(call_default_factory=True)
        }
