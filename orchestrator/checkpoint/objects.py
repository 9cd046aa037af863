"""Commits in an object store, through fsspec: s3://, memory://, gs:// and others."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

import fsspec

from orchestrator.checkpoint.backends import Buffers

# larger files are uploaded in parts of this size, while they are read from memory
PART_BYTES = 32 << 20


def open_filesystem(uri: str, timeout: float) -> Any:
    """The fsspec file system of a remote URI: nothing is cached, every call is bounded, and the caller retries.

    Raises ValueError or ImportError for a protocol that cannot be used.
    """
    protocol = uri.split("://", 1)[0]
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": protocol in ("s3", "s3a")}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": min(10.0, timeout),
            "read_timeout": timeout,
            "retries": {"total_max_attempts": 1},
        }
    fs: Any = fsspec.filesystem(protocol, **options)
    if protocol in ("s3", "s3a"):
        fs.retries = 1
    return fs


def publish_object(fs: Any, path: str, data: bytes) -> None:
    """Make an object where there is none. Raises FileExistsError where one stands."""
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        raise
    except OSError as error:
        # s3fs says EINVAL for 412, "precondition failed"
        if error.errno != errno.EINVAL or not _stands(fs, path):
            raise
        raise FileExistsError(errno.EEXIST, "the object exists", path) from error


def _stands(fs: Any, path: str) -> bool:
    try:
        return bool(fs.info(path)["type"] == "file")
    except FileNotFoundError:
        return False


class ObjectBackend:
    """Any other fsspec file system: an object appears whole when its put is done, and is then durable."""

    def __init__(self, uri: str, timeout: float) -> None:
        protocol = uri.split("://", 1)[0]
        self._has_folders = protocol not in ("s3", "s3a", "gs", "gcs", "az", "abfs")
        self.fs: Any = open_filesystem(uri, timeout)
        self.root = self.fs._strip_protocol(uri).rstrip("/")

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
        data = self.fs.cat_file(self._path(path), start=offset, end=offset + len(target))
        target[: len(data)] = data
        return len(data)

    def write(self, path: str, buffers: Buffers) -> None:
        if sum(map(len, buffers)) <= PART_BYTES:
            self.fs.pipe_file(self._path(path), b"".join(buffers))
            return
        file = self.fs.open(self._path(path), "wb", block_size=PART_BYTES)
        try:
            for buffer in buffers:
                for at in range(0, len(buffer), PART_BYTES):
                    file.write(buffer[at : at + PART_BYTES])
        except BaseException:
            # closing would make an object of the part that was sent
            file.discard()
            file.closed = True
            raise
        file.close()

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
