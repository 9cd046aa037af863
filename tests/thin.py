"""Long lists of cases, of which the default suite runs a part and `make test-long` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(step: int, cases: Iterable[Any], unpack: bool = False) -> list[Any]:
    """Return the cases for `parametrize`; the first of every `step` is quick, the others are slow.

    Args:
        step: how many cases there are for each quick one.
        cases: the cases. Marks of their own stay.
        unpack: whether a case is a tuple with a value for each of several arguments.
    """
    return [
        case if number % step == 0 or hasattr(case, "marks") else _slow(case, unpack)
        for number, case in enumerate(cases)
    ]


def _slow(case: Any, unpack: bool) -> Any:
    values = case if unpack else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
