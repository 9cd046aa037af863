"""What a controller waits for before it trains: the data, and storage that does not answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from orchestrator.config.errors import InputError, one_line
from orchestrator.config.spec import JobSpec
from orchestrator.controller.run_history import RunHistory
from orchestrator.data.progress import StageLine
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.retry import may_come_back, patient
from orchestrator.storage.run_directory import RunDir

T = TypeVar("T")
LOOK = 0.1
"""Seconds between two looks for the beginning of data that is streamed."""


class StorageWait:
    """Calls that need storage, made while no gang runs: tried again for as long as a gang may go on without commits, or
    until `give_up`, which is when the run is to stop. `tell` hears what is waited for."""

    def __init__(self, spec: JobSpec, give_up: Callable[[], bool], tell: Callable[[str], None]) -> None:
        retry = patient(spec.limits.unsaved, give_up)
        self._retry, self._tell = dataclasses.replace(retry, until_repaired=True), tell

    def __call__(self, call: Callable[[], T]) -> T:
        """What the call returns. Raises what storage raised last."""

        def attempt() -> T:
            try:
                return call()
            except Exception as error:
                if may_come_back(error):
                    self._tell(f"waiting for storage: {one_line(error)}")
                raise

        return self._retry(attempt)


class Abandoned(Exception):
    """The run has ended before its data was prepared."""


class DataPreparation:
    """The job's data, held-out sets included, prepared in a thread, so that a stop is heard meanwhile. Data that is
    streamed is prepared further while the run trains."""

    def __init__(self, spec: JobSpec, run: RunDir, stored: StorageWait, tell: Callable[[str], None]) -> None:
        self._spec, self._run, self._stored, self._tell = spec, run, stored, tell
        self._work: Future[PreparedData] | None = None
        self._begun: PreparedData | None = None
        self._ended = False
        self._failed: InputError | None = None
        self.moved = 0.0
        """When a part was last done, monotonic seconds."""

    def goes_on(self, training: bool, stop: Callable[[str], None]) -> bool:
        """Whether more of the data is being prepared. Raises what has ended that; while ranks are `training` and it is
        an error of the input, it calls `stop`, so that they commit, and raises it when none trains any more."""
        if self._failed and not training:
            raise self._failed
        if self._work is None or not self._work.done():
            return self._work is not None
        work, self._work = self._work, None
        try:
            work.result()
        except InputError as error:
            if not training:
                raise
            self._failed = error
            stop(f"the data cannot be prepared: {error}")
        return False

    def look(self, history: RunHistory, seconds: float) -> PreparedData:
        """Where the data is that the run began with, nowhere if it is not there within so many seconds.

        Raises InputError.
        """
        if self._work is None:
            commit = history.newest.meta.get("sets", {}) if history.newest else {}
            before = PreparedData(history.data, commit | history.event_history.sets)
            line = StageLine(self._say)
            pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")

            def work() -> PreparedData:
                return prepared(self._spec, self._run, before, line, begun=self._begin)

            self._begun = None
            self._work = pool.submit(self._stored, work)
            pool.shutdown(wait=False)
        end = time.monotonic() + seconds
        while self._begun is None and not self._work.done() and time.monotonic() < end:
            wait([self._work], timeout=min(seconds, LOOK))
        if self._work.done():
            work_done, self._work = self._work, None
            return work_done.result()
        return self._begun or PreparedData()

    def close(self) -> None:
        """End the thread after the part that is made now."""
        self._ended = True

    def _begin(self, data: PreparedData) -> None:
        self._begun = data

    def _say(self, text: str) -> None:
        if self._ended:
            raise Abandoned
        self.moved = time.monotonic()
        self._tell(f"preparing {text}")
