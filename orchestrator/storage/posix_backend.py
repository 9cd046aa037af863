"""The storage backend of a directory on a POSIX file system."""

from __future__ import annotations

import errno
import os

from orchestrator.storage.atomic import (
    draft_of,
    link_file,
    remove_file,
    replace_file,
    sync_folder,
    write_file,
)
from orchestrator.storage.backend import Buffers


class PosixBackend:
    """See `Backend`. Folders are created as files need them."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._root_is_durable = False

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def list(self, folder: str = "") -> dict[str, int]:
        sizes: dict[str, int] = {}
        try:
            entries = _entries(self._path(folder))
        except (FileNotFoundError, NotADirectoryError):
            return sizes
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            # A commit may have been moved to another disk and replaced by a link. Links at deeper levels may be
            # cyclic.
            if entry.is_dir(follow_symlinks=not folder):
                sizes.update(self.list(path))
            else:
                try:
                    sizes[path] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
        return sizes

    def size(self, path: str) -> int:
        return os.stat(self._path(path)).st_size

    def read(self, path: str) -> bytes:
        with open(self._path(path), "rb") as file:
            return file.read()

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        try:
            # do not follow symbolic links: they may lead out of the folder
            fd = os.open(self._path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise FileNotFoundError(errno.ENOENT, "is a symbolic link and should be a file", path) from None
        try:
            done = 0
            while done < len(target):
                count = os.preadv(fd, [target[done:]], offset + done)
                if not count:
                    break
                done += count
            return done
        finally:
            os.close(fd)

    def write(self, path: str, buffers: Buffers) -> None:
        target = self._path(path)
        self._make_folder(os.path.dirname(target))
        write_file(target, buffers)
        sync_folder(os.path.dirname(target))

    def publish(self, path: str, data: bytes) -> None:
        target = self._path(path)
        folder = os.path.dirname(target)
        draft = draft_of(target)
        self._make_folder(folder)
        self._sync_parents(folder)
        write_file(draft, [data])
        try:
            link_file(draft, target)
        finally:
            remove_file(draft)
        sync_folder(folder)

    def replace(self, path: str, data: bytes | memoryview) -> None:
        target = self._path(path)
        self._make_folder(os.path.dirname(target))
        replace_file(target, [data])

    def remove(self, path: str, durable: bool = False) -> None:
        target = self._path(path)
        if remove_file(target) and durable:
            sync_folder(os.path.dirname(target))

    def remove_folder(self, folder: str) -> None:
        path = self._path(folder)
        try:
            if os.path.islink(path):
                if not _entries(path):
                    os.unlink(path)
            else:
                os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    def _make_folder(self, folder: str) -> None:
        """Create a folder and its parents, durably."""
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        self._make_folder(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            return
        sync_folder(parent)

    def _sync_parents(self, folder: str) -> None:
        """Make every directory down to `folder` durable. Its creator may have died before the fsync."""
        parent = os.path.dirname(folder)
        while not self._root_is_durable and parent != os.path.dirname(parent) and os.access(parent, os.R_OK):
            sync_folder(parent)
            parent = os.path.dirname(parent)
        sync_folder(os.path.dirname(folder))
        self._root_is_durable = True


def _entries(path: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, sorted by name."""
    with os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)
