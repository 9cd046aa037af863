"""The run directory: the one place where a run is written down, on any fsspec URI.

    job.yaml  plan.json  metrics.jsonl  events.jsonl  status.json  summary.json  report.html  checkpoints/  export/

Small documents are replaced whole and atomically. Rows are appended: on a local file system to one file,
on an object store to numbered parts, since objects cannot grow. A row torn by a crash, or altered, is dropped on
reading.
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

from orchestrator.errors import InputError, Unreachable
from orchestrator.rowline import Row
from orchestrator.rowlog import RowLog
from orchestrator.rowtape import FileTape, PartTape
from orchestrator.storage.backends import is_local, local_path
from orchestrator.storage.remote import RemoteFileSystem
from orchestrator.storage.retry import Retry, transient

P = ParamSpec("P")
T = TypeVar("T")

ORIGIN = "origin.json"
"""In a run that a search began with another run's commit: {run, step, config} of that one."""
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
        self._logs: dict[str, RowLog] = {}

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
            kind = Unreachable if transient(error) else InputError
            raise kind(f"cannot be read ({reason})", self.at(name), "check address and credentials") from None

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
        if self.local:
            os.unlink(self._path(name))
        elif self.exists(name):
            self._call(self.fs.rm_file, self._path(name))
        else:
            self.log(name).remove()

    def log(self, name: str) -> RowLog:
        """The rows of `name`."""
        if name not in self._logs:
            path = self._path(name)
            self._logs[name] = RowLog(
                FileTape(path) if self.local else PartTape(self.fs, path, self._call), name
            )
        return self._logs[name]

    def rows(self, name: str) -> list[Row]:
        """All rows of `name` at once, oldest first; for files that are not long."""
        return list(self.log(name).rows())

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Add rows; see `RowLog.append`."""
        self.log(name).append(rows)

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
