"""A rank's side of the gang: who it is, where its peers meet, and how it reports."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Seat:
    """A rank's place in the world, the address where the ranks meet, and that of the node it is on."""

    rank: int
    world: int
    local_rank: int
    host: str
    port: int
    node: str = ""


class Link:
    """The training thread writes, the heartbeat reads; every method is safe from both.

    `store` is the c10d store behind (host, port) where this process serves it (rank 0), else None.
    """

    def __init__(self, seat: Seat, store: Any = None) -> None:
        self.seat, self.store = seat, store
        self._lock = threading.Lock()
        self._step, self._stop = -1, False
        self._rows: list[dict[str, Any]] = []
        self._dropped = 0

    def report(self, step: int, row: dict[str, Any] | None = None) -> None:
        """Say that `step` is done, and hand over its row if this rank has one."""
        with self._lock:
            self._step = step
            if row is not None:
                self._rows.append(row)

    def stop_requested(self) -> bool:
        """Whether the gang was asked to commit and end."""
        return self._stop

    def request_stop(self) -> None:
        """Ask this rank to commit and end at the next step boundary."""
        self._stop = True

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
