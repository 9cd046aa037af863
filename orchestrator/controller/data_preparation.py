"""Wait before training: for the data to be prepared, and for storage to answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

from orchestrator.config.errors import InputError, one_line
from orchestrator.controller.run_history import RunHistory
from orchestrator.data.progress import Progress, StageLine
from orchestrator.resolve.prepared_data import PreparedData
from orchestrator.storage.retry import may_come_back, patient

T = TypeVar("T")
LOOK = 0.1
"""Seconds between two checks for the beginning of streamed data."""


class StorageWait:
    """Calls functions that need storage, again and again for up to `limits.unsaved` seconds, while no gang runs."""

    def __init__(self, unsaved: float, give_up: Callable[[], bool], tell: Callable[[str], None]) -> None:
        """Configure the retries.

        Args:
            unsaved: seconds for which storage may fail.
            give_up: returns whether to stop trying, because the run must stop.
            tell: gets a line about the reason of a wait.
        """
        retry = patient(unsaved, give_up)
        self._retry = dataclasses.replace(retry, until_repaired=True)
        self._tell = tell

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` returns. Raises the last error of storage when it gives up."""

        def attempt() -> T:
            try:
                return call()
            except Exception as error:
                if may_come_back(error):
                    self._tell(f"waiting for storage: {one_line(error)}")
                raise

        return self._retry(attempt)


class Abandoned(Exception):
    """The run ended before its data was prepared."""


class Prepare(Protocol):
    """Prepares a job's data, see `orchestrator.resolve.prepared_data.prepared`."""

    def __call__(
        self, before: PreparedData, tell: Progress, *, on_first_part: Callable[[PreparedData], None] | None
    ) -> PreparedData: ...


class DataPreparation:
    """Prepares the job's data and held-out sets in a thread, so the controller notices a stop meanwhile.

    Streamed data is prepared further while the run trains.

    Attributes:
        moved: the monotonic time at which a part was last prepared.
    """

    def __init__(self, prepare: Prepare, stored: StorageWait, tell: Callable[[str], None]) -> None:
        """Prepare nothing yet, see `look`.

        Args:
            prepare: prepares the data of the job.
            stored: retries calls that need storage.
            tell: gets a line about the progress.
        """
        self._prepare = prepare
        self._stored = stored
        self._tell = tell
        self._work: Future[PreparedData] | None = None
        """The preparation in progress."""
        self._streamed: PreparedData | None = None
        """Streamed data whose beginning is prepared."""
        self._closed = False
        """Whether the run has ended."""
        self._failed: InputError | None = None
        """The error to raise once no rank trains any more."""
        self.moved = 0.0

    def goes_on(self, training: bool, stop: Callable[[str], None]) -> bool:
        """Return whether more of the data is being prepared.

        Args:
            training: whether ranks are training.
            stop: asks the ranks to commit and end. It is called if the preparation fails while they train.

        Raises:
            InputError: the data is wrong. While ranks train, the error waits until they have committed and ended.
            Exception: any other error of the preparation.
        """
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
        """Start the preparation unless it runs, and wait up to `seconds` for the data.

        Args:
            history: says which data the run began with.
            seconds: how long to wait, in seconds.

        Returns:
            The prepared data, or an empty `PreparedData` if it is not ready.

        Raises:
            InputError: the data is wrong, or differs from what the run began with.
        """
        if self._work is None:
            commit = history.commits.newest.meta.get("sets", {}) if history.commits.newest else {}
            before = PreparedData(history.data, commit | history.event_history.sets)
            line = StageLine(self._say)
            pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")

            def work() -> PreparedData:
                return self._prepare(before, line, on_first_part=self._begin)

            self._streamed = None
            self._work = pool.submit(self._stored, work)
            pool.shutdown(wait=False)
        end = time.monotonic() + seconds
        while self._streamed is None and not self._work.done() and time.monotonic() < end:
            wait([self._work], timeout=min(seconds, LOOK))
        if self._work.done():
            work_done, self._work = self._work, None
            return work_done.result()
        return self._streamed or PreparedData()

    def close(self) -> None:
        """End the thread after the part in progress."""
        self._closed = True

    def _begin(self, data: PreparedData) -> None:
        self._streamed = data

    def _say(self, text: str) -> None:
        if self._closed:
            raise Abandoned
        self.moved = time.monotonic()
        self._tell(f"preparing {text}")
