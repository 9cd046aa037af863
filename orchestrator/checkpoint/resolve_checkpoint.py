"""Choose the commit that a command reads, although a running job may remove it meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import TypeVar

from orchestrator.checkpoint.commit_store import KEEP_MORE, Store
from orchestrator.checkpoint.manifest import commit_folder
from orchestrator.checkpoint.pins import holding
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import ENDED
from orchestrator.storage.file_names import COMMITS
from orchestrator.storage.run_directory import RunDir

T = TypeVar("T")
TRIES = 3
"""Maximum number of checkpoints to try if each is removed while it is read."""


def chosen(store: Store, step: int | None) -> int:
    """Return the step of a commit.

    Args:
        store: the store of the run's commits.
        step: a step; None for that of the newest sound commit.

    Raises:
        InputError: the commit does not exist.
    """
    if step is not None:
        if step not in (steps := store.steps()):
            raise InputError("there is no such commit", f"{store.uri} step {step}", f"steps: {steps}")
        return step
    newest = store.latest()
    if newest is None:
        raise InputError("there is no sound commit", store.uri, "train first")
    return newest.step


def run_and_step(uri: str, step: int | None, where: str) -> tuple[str, int | None]:
    """Return a run and the step to read, for a `uri` that is a run or the folder of a commit in one.

    Args:
        uri: the path or URI.
        step: the step that was asked for, None without one.
        where: what asked for that step, for messages.

    Raises:
        InputError: the commit is that of another step.
    """
    head, _, name = uri.rstrip("/").rpartition(f"/{COMMITS}/")
    number = name.removeprefix("step-")
    if not (head and number.isdecimal() and name == commit_folder(int(number))):
        return uri, step
    if step not in (None, int(number)):
        raise InputError(f"{name} is the checkpoint of another step", where, "leave it out")
    return head, int(number)


def reading(store: Store, step: int) -> contextlib.AbstractContextManager[None]:
    """Hold the commit of a step while this process reads it in the block, see `hold_if_allowed`.

    A run that has ended removes nothing, so nothing is written into its directory.

    Args:
        store: the store of the run's commits.
        step: the step of the commit.
    """
    run = RunDir(store.uri.removesuffix(f"/{COMMITS}"))
    if run.read_json_or_empty("status.json").get("phase") in ENDED:
        return contextlib.nullcontext()
    by = f"process {os.getpid()} on {socket.gethostname()}, which reads it ({secrets.token_hex(4)})"
    return holding(store, step, by)


def read_chosen(
    store: Store,
    step: int | None,
    read: Callable[[int], T],
    choose: Callable[[Store, int | None], int] = chosen,
) -> T:
    """Choose a commit and return `read(step)`.

    It pins the commit meanwhile, so that a running job does not remove it. A directory that cannot be written takes no
    pin. If the commit then disappears, it chooses again, TRIES times in all; with a `step` it does not.

    Args:
        store: the commits of the run.
        step: the step to read, None to choose one.
        read: reads the commit of a step.
        choose: returns the step to read, see `chosen`.

    Raises:
        InputError: the commit was removed while it was read.
        Exception: what `read` raises for a commit that still exists.
    """
    for _ in range(TRIES if step is None else 1):
        chosen_step = choose(store, step)
        before = set(store.steps())
        try:
            with reading(store, chosen_step):
                return read(chosen_step)
        except Exception as error:
            last_error = error
            after = set(store.steps())
            # A mean of commits also fails if an earlier commit is removed.
            is_there = chosen_step in before & after
            if is_there and (before <= after or isinstance(error, InputError)):
                raise
    message = f"a running job removed the checkpoint at step {chosen_step} while it was read"
    raise InputError(message, store.location, KEEP_MORE) from last_error
