"""The commands submit, attach and list: runs as jobs of a cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.chain import chain_at
from orchestrator.cli.followed import EVERY, statuses
from orchestrator.cli.options import (
    Cluster,
    Job,
    Json,
    Priority,
    Progress,
    RunDirectory,
    Seeds,
    Set,
    at_its_end,
    emit,
    jobs_of,
    on_this_machine,
    run_of,
    table,
)
from orchestrator.cli.targets import Target, has_commit, job_at, job_named, run_at, shown_of
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED, INTERRUPTED, Outcome

if TYPE_CHECKING:
    from cluster.jobs.ray_jobs import Jobs, Submission
    from orchestrator.storage.run_directory import RunDir

SUMMARY = 60.0
"""Seconds that summary.json may appear after the final status of a run."""


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(submit)
    app.command()(attach)
    app.command("list")(list_jobs)


def submit(
    job: Job,
    overrides: Set = None,
    run_dir: RunDirectory = None,
    address: Cluster = None,
    until: Annotated[int | None, typer.Option(min=1, help="end at this step with a checkpoint")] = None,
    priority: Priority = 0,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=on_this_machine,
            help="send this folder to the cluster; .gitignore and .rayignore apply",
        ),
    ] = None,
    package: Annotated[
        bool, typer.Option("--package", help="send this program too, for nodes with another version")
    ] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="leave out matching files too; repeat")
    ] = None,
    seeds: Seeds = None,
    wait: Annotated[bool, typer.Option("--wait", help="follow the job to its end, like attach")] = False,
    as_json: Json = False,
) -> None:
    """Submit a job to a cluster. A job with the same name resumes from its last checkpoint."""
    from cluster.jobs.ray_jobs import own_packages
    from orchestrator.chain.preflight import check_submitted_chain
    from orchestrator.config.chain import ChainSpec
    from orchestrator.config.packages import PACKAGES
    from orchestrator.launch import submission
    from orchestrator.launch.submitted_job import SubmittedJob

    if working_dir is not None and package:
        raise InputError(
            "give one of them", "--working-dir, --package", "a folder that holds the program will do"
        )
    if exclude and working_dir is None:
        raise InputError("there is no folder to leave it out of", "--exclude", "give --working-dir too")
    if working_dir is not None and not working_dir.is_dir():
        raise InputError("there is no such folder", f"--working-dir {working_dir}", "give another")
    spec = jobs_of(job, overrides, seeds)
    run = run_of(spec.name, run_dir)
    if isinstance(spec, ChainSpec) and until is not None:
        raise InputError("is a step of one run, but this is a chain", "--until", "leave it out")
    environment = own_packages(PACKAGES) if package else {}
    if working_dir is not None:
        environment = submission.sent_along(working_dir.absolute(), exclude or (), "--working-dir")
    # It refuses a job with a secret before the cluster is contacted.
    command = submission.entrypoint(spec.name, spec.document(), run, until, priority)
    jobs = submission.jobs_at(address)
    if isinstance(spec, ChainSpec):
        check_submitted_chain(spec, run, address)
    else:
        SubmittedJob(spec).check(run, until)
    try:
        submitted, new = submission.submit(
            jobs, spec.name, command, run=run, priority=priority, runtime_env=environment
        )
    except KeyboardInterrupt as interruption:
        if not interruption.args:
            raise
        print(f"\n{interruption}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    if wait:
        _follow(jobs, submitted, as_json)
    if as_json:
        emit({**submitted.to_json(), "new": new})
        return
    print(
        f"{submitted.id} is {'submitted' if new else 'running already'}; its run directory: {submitted.run_dir}"
    )
    print(
        f"next: orchestrator attach {submitted.name}, orchestrator status {submitted.name}, "
        f"orchestrator stop {submitted.name}"
    )


def attach(name: Target, address: Cluster = None, progress: Progress = None, as_json: Json = False) -> None:
    """Follow a run or a job to its end, and exit with its code; Ctrl-C, or q on the screen, leaves it running (130)."""
    run = None if address or chain_at(name) else run_at(name)
    named = job_at(name, address) if run is None else job_named(name, address)
    if named is not None:
        _follow(*named, as_json)
    elif run is not None:
        _watch(run, as_json, progress)


def _watch(run: RunDir, as_json: bool, how: str | None) -> None:
    """Follow a run that another command controls, by the files in its run directory."""
    from orchestrator.observe.console import ProgressDisplay, final_table
    from orchestrator.observe.last_status import last_status

    ended_before = run.read_json_or_empty("status.json").get("phase") in ENDED
    before = None if ended_before else run.read_json("summary.json")
    try:
        with ProgressDisplay(how=how) as progress:
            for status in statuses(run):
                progress.update(status)
                if progress.left:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        print(f"\n{run.uri} goes on", file=sys.stderr)
        if as_json:
            emit(last_status(run))
        raise SystemExit(INTERRUPTED) from None
    summary = _summary_of(run, before)
    with at_its_end():
        if as_json:
            emit(summary)
        else:
            final_table(summary)
    raise _exit_of(Outcome(summary["state"]), lambda: summary.get("commit") is not None)


def _summary_of(run: RunDir, before: dict[str, Any] | None) -> dict[str, Any]:
    """The summary of a run that has ended, which is written a moment after its status; not that of a time `before`."""
    deadline = time.monotonic() + SUMMARY
    while time.monotonic() < deadline:
        stored = run.read_json_or_empty("summary.json")
        if stored and stored != before:
            return stored
        time.sleep(EVERY)
    raise InputError("has ended and has no summary", run.uri, "see `orchestrator logs` and events.jsonl")


def list_jobs(address: Cluster = None, as_json: Json = False) -> None:
    """List the jobs of a cluster, the oldest first."""
    from orchestrator.launch import submission
    from orchestrator.observe.formatting import duration

    jobs = submission.jobs_at(address).all()
    if as_json:
        emit([shown_of(job) for job in jobs])
        return
    if not jobs:
        print("no jobs yet; `orchestrator submit JOB` adds one")
        return
    rows = []
    for job in jobs:
        seconds = (job.ended or time.time()) - job.started if job.started else 0.0
        rows.append([job.id, shown_of(job)["state"], str(job.priority), duration(seconds), job.run_dir])
    table("", ["submission", "state", "priority", "for", "run directory"], rows)


def _follow(jobs: Jobs, submission: Submission, as_json: bool) -> None:
    try:
        for part in jobs.follow(submission.id):
            print(part, end="", flush=True, file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"\n{submission.id} is still running; `orchestrator stop {submission.name}` ends it",
            file=sys.stderr,
        )
        if as_json:
            emit(jobs.get(submission.id).to_json())
        raise SystemExit(INTERRUPTED) from None
    final = jobs.get(submission.id)
    if as_json:
        emit(final.to_json())
    else:
        print(f"{final.id}: {final.state}")
    if final.state == Outcome.FAILED and final.exit_code is None:  # its log does not say why
        print(f"orchestrator: {final.message}", file=sys.stderr)
    raise _exit_of(Outcome(final.state), lambda: has_commit(final) is not False)


def _exit_of(outcome: Outcome, can_go_on: Callable[[], bool]) -> typer.Exit:
    """The end of a command that has followed something to its end; stopped is what can go on from a commit."""
    if outcome == Outcome.STOPPED and not can_go_on():
        print("orchestrator: no checkpoint yet; the same job starts from the beginning", file=sys.stderr)
        outcome = Outcome.FAILED
    return typer.Exit(outcome.exit_code)
