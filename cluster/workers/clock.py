"""Unix times from a clock that is never set back.

`time.monotonic` measures durations but has no date, and the system clock may be set while a run goes on. `wall` is the
date at which this process began plus the seconds since then, so differences between its values are correct.
"""

from __future__ import annotations

import os
import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the former counts a laptop's sleep too
_BEGAN = time.time() - time.clock_gettime(_CLOCK)


def wall() -> float:
    """Return unix seconds, unaffected by changes of the system clock since this process began."""
    return _BEGAN + time.clock_gettime(_CLOCK)


def process_age() -> float:
    """Return the seconds since this process began. (psutil may be wrong by a second, like its time of the boot.)"""
    try:
        with open("/proc/self/stat") as file:
            # Field 22, starttime, in clock ticks since boot (proc_pid_stat(5)). The name in parentheses may have
            # spaces: the count begins behind it, at field 3.
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError):  # not Linux
        import psutil

        return time.time() - psutil.Process().create_time()
