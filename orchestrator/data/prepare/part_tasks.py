"""Tasks over parts of the text, by Ray: one CPU each, in order, with errors that are one line.

What passes between them are files, and a row says which.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import dropwhile
from typing import IO, Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.data.quiet_logging import quiet
from orchestrator.storage.retry import storage_failed, transient

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""What is run; both sides are what a row of a dataset can hold."""
NAME = "part"
"""What a process that runs one is called, as `ray::part`."""


def results(
    run: Run, given: Sequence[dict[str, Any]], workers: int, cpus: float, tries: int
) -> Iterator[dict[str, Any]]:
    """What `run` returns for each input, `workers` of them at once with `cpus` each; one whose process ends is tried
    again, so often in all. Raises what Ray does when that does not help."""
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return (_by_dataset if nodes > 1 else _by_tasks)(run, given, workers, cpus, tries)


def _by_tasks(
    run: Run, given: Sequence[dict[str, Any]], workers: int, cpus: float, tries: int
) -> Iterator[dict[str, Any]]:
    task = _call.options(name=NAME, num_cpus=cpus, max_retries=tries - 1)
    function = ray.put(run)  # it may hold much, such as a tokenizer
    left, waiting, running = iter(given), deque[Any](), list[Any]()

    def begin() -> None:
        for one in left:
            running.append(task.remote(function, one))
            waiting.append(running[-1])
            if len(running) == workers:
                return

    try:
        begin()
        while running:
            running[:] = ray.wait(running)[1]
            begin()  # first, since who takes the results may be busy
            while waiting and waiting[0] not in running:
                yield ray.get(waiting.popleft())
    finally:
        if ray.is_initialized():
            for begun in running:
                ray.cancel(begun)


@ray.remote
def _call(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    return run(given)


def _by_dataset(
    run: Run, given: Sequence[dict[str, Any]], workers: int, cpus: float, tries: int
) -> Iterator[dict[str, Any]]:
    import ray.data

    with warnings.catch_warnings():  # by no other option can the tries of a task be bounded
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = ray.data.from_items(list(given), override_num_blocks=len(given)).map(
            run, compute=ray.data.TaskPoolStrategy(size=workers), num_cpus=cpus, max_retries=tries - 1
        )
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.execution_options.preserve_order = True
    with _quiet():
        yield from dataset.iter_rows()


def _quiet() -> AbstractContextManager[None]:
    """Keep Ray Data's progress messages out of the terminal; they stay in Ray's log files."""
    handlers = [h for h in logging.getLogger("ray.data").handlers if isinstance(h, logging.StreamHandler)]
    return quiet(handlers, logging.ERROR)


MOST = 1 << 14
"""Characters of a task that come back, the first of them."""
LOGGER = logging.getLogger("orchestrator.data")


class Copy(io.TextIOBase):
    """A stream whose text goes on to `stream`, and its first MOST characters to `text`."""

    def __init__(self, stream: IO[str], text: io.StringIO) -> None:
        self._stream, self._text = stream, text

    encoding = "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # such as `buffer`

    def writable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        self._text.write(text[: max(MOST - self._text.tell(), 0)])
        return self._stream.write(text)

    def flush(self) -> None:
        """See `io.IOBase`."""
        self._stream.flush()


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """Have what is printed in this context, warnings included; it is printed where it was before too."""
    text = io.StringIO()
    with (
        contextlib.redirect_stdout(Copy(sys.stdout, text)),
        contextlib.redirect_stderr(Copy(sys.stderr, text)),
    ):
        yield text


def log_printed(task: str, text: str) -> None:
    """Log what a task has printed, a message a line."""
    for line in text.splitlines():
        if line.strip():
            LOGGER.info("data, %s: %s", task, line)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
DEATHS = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)
TRIES = 8
"""How often a task is begun whose process ends without a word: a node that goes away is none of its fault, but a row
on which every process ends must not be tried for ever."""


Task = Callable[..., Callable[[], None] | None]
"""What is done with a row; if it returns a function, that is the rest of it, which mostly waits."""
TOGETHER_BYTES = 2**25
"""Bytes of text whose parts one task may take, one after the other."""
MOST_TOGETHER = 16
"""Rows that one task may take."""


def run_tasks(
    task: Task,
    rows: Sequence[dict[str, Any]],
    cache: str,
    leave: float = 0.0,
    together: int = 1,
    there: Callable[[dict[str, Any]], bool] = lambda row: False,
) -> Iterator[int]:
    """Run `task` on each row, which JSON can hold, as many at once as CPUs are free; yields how many of the first rows
    are done. `cache` is where they write. A task whose process or node ends is begun again. If so many CPUs are to be
    left that none is free, one task runs beside those who use them.

    Small ones are done `together`, as many as this in one task at most: there the rest of one (see `Task`) is done
    beside the next, and nobody waits for Ray between them. One that is begun again passes over the first of its rows
    that are `there`.

    Raises InputError and Unreachable as the tasks do, for storage that fails there, and for a row on which the process
    ended TRIES times.
    """
    if not rows:
        return

    def run(given: dict[str, Any]) -> dict[str, Any]:
        group = json.loads(given["rows"])
        with printed() as text:
            todo = list(dropwhile(there, group)) if len(group) > 1 else group
            done, error = run_rows(task, cache, todo)
        return {"done": len(group) - len(todo) + done, "error": error, "printed": text.getvalue()}

    unused, every = ray.available_resources().get("CPU", 1), ray.cluster_resources().get("CPU", 1)
    free = int(min(unused, every - leave))
    share = 1.0 if free >= 1 or not leave else 0.0
    workers = max(1, min(free, len(rows)))
    groups = [
        {"rows": json.dumps(rows[one.start : one.stop])} for one in grouped(len(rows), workers, together)
    ]
    done = 0
    with _told_of_deaths(cache, "a part"):
        for group in results(run, groups, workers, share, TRIES):
            log_printed(f"part {done + 1} of {len(rows)}", group["printed"])
            for _ in range(group["done"]):
                done += 1
                yield done
            raise_error(group["error"])


def grouped(count: int, workers: int, together: int) -> list[range]:
    """The numbers below `count` in groups that follow each other, none larger than `together`: smaller ones towards the
    end, so that all workers end at about the same time (guided self-scheduling: Polychronopoulos and Kuck, 1987)."""
    found: list[range] = []
    first = 0
    while first < count:
        size = max(1, min(together, (count - first) // (2 * workers)))
        found.append(range(first, first + size))
        first += size
    return found


def together(part_bytes: int) -> int:
    """How many parts of so many bytes one task takes, see `run_tasks`."""
    return max(1, min(MOST_TOGETHER, TOGETHER_BYTES // max(part_bytes, 1)))


def run_alone(task: Task, cache: str, *arguments: Any) -> None:
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
        hint = "give its machine more memory; on a cluster, Ray's logs of the worker say more"
        raise InputError(what, cache, hint) from None


@ray.remote(num_cpus=1, max_retries=TRIES - 1)
def _run_alone(task: Task, cache: str, *arguments: Any) -> tuple[str, str]:
    with printed() as text:
        error = run_task(task, cache, *arguments)
    return error, text.getvalue()


def run_task(task: Task, cache: str, *arguments: Any) -> str:
    """Run a task and the rest of it; its error as `encode_error` gives it, empty without one."""
    try:
        if rest := task(*arguments):
            rest()
    except Exception as error:
        return encode_error(error, cache)
    return ""


def run_rows(task: Task, cache: str, rows: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Run a task on one row after the other, the rest of each beside the next, until there is an error: how many of the
    first rows are done, and the error as of `run_task`."""
    done = 0
    with ThreadPoolExecutor(1) as pool:
        rest: Future[str] | None = None
        for row in rows:
            begun: list[Callable[[], None] | None] = []
            error = run_task(lambda row=row, begun=begun: begun.append(task(row)), cache)
            if rest and (failed := rest.result()):
                return done, failed
            done += rest is not None
            if error:
                return done, error
            rest = pool.submit(run_task, begun[0] or (lambda: None), cache)
        error = rest.result() if rest else ""
    return done + (rest is not None and not error), error


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
    if isinstance(error, FileNotFoundError) and error.errno is None:  # as stores tell it
        reason, place = os.strerror(errno.ENOENT), error
    return json.dumps([passing, f"cannot be used on a worker's node ({reason})", str(place), hint])


def raise_error(text: str) -> None:
    """Raise the error that `encode_error` encoded: InputError, or Unreachable if it is transient. Nothing for ""."""
    if text:
        passing, *arguments = json.loads(text)
        raise (Unreachable if passing else InputError)(*arguments)
