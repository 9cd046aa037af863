"""The command tune: search over keys of a job."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from orchestrator.cli.options import (
    Address,
    Job,
    Json,
    RunDirectory,
    Set,
    at_its_end,
    emit,
    job_of,
    run_of,
    table,
)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(tune)


def tune(
    job: Job,
    overrides: Set = None,
    run_dir: RunDirectory = None,
    address: Address = None,
    report: Annotated[
        bool, typer.Option("--report", help="only write the report of the results so far")
    ] = False,
    as_json: Json = False,
) -> None:
    """Search over keys of a job with Ray Tune. The same command continues the search after any interruption."""
    from orchestrator.tune.console import SearchDisplay
    from orchestrator.tune.search import tune as search

    spec = job_of(job, overrides)
    sweep = run_of(spec.name, run_dir)
    if report:
        from orchestrator.tune.report import report as page

        sweep.write_text("report.html", page(sweep))
        print(sweep.at("report.html"))
        return
    with SearchDisplay() as progress:
        outcome = search(spec, sweep, address, progress.update)
    with at_its_end():
        if as_json:
            emit(
                {
                    "exit_code": outcome.outcome.exit_code,
                    "run_dir": sweep.uri,
                    "line": outcome.line,
                    "sweep": outcome.summary,
                }
            )
        else:
            show(outcome.summary)
            unbeaten = outcome.summary.get("frontier") or []
            for problem in filter(None, (outcome.summary["problem"], outcome.summary["tracking"])):
                print(f"orchestrator: {problem}", file=sys.stderr)
            files = (
                f"report.html, sweep.json and {'frontier-TRIAL.yaml' if unbeaten else 'best.yaml'}"
                if outcome.summary["best"]
                else "report.html and sweep.json"
            )
            print(f"{files} are in {sweep.uri}", file=sys.stderr)
            if outcome.summary["best"]:
                print(f"next: orchestrator run {shlex.quote(f'{sweep.uri}/best.yaml')}", file=sys.stderr)
        if outcome.line and not as_json:
            print(f"orchestrator: {outcome.line}", file=sys.stderr)
    raise typer.Exit(outcome.outcome.exit_code)


def show(results: dict[str, Any]) -> None:
    """Print the trials as a table, best first."""
    from orchestrator.observe.formatting import short, value_text

    keys = list(dict.fromkeys(key for trial in results["trials"] for key in trial["config"]))
    sign = 1 if results["mode"] == "min" else -1
    ranked = sorted(
        results["trials"], key=lambda t: (t["value"] is None, sign * (t["value"] or 0.0), t["trial"])
    )
    second = results.get("second")
    rows = [
        [
            trial["trial"],
            trial["state"],
            str(trial["step"]),
            "-" if trial["value"] is None else f"{trial['value']:.4f}",
            *(["-" if trial["second"] is None else value_text(trial["second"])] if second else []),
            *(["yes" if trial["trial"] in results["frontier"] else ""] if second else []),
            *(short(trial["config"].get(key)) for key in keys),
            trial["reason"],
        ]
        for trial in ranked
    ]
    two = [second, "unbeaten"] if second else []
    columns = [
        "trial",
        "state",
        "step",
        results["metric"],
        *two,
        *(key.rsplit(".", 1)[-1] for key in keys),
        "why",
    ]
    table(f"{results['name']}: {len(rows)} trials, {results['steps']} steps", columns, rows)
