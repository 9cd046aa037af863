"""Tasks over parts of the text, by Ray Data: one CPU each, in order, with errors that are one line.

What passes between them are files, and a row of the dataset says which. A dataset takes 2.7 to 4.3 s until its first
task runs.
"""

from __future__ import annotations

import errno
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ray
import ray.data
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

from orchestrator.data.quiet_logging import quiet
from orchestrator.data.task_output import log_printed, printed
from orchestrator.job.errors import InputError, Unreachable
from orchestrator.storage.retry import storage_failed, transient

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
DEATHS = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)
TRIES = 8
"""How often a task is begun whose process ends without a word: a node that goes away is none of its fault, but a row
on which every process ends must not be tried for ever."""


def run_tasks(
    task: Callable[[dict[str, Any]], None], rows: Sequence[dict[str, Any]], cache: str, leave: float = 0.0
) -> Iterator[int]:
    """Run `task` on each row, as many at once as CPUs are free; yields how many of the first rows are done. `cache` is
    where they write. A task whose process or node ends is begun again. If so many CPUs are to be left that none is
    free, one task runs beside those who use them.

    Raises InputError and Unreachable as the tasks do, for storage that fails there, and for a row on which the process
    ended TRIES times.
    """
    if not rows:
        return

    def run(row: dict[str, Any]) -> dict[str, Any]:
        with printed() as text:
            error = run_task(task, cache, row)
        return {"error": error, "printed": text.getvalue()}

    there, every = ray.available_resources().get("CPU", 1), ray.cluster_resources().get("CPU", 1)
    free = int(min(there, every - leave))
    share = 1.0 if free >= 1 or not leave else 0.0
    tasks = ray.data.TaskPoolStrategy(size=max(1, min(free, len(rows))))
    given = ray.data.from_items(list(rows), override_num_blocks=len(rows))
    with warnings.catch_warnings():  # by no other option can the tries of a task be bounded
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = given.map(run, compute=tasks, num_cpus=share, max_retries=TRIES - 1)
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.execution_options.preserve_order = True
    with _quiet(), _told_of_deaths(cache, "a part"):
        for done, row in enumerate(dataset.iter_rows(), 1):
            log_printed(f"part {done} of {len(rows)}", row["printed"])
            raise_error(row["error"])
            yield done


def run_alone(task: Callable[..., None], cache: str, *arguments: Any) -> None:
    """Run one task with its arguments, as Ray takes them, on one CPU. Raises as `run_tasks`."""
    with _told_of_deaths(cache, "all of the text"):
        error, text = ray.get(_run_alone.remote(task, cache, *arguments))
    log_printed(getattr(task, "__name__", "task"), text)
    raise_error(error)


@contextmanager
def _told_of_deaths(cache: str, of: str) -> Iterator[None]:
    """A process that ended too often is an InputError."""
    try:
        yield
    except DEATHS as error:
        what = f"cannot be made: the process for {of} ended {TRIES} times ({type(error).__name__})"
        hint = "give its machine more memory; see Ray's logs of the worker"
        raise InputError(what, cache, hint) from None


@ray.remote(num_cpus=1, max_retries=TRIES - 1)
def _run_alone(task: Callable[..., None], cache: str, *arguments: Any) -> tuple[str, str]:
    with printed() as text:
        error = run_task(task, cache, *arguments)
    return error, text.getvalue()


def run_task(task: Callable[..., None], cache: str, *arguments: Any) -> str:
    """Run a task; its error as `encode_error` gives it, empty without one."""
    try:
        task(*arguments)
    except Exception as error:
        return encode_error(error, cache)
    return ""


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


def _quiet() -> AbstractContextManager[None]:
    """Keep Ray Data's progress messages out of the terminal; they stay in Ray's log files."""
    handlers = [h for h in logging.getLogger("ray.data").handlers if isinstance(h, logging.StreamHandler)]
    return quiet(handlers, logging.ERROR)
