"""Where runs are."""

from __future__ import annotations

from pathlib import Path

from orchestrator.job.paths import absolute
from orchestrator.storage.run_directory import RunDir
from orchestrator.storage.uri import check_uri

RUNS = "runs"
"""The folder of runs that are called by their names."""


def run_directory(name: str, place: str | Path | None) -> RunDir:
    """The run directory at `place`, by default that of the job's name. Raises InputError if it cannot be one."""
    if place is not None:
        check_uri(str(place), "run_dir")
    return RunDir(absolute(str(place) if place is not None else f"{RUNS}/{name}", Path.cwd()))
