"""The command runs: the run directories in a folder, their sizes, and their removal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Json, emit, existing_folder, table
from orchestrator.config.errors import InputError
from orchestrator.storage.file_names import RUNS

if TYPE_CHECKING:
    from orchestrator.launch.stored_runs import StoredRun

COLUMNS = ["run", "state", "step", "size", "checkpoints", "last seen", "held, referred to"]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(runs)


def runs(
    folder: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="folder of run directories: a path or URI")
    ] = RUNS,
    remove: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="remove this run: its name in the folder, or its path; repeat"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="remove without asking")] = False,
    as_json: Json = False,
) -> None:
    """List the run directories in a folder, with their sizes. With --remove, remove some: never one that is running,
    nor one with a pinned checkpoint."""
    from orchestrator.launch.stored_runs import stored_runs

    stored = stored_runs(existing_folder(folder))
    if remove:
        _remove(stored, remove, yes, as_json)
    elif as_json:
        emit([run.to_json() for run in stored])
    elif not stored:
        print(f"no run is in {folder}")
    else:
        table("", COLUMNS, _cells(stored))


def _remove(runs: Sequence[StoredRun], wanted: Sequence[str], yes: bool, as_json: bool) -> None:
    from orchestrator.launch import stored_runs

    chosen = stored_runs.chosen(runs, wanted)
    for run in chosen:  # all before the first is removed
        stored_runs.check_removable(run.run_dir)
    if not yes:
        _ask(chosen, as_json)
    for run in chosen:
        stored_runs.remove(run.run_dir)
    if as_json:
        emit({"removed": [run.run_dir for run in chosen], "bytes": sum(run.bytes for run in chosen)})
    else:
        print(f"removed {', '.join(run.name for run in chosen)}: {_size(sum(run.bytes for run in chosen))}")


def _ask(chosen: Sequence[StoredRun], as_json: bool) -> None:
    """Ask whether to remove these runs. Raises InputError if no terminal can answer, and ends the command after a
    no."""
    if as_json or not sys.stdin.isatty():
        raise InputError("asks first, which needs a terminal and no --json", "--remove", "give --yes")
    table("", COLUMNS, _cells(chosen))
    if not typer.confirm(f"Remove {len(chosen)} run{'s' if len(chosen) > 1 else ''} for good?", err=True):
        print("nothing is removed", file=sys.stderr)
        raise typer.Exit(0)


def _cells(runs: Sequence[StoredRun]) -> list[list[str]]:
    from orchestrator.observe.formatting import duration

    now = time.time()
    return [
        [
            run.name,
            run.state,
            f"{run.step} / {run.steps or '?'}",
            _size(run.bytes),
            _size(run.checkpoint_bytes),
            f"{duration(max(now - run.time, 0.0))} ago" if run.time else "",
            run.problem or "; ".join([*run.held, *run.referred]),
        ]
        for run in runs
    ]


def _size(number: int) -> str:
    """A size in bytes as text, in powers of 1024."""
    for exponent, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**exponent:
            return f"{number / 1024**exponent:.1f} {unit}"
    return f"{number} B"
