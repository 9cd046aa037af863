"""The command profile: traces and tables of the next steps of a running job."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.chain import refuse_chain
from orchestrator.cli.options import Cluster, Json, emit, finite, table
from orchestrator.cli.targets import Target, job_at, run_at
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED

if TYPE_CHECKING:
    from orchestrator.storage.run_directory import RunDir

EVERY = 0.5
"""Seconds between checks for results."""
SHOWN = 12
"""Number of printed operators; the file has more."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(profile)


def profile(
    target: Target,
    ranks: Annotated[str, typer.Option(metavar="N[,N...]", help="ranks to profile")] = "0",
    steps: Annotated[int, typer.Option(min=1, max=50, help="number of steps")] = 2,
    timeout: Annotated[
        float, typer.Option(min=1, callback=finite, help="seconds to wait for the traces")
    ] = 300.0,
    address: Cluster = None,
    as_json: Json = False,
) -> None:
    """Profile the next steps of a running job: a trace for each rank, and the slowest operators."""
    from orchestrator.observe.last_status import last_status

    run = _directory(target, address)
    status = last_status(run)
    wanted = _ranks(ranks, status, run.uri)
    request = {"id": time.strftime("%Y%m%d-%H%M%S", time.gmtime()), "ranks": wanted, "steps": steps}
    folder = f"profiles/{request['id']}"
    with contextlib.suppress(FileExistsError):
        run.fs.makedirs(f"{run.path}/profiles", exist_ok=True)
    run.write_json("profiles/request.json", request)
    tables = _results(run, folder, wanted, timeout)
    if as_json:
        emit({"folder": run.at(folder), "profiles": tables})
        return
    for profile_table in tables:
        _show(profile_table)
    print("Open a trace at https://ui.perfetto.dev (or chrome://tracing):")
    for profile_table in tables:
        for name in profile_table["files"]:
            path = run.at(f"{folder}/{name}")
            memory = name.endswith(".pickle")
            print(
                f"  python -m torch.cuda._memory_viz trace_plot {path} -o memory.html"
                if memory
                else f"  {path}"
            )


def _directory(target: str, address: str | None) -> RunDir:
    if not address:
        refuse_chain(target)
    run = None if address else run_at(target)
    if run is None:
        job = job_at(target, address)[1]
        run = run_at(job.run_dir)
        if run is None:
            problem = "its run directory cannot be read from this machine"
            raise InputError(problem, job.run_dir, "give the command where it can be")
    return run


def _ranks(text: str, status: dict[str, Any], uri: str) -> list[int]:
    try:
        wanted = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError("is not a list of ranks", f"--ranks {text}", "give numbers, as in 0,3") from None
    if status.get("phase") != "train" or not status.get("ranks"):
        phase = status.get("phase", "unknown")
        hint = "ask while it trains" if phase in ENDED else "wait for phase train"
        raise InputError(f"the run does not train now: it is in phase {phase}", uri, hint)
    world = len(status["ranks"])
    if wanted[0] < 0 or wanted[-1] >= world:
        raise InputError(f"the run has {world} ranks", f"--ranks {text}", f"name some of 0 to {world - 1}")
    return wanted


def _results(run: RunDir, folder: str, ranks: list[int], timeout: float) -> list[dict[str, Any]]:
    """Return the tables of these ranks. Raises TimeoutError that names the missing ranks."""
    tables: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + timeout
    while missing := [rank for rank in ranks if rank not in tables]:
        for rank in missing:
            if result := run.read_json_or_empty(f"{folder}/rank-{rank}.json"):
                tables[rank] = result
        if time.monotonic() > end:
            names = ", ".join(map(str, missing))
            problem = f"no profile of rank {names} within {timeout:g} s; `orchestrator logs` may say why"
            raise TimeoutError(problem)
        if len(tables) < len(ranks):
            time.sleep(EVERY)
    return [tables[rank] for rank in ranks]


def _show(tables: dict[str, Any]) -> None:
    first, last = tables["steps"]
    title = f"Rank {tables['rank']}, steps {first} to {last}, {tables['seconds']:.3f} s while profiled"
    on_device = any(row["device_seconds"] for row in tables["operators"])
    key = "device_seconds" if on_device else "cpu_seconds"
    columns = ["operator", "calls", "own time", "share"]
    table(title, columns, [_row(row, key, tables["seconds"]) for row in tables["operators"][:SHOWN]])
    if tables["communication"]:
        rows = [_row(row, "whole_seconds", tables["seconds"]) for row in tables["communication"][:SHOWN]]
        table(f"Rank {tables['rank']}: communication", ["collective", "calls", "time", "share"], rows)


def _row(row: dict[str, Any], key: str, seconds: float) -> list[str]:
    return [row["name"][:60], str(row["calls"]), f"{row[key] * 1e3:.1f} ms", f"{row[key] / seconds:.1%}"]
