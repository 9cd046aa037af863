"""Where an export goes: moved into its place as a whole, or put into an object store with its mark last."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrator.job.errors import InputError
from orchestrator.storage.backends import is_local, local_path, open_backend
from orchestrator.storage.folders import exchange
from orchestrator.storage.inputs import TIMEOUT
from orchestrator.storage.places import check_place
from orchestrator.storage.retry import Retry

MARK = "export.json"
"""Written last: with it an export is whole."""
WEIGHTS = re.compile(r"model[-.].*safetensors(\.index\.json)?")
"""Files of an export whose mark does not list them, as those of earlier versions do not."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOTDIR}
"""What a place says that cannot be written."""


def check_target(target: str) -> None:
    """Refuse to write over what is no export. Raises InputError."""
    check_place(target)
    path = local_path(target)
    if not is_local(target) or not os.path.lexists(path):
        return
    names = os.listdir(path) if os.path.isdir(path) else ["a file"]
    if names and MARK not in names:
        raise InputError("holds something that is no export", target, "give a new folder")


@contextlib.contextmanager
def draft(target: str) -> Iterator[str]:
    """A new folder to write the export in, beside the target where that is local; gone at the end, however that comes.

    Raises InputError if the target cannot be written, or has no more room.
    """
    from safetensors import SafetensorError

    parent, name = os.path.split(local_path(target)) if is_local(target) else (None, "export")
    try:
        if parent:
            os.makedirs(parent, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".tmp", dir=parent) as folder:
            try:
                yield folder
            except SafetensorError:  # it keeps what the disk said to itself
                _probe(folder)
                raise
    except OSError as error:
        if error.errno not in NO_ROOM:  # of the commit that is read, for instance
            raise
        place = target if parent else f"{tempfile.gettempdir()}, on the way to {target}"
        hint = "make room there, or give another folder"
        raise InputError(f"cannot be written ({error.strerror or error})", place, hint) from None


def _probe(folder: str) -> None:
    """Raise the OSError of a disk that is full."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()


def publish(folder: str, target: str, retry: Retry) -> None:
    """Put a finished draft in place of what was exported there before; on an object store its mark goes last."""
    if is_local(target):
        _move(folder, local_path(target))
        return
    files = open_backend(target, TIMEOUT)
    retry(files.remove, MARK)  # else the old mark would stand over half-new files
    names = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    for name in sorted(names, key=lambda name: name == MARK):
        with open(os.path.join(folder, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
            retry(files.write, name, [memoryview(data)])


def _move(folder: str, path: str) -> None:
    _open_to_others(folder)
    made = {*os.listdir(folder), *_listed(f"{path}/{MARK}")}
    exchange(folder, path, lambda name: name in made or WEIGHTS.fullmatch(name) is not None)


def _listed(path: str) -> list[str]:
    """The files of an earlier export, as its mark lists them; empty if it lists none."""
    try:
        with open(path) as file:
            return list(json.load(file)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _open_to_others(folder: str) -> None:
    """Modes as of any new folder under the user's umask, where a temporary one is its owner's alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (Path(folder), *Path(folder).rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
