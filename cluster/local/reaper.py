"""End the Ray processes that are left when the process that started Ray dies (a driver or a local node).

    python -I -S reaper.py MARK PID [FOLDER]

Standard input is a pipe from that process. It breaks when the process dies; a process that ends normally writes a byte
first. The kernel ends Ray's main processes with their parent, but not the children of those: Ray's agents live on for
minutes. All of them have MARK in their environment. A process may overwrite it with a title, so the descendants of PID
are recorded while it lives. The reaper also removes FOLDER. It imports the standard library only.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

VARIABLE = "ORCHESTRATOR_EMBEDDED_RAY"
"""The environment variable of all processes of an embedded Ray. Its value is the marker."""
START_TIMEOUT = 10.0
"""Seconds during which processes that were being started may still appear."""
SCAN_EVERY = 1.0
"""Seconds between two scans of the descendants."""


def main() -> None:
    """Wait for the end of the parent process, and kill what it left."""
    marker = f"{VARIABLE}={sys.argv[1]}".encode()
    starter = int(sys.argv[2])
    known: dict[int, str] = {}
    while not select.select([sys.stdin], [], [], SCAN_EVERY)[0]:
        known = descendants(starter) | {pid: start for pid, start in known.items() if _start_of(pid) == start}
    if sys.stdin.buffer.read(1):
        return
    deadline = time.monotonic() + START_TIMEOUT
    empty_scans = 0
    while empty_scans < 3 and time.monotonic() < deadline:
        remaining = {*marked_processes(marker), *(pid for pid in known if _start_of(pid) == known[pid])}
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        empty_scans = 0 if remaining else empty_scans + 1
        time.sleep(0.2)
    if len(sys.argv) > 3 and os.getppid() != starter:  # otherwise the parent removes the folder itself
        shutil.rmtree(sys.argv[3], ignore_errors=True)


def descendants(ancestor: int) -> dict[int, str]:
    """Return the descendants of a process with their start times, without this process."""
    children: dict[int, dict[int, str]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if (fields := _stat(pid)) and pid != os.getpid():
            children.setdefault(int(fields[1]), {})[pid] = fields[19]
    below: dict[int, str] = {}
    left = [ancestor]
    while left:
        direct = children.get(left.pop(), {})
        below |= direct
        left += direct
    return below


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else fields


def _start_of(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot. It distinguishes processes that reuse an id."""
    return fields[19] if (fields := _stat(pid)) else ""


def marked_processes(marker: bytes) -> list[int]:
    """Return the processes with the marker in their environment, without this process."""
    result = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marker in file.read().split(b"\0"):
                    result.append(int(pid))
        except OSError:
            continue
    return result


if __name__ == "__main__":
    main()
