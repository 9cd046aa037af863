"""Copying a commit into another store, byte by byte, with its manifest last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.checkpoint.store import Store
from orchestrator.storage.file_names import MANIFEST


def copy_commit(
    source: Store, step: int, target: Store, meta: Mapping[str, Any], position: int | None = None
) -> None:
    """Copy the commit of `step` to `target`; the copy's manifest has `meta` merged into its own, and another
    `position` if one is given. An interrupted copy is completed.

    Raises CorruptCommit if the manifest is damaged, InputError if there is none. The tensors are not verified here but
    when they are loaded.
    """
    commit = source.manifest(step)
    there = target.retry(target.backend.list, commit_folder(step))
    for name in commit.files:
        path = f"{commit_folder(step)}/{name}"
        data = source.retry(source.backend.read, path)
        if there.get(path) == len(data):
            continue
        if path in there:  # cut short
            target.retry(target.backend.remove, path)
        target.retry(target.backend.write, path, [data])
    path = f"{commit_folder(step)}/{MANIFEST}"
    with contextlib.suppress(FileExistsError):  # it was copied before
        copied = dataclasses.replace(
            commit, meta=commit.meta | dict(meta), position=commit.position if position is None else position
        )
        target.retry(target.backend.publish, path, copied.to_bytes())
