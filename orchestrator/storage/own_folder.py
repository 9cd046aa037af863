"""Folders of temporary files that are the user's alone, and the same for all of the user's processes on a machine."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def own_folder(kind: str) -> Path:
    """This user's folder for temporary files of a kind. Raises PermissionError if what is there is another's, or could
    have been filled by others: what is read from it would be theirs."""
    found = Path(tempfile.gettempdir()) / f"orchestrator-{kind}-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    if not _is_own(found):
        raise PermissionError(f"{found} is not this user's alone")
    return found


def own_folder_or_another(kind: str) -> Path:
    """`own_folder`, or one beside it where that is another's, which is told in a line when it is made."""
    try:
        return own_folder(kind)
    except OSError as error:
        start = f"orchestrator-{kind}-{os.getuid()}-"
        known = sorted(Path(tempfile.gettempdir()).glob(f"{start}*"))
        if found := next(filter(_is_own, known), None):
            return found
        made = Path(tempfile.mkdtemp(prefix=start))
        print(f"{error}; {made} is used in its place", flush=True)
        return made


def _is_own(folder: Path) -> bool:
    """Whether a folder is this user's, and nobody else can write into it; nobody else may read it from now on."""
    told = folder.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.getuid() or told.st_mode & 0o022:
        return False
    folder.chmod(0o700)  # an earlier version has let others read
    return True
