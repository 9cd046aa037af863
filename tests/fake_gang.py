"""A gang without processes: a script says what each look at it shows. For tests of what watches gangs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from cluster.workers.gang import Bundle, GangStatus
from cluster.workers.hang_report import HangReport
from cluster.workers.rank_output import OutputTarget


@dataclass
class Attempt:
    """What one start was given, and what was asked of the gang since."""

    world: int
    config: dict[str, Any]
    ranks_per_group: int = 1
    avoid: frozenset[str] = frozenset()
    running: bool = True
    saved: int = 0
    stop_requested: bool = False


class FakeGang:
    """Each poll shows the next beat of `script(attempt)`; after its end the last one again, without rows.

    The script may look at the attempt between beats. What it raises, the poll raises. A start fails with the first
    of `refusals` that is left and not empty. `capacity` tells how many ranks could run, all of which are ready.
    """

    def __init__(
        self,
        script: Callable[[Attempt], Iterator[GangStatus]],
        refusals: list[str] | None = None,
        capacity: Callable[[], int] = lambda: 1,
    ) -> None:
        self._script, self._refusals, self._capacity = script, refusals or [], capacity
        self._attempt: Attempt | None = None
        self._beats: Iterator[GangStatus] = iter(())
        self._last = GangStatus()
        self._has_asked = False

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`."""
        return self._capacity()

    def start(
        self,
        world_size: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        ranks_per_group: int = 1,
        avoid: Set[str] = frozenset(),
        output: OutputTarget | None = None,
    ) -> None:
        """See `Gang.start`."""
        if self._refusals and (refusal := self._refusals.pop(0)):
            raise TimeoutError(refusal)
        self._attempt = Attempt(world_size, config, ranks_per_group, frozenset(avoid))
        self._beats, self._last = self._script(self._attempt), GangStatus()
        self._has_asked = False

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        """See `Gang.prewarm`."""

    def occupied_workers(self) -> int:
        """See `Gang.occupied_workers`."""
        return 0

    def ready(self) -> int:
        """See `Gang.ready`."""
        return self._capacity()

    def lost_nodes(self) -> Set[str]:
        """See `Gang.lost_nodes`."""
        return frozenset()

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`. Raises RuntimeError if the gang is not running: nobody may look at it then."""
        if self._attempt is None:
            raise RuntimeError("this gang is not running")
        self._attempt.saved = saved
        self._last = next(self._beats, None) or dataclasses.replace(self._last, rows=(), at=time.monotonic())
        if self._has_asked:
            ranks = tuple(dataclasses.replace(rank, hang=HangReport()) for rank in self._last.ranks)
            self._last = dataclasses.replace(self._last, ranks=ranks)
        return self._last

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        if self._attempt is not None:
            self._attempt.stop_requested = True

    def ask_profile(self, asked: dict[str, Any]) -> None:
        """See `Gang.ask_profile`."""

    def output(self, rank: int) -> str:
        """See `Gang.output`."""
        return ""

    def print_stacks(self) -> None:
        """See `Gang.print_stacks`: the ranks answer at once, and tell nothing."""
        self._has_asked = True

    def stop(self) -> None:
        """See `Gang.stop`."""
        if self._attempt is not None:
            self._attempt.running = False
            self._attempt = None

    def close(self) -> None:
        """See `Gang.close`."""
        self.stop()
