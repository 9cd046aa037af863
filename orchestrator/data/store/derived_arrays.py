"""Arrays that each node derives from prepared data once, and memory-maps from files on its disk.

<derived>/<kind>/<key>/000000.json     facts about the arrays of source 0, and their checksums; written last
<derived>/<kind>/<key>/000000.<name>   the numbers of one array, int64 little-endian
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from orchestrator.data.store.node_copies import locked
from orchestrator.storage.atomic import draft_of, replace_file

CHUNK = 2**20
"""Numbers hashed in one call."""
Keep = Callable[[str, np.ndarray], Any]
"""Takes the next piece of a named array."""


def arrays_in_memory(
    names: Sequence[str], make: Callable[[Keep], dict[str, Any]]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays that `make` passes to its argument piece by piece, int64, and the facts that it returns."""
    result: dict[str, list[np.ndarray]] = {name: [np.zeros(0, np.int64)] for name in names}
    facts = make(lambda name, values: result[name].append(values))
    return {name: np.concatenate(pieces) for name, pieces in result.items()}, facts


def arrays_on_disk(
    folder: Path, source: int, names: Sequence[str], make: Callable[[Keep], dict[str, Any]]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Like `arrays_in_memory`, but memory-mapped from files in `folder`. The node's first process makes them unless
    they exist and are sound.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = folder / f"{source:06d}.json"
    if (existing := _existing(folder, source, names)) is not None:
        return existing
    with locked(facts.with_suffix(".lock")):  # one process of a node makes the arrays, the others wait
        if (existing := _existing(folder, source, names)) is None:
            _write(folder, source, names, make)
            existing = _existing(folder, source, names)
    assert existing is not None
    return existing


def _write(folder: Path, source: int, names: Sequence[str], make: Callable[[Keep], dict[str, Any]]) -> None:
    drafts = {name: Path(draft_of(str(folder / f"{source:06d}.{name}"))) for name in names}
    files: dict[str, BinaryIO] = {}
    sums = {name: xxhash.xxh3_128() for name in names}

    def keep(name: str, values: np.ndarray) -> None:
        sums[name].update(data := values.astype("<i8").tobytes())
        files[name].write(data)

    try:
        for name, draft in drafts.items():
            files[name] = draft.open("wb")
        facts = make(keep)
        for name, file in files.items():
            file.close()
            os.replace(drafts[name], folder / f"{source:06d}.{name}")
        content = json.dumps({"told": facts, "sums": {name: sums[name].hexdigest() for name in names}})
        replace_file(str(folder / f"{source:06d}.json"), [content.encode()])
    finally:
        for name, draft in drafts.items():
            if name in files:
                files[name].close()
            draft.unlink(missing_ok=True)


def _existing(
    folder: Path, source: int, names: Sequence[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Return the arrays if all of them exist and are undamaged."""
    try:
        document = json.loads((folder / f"{source:06d}.json").read_bytes())
        arrays = {name: _mapped(folder / f"{source:06d}.{name}", document["sums"][name]) for name in names}
        return arrays, dict(document["told"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, expected: str) -> np.ndarray:
    """Return the numbers of a file. Raises ValueError if they are damaged, OSError if the file is missing."""
    size = path.stat().st_size
    values = np.memmap(path, "<i8", mode="r") if size else np.zeros(0, "<i8")
    checksum = xxhash.xxh3_128()
    for at in range(0, len(values), CHUNK):
        checksum.update(values[at : at + CHUNK].tobytes())
    if checksum.hexdigest() != expected:
        raise ValueError(f"{path} differs from what was written")
    return values
