"""run, status, stop: a run and its controller."""

from __future__ import annotations

import signal
import sys
import time
from typing import Annotated, Any

import typer

from orchestrator.cli.options import Address, Job, Json, RunDirectory, Set, emit, existing_run, job_of, run_of
from orchestrator.errors import InputError

LOST_AFTER = 15.0
"""Seconds without a word from the controller after which `status` calls it lost."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(run)
    app.command()(status)
    app.command()(stop)


def run(
    job: Job,
    overrides: Set = None,
    run_dir: RunDirectory = None,
    address: Address = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="end at this step with a commit; exit code 3")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND@RANK:STEP", help="inject a fault, to see it survived", hidden=True),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a job to its end, or go on with it from its last commit."""
    from orchestrator.run import run as drive
    from orchestrator.track.console import Progress, final_table

    spec = job_of(job, overrides)
    directory = run_of(spec, run_dir)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = _faults(fault or [])
    with Progress() as progress:
        outcome = drive(spec, directory, until, address, progress.update, faults)
    if as_json:
        emit(
            {
                "exit_code": outcome.code,
                "run_dir": directory.uri,
                "line": outcome.line,
                "summary": outcome.summary,
            }
        )
    elif outcome.summary:
        final_table(outcome.summary)
        _where_next(directory.uri, spec.tracking.uri if spec.tracking else None, outcome.summary)
    if outcome.line and not as_json:
        print(f"orchestrator: {outcome.line}", file=sys.stderr)
    raise typer.Exit(outcome.code)


def status(
    run_dir: Annotated[str, typer.Option("--run-dir", help="a run directory")], as_json: Json = False
) -> None:
    """Show phase, step, attempt, layout and ranks of a run."""
    directory, spec = existing_run(run_dir)
    unknown = {"name": spec.name, "phase": "unknown", "step": 0, "steps": spec.train.steps, "attempt": 0}
    found = directory.read_json("status.json") or {
        **unknown,
        "layout": None,
        "ranks": [],
        "time": time.time(),
    }
    summary = directory.read_json("summary.json")
    silent = time.time() - found["time"]
    ended = found["phase"] in ("done", "failed", "stopped")
    found["controller"] = (
        "ended" if ended else "alive" if silent < LOST_AFTER else f"silent for {silent:.0f} s"
    )
    found["state"] = summary["state"] if ended and summary else found["phase"]
    if as_json:
        emit(found)
        return
    _show_status(found)


def stop(
    run_dir: Annotated[str, typer.Option("--run-dir", help="a run directory")],
    address: Annotated[str, typer.Option(help="the Ray cluster's address")] = "auto",
) -> None:
    """Ask a run on a cluster to commit and end. (A run inside `orchestrator run`: Ctrl-C.)"""
    from cluster.local import NoCluster, ray_at
    from orchestrator.actor import controller_of

    directory, _ = existing_run(run_dir)
    try:
        with ray_at(address):
            controller = controller_of(directory)
            if controller is None:
                raise InputError(
                    "no controller is at work on this run", directory.uri, "see `orchestrator status`"
                )
            import ray

            ray.get(controller.request_stop.remote("stopped by the user"), timeout=30)
    except NoCluster as error:
        raise InputError(str(error), f"--address {address}", "give the address of the cluster") from None
    print(f"{directory.uri} will commit and end")


def _faults(texts: list[str]) -> tuple[str, ...]:
    from cluster.faults import Fault

    for text in texts:
        try:
            Fault.parse(text)
        except ValueError as error:
            raise InputError(str(error), f"--fault {text}") from None
    return tuple(texts)


def _where_next(run_dir: str, tracking: str | None, summary: dict[str, Any]) -> None:
    import os

    shown = os.path.relpath(run_dir) if os.path.isabs(run_dir) else run_dir
    say = _say
    if summary.get("sample"):
        say("\nThe model says:\n  " + summary["sample"].strip().replace("\n", "\n  ") + "\n")
    say("Where to look next")
    say(f"  {shown}/report.html          the run as pictures")
    if summary.get("export"):
        say(f"  {shown}/export/              the model, for transformers.AutoModel.from_pretrained")
    say(f"  orchestrator verify-resume {shown}      replay steps from a commit and compare")
    say(f"  orchestrator checkpoint list {shown}    the commits")
    if tracking:
        say(f"  mlflow ui --backend-store-uri {tracking}")
    problem = (summary.get("tracking") or {}).get("problem")
    if problem:
        say(
            f"MLflow lacks some rows ({problem}); `orchestrator report {shown}` sends them when it answers again"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _show_status(found: dict[str, Any]) -> None:
    from orchestrator.cli.options import table
    from orchestrator.track.console import duration

    eta = f", {duration(found['eta_seconds'])} left" if found.get("eta_seconds") else ""
    print(f"{found.get('name')}: {found['phase']}, step {found.get('step')} of {found.get('steps')}{eta}")
    layout = found.get("layout") or "not chosen yet"
    print(f"attempt {found.get('attempt')}, layout {layout}, controller {found['controller']}")
    if found.get("note"):
        print(found["note"])
    if found["ranks"]:
        rows = [[str(r[key]) for key in ("rank", "node", "pid", "state", "step")] for r in found["ranks"]]
        table("", ["rank", "node", "pid", "state", "step"], rows)
