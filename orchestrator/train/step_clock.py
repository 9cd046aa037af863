"""Where the time of a step goes on one rank, measured in every step.

On a CPU by the clock, which costs a microsecond a switch. On CUDA, where work is queued, by events: they are read once
the device has come past them, so that nothing waits for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

FORWARD, BACKWARD, COMMUNICATION = "forward", "backward", "communication"
PIPELINE, OPTIMIZER = "pipeline", "optimizer"
_QUIET: AbstractContextManager[None] = contextlib.nullcontext()


class Stopwatch:
    """Seconds of what is done from its making to `stop`; on CUDA, where calls return at once, by events."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._began: Any = self._now()
        self._ended: Any = self._began

    def stop(self) -> None:
        """What is timed ends here."""
        self._ended = self._now()

    def seconds(self) -> float:
        """How long it took; on CUDA asked for once the host has waited for what came after."""
        if self._on_cuda:
            return float(self._began.elapsed_time(self._ended)) / 1e3
        return float(self._ended - self._began)

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepClock:
    """Gives every moment of a step to one of its parts.

    `communication` is exposed: time in which this rank does nothing but wait for collectives, on a CPU also those
    within the forward and the backward pass. `pipeline` is time without a micro-batch to compute: the bubble, and
    transfers between stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._part, self._since = "", 0.0
        self._seconds: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event]] = []  # each begins its part; "" ends a step

    def switch(self, part: str) -> str:
        """From now on the time belongs to `part`, and to none if it is empty. Returns the part before."""
        before, self._part = self._part, part
        if self._events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
            return before
        now = time.perf_counter()
        if before:
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._since = now
        return before

    @property
    def runs(self) -> bool:
        """Whether a step is being timed."""
        return bool(self._part)

    def communicating(self) -> AbstractContextManager[None]:
        """What is done within belongs to `communication`, and what comes after to the part before.

        Not on CUDA, where a collective is queued and does not wait; nor in code that is being compiled.
        """
        return _QUIET if self._events or torch.compiler.is_compiling() else self._communicating()

    @contextlib.contextmanager
    def _communicating(self) -> Iterator[None]:
        if not self.runs:
            yield
            return
        before = self.switch(COMMUNICATION)
        try:
            yield
        finally:
            self.switch(before)

    def take(self) -> dict[str, float]:
        """End the step; its seconds by part. On CUDA what the device has not done yet is left to the next call, so that
        the end of a step is told with the step after it."""
        self.switch("")
        if self._events:
            self._read()
        found, self._seconds = self._seconds, {}
        return found

    def _read(self) -> None:
        done = 0
        for (part, begun), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            if not ended.query():
                break
            if part:
                seconds = begun.elapsed_time(ended) / 1e3
                self._seconds[part] = self._seconds.get(part, 0.0) + seconds
            done += 1
        del self._marks[:done]
