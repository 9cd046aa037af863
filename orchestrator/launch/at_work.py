"""Whether another command of this machine trains a run or a chain already."""

from __future__ import annotations

import time

from orchestrator.job.errors import InputError
from orchestrator.storage.lease import is_locked
from orchestrator.storage.run_directory import RunDir

LOOKS = 5.0
"""Seconds within which a run that is trained tells how it is."""
EVERY = 0.25


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
