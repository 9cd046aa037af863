"""The context of a rank's entry point: its rank, the address of the c10d store, and ways to report and to be
stopped."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.workers.hang_report import HangReport

STORE_PORT_TIMEOUT = 1200.0
"""Seconds to wait for the port of the store on rank 0. A controller notices earlier that rank 0 is late."""


@dataclass(frozen=True)
class RankInfo:
    """The position of a rank in its gang."""

    rank: int
    world_size: int
    local_rank: int
    """The number of the rank on its node."""
    host: str
    """The host of the c10d store."""
    port: int = 0
    """The port of the c10d store; 0 if it is sent later, once rank 0 serves the store."""
    node: str = ""
    """The address of the rank's node."""


@dataclass(frozen=True)
class Work:
    """Work of a rank between two optimizer steps, such as an evaluation, and how much of it is done."""

    name: str
    """The rank's activity, as text for people."""
    unit: str
    """The unit that is counted, in the plural: batches or tokens."""
    done: int
    """How many of them are done."""
    of: int
    """How many there are, or at most."""
    seconds: float
    """Seconds from the start of the work until the last of them was done."""

    @property
    def seconds_left(self) -> float:
        """An estimate of the seconds that the rest takes. At least one of `done` is needed."""
        return self.seconds / self.done * (self.of - self.done)


@dataclass(frozen=True)
class Stage:
    """What a rank does at present."""

    number: int = 0
    """How many stages it has begun."""
    name: str = "starting"
    """The present one, as text for people."""


class WorkerContext:
    """The state that a rank's training thread writes and its heartbeat threads read. All methods are thread-safe.

    Attributes:
        rank_info: the position of the rank in its gang.
        store: the c10d store if this process serves it (rank 0), else None.
        changed: set when there is something to send.
        on_hang: called, in a separate thread, when the gang is about to be killed because it hangs. Its argument
            sends a report to the gang.
    """

    def __init__(self, rank_info: RankInfo, store: Any = None) -> None:
        self.rank_info = rank_info
        self.store = store
        self.changed = threading.Event()
        self.on_hang: Callable[[Callable[[HangReport], None]], None] | None = None
        self._lock = threading.Lock()
        self._port = rank_info.port
        self._port_known = threading.Event()
        self._step = -1
        self._evaluated_batches = 0
        self._work: Work | None = None
        self._work_began = 0.0
        self._stage = Stage()
        self._stop = False
        self._waiting = False
        self._preempted = False
        self._profile: dict[str, Any] | None = None
        """The request for a profile that `take_profile` has not returned yet."""
        self._rows: list[dict[str, Any]] = []
        """Rows that are not confirmed to be stored."""
        self._dropped = 0
        """How many rows were forgotten because they are stored."""
        self._held_back = 0
        """How many of the last rows wait for `release`."""

    def report(self, step: int, row: dict[str, Any] | None = None, hold: int = 0) -> None:
        """Report that `step` is done, with its row of metrics if this rank has one.

        Only a row is sent at once. The other ranks' steps come with their next heartbeats: otherwise every rank of a
        large gang would send at every step.

        Args:
            step: the step.
            row: its row.
            hold: how many of the last rows wait for `release`, because a step only counts as done once no single node
                can take it along.
        """
        with self._lock:
            self._step = step
            if row is None:
                return
            self._rows.append(row)
            self._held_back = hold
        self.changed.set()

    def release(self, step: int) -> None:
        """Send the rows up to `step` that `report` has held back.

        After an error they stay behind: the death of another node is one, and may have taken their steps along.
        """
        with self._lock:
            before = self._held_back
            held_rows = self._rows[max(len(self._rows) - before, 0) :]
            self._held_back = sum(row["step"] > step for row in held_rows)
        if self._held_back < before:
            self.changed.set()

    def begin_stage(self, name: str) -> None:
        """Report what this rank does from now on, such as "loading weights", as text for people.

        Every rank of a gang must begin the same stages in the same order: if ranks wait for each other, those with the
        fewest are late.
        """
        self._stage = Stage(self._stage.number + 1, name)

    @property
    def stage(self) -> Stage:
        """What this rank does."""
        return self._stage

    def begin_work(self, name: str, unit: str, of: int) -> None:
        """Report that work between two steps begins, such as an evaluation. `progressed` counts what is done of it.

        Args:
            name: what is done, for people.
            unit: what is counted, in the plural.
            of: how many there are, or at most.
        """
        self._work_began = time.monotonic()
        self._work = Work(name=name, unit=unit, done=0, of=of, seconds=0.0)

    def progressed(self) -> None:
        """Report progress without a step: one more batch is evaluated. The next heartbeat sends it."""
        self.lives()
        if work := self._work:
            seconds = round(time.monotonic() - self._work_began, 3)
            self._work = dataclasses.replace(work, done=work.done + 1, seconds=seconds)

    def lives(self) -> None:
        """Report that this rank is not stuck within a step or a batch that may take long, such as one of generation."""
        self._evaluated_batches += 1

    def end_work(self) -> None:
        """Report that the work between two steps has ended."""
        self._work = None

    def set_store_port(self, port: int) -> None:
        """Set the port at which rank 0 serves the store, and wake the threads that wait for it."""
        self._port = port
        self._port_known.set()

    def store_port(self) -> int:
        """Wait for the port at which rank 0 serves the store. Raises TimeoutError after STORE_PORT_TIMEOUT."""
        if not self._port and not self._port_known.wait(STORE_PORT_TIMEOUT):
            host = self.rank_info.host
            raise TimeoutError(f"rank 0 opened no store on {host} within {STORE_PORT_TIMEOUT:.0f} s")
        return self._port

    def stop_requested(self) -> bool:
        """Whether the gang was asked to commit and end."""
        return self._stop

    def request_stop(self) -> None:
        """Ask this rank to commit and end at the next step boundary."""
        self._stop = True

    def ask_profile(self, request: dict[str, Any]) -> None:
        """Ask this rank to profile its next steps. A later request replaces an earlier one."""
        self._profile = request

    def take_profile(self) -> dict[str, Any] | None:
        """Return the request for a profile since the last call, None without one."""
        request, self._profile = self._profile, None
        return request

    def notice_preemption(self) -> None:
        """Note that this process will be taken away soon."""
        self._preempted = True
        self.changed.set()

    def set_waiting(self, now: bool) -> None:
        """Report whether the rank waits for storage, which may take longer than any step."""
        self._waiting = now

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for storage."""
        return self._waiting

    @property
    def is_leaving(self) -> bool:
        """Whether this process got notice that it will be preempted."""
        return self._preempted

    @property
    def step(self) -> int:
        """The last step reported, -1 before the first."""
        return self._step

    @property
    def evaluated_batches(self) -> int:
        """How many batches this process has evaluated."""
        return self._evaluated_batches

    @property
    def work(self) -> Work | None:
        """The work in progress between two steps, None while the rank trains."""
        return self._work

    def unsaved_rows(self) -> list[dict[str, Any]]:
        """Return the rows that are not confirmed to be stored. Every commit carries them, so none is ever lost."""
        with self._lock:
            return list(self._rows)

    def take_rows(self, start: int, saved: int) -> tuple[dict[str, Any], ...]:
        """Forget the first `saved` of all reported rows, and return those from number `start` on.

        Args:
            start: number of the first row to return, counted over all rows of this process.
            saved: how many of all rows are safely stored.
        """
        with self._lock:
            confirmed = max(saved - self._dropped, 0)
            del self._rows[:confirmed]
            self._dropped += confirmed
            ready = self._rows[: max(len(self._rows) - self._held_back, 0)]
            return tuple(ready[max(start - self._dropped, 0) :])
