"""Map a row's value to one of the labels that a job names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.data.sources.rejected import Unfit

BY_NUMBER = "takes a label by its number"
"""The note about a row whose label is a number that is not the name of a label."""
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
TRUTHS = ("true", "false")
SHOWN = 8
"""Maximum number of labels that an error message lists."""


@dataclass(frozen=True)
class Labels:
    """The label names of a job, and how a row's value maps to one of them.

    Attributes:
        names: label names, in the order of their numbers.
        data_format: format of the prepared data. Before format 6, a JSON number or boolean was always a label number,
            even if a label had that name.
    """

    names: tuple[str, ...]
    data_format: int = 6

    def number_of(self, value: Any) -> int:
        """Return the label number of a row's value. Raises Unfit if no label matches."""
        if self.data_format < 6:
            return _in_range(value, _integer(value) if not isinstance(value, float) else None, self.names)
        named = self._named(value)
        if named is not None:
            return named
        number = None if self._are_values(value) else _integer(value)
        return _in_range(value, number, self.names)

    def is_by_number(self, value: Any) -> bool:
        """Return whether a value, or an element of a list, gives a label as a number that is not a label name."""
        if self.data_format < 6:
            return False
        values = value if isinstance(value, list) else [value]
        return any(self._named(label) is None for label in values)

    def _named(self, value: Any) -> int | None:
        """Return the number of the label whose name equals or spells `value`, or None."""
        if isinstance(value, str):
            return self.names.index(value) if value in self.names else None
        if isinstance(value, bool):
            spelled = [number for number, name in enumerate(self.names) if name.lower() == TRUTHS[not value]]
            if spelled:
                return spelled[0]
        if not isinstance(value, int | float):
            return None
        equal = [n for n, name in enumerate(self.names) if NUMBER.fullmatch(name) and float(name) == value]
        return equal[0] if equal else None

    def _are_values(self, value: Any) -> bool:
        """Return whether the label names are numbers or booleans. Then a number in a row is a name, never an index."""
        if any(NUMBER.fullmatch(name) for name in self.names):
            return True
        return isinstance(value, bool) and any(name.lower() in TRUTHS for name in self.names)


def _integer(value: Any) -> int | None:
    """Return the value as an integer if it is one or spells one, else None."""
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
        raise Unfit("record", f"its label {value!r} is not one of {shown}", hint)
    if not 0 <= number < len(names):
        raise Unfit("record", f"its label {number} is not among 0 to {len(names) - 1}", hint)
    return number
