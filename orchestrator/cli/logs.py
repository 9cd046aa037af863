"""The command logs: what the ranks of a run printed, or the command that a job runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.chain import refuse_chain
from orchestrator.cli.followed import statuses
from orchestrator.cli.options import Cluster, Json, emit
from orchestrator.cli.targets import Target, job_at, job_named, run_at
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED

if TYPE_CHECKING:
    from cluster.jobs.ray_jobs import Jobs, Submission
    from orchestrator.storage.run_directory import RunDir


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(logs)


def logs(
    target: Target,
    rank: Annotated[list[int] | None, typer.Option(min=0, help="show this rank only; repeat")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="show this attempt [default: the last]")] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="show matching lines only")] = None,
    controller: Annotated[
        bool, typer.Option("--controller", help="show the log of the controllers and of data preparation")
    ] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="continue until the run ends")] = False,
    address: Cluster = None,
    as_json: Json = False,
) -> None:
    """Print the output of a run's ranks. For a submitted job without rank options, print the output of its command."""
    try:
        wanted = re.compile(grep or "")
    except re.error as error:
        raise InputError(f"is not a regular expression ({error})", f"--grep {grep}", "fix it") from None
    if not address:
        refuse_chain(target)
    directory = None if address else run_at(target)
    named = job_at(target, address) if directory is None else job_named(target, address)
    if named is not None:
        jobs, job = named
        if not (rank or attempt or grep or controller):
            _print_job(jobs, job, follow, as_json)
            return
        directory = directory or run_at(job.run_dir)
        if directory is None:
            problem = "its run directory cannot be read from this machine"
            raise InputError(problem, job.run_dir, "leave --rank, --attempt, --controller and --grep out")
    assert directory is not None
    if controller:
        if rank or attempt:
            raise InputError("a controller has neither", "--rank, --attempt", "leave it out, or --controller")
        _print_controllers(directory, wanted, follow, as_json)
    else:
        _print_ranks(
            directory, frozenset(rank or ()), attempt=attempt, wanted=wanted, follow=follow, as_json=as_json
        )


def _print_controllers(run: RunDir, wanted: re.Pattern[str], follow: bool, as_json: bool) -> None:
    """Yield the log of each controller in turn, named by its start time."""
    from orchestrator.observe.rank_log import CONTROLLER, LogReader

    log, events = LogReader(run, CONTROLLER), list[dict[str, Any]]()
    for has_ended in _looks(run, follow):
        for name, line in log.new_lines(last=has_ended):
            if wanted.search(line):
                events.append({"began": name.removesuffix(".log"), "line": line})
        if not as_json:
            for event in events:
                print(event["line"], flush=follow)
            events = []
    if as_json:
        emit(events)


def _looks(run: RunDir, follow: bool) -> Iterator[bool]:
    """Whether this read of the logs is the last. Without `follow` the first read is."""
    if not follow:
        yield True
        return
    for status in statuses(run):
        yield status.get("phase") in ENDED


def _print_ranks(
    run: RunDir,
    ranks: frozenset[int],
    attempt: int | None,
    wanted: re.Pattern[str],
    follow: bool,
    as_json: bool,
) -> None:
    entries: list[dict[str, Any]] = []
    alone = len(ranks) == 1
    for number, of, line in _lines(run, ranks, attempt, follow):
        if not wanted.search(line):
            continue
        if as_json:
            entries.append({"attempt": number, "rank": of, "line": line})
        else:
            print(line if alone else f"rank {of} | {line}", flush=follow)
    if as_json:
        emit(entries)


def _lines(
    run: RunDir, ranks: frozenset[int], attempt: int | None, follow: bool
) -> Iterator[tuple[int, int, str]]:
    """Yield attempt, rank and line. With `follow`, continue with later attempts until the run ends."""
    from orchestrator.observe.rank_log import AttemptLog, attempts_of

    attempts = attempts_of(run)
    if attempt is not None and attempt not in attempts and not follow:
        advice = f"attempts {', '.join(map(str, attempts))} did" if attempts else "no other did either"
        raise InputError(f"no rank printed anything; {advice}", f"--attempt {attempt}", "name another")
    shown = attempt or max(attempts, default=0)
    if not shown and not follow:
        print("orchestrator: no rank has printed anything", file=sys.stderr)
        return
    log = AttemptLog(run, shown, ranks)
    for has_ended in _looks(run, follow):
        more = True
        while more:
            later = [] if attempt else [number for number in attempts_of(run) if number > shown]
            more = bool(later)
            yield from ((shown, of, line) for of, line in log.new_lines(last=has_ended or more))
            if later:
                shown = later[0]
                log = AttemptLog(run, shown, ranks)


def _print_job(jobs: Jobs, job: Submission, follow: bool, as_json: bool) -> None:
    if as_json:
        final = jobs.wait(job.id, float("inf")) if follow else job
        emit({**final.to_json(), "lines": jobs.logs(job.id).splitlines()})
    elif follow:
        for part in jobs.follow(job.id):
            print(part, end="", flush=True)
    else:
        print(jobs.logs(job.id), end="")
