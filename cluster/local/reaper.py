"""Ends what an embedded Ray leaves when its driver dies: `python -I -S reaper.py MARK`, with a pipe as standard input.

The kernel ends Ray's main processes with the driver, but not what those have started: its agents live on for minutes.
All of them have MARK in the environment that they were started with. The pipe breaks when the driver is gone, however
that came; a driver that ends by itself writes a byte first. Nothing is imported but what Python always has.
"""

from __future__ import annotations

import os
import signal
import sys
import time

VARIABLE = "ORCHESTRATOR_EMBEDDED_RAY"
"""What is in the environment of all processes of an embedded Ray."""
PATIENCE = 10.0
"""Seconds in which processes that are being started may still appear."""


def main() -> None:
    """Wait for the driver's end, and end what it left."""
    mark = f"{VARIABLE}={sys.argv[1]}".encode()
    if sys.stdin.buffer.read(1):
        return
    end, quiet = time.monotonic() + PATIENCE, 0
    while quiet < 3 and time.monotonic() < end:
        left = marked(mark)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        quiet = 0 if left else quiet + 1
        time.sleep(0.2)


def marked(mark: bytes) -> list[int]:
    """Processes that were started with the mark in their environment, but for this one."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
