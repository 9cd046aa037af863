"""Tasks over parts of the text, by Ray: one CPU each, in order, with errors that are one line.

They are plain tasks and no dataset of Ray Data: what passes between them are files. A dataset takes 2.7 to 4.3 s until
its first task runs here, with two actors and 260 MiB of its own; a plain task takes 0.6 s.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayError, WorkerCrashedError

from orchestrator.job.errors import InputError, Unreachable
from orchestrator.storage.retry import storage_failed, transient

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
DEATHS = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)
TRIES = 8
"""How often a task is begun whose process ends without a word: a node that goes away is none of its fault, but a row
on which every process ends must not be tried for ever."""
CANCEL_SECONDS = 10.0


def run_tasks(
    task: Callable[[dict[str, Any]], None], rows: Sequence[dict[str, Any]], cache: str
) -> Iterator[int]:
    """Run `task` on each row as a task of Ray, on the CPUs that are free; yields how many of the first rows are done.
    `cache` is where they write. A task whose process or node ends is begun again.

    Raises InputError and Unreachable as the tasks do, for storage that fails there, and for a row on which the process
    ended TRIES times.
    """

    @ray.remote(num_cpus=1, max_retries=0)
    def run(row: dict[str, Any]) -> str:
        try:
            task(row)
        except Exception as error:
            return encode_error(error, cache)
        return ""

    free = max(1, int(ray.available_resources().get("CPU", 1)))
    waiting, tried = list(range(len(rows)))[::-1], Counter[int]()
    running: dict[ray.ObjectRef, int] = {}
    done: set[int] = set()
    first = 0
    try:
        while waiting or running:
            while waiting and len(running) < free:
                number = waiting.pop()
                running[run.remote(rows[number])] = number
            ready, _ = ray.wait(list(running), timeout=1.0)
            for ref in ready:
                number = running.pop(ref)
                if _ended(ref, tried, number, cache):
                    done.add(number)
                else:
                    waiting.insert(0, number)  # last, when what has ended it may be over
            while first in done:
                done.remove(first)
                first += 1
                yield first
    finally:
        _cancel(list(running))


def _ended(ref: ray.ObjectRef, tried: Counter[int], number: int, cache: str) -> bool:
    """Whether a task has done its row; False if its process died before. Raises as `run_tasks`."""
    try:
        raise_error(ray.get(ref))
    except DEATHS as error:
        tried[number] += 1
        if tried[number] == TRIES:
            what = (
                f"cannot be made: the process for part {number} ended {TRIES} times ({type(error).__name__})"
            )
            raise InputError(
                what, cache, "give its machine more memory; see Ray's logs of the worker"
            ) from None
        return False
    return True


def _cancel(left: list[ray.ObjectRef]) -> None:
    """End the tasks that still run, so that nothing is written after an error."""
    for ref in left:
        with contextlib.suppress(RayError, ValueError):
            ray.cancel(ref, force=True)
    if left:
        with contextlib.suppress(RayError):
            ray.wait(left, num_returns=len(left), timeout=CANCEL_SECONDS)


def encode_error(error: Exception, cache: str) -> str:
    """An error of a task as JSON, since an exception would carry Ray's full stack trace. Errors other than of input or
    storage are raised."""
    if not (isinstance(error, InputError) or storage_failed(error)):
        raise error
    passing = transient(error)
    if isinstance(error, InputError):
        return json.dumps([passing, error.what, error.where, error.hint])
    hint = "keep sources and cache where all nodes see them"
    if getattr(error, "errno", None) in FULL:
        hint = "make room or name another data.cache; the same command goes on"
    reason, place = getattr(error, "strerror", None) or error, getattr(error, "filename", None) or cache
    return json.dumps([passing, f"cannot be used on a worker's node ({reason})", str(place), hint])


def raise_error(text: str) -> None:
    """Raise the error that `encode_error` encoded: InputError, or Unreachable if it is transient. Nothing for ""."""
    if text:
        passing, *arguments = json.loads(text)
        raise (Unreachable if passing else InputError)(*arguments)
