"""Follow a run through the files in its run directory until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from orchestrator.config.outcome import ENDED, Outcome

if TYPE_CHECKING:
    from orchestrator.storage.row_line import Row
    from orchestrator.storage.run_directory import RunDir

EVERY = 0.5
"""Seconds between reads of the status."""


def statuses(run: RunDir) -> Iterator[Row]:
    """Yield the status of the run repeatedly; the last one is final. If no controller is active for the run any more,
    end the command as failed, with one line."""
    from orchestrator.launch.active_controller import Signs, not_driven
    from orchestrator.observe.last_status import last_status

    signs = Signs()
    while True:
        status = last_status(run)
        is_silent = signs.show_no_controller(status)
        yield status
        if status.get("phase") in ENDED:
            return
        if is_silent:
            print(f"orchestrator: {not_driven(run.uri)}", file=sys.stderr)
            raise typer.Exit(Outcome.FAILED.exit_code)
        time.sleep(EVERY)
