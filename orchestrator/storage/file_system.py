"""File systems by URI. The only module that calls fsspec. Every call to a remote file system has a deadline.

The timeouts of storage clients are not enough: they start after a request is sent, and every received byte renews
them. Here the whole call has a deadline, from connecting to the last byte of the answer. Then it ends with a
TimeoutError that names the call, the path and the seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import lru_cache, partial
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from orchestrator.storage.backend import Buffers
from orchestrator.storage.uri import is_local, local_path

PART_BYTES = 8 << 20
"""Larger files are read and written in parts of this many bytes, each with its own deadline."""
MIN_BYTES_PER_SECOND = 64 << 10
"""Minimum throughput of a store: a call's deadline grows by its bytes divided by this."""
LISTING_FACTOR = 4.0
"""A listing may need several requests, so its deadline is this multiple of a small call's."""


def open_file_system(uri: str, timeout: float) -> tuple[Any, str]:
    """Return the file system of a URI, and the URI's path in it. Local and remote ones share fsspec's method names.

    Raises ValueError or ImportError for a protocol that cannot be used.
    """
    if is_local(uri):
        return LocalFileSystem(), local_path(uri)
    remote = RemoteFileSystem(uri, timeout)
    return remote, remote.root


def shared_file_system(uri: str, timeout: float) -> tuple[RemoteFileSystem, str]:
    """Return the file system of a remote URI and the path in it. All URIs of a bucket share one, because making a
    client takes 0.3 s.

    Raises as `open_file_system`.
    """
    if "::" in uri:
        made = RemoteFileSystem(uri, timeout)
        return made, made.root
    settings = tuple(sorted((key, value) for key, value in os.environ.items() if key.startswith("AWS_")))
    shared = _made("/".join(uri.split("/", 3)[:3]), timeout, settings)
    return shared, shared.path_of(uri)


@lru_cache(maxsize=4)
def _made(bucket: str, timeout: float, settings: tuple[tuple[str, str], ...]) -> RemoteFileSystem:
    """Make a client. `settings` are environment variables that affect it, so they are part of the cache key."""
    return RemoteFileSystem(bucket, timeout)


class RemoteFileSystem:
    """A remote file system with fsspec's method names. Every call has a deadline, nothing is cached, and the caller
    retries.

    Every method may raise TimeoutError, OSError or an error of the store's client.
    """

    def __init__(self, uri: str, timeout: float) -> None:
        """
        Args:
            uri: where; `root` is its path in the file system.
            timeout: seconds for a call that moves hardly any bytes.

        Raises ValueError or ImportError for a protocol that cannot be used.
        """
        self.protocol = uri.split("://", 1)[0]
        self.timeout = timeout
        options: dict[str, Any] = {"use_listings_cache": False}
        if self.on_s3:
            options |= {"skip_instance_cache": True, "config_kwargs": _botocore_config(timeout)}
        self._plain: Any  # the fsspec file system, without deadlines
        self._chained = "::" in uri
        if self._chained:
            self._plain, self.root = fsspec.core.url_to_fs(uri)
        else:
            self._plain = fsspec.filesystem(self.protocol, **options)
            self.root = self._plain._strip_protocol(uri)
        self.root = self.root.rstrip("/")
        if self.on_s3:
            self._plain.retries = 1

    @property
    def on_s3(self) -> bool:
        """Whether this is an S3 store."""
        return self.protocol in ("s3", "s3a")

    def path_of(self, uri: str) -> str:
        """The path of a URI."""
        return str(self._plain._strip_protocol(uri)).rstrip("/")

    def unstrip_protocol(self, path: str) -> str:
        """The URI of a path."""
        return str(self._plain.unstrip_protocol(path))

    def info(self, path: str) -> dict[str, Any]:
        """Name, size and type of a file or folder. Raises FileNotFoundError."""
        return dict(self._call("info", path))

    def isfile(self, path: str) -> bool:
        """Whether there is such a file. A store that does not answer is an error, not False."""
        return self._is("file", path)

    def isdir(self, path: str) -> bool:
        """Whether there is such a folder, or objects below that prefix."""
        return self._is("directory", path)

    def _is(self, kind: str, path: str) -> bool:
        try:
            return bool(self.info(path)["type"] == kind)
        except FileNotFoundError:
            return False

    def ls(self, path: str, detail: bool = False) -> Any:
        """The entries of a folder. Raises FileNotFoundError."""
        self._plain.invalidate_cache(path)
        return self._call("ls", path, detail=detail, seconds=LISTING_FACTOR * self.timeout)

    def find(self, path: str, detail: bool = False) -> Any:
        """All files below a folder, at any depth."""
        return self._call("find", path, detail=detail, seconds=LISTING_FACTOR * self.timeout)

    def glob(self, path: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        """Files and folders that match a pattern, by name."""
        self._plain.invalidate_cache()
        return dict(self._call("glob", path, detail=detail, seconds=LISTING_FACTOR * self.timeout))

    def ukey(self, path: str) -> str:
        """The identity of a file's content, as far as the store reports it."""
        return self._in_thread(lambda: str(self._plain.ukey(path)), "ukey", path, self.timeout)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes [start, end) of a file, or the whole file; fewer where the file ends before."""
        if start is None or end is None:
            data = bytearray()
            while part := self.cat_file(path, len(data), len(data) + PART_BYTES):
                data += part
                if len(part) < PART_BYTES:
                    break
            return bytes(data)
        try:
            content = bytes(self._call("cat_file", path, start=start, end=end, size=end - start))
        except (OSError, ValueError) as error:
            # clients report a range that begins at the end of the file in many ways, s3fs by EINVAL
            unrelated = isinstance(error, OSError) and error.errno != errno.EINVAL
            if unrelated or self.info(path)["size"] > start:
                raise
            return b""
        # a server that does not support ranges sends the whole file
        return content if len(content) <= end - start else content[start:end]

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        """Create or replace a file; with mode "create", raise FileExistsError if there is one."""
        if mode == "overwrite" and len(data) > PART_BYTES:
            self.upload(path, [data])
        else:
            more: dict[str, Any] = {} if mode == "overwrite" else {"mode": mode}
            self._call("pipe_file", path, data, size=len(data), **more)

    def upload(self, path: str, buffers: Buffers) -> None:
        """Write a large file, on S3 in parts. An upload that fails leaves no file."""
        if not self.on_s3:
            data = b"".join(buffers)
            self._call("pipe_file", path, data, size=len(data))
            return
        bucket, key, _ = self._plain.split_path(path)
        target = {"Bucket": bucket, "Key": key}
        upload = self._call_s3("create_multipart_upload", path, **target)["UploadId"]
        target["UploadId"] = upload
        try:
            uploaded = []
            for number, part in enumerate(_parts(buffers), 1):
                answer = self._call_s3("upload_part", path, len(part), Body=part, PartNumber=number, **target)
                uploaded.append({"PartNumber": number, "ETag": answer["ETag"]})
            self._call_s3("complete_multipart_upload", path, MultipartUpload={"Parts": uploaded}, **target)
        except BaseException:
            with contextlib.suppress(Exception):
                self._call_s3("abort_multipart_upload", path, **target)
            raise

    def rm_file(self, path: str) -> None:
        """Remove a file. Some stores raise FileNotFoundError if the folder does not exist."""
        self._call("rm_file", path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        self._call("rmdir", path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, where the store has folders."""
        self._call("makedirs", path, exist_ok=exist_ok)

    def _call(
        self, verb: str, path: str, *arguments: Any, size: int = 0, seconds: float = 0.0, **options: Any
    ) -> Any:
        """Call a method of the fsspec file system. At its deadline a coroutine is cancelled; a thread is left
        to itself."""
        seconds = seconds or self.timeout + size / MIN_BYTES_PER_SECOND
        # a chained file system claims to be asynchronous even where the one below it is not
        if isinstance(self._plain, AsyncFileSystem) and not self._chained:
            begin = partial(getattr(self._plain, f"_{verb}"), path, *arguments, **options)
            return self._await(begin, verb, path, seconds)
        call = getattr(self._plain, verb)
        return self._in_thread(lambda: call(path, *arguments, **options), verb, path, seconds)

    def _call_s3(self, verb: str, path: str, size: int = 0, **options: Any) -> Any:
        seconds = self.timeout + size / MIN_BYTES_PER_SECOND
        return self._await(self._plain._call_s3, verb, path, seconds, verb, **options)

    def _await(
        self, call: Callable[..., Any], verb: str, path: str, seconds: float, *arguments: Any, **options: Any
    ) -> Any:
        try:
            return sync(self._plain.loop, call, *arguments, timeout=seconds, **options)
        except FSTimeoutError:
            raise self._timed_out(verb, path, seconds) from None

    def _in_thread(self, call: Callable[[], Any], verb: str, path: str, seconds: float) -> Any:
        result: Future[Any] = Future()

        def work() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name=f"storage-{verb}", daemon=True).start()
        if not wait_for([result], seconds).done:
            raise self._timed_out(verb, path, seconds)
        return result.result()

    def _timed_out(self, verb: str, path: str, seconds: float) -> TimeoutError:
        return TimeoutError(f"{self.unstrip_protocol(path)}: {verb} had not ended after {seconds:.0f} s")


def _botocore_config(timeout: float) -> dict[str, Any]:
    """botocore's settings: give a dead connection up before the call's deadline, and never retry."""
    return {
        "connect_timeout": min(10.0, timeout),
        "read_timeout": timeout,
        "retries": {"total_max_attempts": 1},
    }


def _parts(buffers: Buffers) -> Iterator[bytes]:
    """The bytes of all buffers in parts of PART_BYTES; the last one may be smaller."""
    held = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            taken = PART_BYTES - len(held)
            held += view[:taken]
            view = view[taken:]
            if len(held) == PART_BYTES:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)
