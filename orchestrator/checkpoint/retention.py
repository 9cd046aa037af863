"""Which commits stay, and the removal of the others: manifest first, and never the newest sound one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.checkpoint.manifest import (
    FILE_NAME,
    FOLDER,
    MANIFEST,
    CommitManifest,
    CorruptCommit,
    folder,
    published,
)

if TYPE_CHECKING:
    from orchestrator.checkpoint.store import Store

BEST = ("loss", "min")
"""What makes a commit of a run the best one: the value in its manifest under this key."""


DOCUMENT = re.compile(r"(manifest|records-[0-9]{5,}-[0-9a-z]+)\.json(\.[0-9a-f]{32}\.tmp)?")
"""The manifest, and the notes of its writers; with what a crash leaves of one."""
HINT = re.compile(r"LATEST\.[0-9a-f]{32}\.tmp")


def prune(store: Store, keep: int, every: int | None, best: tuple[str, str] | None) -> list[int]:
    """See `Store.prune`."""
    sizes = store.retry(store.backend.list)
    sound = _sound(store, sizes, limit=max(keep, 1) if best is None else None)
    if not sound:
        return []
    newest = max(sound)
    stay = set(sorted(sound)[-max(keep, 1) :]) | {
        step for step in published(sizes) if every and step % every == 0
    }
    if best is not None:
        key, sign = best[0], {"min": 1, "max": -1}[best[1]]
        rated = [
            (sign * commit.meta[key], step)
            for step, commit in sound.items()
            if commit.meta.get(key) is not None
        ]
        stay |= {min(rated)[1]} if rated else set()
    gone = [step for step in _present(sizes) if step < newest and step not in stay]
    for step in gone:
        remove(store, step, sizes)
    for step in stay & sound.keys():
        _sweep(store, step, sizes, sound[step])
    for path in sizes:
        if HINT.fullmatch(path):  # a hint that a crash left unfinished
            store.retry(store.backend.remove, path)
    return [step for step in gone if f"{folder(step)}/{MANIFEST}" in sizes]


def rewind(store: Store, step: int) -> list[int]:
    """See `Store.rewind`."""
    sizes = store.retry(store.backend.list)
    gone = [newer for newer in _present(sizes) if newer > step]
    for newer in reversed(gone):
        remove(store, newer, sizes)
    return [newer for newer in gone if f"{folder(newer)}/{MANIFEST}" in sizes]


def remove(store: Store, step: int, sizes: Iterable[str]) -> None:
    """Remove a commit. The manifest goes first: from then on there is none that lacks a shard. What somebody else has
    put into its folder stays."""
    paths = [path for path in sizes if path.startswith(folder(step) + "/") and _is_ours(path)]
    for path in sorted(paths, key=lambda path: not path.endswith("/" + MANIFEST)):
        store.retry(store.backend.remove, path, settle=path.endswith("/" + MANIFEST))
    store.retry(store.backend.remove_folder, folder(step))


def _is_ours(path: str) -> bool:
    """Whether a file of a step's folder has a name that only a store gives."""
    name = path.partition("/")[2]
    return bool(FILE_NAME.fullmatch(name) or DOCUMENT.fullmatch(name))


def _sound(store: Store, sizes: dict[str, int], limit: int | None) -> dict[int, CommitManifest]:
    """The newest `limit` commits whose manifest and sizes are right."""
    found: dict[int, CommitManifest] = {}
    for step in sorted(published(sizes), reverse=True):
        if len(found) == limit:
            break
        try:
            commit = store.manifest(step)
        except CorruptCommit:
            continue
        if not commit.missing(sizes):
            found[step] = commit
    return found


def _present(sizes: dict[str, int]) -> list[int]:
    """Steps of which there is anything, ascending."""
    names = {path.split("/")[0] for path in sizes if "/" in path}
    return sorted(int(found[1]) for name in names if (found := FOLDER.fullmatch(name)))


def _sweep(store: Store, step: int, sizes: dict[str, int], commit: CommitManifest) -> None:
    """Remove what dead attempts left in the folder of a commit."""
    named = {f"{folder(step)}/{name}" for name in (*commit.files, MANIFEST)}
    for path in sizes:
        if path.startswith(folder(step) + "/") and path not in named and _is_ours(path):
            store.retry(store.backend.remove, path)
