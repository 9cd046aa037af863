"""The command top: the state of all runs of a cluster or a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Cluster, Json, emit, existing_folder, finite, table
from orchestrator.cli.targets import before_status
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome

if TYPE_CHECKING:
    from cluster.jobs.ray_jobs import Submission
    from orchestrator.observe.pages.runs_page import Seen
    from orchestrator.storage.run_directory import RunDir

COLUMNS = ["run", "state", "step", "loss", "tokens/s", "left", "layout", "note"]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(top)


def top(
    folder: Annotated[
        str | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="show the runs in this folder [default: those of a cluster]",
            show_default=False,
        ),
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, callback=finite, help="seconds between updates")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print once, as without a terminal")] = False,
    address: Cluster = None,
    as_json: Json = False,
) -> None:
    """Show the state of all runs of a cluster or a folder. On a terminal, update it until Ctrl-C."""
    if as_json:
        emit(_plain(_rows(folder, address)))
    elif once or not sys.stdout.isatty():
        table("", COLUMNS, _cells(_rows(folder, address)))
    else:
        _watch(folder, address, every)


def _watch(folder: str | None, address: str | None, every: float) -> None:
    from rich.live import Live

    cache: Seen = {}
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(_drawn(_cells(_rows(folder, address, cache))), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return


def _rows(folder: str | None, address: str | None, cache: Seen | None = None) -> list[dict[str, Any]]:
    """The rows of the runs in the folder, or of the newest submission of each name on the cluster. The row of a run
    that cannot be read here gives the reason."""
    from orchestrator.observe.pages.runs_page import Runs, listed

    if folder is not None:
        return listed(Runs(existing_folder(folder)).find(), cache=cache)
    from orchestrator.launch import submission

    jobs = {job.name: job for job in submission.jobs_at(address).all() if job.run_dir}
    rows = listed({name: _at(job.run_dir) for name, job in jobs.items()}, cache=cache)
    return [_with_job(row, jobs[row["name"]]) for row in rows]


def _with_job(row: dict[str, Any], job: Submission) -> dict[str, Any]:
    """The row of a job. Until its run has written a status since the submission, it says what the job itself does."""
    from orchestrator.observe.pages.runs_page import UNREADABLE

    is_finished = row["time"] and job.state == Outcome.DONE  # the job of a finished run writes nothing
    if row["state"] == UNREADABLE or is_finished or not job.came_after(row["time"]):
        return row
    before = dict.fromkeys(("step", "loss", "speed", "left", "layout", "silent"), "")
    return {**row, **before, "state": job.state, "says": before_status(job)}


def _at(uri: str) -> RunDir | InputError:
    from orchestrator.storage.run_directory import RunDir

    try:
        return RunDir(uri)
    except InputError as error:
        return error


def _plain(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ("phase", "ended")} for row in rows]


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    keys = ("name", "state", "step", "loss", "speed", "left", "layout", "says")
    return [[str(row[key]) for key in keys] for row in (run | {"state": _state(run)} for run in rows)]


def _state(row: dict[str, Any]) -> str:
    return f"{row['state']}, {row['silent']}" if row["silent"] else str(row["state"])


def _drawn(cells: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=time.strftime("%H:%M:%S"), title_justify="left", expand=True, box=None)
    for name in COLUMNS:
        drawn.add_column(name, no_wrap=name != "note", overflow="fold", ratio=1 if name == "note" else None)
    for row in cells:
        drawn.add_row(*map(Text, row))
    return drawn
