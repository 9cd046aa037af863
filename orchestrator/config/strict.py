"""Common rules of all parts of a job file: no unknown keys, immutable, no NaN, no booleans for numbers."""

from __future__ import annotations

import typing
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

LARGEST = 2**53
"""The largest integer that every JSON reader represents exactly."""
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def web_address(value: str) -> str:
    """Return the value. Raises ValueError if it is not an http or https URL."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not an http or https URL")
    return value


WebAddress = Annotated[str, AfterValidator(web_address)]
"""An http or https URL."""


def _takes_bool(annotation: Any) -> bool:
    """Return whether an annotation accepts booleans, or leaves them to another check."""
    if annotation in (bool, Any):
        return True
    parts = typing.get_args(annotation)
    return any(isinstance(part, bool) or _takes_bool(part) for part in parts if not isinstance(part, str))


def _is_of_words(annotation: Any) -> bool:
    """Return whether an annotation accepts only fixed words, mappings of keys or None.

    pydantic never reads a boolean as one of them, and lists the words or keys.
    """
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return all(isinstance(part, str) for part in parts)
    if not parts:
        return isinstance(annotation, type) and issubclass(annotation, BaseModel | None)
    return all(_is_of_words(part) for part in parts)


class StrictModel(BaseModel):
    """A part of a job file.

    Attributes:
        NO_IDENTITY: keys that change neither the samples nor the weights of a run.
        ADDED_LATER: keys that jobs of earlier versions lack. At their defaults they do not count for `identity`.
    """

    NO_IDENTITY: ClassVar[tuple[str, ...]] = ()
    ADDED_LATER: ClassVar[tuple[str, ...]] = ()
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def a_number_is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true for a number, which pydantic reads as 1. YAML reads yes and on as true."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and not (_takes_bool(annotation) or _is_of_words(annotation)):
            raise ValueError("should not be true or false")
        return value

    def at_default(self, *names: str) -> set[str]:
        """Return those of the keys that have their default."""
        known = type(self).model_fields
        return {
            name
            for name in names
            if getattr(self, name) == known[name].get_default(call_default_factory=True)
        }

    def identity(self) -> dict[str, Any]:
        """Return the keys that determine the samples and the weights of a run, as plain data."""
        left_out = {*self.NO_IDENTITY, *self.at_default(*self.ADDED_LATER)}
        return self.model_dump(mode="json", exclude=left_out)
