"""The run directories in a folder: how large each is, what holds it and what refers to it; and how one is removed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.pins import holders, pinned_steps, without_dead_readers
from orchestrator.config.errors import InputError
from orchestrator.controller.events import EventHistory
from orchestrator.observe.last_status import ControllerState, controller_state, last_status, state_of
from orchestrator.observe.pages.runs_page import UNREADABLE, Runs
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.lease import is_locked
from orchestrator.storage.row_line import EVENTS
from orchestrator.storage.run_directory import ORIGIN, RunDir

NOT_AT_WORK = (ControllerState.ENDED, ControllerState.GONE)
OF_A_NAME = r"[\w.-]"
"""A character that may continue the name of a run."""


@dataclass(frozen=True)
class StoredRun:
    """A run directory in a folder.

    Attributes:
        name: its path in the folder.
        run_dir: its path or URI.
        state: as `status` says it.
        step: the last step.
        steps: the steps that the job has, None if unknown.
        bytes: the size of all its files.
        checkpoint_bytes: the size of its checkpoints.
        time: when its status was last written, unix seconds; 0 if unknown.
        held: a line for each pinned checkpoint.
        referred: a line for each run of the folder that refers to it.
        problem: why its files cannot be read; empty for other runs.
    """

    name: str
    run_dir: str
    state: str
    step: int
    steps: int | None
    bytes: int
    checkpoint_bytes: int
    time: float
    held: list[str] = field(default_factory=list)
    referred: list[str] = field(default_factory=list)
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def stored_runs(folder: str) -> list[StoredRun]:
    """Return the runs in a folder and in the chains and searches there, by name."""
    runs = Runs(folder).find()
    texts = {name: _references(run) for name, run in runs.items()}
    return [_stored(name, run, _referring(name, run, texts)) for name, run in runs.items()]


def chosen(runs: Sequence[StoredRun], wanted: Sequence[str]) -> list[StoredRun]:
    """Return the runs with these names or run directories. Raises InputError if one does not exist."""
    result: dict[str, StoredRun] = {}
    for name in wanted:
        uri = RunDir(name).uri if name else ""
        matching = [run for run in runs if name.rstrip("/") == run.name or uri == run.run_dir]
        if not matching:
            names = ", ".join(run.name for run in runs[:20]) or "none"
            raise InputError(
                "there is no such run in this folder", f"--remove {name}", f"choose from: {names}"
            )
        result[matching[0].name] = matching[0]
    return list(result.values())


def check_removable(run_dir: str) -> None:
    """Raise InputError if a controller drives the run, or if something holds one of its checkpoints."""
    run = RunDir(run_dir)
    status = last_status(run)
    is_at_work = status.get("phase") is not None and controller_state(status) not in NOT_AT_WORK
    if is_at_work or (run.local and is_locked(run.path)):
        raise InputError("a controller drives this run", run.uri, "`orchestrator stop` ends it")
    _refuse_pinned(run)


def remove(run_dir: str) -> None:
    """Remove a run directory. Raises InputError as `check_removable`, and if a controller has taken it up since."""
    run = RunDir(run_dir)
    check_removable(run_dir)
    with run.lock():
        _refuse_pinned(run)
        run.remove_all()


def _refuse_pinned(run: RunDir) -> None:
    if lines := _pin_lines(run, is_removing=True):
        raise InputError(f"is not removed: {lines[0]}", run.uri, "remove what holds it first, or let it end")


def _stored(name: str, run: RunDir, referred: list[str]) -> StoredRun:
    sizes = {"all": 0, COMMITS: 0}
    try:
        for path, entry in run.fs.find(run.path, detail=True).items():
            size = int(entry.get("size") or 0)
            sizes["all"] += size
            sizes[COMMITS] += size if f"/{COMMITS}/" in path[len(run.path) :] else 0
        status = last_status(run)
        steps = status.get("steps")
        return StoredRun(
            name=name,
            run_dir=run.uri,
            state=state_of(status),
            step=int(status.get("step") or 0),
            steps=steps if isinstance(steps, int) else None,
            bytes=sizes["all"],
            checkpoint_bytes=sizes[COMMITS],
            time=float(status.get("time") or 0.0),
            held=_pin_lines(run),
            referred=referred,
        )
    except Exception as error:  # others may write these files, so they may hold anything
        problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return StoredRun(
            name=name,
            run_dir=run.uri,
            state=UNREADABLE,
            step=0,
            steps=None,
            bytes=sizes["all"],
            checkpoint_bytes=sizes[COMMITS],
            time=0.0,
            problem=problem,
        )


def _pin_lines(run: RunDir, is_removing: bool = False) -> list[str]:
    """A line for each held checkpoint. Holds of dead readers are removed only if the run is about to be."""
    store = Store(run.commits)
    paths = store.retry(store.backend.list)
    steps = sorted(pinned_steps(without_dead_readers(store, paths) if is_removing else paths))
    return [f"step {step} is held by {' and '.join(holders(store, step)) or 'somebody'}" for step in steps]


def _references(run: RunDir) -> str:
    """All text of a run that may name another run: its job, where it began, and the weights that it began with."""
    try:
        base = EventHistory(run.rows(EVENTS)).base
        return "\n".join(
            [run.read_text("job.yaml") or "", json.dumps(run.read_json(ORIGIN)), json.dumps(base)]
        )
    except Exception:  # an unreadable run is listed as such
        return ""


def _referring(name: str, run: RunDir, texts: Mapping[str, str]) -> list[str]:
    pattern = re.compile(rf"{re.escape(run.uri)}(?!{OF_A_NAME})")
    return [
        f"{other} refers to it" for other, text in texts.items() if other != name and pattern.search(text)
    ]
