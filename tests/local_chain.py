"""Whole chains on gangs of local processes: each stage's controller in a thread of this process, and no Ray."""

from __future__ import annotations

import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from local_run import controller_here

from orchestrator.chain import drive
from orchestrator.chain.drive import ChainOutcome, Driver
from orchestrator.chain.preflight import check_chain
from orchestrator.chain.stage_run import stage_runs
from orchestrator.config.chain import parse_chain
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.launch.watched_run import RunOutcome
from orchestrator.storage.run_directory import RunDir


class Local:
    """A run in a thread of this process. One gang lasts for all of them, so that only one runs at a time."""

    def __init__(
        self, job: dict[str, Any], run: RunDir, cache: Path, faults: tuple[str, ...], turn: Any
    ) -> None:
        self.stopping, self.status = False, {"phase": "start"}
        self._controller = controller_here(deepcopy(job), run.uri, cache, faults=faults)
        self._turn, self._outcome = turn, None
        threading.Thread(target=self._drive, daemon=True).start()

    def _drive(self) -> None:
        outcome: Any
        with self._turn:
            try:
                found = self._controller.drive()
                outcome = RunOutcome(Outcome(found["state"]), found, found["reason"] or "")
            except InputError as error:
                outcome = RunOutcome(Outcome.WRONG_INPUT, None, str(error))
        self._outcome = outcome

    def look(self) -> RunOutcome | None:
        """See `WatchedRun`."""
        if self.stopping:
            self._controller.request_stop("stopped by the user")
        return self._outcome


def drive_chain_here(
    document: dict[str, Any],
    root: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: dict[str, tuple[str, ...]] | None = None,
) -> ChainOutcome:
    """Run a chain whose stages export nothing, with all of its data prepared in `cache`."""
    document.setdefault("data", {})["cache"] = str(cache)
    chain, place, turn = parse_chain(document), RunDir(str(root)), threading.Lock()
    stages = stage_runs(chain, place)
    done = check_chain(chain, stages, place, None)
    with monkeypatch.context() as patch:
        patch.setattr(drive, "attach", lambda job, run, _, faults, **__: Local(job, run, cache, faults, turn))
        place.create()
        driver = Driver(chain, stages, place, done, lambda _: None, None, faults or {}, 0)
        driver.drive()
        return driver.finish()
