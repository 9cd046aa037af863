"""The command rehearse: try a job in small."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import Job, Json, Set, emit, job_of, run_of

if TYPE_CHECKING:
    from orchestrator.verify.rehearsal.stages import Rehearsal, Stage


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(rehearse)


def rehearse(
    job: Job,
    overrides: Set = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="the device that the job is for, as h100, or the file of its profile [default: as the job's labels "
            "say, or this machine]",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Try a job from end to end on this machine, in under two minutes: small, but with the axes of its layout.

    A part of its data, three steps, a commit, the kill of a rank, a load under another layout, evaluation, export and
    generation; then a step of the real size, on tensors without memory. Nothing is left behind. Exit code 1 if a stage
    fails.
    """
    from rich.console import Console

    from orchestrator.launch.init_checks import check_begins
    from orchestrator.launch.job_checks import check_job
    from orchestrator.verify.rehearsal import stages
    from orchestrator.verify.rehearsal.full_size import plan_at_full_size, worker_of

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was made is removed then too
    began = time.monotonic()
    spec = job_of(job, overrides)
    console = Console(stderr=True)

    def tell(news: Stage | str) -> None:
        text = f"{news} ..." if isinstance(news, str) else f"{news.name}: {news.verdict}"
        console.print(text, markup=False, highlight=False)

    tell("check")
    resolved = check_job(spec, machine_of=worker_of(machine))
    check_begins(resolved, run_of(spec.name, None))
    resolved, full_size = plan_at_full_size(resolved, machine)
    rehearsal = stages.rehearse(resolved, full_size, time.monotonic() - began, tell)
    if as_json:
        emit(rehearsal.to_json())
    else:
        _show(rehearsal)
    return 0 if rehearsal.passed else 1


def _show(rehearsal: Rehearsal) -> None:
    from orchestrator.cli.options import table
    from orchestrator.observe.formatting import duration

    rows = [
        [stage.name, stage.verdict, duration(stage.seconds) if stage.seconds else "", stage.done, stage.mend]
        for stage in rehearsal.stages
    ]
    table(
        f"Rehearsed in {duration(sum(stage.seconds for stage in rehearsal.stages))}",
        ["stage", "verdict", "took", "what", "fix"],
        rows,
    )
    for note in rehearsal.notes:
        print(f"Not as in the job: {note}.")
    bad = [stage.name for stage in rehearsal.stages if stage.verdict == "failed"]
    print(f"{', '.join(bad)} failed: fix this before you run the job." if bad else "Nothing failed.")
