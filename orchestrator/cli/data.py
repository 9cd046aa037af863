"""The commands data corpus, prepare and inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import (
    Address,
    Job,
    Json,
    RunDirectory,
    Set,
    emit,
    job_of,
    on_this_machine,
    run_of,
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(no_args_is_help=True, help="Raw text to token shards.")
    group.command()(corpus)
    group.command()(prepare)
    group.command()(inspect)
    app.add_typer(group, name="data")


def corpus(
    folder: Annotated[
        Path, typer.Argument(parser=on_this_machine, help="where to write the .txt files")
    ] = Path("corpus"),
    as_json: Json = False,
) -> None:
    """Collect real text from this machine: the documentation strings of the installed packages."""
    from orchestrator.data.corpus import collect

    found = collect(str(folder.absolute()))
    if as_json:
        emit(found)
    else:
        print(
            f"{folder}: {found['bytes'] / 2**20:.1f} MiB of documentation strings in {len(found['files'])} files"
        )


def prepare(
    job: Job,
    overrides: Set = None,
    run_dir: RunDirectory = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Make a job's token shards without training."""
    from cluster.local.ray_session import NoCluster, connected_ray
    from orchestrator.launch.preflight import check_job, check_places
    from orchestrator.launch.submission import no_cluster
    from orchestrator.resolve.prepared_data import prepare as prepare_data
    from orchestrator.track.console import ProgressDisplay

    spec = job_of(job, overrides)
    run = run_of(spec, run_dir)
    check_places(spec, run)
    check_job(spec)
    try:
        with ProgressDisplay() as progress, connected_ray(address):

            def report(what: str, done: int, total: int) -> None:
                progress.update({"phase": "prepare", "note": f"{what}: {done} of {total} parts"})

            uri = prepare_data(spec, run, report).uri
    except NoCluster as error:
        raise no_cluster(error, address) from None
    if as_json:
        emit({"data": uri})
    else:
        print(uri)


def inspect(
    data: Annotated[str, typer.Argument(help="a folder of prepared data")], as_json: Json = False
) -> None:
    """Show what a folder of prepared data contains."""
    from orchestrator.data.summary import inspect as look
    from orchestrator.job.paths import absolute

    found = look(absolute(data, Path.cwd()))
    if as_json:
        emit(found)
        return
    for key, value in found.items():
        print(f"{key}: {value}")
