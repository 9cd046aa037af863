"""The target of an export: a folder that is replaced atomically, or an object store where export.json is written
last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrator.config.errors import InputError
from orchestrator.storage.atomic import replace_folder
from orchestrator.storage.input_files import TIMEOUT
from orchestrator.storage.open_backend import open_backend
from orchestrator.storage.retry import Retry
from orchestrator.storage.uri import check_uri, is_local, local_path

MARK = "export.json"
"""Written last: an export with this file is complete."""
WEIGHTS = re.compile(r"model[-.].*safetensors(\.index\.json)?")
"""Files of an export by a version whose export.json did not list them."""
NO_ROOM = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
    errno.ENOTDIR,
    errno.EEXIST,
}
"""Error numbers of a target that cannot be written."""


def check_target(target: str) -> None:
    """Raise InputError if the target holds something other than an export, which would be overwritten."""
    check_uri(target)
    path = local_path(target)
    if not is_local(target) or not os.path.lexists(path):
        return
    names = os.listdir(path) if os.path.isdir(path) else ["a file"]
    if names and MARK not in names:
        raise InputError("holds something other than an export", target, "give a new folder")


def mark_of(target: str) -> str:
    """Return the mark of a complete export at a target, which identifies its content; empty if incomplete or
    unreadable.
    """
    try:
        return open_backend(target, TIMEOUT).read(MARK).decode()
    except Exception:  # stores raise various errors
        return ""


@contextlib.contextmanager
def draft(target: str) -> Iterator[str]:
    """Yield a temporary folder for an export, beside the target if that is local. It is always removed at the end.

    Raises InputError if the target cannot be written, or its disk is full.
    """
    from safetensors import SafetensorError

    parent, name = os.path.split(local_path(target)) if is_local(target) else (None, "export")
    try:
        if parent:
            os.makedirs(parent, exist_ok=True)
        _remove_drafts(parent or tempfile.gettempdir(), name)
        with (
            tempfile.TemporaryDirectory(prefix=f".{name}.", suffix=".tmp", dir=parent) as folder,
            _locked(folder, wait=True),
        ):
            try:
                yield folder
            except SafetensorError:  # it does not report the error of the disk
                _probe(folder)
                raise
    except OSError as error:
        if error.errno not in NO_ROOM:  # for example an error of the commit that is read
            raise
        where = target if parent else f"{tempfile.gettempdir()}, on the way to {target}"
        hint = "make room there, or give another folder"
        raise InputError(f"cannot be written ({error.strerror or error})", where, hint) from None


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[str]:
    """Yield a draft that becomes the local folder `target` at the end. Raises InputError as `draft` does, and if the
    target is not empty.
    """
    path = os.path.realpath(local_path(target))
    taken = InputError("the target is not empty", target, "name a new folder")
    if os.path.lexists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise taken
    with draft(path) as folder:
        try:
            yield folder
        except InputError:  # from another process, which does not report the error of the disk
            _probe(folder)
            raise
        _open_to_others(folder)
        try:
            os.rename(folder, path)  # replaces only an empty folder
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise taken from None
            raise


def _remove_drafts(parent: str, name: str) -> None:
    """Remove the drafts of killed exports: no process holds their locks."""
    pattern = re.compile(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}\.tmp")
    for draft in filter(pattern.fullmatch, os.listdir(parent)):
        folder = os.path.join(parent, draft)
        with contextlib.suppress(OSError), _locked(folder) as ours:
            if ours and os.listdir(folder):  # an empty one was just made and is about to be locked
                shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: str, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a draft, which ends with the process. Yield whether it is held: not if another process holds
    it, or if the file system has no locks.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    held = False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        yield held
    finally:
        os.close(fd)


def _probe(folder: str) -> None:
    """Raise the OSError of a full disk."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))
        file.flush()


def publish(folder: str, target: str, retry: Retry) -> None:
    """Replace an earlier export at the target by a finished draft.

    On an object store, export.json is written last, and files of the earlier export that the new one lacks are removed.

    Args:
        folder: the local folder with the draft.
        target: a path or URI.
        retry: repeats failed calls of the store.
    """
    if is_local(target):
        _move(folder, local_path(target))
        return
    files = open_backend(target, TIMEOUT)
    existing = retry(files.list)
    before = _files_in(retry(files.read, MARK)) if MARK in existing else []
    retry(files.remove, MARK)  # the old mark would vouch for a mixture of old and new files
    names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]
    for name in existing.keys() - {
        *names,
        MARK,
    }:  # an old index or an old whole file would be read instead of the new one
        if name.partition("/")[0] in before or WEIGHTS.fullmatch(name):
            retry(files.remove, name)
    for name in sorted(names, key=lambda name: name == MARK):
        with open(os.path.join(folder, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
            retry(files.write, name, [memoryview(data)])


def _move(folder: str, path: str) -> None:
    _open_to_others(folder)
    made = {*os.listdir(folder), *_listed(f"{path}/{MARK}")}
    replace_folder(folder, path, lambda name: name in made or WEIGHTS.fullmatch(name) is not None)


def _listed(path: str) -> list[str]:
    """Return the files that the mark of an earlier export lists; empty if it lists none."""
    try:
        return _files_in(Path(path).read_bytes())
    except OSError:
        return []


def _files_in(mark: bytes) -> list[str]:
    try:
        return list(json.loads(mark)["files"])
    except (ValueError, KeyError, TypeError):
        return []


def _open_to_others(folder: str) -> None:
    """Give the folder the modes of any new one under the user's umask, because temporary folders are private."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (Path(folder), *Path(folder).rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
