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
from collections.abc import Iterable, Iterator
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from orchestrator.errors import InputError

Row = dict[str, Any]

LOCK_TIMEOUT = 20.0
"""Seconds for the processes of a killed command to be gone."""


class RunDir:
    """Reads and writes the documents and rows of one run. Raises InputError if the place cannot be used."""

    def __init__(self, uri: str) -> None:
        try:
            self.fs, self.path = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            mend = "use a path or an fsspec URI such as s3://"
            raise InputError(f"the run directory cannot be opened ({error})", uri, mend) from None
        self.local = isinstance(self.fs, LocalFileSystem)
        self.uri = self.path if self.local else uri.rstrip("/")

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
            self.fs.makedirs(self.path, exist_ok=True)
            probe = self._path(f".probe-{os.getpid()}")
            self.fs.pipe_file(probe, b"")
            self.fs.rm_file(probe)
        except Exception as error:  # every fsspec backend raises its own kind
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InputError(
                f"the run directory cannot be written ({reason})", self.uri, "give another --run-dir"
            ) from None

    def exists(self, name: str) -> bool:
        """Whether a document of that name is there."""
        return bool(self.fs.isfile(self._path(name)))

    def read_text(self, name: str) -> str | None:
        """A document, or None if there is none."""
        try:
            return self.fs.cat_file(self._path(name)).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_text(self, name: str, text: str) -> None:
        """Replace a document whole: a reader sees the old one or the new one."""
        path = self._path(name)
        if not self.local:
            self.fs.pipe_file(path, text.encode())
            return
        draft = f"{path}.{os.getpid()}.tmp"
        with open(draft, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)

    def read_json(self, name: str) -> Any:
        """A JSON document, or None if there is none."""
        text = self.read_text(name)
        return None if text is None else json.loads(text)

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON document whole."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def rows(self, name: str) -> list[Row]:
        """All rows of `name`, oldest first."""
        rows = []
        for part in self._parts(name):
            for line in self.fs.cat_file(part).decode(errors="replace").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue
        return rows

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Add rows. They are on disk, or in the store, when this returns."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not text:
            return
        if not self.local:
            parts = self._parts(name)
            number = int(parts[-1].rsplit("-", 1)[1]) + 1 if parts else 0
            self.fs.pipe_file(f"{self._path(name)}/part-{number:08d}", text.encode())
            return
        with open(self._path(name), "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = "\n" + text  # a crash tore the last row: leave it alone on its line
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def replace_rows(self, name: str, rows: Iterable[Row]) -> None:
        """Exchange all rows for these."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if self.local:
            self.write_text(name, text)
            return
        old = self._parts(name)
        number = int(old[-1].rsplit("-", 1)[1]) + 1 if old else 0
        # The new part goes first; a crash before the removals leaves duplicates, which readers settle by step.
        self.fs.pipe_file(f"{self._path(name)}/part-{number:08d}", text.encode())
        for part in old:
            self.fs.rm_file(part)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only controller of this run on this machine. The lock ends with the process, however that ends.

        Raises InputError if another holds it for longer than a dying one could.
        """
        if not self.local:
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

    def _path(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def _parts(self, name: str) -> list[str]:
        path = self._path(name)
        if self.local:
            return [path] if os.path.exists(path) else []
        self.fs.invalidate_cache(path)
        try:
            return sorted(p for p in self.fs.ls(path, detail=False) if "/part-" in p)
        except FileNotFoundError:
            return []
