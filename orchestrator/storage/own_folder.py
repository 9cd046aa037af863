"""Private folders for temporary files, shared by all processes of the user on a machine."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def own_folder(kind: str) -> Path:
    """Return this user's folder for temporary files of a kind.

    Raises PermissionError if the folder belongs to another user or was writable by others: its content could be
    theirs.
    """
    folder = Path(tempfile.gettempdir()) / f"orchestrator-{kind}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(folder):
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def own_folder_or_another(kind: str) -> Path:
    """Return `own_folder`, or another folder if that one belongs to another user. Prints one line when it creates
    the other.
    """
    try:
        return own_folder(kind)
    except OSError as error:
        start = f"orchestrator-{kind}-{os.getuid()}-"
        candidates = sorted(Path(tempfile.gettempdir()).glob(f"{start}*"))
        if existing := next(filter(_is_own, candidates), None):
            return existing
        made = Path(tempfile.mkdtemp(prefix=start))
        print(f"{error}; {made} is used instead", flush=True)
        return made


def _is_own(folder: Path) -> bool:
    """Return whether a folder is this user's and no other user can write in it. Makes it unreadable for others."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        return False
    folder.chmod(0o700)  # an earlier version let others read it
    return True
