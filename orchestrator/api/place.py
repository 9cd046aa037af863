"""Resolve the place of a run."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.paths import absolute
from orchestrator.storage.file_names import RUNS
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import check_uri


def run_directory(name: str, place: str | Path | None, where: str = "run_dir") -> RunDir:
    """Return the run directory at a place.

    Args:
        name: the name of the job, which gives the default place: runs/<name>.
        place: a path or URI; None for the default.
        where: the argument or option that gives `place`, for messages.

    Raises:
        InputError: `place` cannot be a run directory.
    """
    if place is not None:
        check_uri(str(place), where)
    return RunDir(absolute(str(place) if place is not None else f"{RUNS}/{name}", Path.cwd()))


def place_of(run: str | Path) -> str:
    """The absolute path or URI of what a user calls a run: a path or URI, or its name in the folder RUNS. Raises
    InputError if it cannot be one."""
    named = str(run)
    check_uri(named)
    if "/" not in named and not Path(named).exists() and (Path(RUNS) / named).is_dir():
        named = f"{RUNS}/{named}"
    return absolute(named, Path.cwd())
