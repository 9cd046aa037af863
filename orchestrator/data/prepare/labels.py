"""Which label a row means: by its name, and by a number only where no label could be meant by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.data.sources.rejected import Unfit

NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
TRUTHS = ("true", "false")
SHOWN = 8
"""Most labels that a message names."""


@dataclass(frozen=True)
class Labels:
    """The labels of a job, and which of them a row means.

    Attributes:
        names: the labels, in the order of their numbers.
        data_format: of the prepared data. Before 6 a JSON number or boolean was a number even where a label had its
            name.
    """

    names: tuple[str, ...]
    data_format: int = 6

    def number_of(self, value: Any) -> int:
        """The number of the label that a row names. Raises Unfit if there is none."""
        if self.data_format < 6:
            return _in_range(value, _whole(value) if not isinstance(value, float) else None, self.names)
        named = self._named(value)
        if named is not None:
            return named
        number = None if self._are_values(value) else _whole(value)
        return _in_range(value, number, self.names)

    def is_by_number(self, value: Any) -> bool:
        """Whether a value, or one of a list of such, says a label by its number, which no label is called."""
        if self.data_format < 6:
            return False
        values = value if isinstance(value, list) else [value]
        return any(self._named(each) is None for each in values)

    def _named(self, value: Any) -> int | None:
        """The number of the label with the name that `value` is, or spells; None if there is none."""
        if isinstance(value, str):
            return self.names.index(value) if value in self.names else None
        if isinstance(value, bool):
            spelled = [number for number, name in enumerate(self.names) if name.lower() == TRUTHS[not value]]
            if spelled:
                return spelled[0]
        if not isinstance(value, int | float):
            return None
        alike = [n for n, name in enumerate(self.names) if NUMBER.fullmatch(name) and float(name) == value]
        return alike[0] if alike else None

    def _are_values(self, value: Any) -> bool:
        """Whether labels are numbers or truths themselves, so that another one of these is no place among them."""
        if any(NUMBER.fullmatch(name) for name in self.names):
            return True
        return isinstance(value, bool) and any(name.lower() in TRUTHS for name in self.names)


def _whole(value: Any) -> int | None:
    """The whole number that a value is, or spells; None if it is none."""
    if isinstance(value, str):
        spelled = value.strip()
        return int(spelled) if spelled.isdecimal() and len(spelled) < 10 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) else None


def _in_range(value: Any, number: int | None, names: Sequence[str]) -> int:
    hint = "name all labels in data.labels"
    if isinstance(value, str) and value in names:
        return names.index(value)
    if number is None:
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        raise Unfit("record", f"its label {value!r} is none of {shown}", hint)
    if not 0 <= number < len(names):
        raise Unfit("record", f"its label {number} is not among 0 to {len(names) - 1}", hint)
    return number
