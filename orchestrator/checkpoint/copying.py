"""A commit copied into another store, byte by byte, with its manifest last."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from orchestrator.checkpoint.manifest import folder
from orchestrator.checkpoint.store import Store
from orchestrator.storage.file_names import MANIFEST


def copy(source: Store, step: int, target: Store, **meta: Any) -> None:
    """Make the commit of `step` one of `target` too, with `meta` in the place of what its manifest says of its own
    run; a copy that was cut short before is made whole.

    Raises CorruptCommit if its manifest is damaged, InputError if there is none. Bytes are not verified: whoever
    loads them does.
    """
    commit = source.manifest(step)
    for name in commit.files:
        path = f"{folder(step)}/{name}"
        target.retry(target.backend.write, path, [source.retry(source.backend.read, path)])
    path = f"{folder(step)}/{MANIFEST}"
    with contextlib.suppress(FileExistsError):  # it was whole already
        told = dataclasses.replace(commit, meta=commit.meta | meta)
        target.retry(target.backend.publish, path, told.to_bytes())
