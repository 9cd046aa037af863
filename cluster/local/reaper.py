"""Ends what an embedded Ray leaves when its driver dies: `python -I -S reaper.py MARK`, with a pipe as standard input.

The kernel ends Ray's main processes with the driver, but not the processes that those have started: Ray's agents live
on for minutes. All of them were started with MARK in their environment. The pipe breaks when the driver dies; a driver
that ends in order writes a byte first. Only the standard library is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time

VARIABLE = "ORCHESTRATOR_EMBEDDED_RAY"
"""Environment variable of all processes of an embedded Ray; its value is the marker."""
START_TIMEOUT = 10.0
"""Seconds during which processes that were being started may still appear."""


def main() -> None:
    """Wait for the end of the driver, and kill what it left."""
    marker = f"{VARIABLE}={sys.argv[1]}".encode()
    if sys.stdin.buffer.read(1):
        return
    deadline, empty_scans = time.monotonic() + START_TIMEOUT, 0
    while empty_scans < 3 and time.monotonic() < deadline:
        remaining = marked_processes(marker)
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        empty_scans = 0 if remaining else empty_scans + 1
        time.sleep(0.2)


def marked_processes(marker: bytes) -> list[int]:
    """Processes that were started with the marker in their environment, this one excepted."""
    found = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marker in file.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
