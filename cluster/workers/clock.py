"""Wall time for what is written down, from a clock that nobody sets.

Durations and deadlines are measured by `time.monotonic`, which is one host's and since no date. What is written down
has a date, and is subtracted later: `wall` is the date on which this process began, and the seconds since.
"""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the former counts a laptop's sleep too
_BEGAN = time.time() - time.clock_gettime(_CLOCK)


def wall() -> float:
    """Unix seconds. A clock that is set meanwhile changes nothing: two of these are as far apart as they were."""
    return _BEGAN + time.clock_gettime(_CLOCK)
