"""The requests of rank 0 for all logits of a teacher that are missing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchestrator.train.rollouts.work_queue import QueueClient
from orchestrator.train.task import RolloutAddress

AT_ONCE = 64
"""Units of work that are in the queue at once. More teacher workers than this would not all have work."""


class PartRequests:
    """Asks for parts in a thread, so many at once, until all are there."""

    def __init__(
        self,
        address: RolloutAddress,
        attempt: int,
        parts: dict[str, Sequence[int] | np.ndarray],
        finish: Callable[[], None],
    ) -> None:
        """Begin.

        Args:
            address: where the queue of work is.
            attempt: the attempt of the run.
            parts: by name, the samples of the missing parts, in the order in which they are needed.
            finish: called once all parts are there.
        """
        self._client = QueueClient(address.address, address.token)
        self._attempt = attempt
        self._parts = parts
        self._finish = finish
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="logits", daemon=True).start()

    def check(self) -> None:
        """Raise what ended the thread, if it failed."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._ask_all()
        except Exception as error:  # raised by the thread that waits for the parts
            self._error = error

    def _ask_all(self) -> None:
        asked: deque[str] = deque()
        for name, samples in self._parts.items():
            if len(asked) == AT_ONCE:
                self._client.collect([asked.popleft()])
            content: dict[str, Any] = {"samples": list(map(int, samples))}
            self._client.ask(self._attempt, {name: content}, is_ahead=True)
            asked.append(name)
        self._client.collect(asked)
        if self._parts:
            self._finish()
        self._client.finish(self._attempt)
        self._client.close()
