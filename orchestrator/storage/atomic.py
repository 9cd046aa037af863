"""Atomic replacement of local files and folders: readers see either the old one or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable

DRAFT = re.compile(r"(.+)\.[0-9a-f]{32}\.tmp")
"""The name of a draft: its file's name and a random part."""
STALE = 600.0
"""Seconds without a change after which a draft must belong to a killed process."""


def write_file(path: str, buffers: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Create a file and fsync it. Its name becomes durable with `sync_folder`. `mode` is as for `os.open`.

    Raises FileExistsError if it exists. After any error, including one raised by `buffers`, no file is left.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        for buffer in buffers:
            view = memoryview(buffer)
            while len(view):
                count = os.write(fd, view)
                if not count:
                    raise OSError(errno.EIO, "nothing could be written", path)
                view = view[count:]
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def replace_file(path: str, buffers: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Create or replace a file atomically. A power cut may bring the old content back. `mode` is as for `os.open`.

    Raises OSError, or whatever `buffers` raises; then the old file is untouched. Only a crash leaves the draft,
    `<path>.<32 hexadecimal digits>.tmp`.
    """
    draft = draft_of(path)
    write_file(draft, buffers, mode)
    try:
        os.replace(draft, path)
    except BaseException:
        remove_file(draft)
        raise


def link_file(draft: str, target: str) -> None:
    """Rename the draft to `target`, by a hard link. Raises FileExistsError if another process was faster; a rename
    would not.
    """
    try:
        os.link(draft, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "the file exists", target) from None
        os.rename(draft, target)  # this file system has no hard links


def draft_of(path: str) -> str:
    """Return a new name beside `path` for a draft of its content."""
    return f"{path}.{uuid.uuid4().hex}.tmp"


def remove_drafts(folder: str, younger: Callable[[str], bool] = lambda name: False) -> None:
    """Remove the drafts of killed processes in a folder.

    These are drafts that have not changed for STALE seconds, and younger ones if `younger` returns True for the name
    of their file, because nobody can be writing it.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process removed it
                if (match := DRAFT.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                    old = time.time() - entry.stat().st_mtime > STALE
                    if old or younger(match[1]):
                        os.unlink(entry.path)


def remove_file(path: str) -> bool:
    """Remove a file; return whether it existed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_folder(draft: str, target: str, ours: Callable[[str], bool]) -> None:
    """Move the folder `draft` to `target`, replacing an existing folder.

    Entries of the old folder for whose name `ours` returns True are removed. All others move into the new folder, or
    stay in the old one if their name is taken: a user's file is never removed.

    Raises OSError. A crash leaves the old folder as `<draft>.old`.
    """
    target = os.path.realpath(target)
    old = f"{draft}.old"
    if os.path.lexists(target):
        os.replace(target, old)
    os.replace(draft, target)
    if not os.path.isdir(old):
        return
    for name in os.listdir(old):
        path = os.path.join(old, name)
        moved = os.path.join(target, name)
        if ours(name):
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        elif not os.path.lexists(moved):
            os.rename(path, moved)
    with contextlib.suppress(
        OSError
    ):  # not empty: it holds a user's file whose name is taken in the new folder
        os.rmdir(old)
