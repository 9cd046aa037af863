"""What the parts of a job file have in common: no unknown keys, no change after reading, no NaN."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**53
"""The largest whole number that JSON, and whoever reads it, keeps whole."""
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class StrictModel(BaseModel):
    """A part of a job file."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def at_default(self, *names: str) -> set[str]:
        """Those of the keys that have their default."""
        known = type(self).model_fields
        return {
            name
            for name in names
            if getattr(self, name) == known[name].get_default(call_default_factory=True)
        }
