"""Commits in a directory of a POSIX file system."""

from __future__ import annotations

import errno
import os
import uuid

from orchestrator.storage.backends import Buffers


class PosixBackend:
    """A directory on a POSIX file system."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._anchored = False

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def list(self, folder: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            entries = _entries(self._path(folder))
        except (FileNotFoundError, NotADirectoryError):
            return found
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                found.update(self.list(path))
            else:
                try:
                    found[path] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
        return found

    def read(self, path: str) -> bytes:
        with open(self._path(path), "rb") as file:
            return file.read()

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        try:
            # a link could lead out of the folder: not followed
            fd = os.open(self._path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise FileNotFoundError(errno.ENOENT, "a link stands where a file should", path) from None
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
        self._make(os.path.dirname(target))
        self._write_file(target, buffers)
        self._sync(os.path.dirname(target))

    def publish(self, path: str, data: bytes) -> None:
        target = self._path(path)
        folder = os.path.dirname(target)
        temporary = f"{target}.{uuid.uuid4().hex}.tmp"
        self._make(folder)
        self._anchor(folder)
        self._write_file(temporary, [data])
        try:
            self._link(temporary, target)
        finally:
            self._unlink(temporary)
        self._sync(folder)

    def replace(self, path: str, data: bytes) -> None:
        target = self._path(path)
        temporary = f"{target}.{uuid.uuid4().hex}.tmp"
        self._make(os.path.dirname(target))
        self._write_file(temporary, [data])
        try:
            os.replace(temporary, target)
        except BaseException:
            self._unlink(temporary)
            raise

    def remove(self, path: str, settle: bool = False) -> None:
        target = self._path(path)
        if self._unlink(target) and settle:
            self._sync(os.path.dirname(target))

    def remove_folder(self, folder: str) -> None:
        try:
            os.rmdir(self._path(folder))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    def _link(self, temporary: str, target: str) -> None:
        """A link, unlike a rename, fails where another attempt was faster."""
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, "the file exists", target) from None
            os.rename(temporary, target)

    def _make(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        self._make(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            return
        self._sync(parent)

    def _anchor(self, folder: str) -> None:
        """Make every directory down to `folder` durable: who made one may have died before it was."""
        parent = os.path.dirname(folder)
        while not self._anchored and parent != os.path.dirname(parent) and os.access(parent, os.R_OK):
            self._sync(parent)
            parent = os.path.dirname(parent)
        self._sync(os.path.dirname(folder))
        self._anchored = True

    def _unlink(self, path: str) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def _write_file(self, path: str, buffers: Buffers) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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

    def _sync(self, folder: str) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _entries(path: str) -> list[os.DirEntry[str]]:
    """The entries of a directory, by name."""
    with os.scandir(path) as entries:
        return sorted(entries, key=lambda entry: entry.name)
