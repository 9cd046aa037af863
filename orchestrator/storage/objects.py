"""Files in an object store, through fsspec: s3://, memory://, gs:// and others."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

from orchestrator.storage import remote
from orchestrator.storage.backends import Buffers
from orchestrator.storage.remote import RemoteFileSystem

FLAT = ("s3", "s3a", "gs", "gcs", "az", "abfs")
"""Protocols of stores that have no folders."""


def publish_object(fs: Any, path: str, data: bytes) -> None:
    """Make an object where there is none. Raises FileExistsError where one stands."""
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        raise
    except OSError as error:
        # s3fs says EINVAL for 412, "precondition failed"
        if error.errno != errno.EINVAL or not fs.isfile(path):
            raise
        raise FileExistsError(errno.EEXIST, "the object exists", path) from error


class ObjectBackend:
    """Any other fsspec file system: an object appears whole when its put is done, and is then durable."""

    def __init__(self, uri: str, timeout: float) -> None:
        self.fs = RemoteFileSystem(uri, timeout)
        self.root = self.fs.root
        self._has_folders = self.fs.protocol not in FLAT

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def list(self, folder: str = "") -> dict[str, int]:
        try:
            found = self.fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        skip = len(self.root) + 1
        return {path[skip:]: int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def read(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(self._path(path)))

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        done = 0
        while done < len(target):
            count = min(remote.PART_BYTES, len(target) - done)
            data = self.fs.cat_file(self._path(path), start=offset + done, end=offset + done + count)
            target[done : done + len(data)] = data
            done += len(data)
            if len(data) < count:
                break
        return done

    def write(self, path: str, buffers: Buffers) -> None:
        if sum(map(len, buffers)) <= remote.PART_BYTES:
            self.fs.pipe_file(self._path(path), b"".join(buffers))
        else:
            self.fs.upload(self._path(path), buffers)

    def publish(self, path: str, data: bytes) -> None:
        publish_object(self.fs, self._path(path), data)

    def replace(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(self._path(path), data)

    def remove(self, path: str, settle: bool = False) -> None:
        try:
            self.fs.rm_file(self._path(path))
        except FileNotFoundError:
            return

    def remove_folder(self, folder: str) -> None:
        if self._has_folders:
            # some refuse a folder that is not empty, some one that was never made
            with contextlib.suppress(OSError, NotImplementedError):
                self.fs.rmdir(self._path(folder))
