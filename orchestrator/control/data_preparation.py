"""What a controller waits for before it trains: the data, and storage that does not answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from orchestrator.control.run_history import RunHistory
from orchestrator.data.progress import StageLine
from orchestrator.job.errors import one_line
from orchestrator.job.spec import JobSpec
from orchestrator.resolve.prepared_data import PreparedData, prepared
from orchestrator.storage.retry import may_come_back, patient
from orchestrator.storage.run_directory import RunDir

T = TypeVar("T")


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


class DataPreparation:
    """The job's data, held-out sets included, prepared in a thread, so that a stop is heard meanwhile."""

    def __init__(self, spec: JobSpec, run: RunDir, stored: StorageWait, tell: Callable[[str], None]) -> None:
        self._spec, self._run, self._stored, self._tell = spec, run, stored, tell
        self._work: Future[PreparedData] | None = None

    def look(self, history: RunHistory, seconds: float) -> PreparedData:
        """Where the data is that the run began with, nowhere if it is not there within so many seconds.

        Raises InputError.
        """
        if self._work is None:
            commit = history.newest.meta.get("sets", {}) if history.newest else {}
            before = PreparedData(history.data, commit | history.event_history.sets)
            line = StageLine(lambda text: self._tell(f"preparing {text}"))
            pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
            self._work = pool.submit(self._stored, lambda: prepared(self._spec, self._run, before, line))
            pool.shutdown(wait=False)
        wait([self._work], timeout=seconds)
        if not self._work.done():
            return PreparedData()
        work, self._work = self._work, None
        return work.result()
