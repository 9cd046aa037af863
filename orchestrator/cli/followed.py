"""A run that is followed by what it writes into its run directory, until it has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from orchestrator.job.outcome import ENDED, Outcome

if TYPE_CHECKING:
    from orchestrator.storage.row_line import Row
    from orchestrator.storage.run_directory import RunDir

SILENCE = 300.0
"""Seconds without a sign of whoever drives a run after which nobody waits for it any more: while workers are placed and
begin on new nodes there is none for minutes."""
EVERY = 0.5
"""Seconds between looks at it."""


def statuses(run: RunDir) -> Iterator[Row]:
    """The status of the run, again and again; the last one says that it has ended. If nobody drives the run any more,
    the command ends as one that failed, in a line."""
    seen, heard = None, time.monotonic()
    while True:
        status = run.read_json_or_empty("status.json")
        if status.get("time") != seen:
            seen, heard = status.get("time"), time.monotonic()
        yield status
        if status.get("phase") in ENDED:
            return
        if time.monotonic() - heard > SILENCE:
            print(f"orchestrator: {run.uri}: nobody has driven this run for {SILENCE:.0f} s", file=sys.stderr)
            raise typer.Exit(Outcome.FAILED.exit_code)
        time.sleep(EVERY)
