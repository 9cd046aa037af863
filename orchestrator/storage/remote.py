"""Remote file systems, every call of which ends with an answer, an error, or a TimeoutError that says how long
was waited for what.

A client's own timeouts are not enough: they begin after a request is sent, and each byte that trickles in renews
them. Here a call as a whole has a deadline, from the connection to the last byte of the answer.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.exceptions import FSTimeoutError

from orchestrator.storage.backends import Buffers

PART_BYTES = 8 << 20
"""More than this is read and written in parts of so many bytes, each with a deadline of its own."""
SLOWEST = 64 << 10
"""Bytes a second that a store must take or give: a part's deadline grows by its size over this."""
LISTING = 4.0
"""Times the deadline of a small call that a listing has, which may be many requests."""


class RemoteFileSystem:
    """An fsspec file system under its own names, each call bounded; nothing is cached, and the caller retries.

    `timeout` is the seconds that a call may take which moves next to nothing. Raises ValueError or ImportError for a
    protocol that cannot be used.
    """

    def __init__(self, uri: str, timeout: float) -> None:
        self.protocol, self.timeout = uri.split("://", 1)[0], timeout
        options: dict[str, Any] = {"use_listings_cache": False}
        if self.on_s3:
            options |= {"skip_instance_cache": True, "config_kwargs": _client(timeout)}
        self._plain: Any
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

    def unstrip_protocol(self, path: str) -> str:
        """The URI of a path."""
        return str(self._plain.unstrip_protocol(path))

    def info(self, path: str) -> dict[str, Any]:
        """Name, size and type of a file or folder. Raises FileNotFoundError."""
        return dict(self._call("info", path))

    def isfile(self, path: str) -> bool:
        """Whether a file is there. That nobody answers is an error, not a no."""
        return self._is("file", path)

    def isdir(self, path: str) -> bool:
        """Whether a folder is there, or a prefix of objects."""
        return self._is("directory", path)

    def _is(self, kind: str, path: str) -> bool:
        try:
            return bool(self.info(path)["type"] == kind)
        except FileNotFoundError:
            return False

    def ls(self, path: str, detail: bool = False) -> Any:
        """What a folder holds. Raises FileNotFoundError."""
        self._plain.invalidate_cache(path)
        return self._call("ls", path, detail=detail, seconds=LISTING * self.timeout)

    def find(self, path: str, detail: bool = False) -> Any:
        """All files below a folder."""
        return self._call("find", path, detail=detail, seconds=LISTING * self.timeout)

    def glob(self, path: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        """What matches a pattern, by name."""
        self._plain.invalidate_cache()
        return dict(self._call("glob", path, detail=detail, seconds=LISTING * self.timeout))

    def ukey(self, path: str) -> str:
        """What identifies the content of a file, as far as the store can tell."""
        return self._in_thread(lambda: str(self._plain.ukey(path)), "ukey", path, self.timeout)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes [start, end) of a file, or all of it; fewer at its end."""
        if start is None or end is None:
            data = bytearray()
            while part := self.cat_file(path, len(data), len(data) + PART_BYTES):
                data += part
                if len(part) < PART_BYTES:
                    break
            return bytes(data)
        try:
            found = bytes(self._call("cat_file", path, start=start, end=end, size=end - start))
        except (OSError, ValueError) as error:
            # a range that begins at the end has names of many kinds, EINVAL on S3
            passing = isinstance(error, OSError) and error.errno != errno.EINVAL
            if passing or self.info(path)["size"] > start:
                raise
            return b""
        # a server that knows no ranges sends all
        return found if len(found) <= end - start else found[start:end]

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        """Write a file whole; with mode "create", only where there is none."""
        if mode == "overwrite" and len(data) > PART_BYTES:
            self.upload(path, [data])
        else:
            more: dict[str, Any] = {} if mode == "overwrite" else {"mode": mode}
            self._call("pipe_file", path, data, size=len(data), **more)

    def upload(self, path: str, buffers: Buffers) -> None:
        """Write a large file; one that broke off leaves nothing that looks like a file."""
        if not self.on_s3:
            data = b"".join(buffers)
            self._call("pipe_file", path, data, size=len(data))
            return
        bucket, key, _ = self._plain.split_path(path)
        target = {"Bucket": bucket, "Key": key}
        upload = self._call_s3("create_multipart_upload", path, **target)["UploadId"]
        target["UploadId"] = upload
        try:
            made = []
            for number, part in enumerate(_parts(buffers), 1):
                answer = self._call_s3("upload_part", path, len(part), Body=part, PartNumber=number, **target)
                made.append({"PartNumber": number, "ETag": answer["ETag"]})
            self._call_s3("complete_multipart_upload", path, MultipartUpload={"Parts": made}, **target)
        except BaseException:
            with contextlib.suppress(Exception):
                self._call_s3("abort_multipart_upload", path, **target)
            raise

    def rm_file(self, path: str) -> None:
        """Remove a file. Some stores raise FileNotFoundError where there is none."""
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
        """A verb of fsspec, cancelled at its deadline where that can be done, else left alone in its thread."""
        seconds = seconds or self.timeout + size / SLOWEST
        # what is chained says that it can be awaited, whatever is below it
        if isinstance(self._plain, AsyncFileSystem) and not self._chained:
            return self._await(
                getattr(self._plain, f"_{verb}"), verb, path, seconds, path, *arguments, **options
            )
        call = getattr(self._plain, verb)
        return self._in_thread(lambda: call(path, *arguments, **options), verb, path, seconds)

    def _call_s3(self, verb: str, path: str, size: int = 0, **options: Any) -> Any:
        seconds = self.timeout + size / SLOWEST
        return self._await(self._plain._call_s3, verb, path, seconds, verb, **options)

    def _await(
        self, call: Callable[..., Any], verb: str, path: str, seconds: float, *arguments: Any, **options: Any
    ) -> Any:
        try:
            return sync(self._plain.loop, call, *arguments, timeout=seconds, **options)
        except FSTimeoutError:
            raise self._late(verb, path, seconds) from None

    def _in_thread(self, call: Callable[[], Any], verb: str, path: str, seconds: float) -> Any:
        result: Future[Any] = Future()

        def work() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name=f"storage-{verb}", daemon=True).start()
        if not wait_for([result], seconds).done:
            raise self._late(verb, path, seconds)
        return result.result()

    def _late(self, verb: str, path: str, seconds: float) -> TimeoutError:
        return TimeoutError(f"{self.unstrip_protocol(path)}: {verb} had not ended after {seconds:.0f} s")


def _client(timeout: float) -> dict[str, Any]:
    """What botocore is told: a dead connection is given up before the call is, and no try is hidden from the caller."""
    return {
        "connect_timeout": min(10.0, timeout),
        "read_timeout": timeout,
        "retries": {"total_max_attempts": 1},
    }


def _parts(buffers: Buffers) -> Iterator[bytes]:
    """The bytes of all buffers in parts of PART_BYTES, the last one smaller."""
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
