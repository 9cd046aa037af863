"""A gang of local processes: for replaying a run, rehearsing it, and testing without a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Set
from typing import Any

from cluster.workers.fork_server import ForkServer
from cluster.workers.gang import Bundle, Cause, GangStatus, RankStatus
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.worker_context import RankInfo

LOOPBACK = "127.0.0.1"


class ProcessGang:
    """Ranks forked from one process that dies with this one, on loopback."""

    def __init__(self) -> None:
        self._watch = HeartbeatServer(LOOPBACK)
        self._zygote: ForkServer | None = None

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`. As many as there are processors for; `start` takes more."""
        return int((os.cpu_count() or 1) / bundle.cpu)

    def start(
        self,
        world: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        together: int = 1,
        avoid: Set[str] = frozenset(),
    ) -> None:
        """See `Gang.start`."""
        if self._zygote is None or self._zygote.target != target:
            self._end()
            self._zygote = ForkServer(target)
        self.stop()
        token = self._watch.expect(["local"] * world)
        words = {"target": target, "config": config, "watcher": self._watch.address, "token": token}
        try:
            for rank in range(world):
                seat = dataclasses.asdict(RankInfo(rank, world, rank, LOOPBACK))
                pid = self._zygote.launch(seat=seat, **words)
                self._watch.mark(rank, pid=pid, heard=time.monotonic())
        except OSError as error:
            self._end()
            raise TimeoutError(f"workers did not start: {error}") from None

    def hold(self, count: int) -> None:
        """See `Gang.hold`. There is nothing to hold: one process forks any number of ranks."""

    def ready(self) -> int:
        """See `Gang.ready`."""
        return os.cpu_count() or 1

    def lost(self) -> Set[str]:
        """See `Gang.lost`."""
        return frozenset()

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        return self._watch.poll(saved, wait, self._cause)

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        self._watch.tell({"stop": True})

    def stop(self) -> None:
        """See `Gang.stop`."""
        if self._zygote is not None:
            try:
                self._zygote.end_ranks()
            except OSError:
                self._end()

    def close(self) -> None:
        """See `Gang.close`."""
        self.stop()
        self._end()
        self._watch.close()

    def _end(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _cause(self, rank: RankStatus) -> tuple[Cause, str]:
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(OSError):
            while self._zygote is not None and time.monotonic() < deadline:
                if (cause := self._zygote.cause(rank.pid)) is not None:
                    return cause, cause.text
                time.sleep(0.002)  # the kernel closes the connection just before the process ends
        return Cause("lost"), "the process that starts ranks has ended"
