"""The command chaos: inject faults into runs, and check that each run stays the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Job, Json, Set, emit, job_of, on_this_machine, table

if TYPE_CHECKING:
    from orchestrator.verify.comparison import RunComparison


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(chaos)


def chaos(
    job: Job,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND@RANK:STEP",
            help="train with this fault: kill, stop, raise, nan, slow, node, drain @RANK:STEP; driver, controller, "
            "flip, torn, outage, full @STEP [default: one run for each of them]; or product, gradient, update "
            "@RANK:STEP, after which the rank computes wrongly",
        ),
    ] = None,
    randoms: Annotated[
        int, typer.Option("--random", min=0, help="train with this many faults, at random ranks and steps")
    ] = 0,
    seed: Annotated[int, typer.Option(help="seed of the random faults")] = 0,
    overrides: Set = None,
    runs: Annotated[Path, typer.Option(parser=on_this_machine, help="folder for the run directories")] = Path(
        "runs/chaos"
    ),
    as_json: Json = False,
) -> int:
    """Train a job without and with faults on real local nodes, and compare. Exit code 1 if a run differs."""
    from rich.console import Console

    from orchestrator.verify import chaos as verify
    from orchestrator.verify.chaos_faults import expand
    from orchestrator.verify.comparison import to_json

    spec = job_of(job, overrides)
    disturbed = expand(fault or [], randoms, seed, spec.resources, spec.train)
    _refuse_old(runs)
    console = Console(stderr=True)

    def report(news: RunComparison | str) -> None:
        if isinstance(news, str):
            text = news
        else:
            compared.append(news)
            text = f"{news.fault}: {'held' if news.is_same else 'NOT the same run'}"
        console.print(f"[{len(compared)} of {len(disturbed)} faults] {text}", markup=False)

    compared: list[RunComparison] = []
    comparisons = verify.chaos(spec, runs.absolute(), disturbed, report)
    if as_json:
        emit(to_json(comparisons))
    else:
        _show(comparisons)
    return 0 if all(comparison.is_same for comparison in comparisons) else 1


def _refuse_old(runs: Path) -> None:
    from orchestrator.config.errors import InputError

    if os.path.lexists(runs) and (not runs.is_dir() or any(runs.iterdir())):
        raise InputError(
            "runs of an earlier chaos are here", str(runs), "remove the folder or name another by --runs"
        )


def _show(comparisons: list[RunComparison]) -> None:
    rows = [
        [
            v.fault,
            v.ended,
            v.receipt,
            v.losses,
            str(v.attempts),
            f"{v.lost_steps} steps" if v.lost_steps != 1 else "1 step",
            "-" if v.back_after is None else f"{v.back_after:.2f} s",
            ", ".join(v.left) or "nothing",
        ]
        for v in comparisons
    ]
    columns = ["fault", "ended", "receipt", "losses", "attempts", "lost", "back after", "left behind"]
    table("The same run?", columns, rows)
