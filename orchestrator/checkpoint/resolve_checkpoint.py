"""The commit that a command reads, of a run that may be at work and remove it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from orchestrator.checkpoint.store import KEEP_MORE, Store
from orchestrator.config.errors import InputError

T = TypeVar("T")
TRIES = 3
"""Commits that are chosen one after another, each removed while it was read."""


def chosen(store: Store, step: int | None) -> int:
    """The step itself if it is committed; by default that of the newest sound commit. Raises InputError if there is
    none."""
    if step is not None:
        if step not in (steps := store.steps()):
            raise InputError("there is no such commit", f"{store.uri} step {step}", f"steps: {steps}")
        return step
    newest = store.latest()
    if newest is None:
        raise InputError("there is no sound commit", store.uri, "train first")
    return newest.step


def read_chosen(
    store: Store,
    step: int | None,
    read: Callable[[int], T],
    choose: Callable[[Store, int | None], int] = chosen,
) -> T:
    """What `read` returns of the step that is chosen: of another one if its commit was removed meanwhile, unless a
    `step` is asked for. Raises InputError if it was removed, and what `read` raises of one that is still there."""
    for _ in range(TRIES if step is None else 1):
        here, before = choose(store, step), set(store.steps())
        try:
            return read(here)
        except Exception as error:
            after, last = set(store.steps()), error
            # Of a mean of commits it may be an earlier one that is gone.
            if here in before & after and (before <= after or isinstance(error, InputError)):
                raise
    raise InputError(
        f"a run at work has removed step {here} while it was read", store.location, KEEP_MORE
    ) from last
