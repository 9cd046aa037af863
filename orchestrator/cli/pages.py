"""The commands compare and serve: compare runs, and show the runs of a folder in a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.chain import chain_at
from orchestrator.cli.options import Json, emit, existing_folder, existing_run, table
from orchestrator.config.errors import InputError
from orchestrator.storage.file_names import RUNS

if TYPE_CHECKING:
    from orchestrator.storage.run_directory import RunDir


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(compare)
    app.command()(serve)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="run directories, or those of chains", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="write a page with all curves on one scale"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: numbers, curves on one scale, and differences of their job files. Runs that differ by seed alone
    are one column: their mean and standard deviation."""
    from orchestrator.observe.pages import compare as made

    comparison = made.compared([run for named in runs for run in _runs_at(named)])
    if output is not None:
        try:
            output.write_text(made.page(comparison))
        except OSError as error:
            raise InputError(
                f"cannot be written ({error.strerror})", str(output), "name another file"
            ) from None
    if as_json:
        emit(made.as_json(comparison))
        return
    table(
        "",
        ["", *(column.title for column in comparison)],
        [[name, *values] for name, values in made.facts(comparison)],
    )
    if lines := made.on_terminal(comparison):
        print("loss, from the first step to the last, on one scale")
        print("\n".join(f"  {line}" for line in lines))
    if rows := [[key, *values] for key, values in made.differences(comparison)]:
        table("Job files differ in", ["key", *(column.label for column in comparison)], rows)
    else:
        print(made.alike(comparison))
    if output is not None:
        print(output)


def _runs_at(named: str) -> list[RunDir]:
    """Return the run of this name, or the runs of the stages of a chain that have begun. Raises InputError."""
    if (chain := chain_at(named)) is None:
        return [existing_run(named)[0]]
    root, spec = chain
    stages = [type(root)(root.at(stage.name)) for stage in spec.stages]
    return [stage for stage in stages if stage.holds_a_run()]


def serve(
    folder: Annotated[str, typer.Argument(help="a folder of run directories: a path or URI")] = RUNS,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 picks a free one")] = 0,
) -> None:
    """Show all runs of a folder in a browser on this machine, at an address with a token, until Ctrl-C."""
    from orchestrator.observe.pages.page_server import PageServer

    path = existing_folder(folder)
    try:
        server = PageServer(path, port)
    except OSError as error:
        raise InputError(
            f"cannot be used ({error.strerror})", f"--port {port}", "give another, or none"
        ) from None
    print(server.url, flush=True)
    print("orchestrator: Ctrl-C ends it", file=sys.stderr)
    try:
        server.serve()
    except KeyboardInterrupt:
        return
