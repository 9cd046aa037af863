"""The run directory: the one place where a run is written down, on any fsspec URI.

    job.yaml  plan.json  metrics.jsonl  events.jsonl  status.json  summary.json  report.html  checkpoints/  export/

Small documents are replaced whole and atomically. Rows are appended: on a local file system to one file,
on an object store to numbered parts, since objects cannot grow. A row torn by a crash, or altered, is dropped on
reading.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from orchestrator.job.errors import InputError, Unreachable
from orchestrator.storage.atomic import replace_file
from orchestrator.storage.file_names import COMMITS, FENCE, MANIFEST
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.lease import LOCK, Lease, lock_file
from orchestrator.storage.retry import Retry, transient
from orchestrator.storage.row_files import NumberedRowFiles, SingleRowFile
from orchestrator.storage.row_line import TRIALS, Row
from orchestrator.storage.row_log import RowLog
from orchestrator.storage.uri import check_uri, is_local

P = ParamSpec("P")
T = TypeVar("T")

ORIGIN = "origin.json"
"""In a run that a search began with another run's commit: {run, step, config} of that one."""
REMOTE_TIMEOUT = 15.0
"""Seconds that a small call to a remote store may take."""
RETRY = Retry(attempts=5, first=0.1, cap=3.0, deadline=30.0)
"""Bounds of every call to a remote store: rows, which can wait, are tried again later."""


FILES = (
    "job.yaml",
    "plan.json",
    "metrics.jsonl",
    "events.jsonl",
    "status.json",
    "summary.json",
    "report.html",
)
OURS = frozenset({LOCK, COMMITS, "events.jsonl", TRIALS, "origin.json", "failed.json"})
"""What shows that a directory is of a run or of a search. A job.yaml alone may be a user's own."""
PROBE = ".probe-"


class RunDir:
    """Reads and writes the documents and rows of one run. Raises InputError if the place cannot be used."""

    def __init__(self, uri: str) -> None:
        check_uri(uri)
        self.local = is_local(uri)
        self.path: str
        self.fs, self.path = open_file_system(uri, REMOTE_TIMEOUT)
        self.uri = self.path if self.local else uri.rstrip("/")
        self._logs: dict[str, RowLog] = {}
        self._lease: Lease | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path.rstrip("/"))

    def at(self, name: str) -> str:
        """The URI of something in this directory."""
        return posixpath.join(self.uri, name)

    def create(self) -> tuple[str, ...]:
        """Make the directory and prove that it can be written; the local folders made for it, outermost first.

        Raises InputError if it cannot be, or if it holds something and nothing of a run: what is written here may be
        removed again.
        """
        self._refuse_foreign()
        made = tuple(_missing(self.path)) if self.local else ()
        try:
            self._call(self.fs.makedirs, self.path, exist_ok=True)
            probe = self._path(f"{PROBE}{os.getpid()}")
            self._call(self.fs.pipe_file, probe, b"")
            self._call(self.fs.rm_file, probe)
        except Exception as error:  # every fsspec backend raises its own kind
            remove_empty(made)
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InputError(
                f"the run directory cannot be written ({reason})", self.uri, "give another --run-dir"
            ) from None
        return made

    def _refuse_foreign(self) -> None:
        names = {name for name in self._names() if not name.startswith(PROBE)}
        if names and not names & OURS:
            what = f"holds something that is of no run ({min(names)})"
            raise InputError(what, self.uri, "give another --run-dir, one that is new or empty")
        manifests = glob.glob(f"{COMMITS}/*/{MANIFEST}", root_dir=self.path) if self.local else []
        for name in (*sorted(names & {LOCK, *FILES}), f"{COMMITS}/{FENCE}", *sorted(manifests)):
            if self.local and os.path.isdir(self._path(name)):
                raise InputError("is a folder and should be a file", self.at(name), "move it away")
        if self.local and COMMITS in names and not os.path.isdir(self._path(COMMITS)):
            raise InputError(
                "is a file and should be the folder of commits", self.at(COMMITS), "move it away"
            )

    def holds_a_run(self) -> bool:
        """Whether a run has been here. Raises InputError if a search has, or the place cannot be read."""
        names = self._names()
        if TRIALS in names:
            hint = "name one of its trials, such as its folder 0000; `orchestrator tune --report` is for the whole"
            raise InputError("is the folder of a search", self.uri, hint)
        return bool(names & OURS)

    def _names(self) -> set[str]:
        """What is in the directory, empty if it is not there."""
        try:
            found = self._call(self.fs.ls, self.path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except Exception as error:  # every fsspec backend raises its own kind
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            hint = "check the place, its permissions and credentials"
            raise Unreachable(f"the run directory cannot be read ({reason})", self.uri, hint) from None
        return {
            path.rstrip("/").rsplit("/", 1)[-1] for path in found if path.rstrip("/") != self.path.rstrip("/")
        }

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
        self.require_lock()
        path = self._path(name)
        if self.local:
            replace_file(path, [text.encode()])
        else:
            self._call(self.fs.pipe_file, path, text.encode())

    def read_json(self, name: str) -> Any:
        """A JSON document, or None if there is none."""
        text = self.read_text(name)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            raise InputError("is damaged", self.at(name), "remove it") from None

    def told(self, name: str) -> Row:
        """A JSON object that nothing is decided by: {} if there is none or it is damaged, for the next replaces it."""
        try:
            found = self.read_json(name)
        except InputError:
            return {}
        return found if isinstance(found, dict) else {}

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
                SingleRowFile(path) if self.local else NumberedRowFiles(self.fs, path, self._as_holder), name
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
        """Be the only controller of this run. See `lock_file` and `Lease`.

        Raises InputError if another is at work. On an object store, every writing raises LeaseLost once another has
        taken over.
        """
        if self.local:
            with lock_file(self.path):
                yield
            return
        with Lease(self.fs, self.path, self.uri, self._call) as self._lease:
            try:
                yield
            finally:
                self._lease = None

    def require_lock(self) -> None:
        """Raise LeaseLost if this was the only controller of the run and is so no more."""
        if self._lease is not None:
            self._lease.require()

    def _path(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def _call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call to storage, tried again within bounds if it is remote."""
        return call(*args, **kwargs) if self.local else RETRY(call, *args, **kwargs)

    def _as_holder(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same, by who has not been overtaken."""
        self.require_lock()
        return self._call(call, *args, **kwargs)


def remove_empty(folders: Iterable[str]) -> None:
    """Remove folders that `RunDir.create` made, outermost first, as far as nothing is in them."""
    for folder in reversed(tuple(folders)):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _missing(path: str) -> list[str]:
    """The folders from the outermost that is not there down to `path`."""
    missing: list[str] = []
    while path and not os.path.lexists(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing
