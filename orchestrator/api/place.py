"""Resolve the place of a run."""

from __future__ import annotations

from pathlib import Path

from orchestrator.checkpoint.identity import read_job
from orchestrator.config.errors import Absent
from orchestrator.config.paths import absolute
from orchestrator.config.spec import JobSpec
from orchestrator.storage.file_names import RUNS
from orchestrator.storage.run_directory import OURS, RunDir
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
    """The absolute path or URI of what a user calls a run: a path or URI, or its name in the folder RUNS.

    A bare name is a path where a run is there, or where the folder RUNS has no such name. Raises InputError if it
    cannot be a place.
    """
    places = _places(run)
    if len(places) == 1:
        return places[0]
    holding = [place for place in places if any((Path(place) / name).exists() for name in OURS)]
    return next((place for place in (*holding, *places) if Path(place).exists()), places[0])


def existing_run(run: str | Path) -> tuple[RunDir, JobSpec]:
    """An existing run directory and its job, by what a user calls the run. Commands and `load_run` decide by this.

    Raises Absent if there is no run, which names each place where one could be, and InputError for a search, a chain
    or a damaged job file.
    """
    directory = RunDir(place_of(run))
    spec = read_job(directory)
    if spec is None or not directory.holds_a_run():
        places = _places(run)
        where = f"{places[0]} and {places[1]}" if len(places) > 1 else directory.uri
        raise Absent("there is no run here", where, "give a run directory, such as runs/<name>")
    return directory, spec


def _places(run: str | Path) -> list[str]:
    """Where a run may be, by what a user calls it; the folder RUNS comes second, and only for a bare name."""
    named = str(run)
    check_uri(named)
    is_name = "/" not in named and named not in ("", ".", "..")
    return [absolute(each, Path.cwd()) for each in (named, *([f"{RUNS}/{named}"] if is_name else ()))]
