"""Whether somebody drives a run: another command of this machine, or anyone at all."""

from __future__ import annotations

import time

from orchestrator.config.errors import InputError
from orchestrator.storage.lease import is_locked
from orchestrator.storage.run_directory import RunDir

LOOKS = 5.0
"""Seconds within which a run that is trained tells how it is."""
EVERY = 0.25
SILENCE = 300.0
"""Seconds without a sign of whoever drives a run after which nobody waits for it any more: while workers are placed and
begin on new nodes there is none for minutes."""


class Signs:
    """What was heard of a run by who waits for it."""

    def __init__(self) -> None:
        self._told: float | None = None
        self._heard = time.monotonic()

    def are_gone(self, told: float | None) -> bool:
        """Whether nobody drives the run any more, whose status now is of the time `told`."""
        if told != self._told:
            self._told, self._heard = told, time.monotonic()
        return time.monotonic() - self._heard > SILENCE


def not_driven(run: str) -> str:
    """What is said of a run whose signs are gone."""
    return f"nobody has driven {run} for {SILENCE:.0f} s"


def refuse_if_at_work(run_dir: RunDir, *stages: RunDir) -> None:
    """Raise InputError if another command of this machine trains the run, or drives the chain of these `stages`: one
    that is locked, and goes on telling how it is. The lock of a command that was just killed is held a little longer,
    too."""
    before, deadline = None, time.monotonic() + LOOKS
    while run_dir.local and is_locked(run_dir.path) and time.monotonic() < deadline:
        told = [each.read_json_or_empty("status.json").get("time") for each in stages or (run_dir,)]
        if before is not None and told != before:
            what, hint = (
                "another command trains this run",
                "wait for its end, or press Ctrl-C in its terminal",
            )
            raise InputError(what, run_dir.uri, hint)
        before = told
        time.sleep(EVERY)
