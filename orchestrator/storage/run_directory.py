"""The run directory: all files of a run, on a local path or any fsspec URI.

job.yaml  plan.json  metrics.jsonl  events.jsonl  status.json  summary.json  report.html  checkpoints/  export/

Documents are replaced atomically. Rows are appended: to one file on a local file system, to numbered parts on an
object store, whose objects cannot grow. Readers drop rows that a crash tore or that were altered.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import posixpath
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.storage.atomic import remove_drafts, replace_file
from orchestrator.storage.file_names import ATTEMPT_FILE, CHAIN, COMMITS, MANIFEST
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.lease import LOCK, FolderLock, Lease, lock_file
from orchestrator.storage.retry import Retry, transient
from orchestrator.storage.row_files import NumberedRowFiles, SingleRowFile
from orchestrator.storage.row_line import TRIALS, Row
from orchestrator.storage.row_log import RowLog
from orchestrator.storage.uri import check_uri, is_local

P = ParamSpec("P")
T = TypeVar("T")

ORIGIN = "origin.json"
"""The commit of another run that a run began from, if any; `step` is that commit's. A run that continues another
(`resolve.continued`) has {run, step, position, receipt}, where run is the other's directory. A trial that a search
started from another trial's commit (`tune.lineage`) has {donor, asked, step, config}.
"""
KEPT = {
    ORIGIN: "put it back; a run with train.continue_from writes it again from its commits: run the job again"
}
"""Hints for damaged documents that the user must not simply remove."""
PRECISION = "precision.json"
"""Why a run has its precision, if the job left it open."""
SMOKE = "smoke.json"
"""Marks the directory of a trial run (`run --smoke`). The job's next trial starts it from scratch."""
REMOTE_TIMEOUT = 15.0
"""Seconds for a small call to a remote store."""
RETRY = Retry(attempts=5, first=0.1, cap=3.0, deadline=30.0)
"""Retries of every call to a remote store. Rows that cannot be written in that time are written later."""


REPORT = "report.html"
"""The only document that processes besides the controller write too, with `orchestrator report`."""
FILES = (
    "job.yaml",
    "plan.json",
    "metrics.jsonl",
    "events.jsonl",
    "nodes.jsonl",
    "status.json",
    "summary.json",
    REPORT,
)
OURS = frozenset({LOCK, COMMITS, "events.jsonl", TRIALS, CHAIN, ORIGIN, PRECISION, SMOKE, "failed.json"})
"""Names that show that a directory belongs to a run, a search or a chain. A job.yaml alone may be the user's own."""
PROBE = ".probe-"


class RunDir:
    """Reads and writes the documents and rows of one run."""

    def __init__(self, uri: str) -> None:
        """Reads and writes nothing yet. Raises InputError if the URI cannot be used, see `check_uri`."""
        check_uri(uri)
        self.local = is_local(uri)
        self.path: str
        self.fs, self.path = open_file_system(uri, REMOTE_TIMEOUT)
        self.uri = self.path if self.local else uri.rstrip("/")
        self._logs: dict[str, RowLog] = {}
        self._lock: Lease | FolderLock | None = None

    @property
    def name(self) -> str:
        """The last component of the path."""
        return posixpath.basename(self.path.rstrip("/"))

    def at(self, name: str) -> str:
        """Return the path or URI of the entry `name`."""
        return posixpath.join(self.uri, name)

    @property
    def commits(self) -> str:
        """The path or URI of the folder of commits."""
        return self.at(COMMITS)

    def create(self) -> tuple[str, ...]:
        """Create the directory and check that it can be written. Return the local folders created for it, outermost
        first.

        Raises InputError if it cannot be written, or if it has entries but none of a run. A run may remove its files
        later, so it must not share a directory with other files.
        """
        self.check_ours()
        made = tuple(_missing(self.path)) if self.local else ()
        try:
            self._call(self.fs.makedirs, self.path, exist_ok=True)
            probe = self._path(f"{PROBE}{os.getpid()}")
            self._call(self.fs.pipe_file, probe, b"")
            self._call(self.fs.rm_file, probe)
        except Exception as error:  # fsspec backends raise various errors
            remove_empty(made)
            if self.local and (link := dangling(self.path)):
                problem = f"{link} is a link to {os.readlink(link)}, which does not exist"
                raise InputError(problem, self.uri, "make that folder, or remove the link") from None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InputError(
                f"the run directory cannot be written ({reason})", self.uri, "give another --run-dir"
            ) from None
        return made

    def is_gone(self) -> bool:
        """Return whether the directory is missing. On an object store, always False: it has no directories."""
        return self.local and not os.path.isdir(self.path)

    def check_ours(self) -> None:
        """Raise InputError if the directory has entries but none of a run."""
        names = {name for name in self._names() if not name.startswith(PROBE)}
        if names and not names & OURS:
            problem = f"is not a run directory: it holds {min(names)}"
            raise InputError(problem, self.uri, "give another --run-dir, one that is new or empty")
        manifests = glob.glob(f"{COMMITS}/*/{MANIFEST}", root_dir=self.path) if self.local else []
        for name in (*sorted(names & {LOCK, *FILES}), f"{COMMITS}/{ATTEMPT_FILE}", *sorted(manifests)):
            if self.local and os.path.isdir(self._path(name)):
                raise InputError("is a folder and should be a file", self.at(name), "move it away")
        if self.local and COMMITS in names and not os.path.isdir(self._path(COMMITS)):
            raise InputError(
                "is a file and should be the folder of commits", self.at(COMMITS), "move it away"
            )

    def holds_a_run(self, ignored: str = "") -> bool:
        """Return whether this is a run's directory, ignoring the entry `ignored`.

        Raises InputError if it is a search's, or if it cannot be read.
        """
        names = self._names()
        if TRIALS in names:
            hint = "name one of its trials, such as its folder 0000; `orchestrator tune --report` is for the search"
            raise InputError("is the folder of a search", self.uri, hint)
        return bool((names - {ignored}) & OURS)

    def _names(self) -> set[str]:
        """Return the names of all entries; empty if the directory does not exist."""
        try:
            paths = self._call(self.fs.ls, self.path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except Exception as error:  # fsspec backends raise various errors
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            hint = "check the path, its permissions and credentials"
            raise Unreachable(f"the run directory cannot be read ({reason})", self.uri, hint) from None
        return {
            path.rstrip("/").rsplit("/", 1)[-1] for path in paths if path.rstrip("/") != self.path.rstrip("/")
        }

    def exists(self, name: str) -> bool:
        """Return whether a document of that name exists."""
        return bool(self._call(self.fs.isfile, self._path(name)))

    def read_text(self, name: str) -> str | None:
        """Return the text of a document; None if missing. Raises InputError, or Unreachable if the store fails."""
        try:
            return str(self._call(self.fs.cat_file, self._path(name)).decode())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # fsspec backends raise various errors
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            kind = Unreachable if transient(error) else InputError
            hint = "check its permissions" if self.local else "check address and credentials"
            raise kind(f"cannot be read ({reason})", self.at(name), hint) from None

    def write_text(self, name: str, text: str, private: bool = False) -> None:
        """Create or replace a document atomically. A `private` one is readable by the user alone, on file systems
        with users.

        Raises LeaseLost if another controller has taken over the run, see `lock`.
        """
        self.require_lock()
        path = self._path(name)
        if self.local:
            replace_file(path, [text.encode()], 0o600 if private else 0o666)
        else:
            self._call(self.fs.pipe_file, path, text.encode())

    def read_json(self, name: str) -> Any:
        """Return a JSON document; None if it is missing. Raises InputError if it is damaged."""
        text = self.read_text(name)
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            raise InputError("is damaged", self.at(name), KEPT.get(name, "remove it")) from None

    def read_json_or_empty(self, name: str) -> Row:
        """Return a JSON object for display only: {} if it is missing or damaged."""
        try:
            value = self.read_json(name)
        except InputError:
            return {}
        return value if isinstance(value, dict) else {}

    def write_json(self, name: str, value: Any) -> None:
        """Create or replace a JSON document; see `write_text`."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Remove a document or a row file. Raises OSError."""
        if self.local:
            os.unlink(self._path(name))
        elif self.exists(name):
            self._call(self.fs.rm_file, self._path(name))
        else:
            self.log(name).remove()

    def remove_all(self) -> None:
        """Remove the directory, whose lock is held, with all its content. Raises OSError."""
        if self.local:
            shutil.rmtree(self.path)
            return
        for path in self._call(self.fs.find, self.path):
            if posixpath.basename(posixpath.dirname(path)) != LOCK:  # keep the lock
                self._call(self.fs.rm_file, path)
        self._logs.clear()

    def log(self, name: str) -> RowLog:
        """Return the row file `name`."""
        if name not in self._logs:
            path = self._path(name)
            self._logs[name] = RowLog(
                SingleRowFile(path, self.require_lock)
                if self.local
                else NumberedRowFiles(self.fs, path, self._call_with_lease),
                name,
            )
        return self._logs[name]

    def rows(self, name: str) -> list[Row]:
        """Return all rows of `name`, oldest first. For short files only."""
        return list(self.log(name).rows())

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Append rows; see `RowLog.append`. Raises LeaseLost as `write_text` does."""
        self.log(name).append(rows)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Become the only controller of this run; see `lock_file` and `Lease`. Removes drafts that a killed
        controller left.

        Raises InputError if another controller holds the run. Afterwards, every write raises LeaseLost if another
        controller takes over on an object store, or if a local directory disappears.
        """
        held = lock_file(self.path) if self.local else Lease(self.fs, self.path, self.uri, self._call)
        with held as self._lock:
            if self.local:
                remove_drafts(self.path, lambda name: name != REPORT)
                remove_drafts(posixpath.join(self.path, COMMITS), lambda name: name == ATTEMPT_FILE)
            else:
                for log in self._logs.values():
                    log.reopen()
            try:
                yield
            finally:
                self._lock = None

    def require_lock(self) -> None:
        """Raise LeaseLost if this process held the run's lock and has lost it."""
        if self._lock is not None:
            self._lock.require()

    def _path(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def _call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the file system, with retries if it is remote."""
        return call(*args, **kwargs) if self.local else RETRY(call, *args, **kwargs)

    def _call_with_lease(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`_call`, after a check that the lease is not lost."""
        self.require_lock()
        return self._call(call, *args, **kwargs)


def runs_in(folder: str) -> list[RunDir]:
    """Return the entries of a folder that may be run directories, by name. Raises InputError if it cannot be read."""
    above = RunDir(folder)
    return [RunDir(above.at(name)) for name in sorted(above._names()) if not name.startswith(("_", "."))]


def remove_empty(folders: Iterable[str]) -> None:
    """Remove the folders that `RunDir.create` created (outermost first), as far as they are empty."""
    for folder in reversed(tuple(folders)):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def dangling(path: str) -> str:
    """Return the broken link on the way to a local path; empty without one."""
    while path and path != os.path.dirname(path):
        if os.path.islink(path) and not os.path.exists(path):
            return path
        path = os.path.dirname(path)
    return ""


def _missing(path: str) -> list[str]:
    """Return the missing folders on the way down to `path`, outermost first."""
    missing: list[str] = []
    while path and not os.path.lexists(path):
        missing.insert(0, path)
        path = os.path.dirname(path)
    return missing
