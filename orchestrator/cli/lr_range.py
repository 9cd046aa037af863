"""The option --lr-range of the command run: a learning-rate range test."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from orchestrator.cli.options import at_its_end, emit, note_of_search, run_of
from orchestrator.cli.try_run import begun_anew
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.tune.lr_range import OPTION, SUFFIX, found_in, job_of_range, range_of

if TYPE_CHECKING:
    from orchestrator.storage.run_directory import RunDir

PAGE = "lr-range.html"


def run_lr_range(
    document: Mapping[str, Any],
    text: str,
    run_dir: str | None,
    address: str | None,
    *,
    priority: int,
    how: str | None,
    as_json: bool,
) -> Outcome:
    """Run a range test of a job in a directory of its own, show what it found, and return how its training ended.

    A loss that is not a number is a result, not a failure. What a stopped test has found is shown too. Raises
    InputError.
    """
    from orchestrator.launch.start_run import run as drive
    from orchestrator.observe.console import ProgressDisplay

    job = job_of_range(document, range_of(text))
    if document["tune"] is not None:
        note_of_search(OPTION)
    directory = run_of(job.name, f"{run_dir.rstrip('/')}{SUFFIX}" if run_dir else None)
    with begun_anew(directory), ProgressDisplay(how=how) as display:
        outcome = drive(job, directory, until=None, address=address, show=display.update, priority=priority)
    is_over = outcome.outcome == Outcome.DONE or has_diverged(directory)
    ending = {} if is_over else {"exit_code": outcome.outcome.exit_code, "line": outcome.line}
    if not is_over and outcome.line and not as_json:
        print(f"orchestrator: {outcome.line}", file=sys.stderr)
    with at_its_end():
        try:
            if is_over or outcome.outcome == Outcome.STOPPED:
                show(job.name, job.workload.objective, directory, as_json, ending)
                return Outcome.DONE if is_over else outcome.outcome
        except InputError:  # too few steps
            if is_over:
                raise
        if as_json:
            emit({**ending, "run_dir": directory.uri})
    return outcome.outcome


def has_diverged(directory: RunDir) -> bool:
    """Return whether the last fault of the test is a loss or a gradient that is not a number."""
    from orchestrator.storage.row_line import EVENTS

    causes = [event["cause"] for event in directory.rows(EVENTS) if event.get("cause")]
    return bool(causes) and causes[-1].get("kind") == "unstable"


def show(
    name: str, objective: str, directory: RunDir, as_json: bool, ending: Mapping[str, Any] | None = None
) -> None:
    """Write the page and the numbers of a test that has ended, and print them; as JSON with those of its `ending`.

    Raises InputError for too few steps.
    """
    from orchestrator.config.loss_unit import loss_unit
    from orchestrator.observe.pages import range_page
    from orchestrator.storage.row_line import METRICS

    # A later attempt repeats steps, or goes on after those of an earlier one.
    rows = {row["step"]: row for row in sorted(directory.rows(METRICS), key=itemgetter("attempt"))}
    result = found_in([rows[step] for step in sorted(rows)], has_diverged(directory))
    numbers = result.to_json()
    directory.write_json("lr-range.json", numbers)
    directory.write_text(PAGE, range_page.page(name, loss_unit(objective), numbers, result.line))
    if as_json:
        emit({**(ending or {}), "run_dir": directory.uri, **numbers})
        return
    print(range_page.on_terminal(numbers))
    print(result.line)
    print(directory.at(PAGE))


def refuse_other_runs(options: dict[str, bool]) -> None:
    """Raise InputError if another option is given that means another kind of run."""
    for name, is_given in options.items():
        if is_given:
            raise InputError(f"does not go with {name}", OPTION, "give one of them")
