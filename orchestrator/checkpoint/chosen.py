"""The commit that a command reads, of a run that may be at work and remove it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from orchestrator.checkpoint.manifest import CommitManifest
from orchestrator.checkpoint.store import KEEP_MORE, Store
from orchestrator.job.errors import InputError

T = TypeVar("T")
TRIES = 3
"""Commits that are chosen one after another, each removed while it was read."""


def chosen(store: Store, step: int | None) -> CommitManifest:
    """The commit of that step, by default the newest sound one. Raises InputError if there is none."""
    if step is not None:
        if step not in (steps := store.steps()):
            raise InputError("there is no such commit", f"{store.uri} step {step}", f"steps: {steps}")
        return store.manifest(step)
    newest = store.latest()
    if newest is None:
        raise InputError("there is no sound commit", store.uri, "train first")
    return newest


def read_chosen(
    store: Store,
    step: int | None,
    read: Callable[[CommitManifest], T],
    choose: Callable[[Store, int | None], CommitManifest] = chosen,
) -> T:
    """What `read` returns of the commit that is chosen: another one if it was removed meanwhile, unless
    a `step` is asked for. Raises InputError if it was removed, and what `read` raises of one that is still there."""
    for _ in range(TRIES if step is None else 1):
        commit, before = choose(store, step), set(store.steps())
        try:
            return read(commit)
        except Exception as error:
            gone, last = before - set(store.steps()), error
            # Of a mean of commits it may be an earlier one that is gone.
            if commit.step not in gone and (not gone or isinstance(error, InputError)):
                raise
    what = f"a run at work has removed the commit at step {commit.step} while it was read"
    raise InputError(what, store.location, KEEP_MORE) from last
