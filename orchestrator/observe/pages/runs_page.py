"""A page of all runs in a folder: what each is doing, with a search by words."""

from __future__ import annotations

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
from orchestrator.storage.run_directory import RunDir

TIMEOUT = 15.0
"""Seconds for a small call to a remote store."""
DEPTH = 2
"""Depth at which runs are found below the served folder, because chains and searches contain runs."""
UNREADABLE = "unreadable"
"""The state of a run whose files cannot be read or are invalid."""
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

    def _look(self, inside: str, found: dict[str, RunDir], depth: int) -> None:
        try:
            entries: list[Any] = self._fs.ls(posixpath.join(self._path, inside), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        except PermissionError:
            if not inside:
                raise
            found[inside] = RunDir(posixpath.join(self.folder, inside))  # reported in its row
            return
        names = {posixpath.basename(each["name"].rstrip("/")): each["type"] for each in entries}
        if inside and "job.yaml" in names and ("events.jsonl" in names or "status.json" in names):
            found[inside] = RunDir(posixpath.join(self.folder, inside))
        elif depth:
            for name, kind in names.items():
                if kind == "directory" and name not in NO_RUNS and not name.startswith("."):
                    self._look(posixpath.join(inside, name), found, depth - 1)


def listed(runs: Mapping[str, RunDir | InputError], words: str = "") -> list[dict[str, Any]]:
    """Return the page's rows for the runs whose name, state or job file contains all the words, training runs first.

    For an unusable folder, the row gives the reason.
    """
    wanted = words.lower().split()
    all_rows = [_row_or_why(name, run) for name, run in runs.items()]
    kept = [row for row in all_rows if all(word in row["text"] for word in wanted)]
    return sorted(kept, key=lambda row: (row["ended"], -row["time"]))


def _row_or_why(name: str, run: RunDir | InputError) -> dict[str, Any]:
    """Return a run's row; for an unreadable run, the reason. Other runs are not affected."""
    try:
        if isinstance(run, InputError):
            raise run
        return _row(name, run)
    except Exception as error:  # others may write these files, so they may hold anything
        says = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        says = redact_message(" ".join(says.split()))
        row = {"name": name, "state": UNREADABLE, "silent": "", "ended": True, "time": 0.0, "says": says}
        row |= dict.fromkeys(("step", "loss", "speed", "left", "layout"), "")
        return row | {"text": f"{name} {UNREADABLE} {says}".lower()}


def _row(name: str, run: RunDir) -> dict[str, Any]:
    """Return the row of a run. Raises InputError, and errors from values of wrong types."""
    try:
        job = run.read_text("job.yaml") or ""
        unread = ""
    except (
        InputError
    ) as error:  # belongs to another user, who alone may read it; the rest may be readable for all
        job = ""
        unread = str(error)
    status = last_status(run)
    summary = run.read_json_or_empty("summary.json")
    if unread and not status:
        raise InputError(unread)
    phase = str(status.get("phase") or "unknown")
    at = float(status.get("time") or 0.0)
    ended = phase in ENDED
    is_silent = controller_state(status) is ControllerState.SILENT
    loss = status.get("loss") if status.get("loss") is not None else summary.get("final_loss")
    shown = {
        "name": name,
        "state": state_of(status),
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
    text = " ".join(map(str, (name, phase, shown["state"], shown["layout"], shown["says"], redact(job))))
    return shown | {"text": text.lower()}


def page(folder: str, rows: Sequence[Mapping[str, Any]], words: str, total: int) -> str:
    """Return the page of these runs, found by `words` among `total` runs."""
    content = {"folder": redact(folder), "rows": rows, "words": words, "total": total}
    return render("runs", content)
