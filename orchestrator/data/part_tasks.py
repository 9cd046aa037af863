"""Tasks over parts of the text, by Ray Data: one CPU each, in order, with errors that are one line."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
import ray.data

from orchestrator.data.quiet_logging import quiet
from orchestrator.job.errors import InputError, Unreachable
from orchestrator.storage.retry import storage_failed, transient

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_tasks(
    task: Callable[[dict[str, Any]], None], rows: Sequence[dict[str, Any]], cache: str
) -> Iterator[int]:
    """Run `task` on each row as a task of Ray Data, on the CPUs that are free; yields how many of the first rows are
    done. `cache` is where they write.

    Raises InputError and Unreachable as the tasks do, and for storage that fails there.
    """

    def run(row: dict[str, Any]) -> dict[str, Any]:
        try:
            task(row)
        except Exception as error:
            return {"error": encode_error(error, cache)}
        return {"error": ""}

    free = int(ray.available_resources().get("CPU", 1))
    tasks = ray.data.TaskPoolStrategy(size=max(1, min(free, len(rows))))
    dataset = ray.data.from_items(list(rows), override_num_blocks=len(rows)).map(
        run, compute=tasks, num_cpus=1
    )
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.execution_options.preserve_order = True
    with _quiet():
        for done, row in enumerate(dataset.iter_rows(), 1):
            raise_error(row["error"])
            yield done


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
