"""The storage backend of an object store, or any other remote file system of fsspec: s3://, gs://, memory://."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

from orchestrator.storage import file_system
from orchestrator.storage.backend import Buffers
from orchestrator.storage.file_system import RemoteFileSystem

WITHOUT_FOLDERS = ("s3", "s3a", "gs", "gcs", "az", "abfs")
"""Protocols of stores without folders, whose names merely contain slashes."""


def create_object(fs: Any, path: str, data: bytes) -> None:
    """Create an object by a conditional put. Raises FileExistsError if it exists."""
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        raise
    except OSError as error:
        # s3fs raises EINVAL for HTTP status 412, "precondition failed"
        if error.errno != errno.EINVAL or not fs.isfile(path):
            raise
        raise FileExistsError(errno.EEXIST, "the object exists", path) from error


class ObjectBackend:
    """See `Backend`. An object appears, complete and durable, when its put returns."""

    def __init__(self, uri: str, timeout: float) -> None:
        self.fs = RemoteFileSystem(uri, timeout)
        self.root = self.fs.root
        self._has_folders = self.fs.protocol not in WITHOUT_FOLDERS

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def list(self, folder: str = "") -> dict[str, int]:
        try:
            entries = self.fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        skip = len(self.root) + 1
        return {path[skip:]: int(info["size"]) for path, info in entries.items() if info["type"] == "file"}

    def size(self, path: str) -> int:
        return int(self.fs.info(self._path(path))["size"])

    def read(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(self._path(path)))

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        done = 0
        while done < len(target):
            count = min(file_system.PART_BYTES, len(target) - done)
            data = self.fs.cat_file(self._path(path), start=offset + done, end=offset + done + count)
            target[done : done + len(data)] = data
            done += len(data)
            if len(data) < count:
                break
        return done

    def write(self, path: str, buffers: Buffers) -> None:
        if sum(map(len, buffers)) <= file_system.PART_BYTES:
            self.fs.pipe_file(self._path(path), b"".join(buffers))
        else:
            self.fs.upload(self._path(path), buffers)

    def publish(self, path: str, data: bytes) -> None:
        create_object(self.fs, self._path(path), data)

    def replace(self, path: str, data: bytes | memoryview) -> None:
        self.fs.pipe_file(self._path(path), bytes(data))  # store clients accept only bytes

    def remove(self, path: str, durable: bool = False) -> None:
        try:
            self.fs.rm_file(self._path(path))
        except FileNotFoundError:
            return

    def remove_folder(self, folder: str) -> None:
        if self._has_folders:
            # some stores refuse to remove a folder that is not empty, others one that was never created
            with contextlib.suppress(OSError, NotImplementedError):
                self.fs.rmdir(self._path(folder))
