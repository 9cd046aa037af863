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


def _moment(on_cuda: bool) -> Any:
    """This moment: a number of seconds, or on CUDA, where calls return at once, an event."""
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Seconds from one moment to another."""
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


class Stopwatch:
    """Seconds of what is done from its making to `stop`; on CUDA, where calls return at once, by events."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._began: Any = _moment(self._on_cuda)
        self._ended: Any = self._began

    def stop(self) -> None:
        """What is timed ends here."""
        self._ended = _moment(self._on_cuda)

    def seconds(self) -> float:
        """How long it took; on CUDA asked for once the host has waited for what came after."""
        return _between(self._began, self._ended)


class Timeline:
    """When the actions of a pipeline's schedule ran on this rank, in one step."""

    def __init__(self, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._actions: list[tuple[str, int, int, Any, Any]] = []
        self._began = self.now()

    def now(self) -> Any:
        """This moment, for `add`."""
        return _moment(self._on_cuda)

    def add(self, kind: str, stage: int, part: int, began: Any) -> None:
        """An action that ends now: F, B, I or W (see `planner.simulation.timeline`) of micro-batch `part`."""
        self._actions.append((kind, stage, part, began, self.now()))

    def actions(self) -> list[tuple[str, int, int, float, float]]:
        """Kind, stage, micro-batch, begin and end in seconds since the step began. On CUDA the device is waited for."""
        if self._on_cuda and self._actions:
            torch.cuda.synchronize()
        return [
            (kind, stage, part, _between(self._began, begin), _between(self._began, end))
            for kind, stage, part, begin, end in self._actions
        ]


class StepClock:
    """Gives every moment of a step to one of its parts.

    `communication` is exposed: time in which this rank does nothing but wait for collectives, on a CPU also those
    within the forward and the backward pass. `pipeline` is time without a micro-batch to compute: the bubble, and
    transfers between stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self.timeline: Timeline | None = None
        """Of the step that runs, if it is recorded."""
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

    def record(self) -> None:
        """Record the timeline of the step that begins now."""
        self.timeline = Timeline(self._events)

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
