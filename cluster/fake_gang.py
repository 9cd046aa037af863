"""A gang without processes: a script says what each look at it shows. For tests of what watches gangs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from cluster.gang import Beat, Bundle


class FakeGang:
    """Each poll shows the next beat of `script(gang)`; after its end the last one again, without rows.

    The script may look at the gang between beats: `world` and `config` as started, `saved` as polled, and
    whether a stop is asked for. What it raises, the poll raises. With a `refusal`, the start fails with it.
    """

    def __init__(self, script: Callable[[FakeGang], Iterator[Beat]], refusal: str = "") -> None:
        self.world, self.saved = 0, 0
        self.config: dict[str, Any] = {}
        self.running = self.stop_requested = False
        self._beats, self._last, self._refusal = script(self), Beat(), refusal

    def start(self, world: int, bundle: Bundle, target: str, config: dict[str, Any]) -> None:
        """See `Gang.start`."""
        if self._refusal:
            raise TimeoutError(self._refusal)
        self.world, self.config, self.running = world, config, True

    def poll(self, saved: int) -> Beat:
        """See `Gang.poll`. Raises RuntimeError if the gang is not running: nobody may look at it then."""
        if not self.running:
            raise RuntimeError("this gang is not running")
        self.saved = saved
        self._last = next(self._beats, dataclasses.replace(self._last, rows=()))
        return self._last

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        self.stop_requested = True

    def stop(self) -> None:
        """See `Gang.stop`."""
        self.running = False
