"""Copy a commit into another store, byte by byte. The manifest is copied last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.storage.file_names import MANIFEST


def copy_commit(
    source: Store, step: int, target: Store, meta: Mapping[str, Any], position: int | None = None
) -> None:
    """Copy a commit to another store, or complete an interrupted copy.

    Tensors are not verified here. They are verified when they are loaded.

    Args:
        source: the store that has the commit.
        step: the step of the commit.
        target: the store to copy to.
        meta: merged into the meta of the copy.
        position: replaces the position of the copy, unless it is None.

    Raises:
        CorruptCommit: the manifest is damaged.
        InputError: the commit does not exist.
    """
    commit = source.manifest(step)
    copied_files = target.retry(target.backend.list, commit_folder(step))
    for name in commit.file_sizes:
        path = f"{commit_folder(step)}/{name}"
        data = source.retry(source.backend.read, path)
        if copied_files.get(path) == len(data):
            continue
        if path in copied_files:  # cut short
            target.retry(target.backend.remove, path)
        target.retry(target.backend.write, path, [data])
    path = f"{commit_folder(step)}/{MANIFEST}"
    with contextlib.suppress(FileExistsError):  # an earlier call has copied it
        copied = dataclasses.replace(
            commit, meta=commit.meta | dict(meta), position=commit.position if position is None else position
        )
        target.retry(target.backend.publish, path, copied.to_bytes())
