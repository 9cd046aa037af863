"""Numbers and states in the words that people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def head(status: Mapping[str, Any]) -> str:
    """The phase, with the number of the attempt from the second one on."""
    again = f" (attempt {status['attempt']})" if (status.get("attempt") or 1) > 1 else ""
    return f"{status.get('phase') or '...'}{again}"


def duration(seconds: float | None) -> str:
    """Seconds in readable units: 40 ms, 8.2 s, 3 min 20 s, 5 h 03 min; "unknown" for None."""
    if seconds is None:
        return "unknown"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: float | None) -> str:
    """A number with three digits and a unit: 812, 12.3k, 4.56M; "unknown" for None."""
    if number is None:
        return "unknown"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
