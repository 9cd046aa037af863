"""A page of all runs in a folder: what each is doing, with a search by words."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED
from orchestrator.config.redact import redact, redact_message
from orchestrator.observe.formatting import count, duration
from orchestrator.observe.last_status import ControllerState, controller_state, last_status, state_of
from orchestrator.observe.pages.page import render
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.file_system import open_file_system
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import RunDir

TIMEOUT = 15.0
"""Seconds for a small call to a remote store."""
DEPTH = 2
"""Depth at which runs are found below the served folder, because chains and searches contain runs."""
UNREADABLE = "unreadable"
"""The state of a run whose files cannot be read or are invalid."""
READ = ("job.yaml", "metrics.jsonl", "status.json", "summary.json")
"""The files that a row is read from."""
TOLD = ("mtime", "ino", "ETag", "etag", "LastModified", "updated", "last_modified")
"""What listings of file systems and of stores tell of a file that another file under its name does not share."""
MAY_CHANGE = ("size", "mode", "uid", "gid", "created")
"""What else they tell that changes with a file or with who may read it; `created` is the ctime of a local file."""
NO_RUNS = frozenset({"_data", COMMITS, "logs", "export", "profiles", "excerpt", "__pycache__"})


class Runs:
    """The runs in a folder, by their paths in it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._fs, self._path = open_file_system(folder, TIMEOUT)

    def find(self) -> dict[str, RunDir]:
        """Find every existing run, by name. Raises OSError and errors of the store's client."""
        runs: dict[str, RunDir] = {}
        self._look("", runs, DEPTH)
        return dict(sorted(runs.items()))

    def _look(self, inside: str, runs: dict[str, RunDir], depth: int) -> None:
        try:
            entries: list[Any] = self._fs.ls(posixpath.join(self._path, inside), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        except PermissionError:
            if not inside:
                raise
            runs[inside] = RunDir(posixpath.join(self.folder, inside))  # reported in its row
            return
        names = {posixpath.basename(each["name"].rstrip("/")): each["type"] for each in entries}
        if inside and "job.yaml" in names and ("events.jsonl" in names or "status.json" in names):
            runs[inside] = RunDir(posixpath.join(self.folder, inside))
        elif depth:
            for name, kind in names.items():
                if kind == "directory" and name not in NO_RUNS and not name.startswith("."):
                    self._look(posixpath.join(inside, name), runs, depth - 1)


Seen = dict[str, tuple[Any, dict[str, Any]]]
"""The rows of runs that have ended, each with the state of the files that it was read from, by name."""


def listed(
    runs: Mapping[str, RunDir | InputError], words: str = "", cache: Seen | None = None
) -> list[dict[str, Any]]:
    """Return the page's rows for the runs whose name, state or job file contains all the words, training runs first.

    For an unusable folder, the row gives the reason.

    Args:
        runs: the runs by name.
        words: what to search for.
        cache: kept by the caller between calls. The files of a run that has ended are read again only if they have
            changed.
    """
    wanted = words.lower().split()
    all_rows = [_row_if_changed(name, run, cache) for name, run in runs.items()]
    kept = [row for row in all_rows if not wanted or _has_all(wanted, _text(row, runs[row["name"]]))]
    return sorted(kept, key=lambda row: (row["ended"], -row["time"]))


def _has_all(words: Sequence[str], text: str) -> bool:
    return all(word in text for word in words)


def _row_if_changed(name: str, run: RunDir | InputError, cache: Seen | None) -> dict[str, Any]:
    if cache is None or isinstance(run, InputError):
        return _row_or_why(name, run)
    state = _state_of_files(run)
    before, row = cache.get(name, (None, {}))
    if before is not None and before == state:
        return row
    row = _row_or_why(name, run)
    if row["ended"] and row["state"] != UNREADABLE and _is_job_readable(run):
        cache[name] = (state, row)
    return row


def _is_job_readable(run: RunDir) -> bool:
    try:
        run.read_text("job.yaml")
    except InputError:  # who may read it can change without a change of the file
        return False
    return True


def _state_of_files(run: RunDir) -> Any:
    """Return what the folder's listing tells of the files that a row is read from; None if it does not tell enough.

    A document is replaced whole, by another file.
    """
    try:
        entries = run.fs.ls(run.path, detail=True)
    except Exception:  # fsspec backends raise various errors; the row says why
        return None
    entry_of = {posixpath.basename(each["name"]): each for each in entries}
    files = {name: entry_of[name] for name in READ if name in entry_of}
    if not files or not all(any(entry.get(key) for key in TOLD) for entry in files.values()):
        return None
    return run.path, {name: [entry.get(key) for key in (*TOLD, *MAY_CHANGE)] for name, entry in files.items()}


def _row_or_why(name: str, run: RunDir | InputError) -> dict[str, Any]:
    """Return a run's row; for an unreadable run, the reason. Other runs are not affected."""
    try:
        if isinstance(run, InputError):
            raise run
        return _row(name, run)
    except Exception as error:  # others may write these files, so they may hold anything
        says = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        says = redact_message(" ".join(says.split()))
        row = {
            "name": name,
            "state": UNREADABLE,
            "phase": UNREADABLE,
            "silent": "",
            "ended": True,
            "time": 0.0,
        }
        return row | {"says": says} | dict.fromkeys(("step", "loss", "speed", "left", "layout"), "")


def _row(name: str, run: RunDir) -> dict[str, Any]:
    """Return the row of a run. Raises InputError, and errors from values of wrong types."""
    unread = ""
    try:
        run.read_text("job.yaml")
    except (
        InputError
    ) as error:  # it belongs to another user, who alone may read it; the rest may be readable for all
        unread = str(error)
    status = last_status(run)
    summary = run.read_json_or_empty("summary.json")
    if unread and not status:
        raise InputError(unread)
    if not status and run.read_text("status.json") is None and (event := run.log(EVENTS).last()):
        # The run has begun, and writes its first status in a moment.
        status = {"phase": event.get("phase"), "note": event.get("reason")}
    phase = str(status.get("phase") or "unknown")
    at = float(status.get("time") or 0.0)
    ended = phase in ENDED
    is_silent = controller_state(status) is ControllerState.SILENT
    loss = status.get("loss") if status.get("loss") is not None else summary.get("final_loss")
    return {
        "name": name,
        "state": state_of(status),
        "phase": phase,
        "silent": str(status["controller"]) if is_silent else "",
        "ended": ended,
        "time": at,
        "step": f"{status.get('step', 0)} / {status.get('steps', '?')}",
        "loss": "" if loss is None else f"{loss:.4f}",
        "speed": "" if status.get("tokens_per_second") is None else count(status["tokens_per_second"]),
        "left": duration(status["eta_seconds"]) if status.get("eta_seconds") else "",
        "layout": status.get("layout") or "",
        "says": redact(str(status.get("note") or status.get("why_slow") or unread)),
    }


def _text(row: Mapping[str, Any], run: RunDir | InputError) -> str:
    """Return what the words of a search are looked for in. A job file without its secrets takes longer than a row."""
    job = ""
    if not isinstance(run, InputError):
        with contextlib.suppress(Exception):  # the row says what cannot be read
            job = redact(run.read_text("job.yaml") or "")
    return " ".join(
        map(str, (*(row[key] for key in ("name", "phase", "state", "layout", "says")), job))
    ).lower()


def page(folder: str, rows: Sequence[Mapping[str, Any]], words: str, total: int) -> str:
    """Return the page of these runs, found by `words` among `total` runs."""
    content = {"folder": redact(folder), "rows": rows, "words": words, "total": total}
    return render("runs", content)
