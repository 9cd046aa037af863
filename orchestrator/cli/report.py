"""The commands report and verify-resume, for the time after a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchestrator.cli.chain import chain_at, write_report
from orchestrator.cli.options import Json, Run, emit, existing_run, table


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("verify-resume")(verify_resume)
    app.command()(report)


def verify_resume(
    run_dir: Run,
    steps: Annotated[int, typer.Option(min=1, help="number of steps to replay")] = 5,
    step: Annotated[
        int | None, typer.Option(help="step of the checkpoint to start from [default: the earliest kept]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay steps from a checkpoint, and compare receipts and losses with the record of the run."""
    from orchestrator.verify.replay import replay

    run, spec = existing_run(run_dir)
    replayed = replay(spec, run, step, steps)
    if as_json:
        emit(replayed.to_json())
    else:
        rows = [
            [str(r["step"]), f"{r['recorded']!r}", f"{r['replayed']!r}", r["verdict"]] for r in replayed.rows
        ]
        table(f"Replayed from the commit at step {replayed.start}", ["step", "loss", "replayed", ""], rows)
        print(replayed.line, file=sys.stderr)
    raise typer.Exit(0 if replayed.same else 1)


def report(run_dir: Run) -> None:
    """Write report.html again. Send missing rows to MLflow, and the model if the job registers it."""
    from orchestrator.observe.mlflow_delivery import deliver
    from orchestrator.observe.pages.report import report as make
    from orchestrator.observe.registry import register_export

    if (chain := chain_at(run_dir)) is not None:
        write_report(*chain)
        return
    run, spec = existing_run(run_dir)
    run.write_text("report.html", make(run))
    delivery = deliver(spec.tracked, run)
    print(run.at("report.html"))
    if (
        problem := None
        if delivery.problem
        else register_export(spec.name, spec.tracking, spec.checkpoint, spec.model_dump(mode="json"), run)
    ):
        print(f"orchestrator: {problem}", file=sys.stderr)
    if delivery.line:
        print(f"orchestrator: {delivery.line}", file=sys.stderr)
    if delivery.problem:
        print(f"orchestrator: MLflow lacks {delivery.missing} rows: {delivery.problem}", file=sys.stderr)
