"""Identify a process across machines and PID namespaces, so that a reader of its files knows whether it still runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def process_identity(pid: int) -> dict[str, Any]:
    """Return the identity of a process: the machine's boot id, the PID namespace, the PID, and its start time in
    ticks since boot ("born"; empty if the process does not exist).
    """
    state, *rest = _stat(pid)
    born = rest[18] if len(rest) > 18 and state not in "ZX" else ""
    space = _symlink_target("/proc/self/ns/pid")
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    return {"boot": boot, "space": space, "pid": pid, "born": born}


def lineage(max_depth: int = 3) -> list[dict[str, Any]]:
    """Return the identities of this process and its ancestors, at most `max_depth`.

    The machine's first process is left out.
    """
    result: list[dict[str, Any]] = []
    pid = os.getpid()
    while pid > 1 and len(result) < max_depth:
        result.append(process_identity(pid))
        _, *rest = _stat(pid)
        pid = int(rest[0]) if rest else 0
    return result


def has_ended(identity: Mapping[str, Any]) -> bool | None:
    """Return whether the process with that identity has ended; None if it belongs to another machine or PID namespace,
    or to another user, whose processes are hidden.

    Raises ValueError, TypeError or KeyError if `identity` is no identity of a process.
    """
    local = process_identity(int(identity["pid"]))
    if not local["boot"] or (identity["boot"], identity["space"]) != (local["boot"], local["space"]):
        return None
    if not local["born"] and _is_hidden(int(identity["pid"])):
        return None
    return bool(identity["born"] != local["born"])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; [""] without that file.

    proc(5): the name in parentheses may hold anything; after it come the state, the parent and, 18 on, starttime.
    """
    return _first_line(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]


def _is_hidden(pid: int) -> bool:
    """Return whether the process exists and belongs to another user: /proc may hide it (mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _first_line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""


def _symlink_target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
