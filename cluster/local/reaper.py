"""Ends what Ray leaves on this machine when the process that started it dies, a driver with an embedded Ray or a local
node: `python -I -S reaper.py MARK PID [FOLDER]`, with a pipe as standard input.

The kernel ends Ray's main processes with that process, but not those which they have started: Ray's agents live on for
minutes. All of them were started with MARK in their environment. Some give themselves a title, which writes over it, so
the descendants are remembered while they live. The pipe breaks when the process dies; one that ends in order writes a
byte first. With it goes the folder of that Ray. Only the standard library is imported.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

VARIABLE = "ORCHESTRATOR_EMBEDDED_RAY"
"""Environment variable of all processes of an embedded Ray; its value is the marker."""
START_TIMEOUT = 10.0
"""Seconds during which processes that were being started may still appear."""
SCAN_EVERY = 1.0
"""Seconds between looks at the descendants."""


def main() -> None:
    """Wait for the end of the process that started this one, and kill what it left."""
    marker, starter = f"{VARIABLE}={sys.argv[1]}".encode(), int(sys.argv[2])
    known: dict[int, str] = {}
    while not select.select([sys.stdin], [], [], SCAN_EVERY)[0]:
        known = descendants(starter) | {pid: start for pid, start in known.items() if _start_of(pid) == start}
    if sys.stdin.buffer.read(1):
        return
    deadline, empty_scans = time.monotonic() + START_TIMEOUT, 0
    while empty_scans < 3 and time.monotonic() < deadline:
        remaining = {*marked_processes(marker), *(pid for pid in known if _start_of(pid) == known[pid])}
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        empty_scans = 0 if remaining else empty_scans + 1
        time.sleep(0.2)
    if len(sys.argv) > 3 and os.getppid() != starter:  # else it removes its folder itself
        shutil.rmtree(sys.argv[3], ignore_errors=True)


def descendants(ancestor: int) -> dict[int, str]:
    """The processes below that one, with when each was started, this one excepted."""
    children: dict[int, dict[int, str]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if (fields := _stat(pid)) and pid != os.getpid():
            children.setdefault(int(fields[1]), {})[pid] = fields[19]
    found, left = dict[int, str](), [ancestor]
    while left:
        below = children.get(left.pop(), {})
        found |= below
        left += below
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else fields


def _start_of(pid: int) -> str:
    """When a process was started, in clock ticks since boot: a number that is used again has another."""
    return fields[19] if (fields := _stat(pid)) else ""


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
