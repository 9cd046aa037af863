"""What a rank's training code is given: its rank, where the ranks meet, and a way to report and to be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STORE_PORT_TIMEOUT = 180.0
"""Seconds to wait for the port of the store on rank 0."""


@dataclass(frozen=True)
class RankInfo:
    """A rank's number, the world size, its number on its node, the host and port of the c10d store, and the address of
    its node.

    A `port` of 0 is sent later, once rank 0 serves the store.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int = 0
    node: str = ""


class WorkerContext:
    """Shared by the training thread, which writes, and the heartbeat threads, which read; all methods are thread-safe.

    `store` is the c10d store if this process serves it (rank 0), else None. `changed` is set when there is something
    to send.
    """

    def __init__(self, rank_info: RankInfo, store: Any = None) -> None:
        self.rank_info, self.store = rank_info, store
        self._lock = threading.Lock()
        self._port, self._port_known = rank_info.port, threading.Event()
        self.changed = threading.Event()
        self._step, self._evaluated_batches, self._stop = -1, 0, False
        self._waiting = self._preempted = False
        self._profile: dict[str, Any] | None = None
        self.on_hang: Callable[[], None] | None = None
        """Called, in a thread of its own, when the gang is about to be ended because it hangs."""
        self._rows: list[dict[str, Any]] = []
        self._dropped = 0

    def report(self, step: int, row: dict[str, Any] | None = None) -> None:
        """Report that `step` is done, with its row of metrics if this rank has one."""
        with self._lock:
            self._step = step
            if row is not None:
                self._rows.append(row)
        self.changed.set()

    def progressed(self) -> None:
        """Report that one more batch is evaluated, which takes no step."""
        self._evaluated_batches += 1
        self.changed.set()

    def set_store_port(self, port: int) -> None:
        """Set the port where rank 0 serves the store, and wake those who wait for it."""
        self._port = port
        self._port_known.set()

    def store_port(self) -> int:
        """Wait for the port where rank 0 serves the store. Raises TimeoutError after STORE_PORT_TIMEOUT."""
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

    def ask_profile(self, asked: dict[str, Any]) -> None:
        """Ask this rank to profile its next steps; of two requests the latter counts."""
        self._profile = asked

    def take_profile(self) -> dict[str, Any] | None:
        """The profile that was asked for since the last call, None without one."""
        asked, self._profile = self._profile, None
        return asked

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
        """Whether this process has had notice that it will be taken away."""
        return self._preempted

    @property
    def step(self) -> int:
        """The last step reported, -1 before the first."""
        return self._step

    @property
    def evaluated_batches(self) -> int:
        """Batches that this process has evaluated."""
        return self._evaluated_batches

    def unsaved_rows(self) -> list[dict[str, Any]]:
        """Rows that nobody has confirmed to be stored; a commit carries them, so that none is ever lost."""
        with self._lock:
            return list(self._rows)

    def take_rows(self, start: int, saved: int) -> tuple[dict[str, Any], ...]:
        """Forget the first `saved` rows of all reported, and return those from number `start` on."""
        with self._lock:
            confirmed = max(saved - self._dropped, 0)
            del self._rows[:confirmed]
            self._dropped += confirmed
            return tuple(self._rows[max(start - self._dropped, 0) :])
