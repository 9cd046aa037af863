"""Runs of documents that follow each other in a stream: in memory, or of much text in files on this node's disk.

<derived>/split/<key>/000000.json            of source 0: what its maker has to say, sizes and checksums, written last
<derived>/split/<key>/000000.<side>.starts   the first token of each run, int64 little-endian; .stops and .ends alike
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from orchestrator.data.node_copies import locked
from orchestrator.storage.atomic import draft_of, replace_file

CHUNK = 2**20
"""Numbers that are hashed at once."""


class Runs(NamedTuple):
    """Tokens [start, stop) of a stream, and how many tokens the runs up to each have together; int64 [runs]."""

    starts: np.ndarray
    stops: np.ndarray
    ends: np.ndarray


def edges(bounds: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each run of `chosen` documents and the one after its last, int64 [runs]; document i is tokens
    [bounds[i], bounds[i + 1])."""
    change = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    return bounds[np.flatnonzero(change == 1)], bounds[np.flatnonzero(change == -1)]


class RunsMaker:
    """Joins runs that are added in order, and gives them to `keep`, an array of starts, stops and ends at a time."""

    def __init__(self, keep: Callable[[str, np.ndarray], Any]) -> None:
        self._keep, self._total = keep, 0
        self._last = np.zeros((2, 0), dtype=np.int64)  # the run that the next may continue

    def add(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """The next runs, int64 [runs]."""
        if not len(starts):
            return
        if self._last.size and self._last[1, 0] == starts[0]:
            starts = np.concatenate((self._last[0], starts[1:]))
        else:
            starts, stops = np.concatenate((self._last[0], starts)), np.concatenate((self._last[1], stops))
        self._emit(starts[:-1], stops[:-1])
        self._last = np.array([[starts[-1]], [stops[-1]]])

    def finish(self) -> None:
        """There are no more."""
        self._emit(*self._last)

    def _emit(self, starts: np.ndarray, stops: np.ndarray) -> None:
        ends = self._total + np.cumsum(stops - starts)
        self._total = int(ends[-1]) if len(ends) else self._total
        for name, values in (("starts", starts), ("stops", stops), ("ends", ends)):
            self._keep(name, values.astype("<i8"))


Fill = Callable[[dict[str, RunsMaker]], dict[str, Any]]
"""Adds runs to the makers of all sides, and returns what there is to say of them, as JSON."""


def in_memory(sides: tuple[str, ...], fill: Fill) -> tuple[dict[str, Runs], dict[str, Any]]:
    """The runs of each side that `fill` adds, and what it says."""
    found: dict[str, dict[str, list[np.ndarray]]] = {
        side: {name: [np.zeros(0, np.int64)] for name in Runs._fields} for side in sides
    }
    makers = {
        side: RunsMaker(lambda name, values, side=side: found[side][name].append(values))  # type: ignore[misc]
        for side in sides
    }
    told = fill(makers)
    for maker in makers.values():
        maker.finish()
    runs = {side: Runs(*(np.concatenate(found[side][name]) for name in Runs._fields)) for side in sides}
    return runs, told


def on_disk(
    folder: Path, source: int, sides: tuple[str, ...], fill: Fill
) -> tuple[dict[str, Runs], dict[str, Any]]:
    """The same, memory-mapped from files in `folder`, which the first process of a node makes unless they are there and
    sound."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = folder / f"{source:06d}.json"
    if (found := _there(folder, source, sides)) is not None:
        return found
    with locked(facts.with_suffix(".lock")):  # one process of a node makes it while the others wait
        if (found := _there(folder, source, sides)) is None:
            _write(folder, source, sides, fill)
            found = _there(folder, source, sides)
    assert found is not None
    return found


def _write(folder: Path, source: int, sides: tuple[str, ...], fill: Fill) -> None:
    names = [f"{side}.{name}" for side in sides for name in Runs._fields]
    drafts = {name: Path(draft_of(str(folder / f"{source:06d}.{name}"))) for name in names}
    files: dict[str, BinaryIO] = {}
    sums = {name: xxhash.xxh3_128() for name in names}

    def keeper(side: str) -> Callable[[str, np.ndarray], None]:
        def keep(name: str, values: np.ndarray) -> None:
            sums[f"{side}.{name}"].update(data := values.tobytes())
            files[f"{side}.{name}"].write(data)

        return keep

    try:
        for name, draft in drafts.items():
            files[name] = draft.open("wb")
        makers = {side: RunsMaker(keeper(side)) for side in sides}
        told = fill(makers)
        for maker in makers.values():
            maker.finish()
        for name, file in files.items():
            file.close()
            os.replace(drafts[name], folder / f"{source:06d}.{name}")
        content = json.dumps({"told": told, "sums": {name: sums[name].hexdigest() for name in names}})
        replace_file(str(folder / f"{source:06d}.json"), [content.encode()])
    finally:
        for name, draft in drafts.items():
            if name in files:
                files[name].close()
            draft.unlink(missing_ok=True)


def _there(
    folder: Path, source: int, sides: tuple[str, ...]
) -> tuple[dict[str, Runs], dict[str, Any]] | None:
    """The runs if all of them are there, and are what was written."""
    try:
        found = json.loads((folder / f"{source:06d}.json").read_bytes())
        runs = {
            side: Runs(
                *(
                    _mapped(folder / f"{source:06d}.{side}.{name}", found["sums"][f"{side}.{name}"])
                    for name in Runs._fields
                )
            )
            for side in sides
        }
        return runs, dict(found["told"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, expected: str) -> np.ndarray:
    """The numbers of a file. Raises ValueError if they are not what was written, OSError if it is missing."""
    size = path.stat().st_size
    values = np.memmap(path, "<i8", mode="r") if size else np.zeros(0, "<i8")
    found = xxhash.xxh3_128()
    for at in range(0, len(values), CHUNK):
        found.update(values[at : at + CHUNK].tobytes())
    if found.hexdigest() != expected:
        raise ValueError(f"{path} is not what was written")
    return values
