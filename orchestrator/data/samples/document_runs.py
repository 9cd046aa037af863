"""Runs of consecutive documents in a stream, in memory or, for much text, in files on this node's disk.

The file `<side>.starts` has the first token of each run; `.stops` and `.ends` correspond (see `derived_arrays`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from orchestrator.data.store.derived_arrays import Keep, arrays_on_disk


class Runs(NamedTuple):
    """Tokens [start, stop) of a stream, and the cumulative number of tokens of the runs; int64 [runs]."""

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray


def edges(bounds: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token of each run of `chosen` documents and the one after its last, int64 [runs].

    Document i is tokens [bounds[i], bounds[i + 1]).
    """
    change = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    return bounds[np.flatnonzero(change == 1)], bounds[np.flatnonzero(change == -1)]


class RunsMaker:
    """Joins runs that are added in order, and passes them to `keep` as arrays of starts, stops and ends."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._total = 0
        self._last = np.zeros((2, 0), dtype=np.int64)  # the run that the next one may continue

    def add(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Add the next runs, int64 [runs]."""
        if not len(starts):
            return
        if self._last.size and self._last[1, 0] == starts[0]:
            starts = np.concatenate((self._last[0], starts[1:]))
        else:
            starts = np.concatenate((self._last[0], starts))
            stops = np.concatenate((self._last[1], stops))
        self._emit(starts[:-1], stops[:-1])
        self._last = np.array([[starts[-1]], [stops[-1]]])

    def finish(self) -> None:
        """Pass on the last run."""
        starts, stops = self._last
        self._emit(starts, stops)

    def _emit(self, starts: np.ndarray, stops: np.ndarray) -> None:
        ends = self._total + np.cumsum(stops - starts)
        self._total = int(ends[-1]) if len(ends) else self._total
        for name, values in (("starts", starts), ("stops", stops), ("ends", ends)):
            self._keep(name, values)


Fill = Callable[[dict[str, RunsMaker]], dict[str, Any]]
"""Adds runs to the makers of all sides, and returns facts about them that JSON can hold."""


def in_memory(sides: tuple[str, ...], fill: Fill) -> tuple[dict[str, Runs], dict[str, Any]]:
    """Return the runs of each side that `fill` adds, and the facts that it returns."""
    arrays: dict[str, dict[str, list[np.ndarray]]] = {
        side: {name: [np.zeros(0, np.int64)] for name in Runs._fields} for side in sides
    }
    makers = {
        side: RunsMaker(lambda name, values, side=side: arrays[side][name].append(values))  # type: ignore[misc]
        for side in sides
    }
    facts = fill(makers)
    for maker in makers.values():
        maker.finish()
    runs = {side: Runs(*(np.concatenate(arrays[side][name]) for name in Runs._fields)) for side in sides}
    return runs, facts


def on_disk(
    folder: Path, source: int, sides: tuple[str, ...], fill: Fill
) -> tuple[dict[str, Runs], dict[str, Any]]:
    """Like `in_memory`, but memory-mapped from files in `folder`, see `arrays_on_disk`."""

    def write(keep: Keep) -> dict[str, Any]:
        makers = {
            side: RunsMaker(lambda name, values, side=side: keep(f"{side}.{name}", values))  # type: ignore[misc]
            for side in sides
        }
        facts = fill(makers)
        for maker in makers.values():
            maker.finish()
        return facts

    names = [f"{side}.{name}" for side in sides for name in Runs._fields]
    arrays, facts = arrays_on_disk(folder, source, names, write)
    return {side: Runs(*(arrays[f"{side}.{name}"] for name in Runs._fields)) for side in sides}, facts
