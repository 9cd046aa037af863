"""The command bench: what exports keep of a metric, and what they cost."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.evaluate import absolute_path
from orchestrator.cli.options import Address, Json, emit, table
from orchestrator.config.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(bench)


def bench(
    exports: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPORT EXPORT...",
            help="folders of exports for transformers or onnxruntime; the others are compared with the first",
            show_default=False,
        ),
    ],
    on: Annotated[str, typer.Option(metavar="FILES", help="held-out rows, with the columns of the job")],
    metric: Annotated[
        str | None,
        typer.Option(
            help="the metric of shares and pictures [default: accuracy of classes, else perplexity]"
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="most samples to read")] = 2000,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="samples in a batch; repeat [default: 1 and 32]")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="turns of each export; 0 measures no speed")] = 20,
    threads: Annotated[
        int | None, typer.Option(min=1, help="threads of each export [default: this process's CPUs]")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="override a key of the job that reads the rows"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write a page with the table and pictures")
    ] = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Compare exports in alternating rounds: metric, share of the first's, bytes, memory, latency, tokens/s."""
    from cluster.workers.machine import processors_here
    from orchestrator.bench.export_folder import read_exports
    from orchestrator.bench.inputs import comparable_metric, read_inputs
    from orchestrator.bench.measure import measure_exports, to_json
    from orchestrator.launch.preparation import prepared_with_progress
    from orchestrator.observe.console import ProgressDisplay
    from orchestrator.observe.pages.exports_page import page

    if output is not None and not output.parent.is_dir():
        raise InputError("is in no folder", f"--html {output}", "name a file in a folder that exists")
    folders = read_exports(exports)
    prepare = partial(prepared_with_progress, address=address)
    inputs = read_inputs(folders, absolute_path(on), overrides or [], samples, prepare)
    chosen = comparable_metric(folders, inputs, metric, "--metric")
    count = threads or processors_here()
    with ProgressDisplay() as progress:
        measured = measure_exports(
            folders,
            inputs,
            batches=batch or [1, 32],
            rounds=rounds,
            threads=count,
            tell=progress.update,
        )
    rows = to_json(measured, chosen)
    about = f"{inputs[0].samples} held-out samples of {on}; {count} threads, {rounds} alternating rounds"
    if output is not None:
        output.write_text(page(rows, about))
    if as_json:
        emit(rows)
        return
    show_exports(rows)
    print(about, file=sys.stderr)
    if output is not None:
        print(output)


def show_exports(rows: list[dict[str, Any]]) -> None:
    """Print the rows of `measure.to_json` as a table, an export a line. Times are left out unless all have them."""
    from orchestrator.observe.formatting import count, duration
    from orchestrator.observe.pages.page import size

    metric = rows[0]["metric"]
    columns = ["export", metric, "share", "parameters", "weights", "memory"]
    timed = all(row["speeds"] for row in rows)
    for speed in rows[0]["speeds"] if timed else ():
        columns += [f"batch {speed['batch']}: p50", "p95", "tokens/s"]
    cells = []
    for row in rows:
        line = [row["export"], f"{row['metrics'][metric]:.4g}", f"{100 * row['share']:.1f} %"]
        line += [count(row["parameters"]), size(row["weights_bytes"]), size(row["memory_bytes"])]
        for speed in row["speeds"] if timed else ():
            line += [duration(speed["p50_seconds"]), duration(speed["p95_seconds"])]
            line.append(count(speed["tokens_per_second"]))
        cells.append(line)
    table("", columns, cells)
