"""Numbers and states in the words that people read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NAME_LENGTH = 50
"""Characters of a search's name in those of its trials, which have room for a number."""


def head(status: Mapping[str, Any]) -> str:
    """The phase, with the number of the attempt from the second one on."""
    again = f" (attempt {status['attempt']})" if (status.get("attempt") or 1) > 1 else ""
    return f"{status.get('phase') or '...'}{again}"


def duration(seconds: float | None) -> str:
    """Seconds in readable units: 70 µs, 40 ms, 8.2 s, 3 min 20 s, 5 h 03 min; "unknown" for None."""
    if seconds is None:
        return "unknown"
    if 1e-7 <= seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
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


def run_name(job: str, folder: str) -> str:
    """What a run is called among others, by its job's name and the last part of its directory: many runs may have one
    job file, each in a directory of its own. A name that ends with the directory's says it already, as a stage's."""
    return job if f"-{job}".endswith(f"-{folder}") else folder


def trial_name(search: str, trial: str) -> str:
    """The name of a trial's job, whose search is called so: a directory may have signs that a job's name has not."""
    return f"{re.sub('[^A-Za-z0-9._-]', '-', search).lstrip('._-')[:NAME_LENGTH] or 'search'}-{trial}"
