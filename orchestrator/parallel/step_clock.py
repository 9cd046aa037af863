"""Measures where one rank spends the time of each step.

A CPU reads the clock, at a microsecond per switch. On CUDA, where work is queued, events mark the time. They are read
after the device has passed them, so that nothing waits for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

FORWARD = "forward"
BACKWARD = "backward"
COMMUNICATION = "communication"
PIPELINE, OPTIMIZER = "pipeline", "optimizer"
_QUIET: AbstractContextManager[None] = contextlib.nullcontext()


def _moment(on_cuda: bool) -> Any:
    """Return the current time: seconds on a CPU, or a recorded event on CUDA, where calls return at once."""
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Return the seconds between two moments."""
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


class Stopwatch:
    """Measures seconds from its creation to `stop`; on CUDA by events, because calls return at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._began: Any = _moment(self._on_cuda)
        self._end: Any = self._began

    def stop(self) -> None:
        """End the measurement."""
        self._end = _moment(self._on_cuda)

    def seconds(self) -> float:
        """Return the duration. On CUDA, call it only after the host has waited for later work."""
        return _between(self._began, self._end)


class Timeline:
    """The times at which the actions of a pipeline's schedule ran on this rank in one step."""

    def __init__(self, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._actions: list[tuple[str, int, int, Any, Any]] = []
        self._began = self.now()

    def now(self) -> Any:
        """Return the current moment, for `add`."""
        return _moment(self._on_cuda)

    def add(self, kind: str, stage: int, part: int, began: Any) -> None:
        """Add an action that ends now: F, B, I or W (see `planner.simulation.timeline`) of micro-batch `part`.

        Args:
            kind: F, B, I or W.
            stage: number of the stage.
            part: number of the micro-batch.
            began: the moment at which it began, from `now`.
        """
        self._actions.append((kind, stage, part, began, self.now()))

    def actions(self) -> list[tuple[str, int, int, float, float]]:
        """Return kind, stage, micro-batch, begin and end of each action, in seconds since the step began.

        On CUDA this waits for the device.
        """
        if self._on_cuda and self._actions:
            torch.cuda.synchronize()
        return [
            (kind, stage, part, _between(self._began, begin), _between(self._began, end))
            for kind, stage, part, begin, end in self._actions
        ]


class StepClock:
    """Assigns every moment of a step to one of its parts.

    `communication` is exposed time, in which this rank only waits for collectives; on a CPU it includes those within
    the forward and backward passes. `pipeline` is time without a micro-batch to compute: the bubble, and transfers
    between stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self.timeline: Timeline | None = None
        """The timeline of the current step; None unless it is recorded."""
        self._part, self._since = "", 0.0
        self._seconds: dict[str, float] = {}
        # each event begins its part; part "" ends a step
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def switch(self, part: str) -> str:
        """Assign the time from now on to `part`, or to no part if it is empty. Return the previous part."""
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
        """Return a context whose time belongs to `communication`; afterwards the previous part continues.

        It does nothing on CUDA, where a collective is queued and does not wait, and in code that is being compiled.
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
        """End the step and return its seconds by part.

        On CUDA, work that the device has not finished is counted by the next call, so the end of a step is reported
        with the step after it.
        """
        self.switch("")
        if self._events:
            self._read()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _read(self) -> None:
        """Add the durations of all parts whose end the device has passed, without waiting for the others."""
        done = 0
        for (part, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if not end.query():
                break
            if part:
                seconds = start.elapsed_time(end) / 1e3
                self._seconds[part] = self._seconds.get(part, 0.0) + seconds
            done += 1
        # The last mark that was passed stays: it begins the part that is still running.
        del self._marks[:done]
