"""A rank's side of the gang: who it is, where its peers meet, and how it reports."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

MEETING = 180.0
"""Seconds to wait for the port where the ranks meet."""


@dataclass(frozen=True)
class RankInfo:
    """A rank's place in the world, the address where the ranks meet, and that of the node it is on.

    A `port` of 0 is told later, once rank 0 serves there.
    """

    rank: int
    world: int
    local_rank: int
    host: str
    port: int = 0
    node: str = ""


class WorkerContext:
    """The training thread writes, the heartbeat reads; every method is safe from both.

    `store` is the c10d store where the ranks meet, where this process serves it (rank 0), else None. `news` is set
    when there is something to tell.
    """

    def __init__(self, seat: RankInfo, store: Any = None) -> None:
        self.seat, self.store = seat, store
        self._lock = threading.Lock()
        self._port, self._met = seat.port, threading.Event()
        self.news = threading.Event()
        self._step, self._stop = -1, False
        self._waiting = self._leaving = False
        self._rows: list[dict[str, Any]] = []
        self._dropped = 0

    def report(self, step: int, row: dict[str, Any] | None = None) -> None:
        """Say that `step` is done, and hand over its row if this rank has one."""
        with self._lock:
            self._step = step
            if row is not None:
                self._rows.append(row)
        self.news.set()

    def meet(self, port: int) -> None:
        """Tell the port where rank 0 serves the store."""
        self._port = port
        self._met.set()

    def port(self) -> int:
        """The port where the ranks meet, waited for. Raises TimeoutError if rank 0 never opens it."""
        if not self._port and not self._met.wait(MEETING):
            raise TimeoutError(f"rank 0 opened no store on {self.seat.host} within {MEETING:.0f} s")
        return self._port

    def stop_requested(self) -> bool:
        """Whether the gang was asked to commit and end."""
        return self._stop

    def request_stop(self) -> None:
        """Ask this rank to commit and end at the next step boundary."""
        self._stop = True

    def leave(self) -> None:
        """Note that this process will be taken away soon."""
        self._leaving = True
        self.news.set()

    def waiting(self, now: bool) -> None:
        """Say that the rank waits for storage, which may take longer than any step."""
        self._waiting = now

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for storage."""
        return self._waiting

    @property
    def is_leaving(self) -> bool:
        """Whether this process was told that it will be taken away."""
        return self._leaving

    @property
    def step(self) -> int:
        """The last step reported, -1 before the first."""
        return self._step

    def unsaved_rows(self) -> list[dict[str, Any]]:
        """Rows that nobody has confirmed to be stored; a commit carries them, so that none is ever lost."""
        with self._lock:
            return list(self._rows)

    def take(self, start: int, saved: int) -> tuple[dict[str, Any], ...]:
        """Forget the first `saved` rows of all reported, and return those from number `start` on."""
        with self._lock:
            forget = max(saved - self._dropped, 0)
            del self._rows[:forget]
            self._dropped += forget
            return tuple(self._rows[max(start - self._dropped, 0) :])
