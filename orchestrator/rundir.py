"""The run directory: the one place where a run is written down, on any fsspec URI.

    job.yaml  plan.json  metrics.jsonl  events.jsonl  status.json  summary.json  report.html  checkpoints/  export/

Small documents are replaced whole and atomically. Rows are appended: on a local file system to one file,
on an object store to numbered parts, since objects cannot grow. A row torn by a crash is dropped on reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from fsspec.implementations.local import LocalFileSystem

from orchestrator.errors import InputError
from orchestrator.storage.backends import is_local, local_path
from orchestrator.storage.objects import publish_object
from orchestrator.storage.remote import RemoteFileSystem
from orchestrator.storage.retry import Retry

Row = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

ALIVE = 15.0
"""Seconds since its last status after which a controller on another machine is taken for dead."""
REMOTE_TIMEOUT = 15.0
"""Seconds that a small call to a remote store may take."""
RETRY = Retry(attempts=5, first=0.1, cap=3.0, deadline=30.0)
"""Bounds of every call to a remote store: rows, which can wait, are tried again later."""
LOCK_TIMEOUT = 20.0
"""Seconds for the processes of a killed command to be gone."""


class RunDir:
    """Reads and writes the documents and rows of one run. Raises InputError if the place cannot be used."""

    def __init__(self, uri: str) -> None:
        self.local = is_local(uri)
        self.fs: Any
        try:
            self.fs = LocalFileSystem() if self.local else RemoteFileSystem(uri, REMOTE_TIMEOUT)
        except (ValueError, ImportError) as error:
            mend = "use a path or an fsspec URI such as s3://"
            raise InputError(f"the run directory cannot be opened ({error})", uri, mend) from None
        self.path: str = local_path(uri) if self.local else self.fs.root
        self.uri = self.path if self.local else uri.rstrip("/")
        self._next: dict[str, int] = {}

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path.rstrip("/"))

    def at(self, name: str) -> str:
        """The URI of something in this directory."""
        return posixpath.join(self.uri, name)

    def create(self) -> None:
        """Make the directory and prove that it can be written. Raises InputError."""
        try:
            self._call(self.fs.makedirs, self.path, exist_ok=True)
            probe = self._path(f".probe-{os.getpid()}")
            self._call(self.fs.pipe_file, probe, b"")
            self._call(self.fs.rm_file, probe)
        except Exception as error:  # every fsspec backend raises its own kind
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InputError(
                f"the run directory cannot be written ({reason})", self.uri, "give another --run-dir"
            ) from None

    def exists(self, name: str) -> bool:
        """Whether a document of that name is there."""
        return bool(self._call(self.fs.isfile, self._path(name)))

    def read_text(self, name: str) -> str | None:
        """A document, or None if there is none."""
        try:
            return str(self._call(self.fs.cat_file, self._path(name)).decode())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every fsspec backend raises its own kind
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"cannot be read ({reason})", self.at(name), "check address and credentials"
            ) from None

    def write_text(self, name: str, text: str) -> None:
        """Replace a document whole: a reader sees the old one or the new one."""
        path = self._path(name)
        if not self.local:
            self._call(self.fs.pipe_file, path, text.encode())
            return
        draft = f"{path}.{os.getpid()}.tmp"
        try:
            with open(draft, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise

    def read_json(self, name: str) -> Any:
        """A JSON document, or None if there is none."""
        text = self.read_text(name)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            raise InputError("is damaged", self.at(name), "remove it") from None

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON document whole."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Remove a document or rows. Raises OSError."""
        for path in self._parts(name) if not self.local else [self._path(name)]:
            self._call(self.fs.rm_file, path)

    def rows(self, name: str) -> list[Row]:
        """All rows of `name`, oldest first."""
        rows = []
        for part in self._parts(name):
            for line in self._call(self.fs.cat_file, part).decode(errors="replace").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue
        return rows

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Add rows. They are on disk, or in the store, when this returns; if it raises, none of them is on a disk."""
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if data and not self.local:
            self._add_part(name, data)
        elif data:
            self._extend(name, data)

    def replace_rows(self, name: str, rows: Iterable[Row]) -> None:
        """Exchange all rows for these."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if self.local:
            self.write_text(name, text)
            return
        old = self._parts(name)
        self._next[name] = _number(old[-1]) + 1 if old else 0
        # The new part goes first; a crash before the removals leaves duplicates, which readers settle by step.
        self._add_part(name, text.encode())
        for part in old:
            self._call(self.fs.rm_file, part)

    def _extend(self, name: str, data: bytes) -> None:
        with open(self._path(name), "ab+", buffering=0) as file:
            size = file.tell()
            if size:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    data = b"\n" + data  # a crash tore the last row: leave it alone on its line
            view = memoryview(data)
            try:
                while view:
                    view = view[file.write(view) or 0 :]
                os.fsync(file.fileno())
            except OSError:  # a full disk takes a part; none of it may stay, since all will be written again
                file.truncate(size)
                raise

    def _add_part(self, name: str, data: bytes) -> None:
        """Write the next part. There is one writer, so its number is known from the last one, without a listing."""
        if name not in self._next:
            parts = self._parts(name)
            self._next[name] = _number(parts[-1]) + 1 if parts else 0
        while True:
            path = f"{self._path(name)}/part-{self._next[name]:08d}"
            try:
                self._call(publish_object, self.fs, path, data)
            except FileExistsError:
                # Ours, if the answer to an earlier try was lost; what has come since then is still to be written.
                standing = self._call(self.fs.cat_file, path)
                data = data.removeprefix(standing)
                if data:
                    self._next[name] += 1
                    continue
            self._next[name] += 1
            return

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only controller of this run on this machine. The lock ends with the process, however that ends.

        Raises InputError if another holds it for longer than a dying one could.
        """
        if not self.local:
            self._wait_for_silence()
            yield
            return
        with open(self._path(".lock"), "w") as file:
            deadline = time.monotonic() + LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        mend = "attach to it with --address, or stop it"
                        raise InputError(
                            "another controller is at work on this run", self.uri, mend
                        ) from None
                    time.sleep(0.1)
            yield

    def _wait_for_silence(self) -> None:
        """On an object store, which has no locks: nobody else must be writing status.json."""
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            status = self.read_json("status.json") or {}
            ended = status.get("phase") in (None, "done", "failed", "stopped")
            if ended or time.time() - status.get("time", 0.0) > ALIVE:
                return
            if time.monotonic() > deadline:
                mend = "attach to it with --address, or stop it"
                raise InputError("another controller is at work on this run", self.uri, mend)
            time.sleep(0.5)

    def _path(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def _call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call to storage, tried again within bounds if it is remote."""
        return call(*args, **kwargs) if self.local else RETRY(call, *args, **kwargs)

    def _parts(self, name: str) -> list[str]:
        path = self._path(name)
        if self.local:
            return [path] if os.path.exists(path) else []
        try:
            return sorted(p for p in self._call(self.fs.ls, path, detail=False) if "/part-" in p)
        except FileNotFoundError:
            return []


def _number(part: str) -> int:
    return int(part.rsplit("-", 1)[1])
