"""Numbers and states as readable text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.workers.worker_context import Work

NAME_LENGTH = 50
"""Characters of a search's name in the names of its trials, which leave room for a number."""


def head(status: Mapping[str, Any]) -> str:
    """Return the phase, with the number of the attempt from the second one on."""
    again = f" (attempt {status['attempt']})" if (status.get("attempt") or 1) > 1 else ""
    return f"{status.get('phase') or '...'}{again}"


def duration(seconds: float | None) -> str:
    """Format seconds in readable units: 70 µs, 40 ms, 8.2 s, 3 min 20 s, 5 h 03 min; "unknown" for None."""
    if seconds is None:
        return "unknown"
    if 1e-7 <= seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def work_text(work: Work) -> str:
    """Return how far the ranks' work between two steps is, and how long the rest takes."""
    time_left = f", {duration(work.seconds_left)} left" if work.done else ""
    return f"{work.name}: {work.done} of {work.of} {work.unit}{time_left}"


def count(number: float | None) -> str:
    """Format a number with three digits and a unit: 812, 12.3k, 4.56M; "unknown" for None."""
    if number is None:
        return "unknown"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def value_text(number: float) -> str:
    """Format a metric: whole numbers from 1,000 on exactly, such as 45,056 bytes; others with five digits."""
    return f"{number:,.0f}" if abs(number) >= 1000 and number == round(number) else f"{number:.5g}"


def short(value: Any) -> str:
    """Format a value of a job as the job file has it: floats with four digits, null, {weights: int8}."""
    import yaml

    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.partition("\n")[0]


def run_name(job: str, folder: str) -> str:
    """Return a display name of a run from its job's name and the last part of its directory.

    Many runs may share a job file, each in its own directory. A job name that already ends with the directory's, as
    that of a stage does, is used alone.
    """
    return job if f"-{job}".endswith(f"-{folder}") else folder


def trial_name(search: str, trial: str) -> str:
    """Return the name of a trial's job, for a search of this name. A directory may contain characters that a job's
    name may not.
    """
    return f"{re.sub('[^A-Za-z0-9._-]', '-', search).lstrip('._-')[:NAME_LENGTH] or 'search'}-{trial}"
