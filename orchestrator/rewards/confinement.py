"""Limits of a process that scores: memory, lifetime, network and writable folders. Linux; elsewhere some are missing.

This keeps honest mistakes in. It is not a sandbox for hostile code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Collection
from typing import NoReturn

IS_LINUX = sys.platform == "linux"
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36
_SET_NO_NEW_PRIVILEGES = 38
_NEW_USER = 0x10000000
_NEW_NETWORK = 0x40000000
_NEW_PROCESSES = 0x20000000
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_CHANGES = _WRITE_FILE | 0b1_1111_1111 << 4
"""Landlock's rights to write files, and to remove and make entries of folders: bits 1 and 4 to 12."""
_TCP = 0b11
_SCOPES = 0b11
"""Abstract sockets and signals stay within the process and its children."""
PATIENCE = 5.0
"""Seconds to wait until killed processes are gone."""


def limit_memory(size: int) -> None:
    """Limit the address space of this process to `size` bytes for good. Crashes leave no core file."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    size = size if hard_limit == resource.RLIM_INFINITY else min(size, hard_limit)
    with contextlib.suppress(ValueError, OSError):  # a system that does not have the limit
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with(parent: int, sent: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends. Exit if that has ended already."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(sent))
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the direct children of this process, which has one thread; empty where the system does not say."""
    if not IS_LINUX:
        return []
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _parent_of(name) == os.getpid()]


def _parent_of(pid: str) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


def kill_children(spared: Collection[int] = ()) -> None:
    """Kill and reap all children but those `spared`, and what they leave behind. Needs `adopt_orphans`."""
    deadline = time.monotonic() + PATIENCE
    while (pids := [pid for pid in children() if pid not in spared]) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def limit_files(size: int) -> None:
    """Limit the size of a file that this process writes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def isolate() -> bool:
    """Go on in a child that has no network and sees no other processes; this process then ends as the child does.

    All processes that the child starts end with it, and when this process ends. Returns False, in this process, where
    the kernel does not allow it.
    """
    if not IS_LINUX:
        return False
    user, group = os.getuid(), os.getgid()
    library = ctypes.CDLL(None, use_errno=True)
    if not library.unshare(_NEW_USER | _NEW_NETWORK | _NEW_PROCESSES):
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    elif library.unshare(_NEW_NETWORK | _NEW_PROCESSES):
        return False
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        _end_as(int(os.read(read_end, 16) or signal.SIGKILL))
    os.close(read_end)
    library.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    # The first process of a namespace ignores most signals, so the code runs in the second.
    if second := os.fork():
        pid, status = os.wait()
        while pid != second:
            pid, status = os.wait()
        os.write(write_end, str(status).encode())
        os._exit(0)
    os.close(write_end)
    return True


def _end_as(status: int) -> NoReturn:
    """End this process with the status of another, as `os.waitpid` returns it."""
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; less than 1 if it has none."""
    if not IS_LINUX:
        return 0
    library = ctypes.CDLL(None, use_errno=True)
    return int(library.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)))


def write_only_in(folder: str) -> bool:
    """Restrict this process and its children: they may write only in `folder` and signal only each other (Landlock).

    Returns False where the kernel has no Landlock.
    """
    version = landlock_version()
    if version < 1:
        return False
    library = ctypes.CDLL(None, use_errno=True)
    changes = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    parts = [changes, *([_TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"={len(parts)}Q", *parts)
    rules = library.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if rules < 0:
        return False
    for path, rights in ((folder, changes), ("/dev/null", changes & (_WRITE_FILE | _TRUNCATE))):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, descriptor)
        failed = library.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, ctypes.c_uint32(0))
        os.close(descriptor)
        if failed:
            return False
    library.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return not library.syscall(_RESTRICT_SELF, rules, ctypes.c_uint32(0))
