"""Ray tasks over parts of the text, with one CPU each, in order. Errors are one line.

Tasks exchange data through files; a row names the file.
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
from typing import IO, Any, Literal

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, WorkerCrashedError

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.data.quiet_logging import quiet
from orchestrator.storage.retry import storage_failed, transient

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""The function that a task runs. Input and output are rows that a Ray dataset can hold."""
ANYWHERE: Literal["DEFAULT"] = "DEFAULT"
"""Ray's strategy for tasks outside the caller's placement group: that of a search's trial has no CPU for tasks."""
NAME = "part"
"""The name of a task's process, shown as `ray::part`."""


def results(
    run: Run, inputs: Sequence[dict[str, Any]], workers: int, cpus: float, tries: int
) -> Iterator[dict[str, Any]]:
    """Yield what `run` returns for each input, in order.

    Args:
        run: the function to run.
        inputs: its inputs.
        workers: number of parallel tasks.
        cpus: number of CPUs of each task.
        tries: how often a task whose process ends is started in all.

    Raises Ray's error if all tries fail.
    """
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return (_by_dataset if nodes > 1 else _by_tasks)(run, inputs, workers, cpus, tries)


def _by_tasks(
    run: Run, inputs: Sequence[dict[str, Any]], workers: int, cpus: float, tries: int
) -> Iterator[dict[str, Any]]:
    task = _call.options(name=NAME, num_cpus=cpus, max_retries=tries - 1, scheduling_strategy=ANYWHERE)
    function = ray.put(run)  # it may be large, for example a tokenizer
    remaining = iter(inputs)
    waiting = deque[Any]()
    running = list[Any]()

    def begin() -> None:
        for next_input in remaining:
            running.append(task.remote(function, next_input))
            waiting.append(running[-1])
            if len(running) == workers:
                return

    try:
        begin()
        while running:
            running[:] = ray.wait(running)[1]
            begin()  # start the next tasks first: the consumer of the results may be slow
            while waiting and waiting[0] not in running:
                yield ray.get(waiting.popleft())
    finally:
        if ray.is_initialized():
            for task_ref in running:
                ray.cancel(task_ref)


@ray.remote
def _call(run: Run, task_input: dict[str, Any]) -> dict[str, Any]:
    return run(task_input)


def _by_dataset(
    run: Run, inputs: Sequence[dict[str, Any]], workers: int, cpus: float, tries: int
) -> Iterator[dict[str, Any]]:
    import ray.data

    with warnings.catch_warnings():  # Ray Data has no other option to limit the tries of a task
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = ray.data.from_items(list(inputs), override_num_blocks=len(inputs)).map(
            run, compute=ray.data.TaskPoolStrategy(size=workers), num_cpus=cpus, max_retries=tries - 1
        )
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.execution_options.preserve_order = True
    with _quiet():
        yield from dataset.iter_rows()


def _quiet() -> AbstractContextManager[None]:
    """Keep Ray Data's progress messages off the terminal. They stay in Ray's log files."""
    handlers = [h for h in logging.getLogger("ray.data").handlers if isinstance(h, logging.StreamHandler)]
    return quiet(handlers, logging.ERROR)


MOST = 1 << 14
"""A task returns at most this many characters of its output, from the beginning."""
LOGGER = logging.getLogger("orchestrator.data")


class Copy(io.TextIOBase):
    """A stream that passes its text on to `stream`, and its first MOST characters to `text`."""

    def __init__(self, stream: IO[str], text: io.StringIO) -> None:
        self._stream = stream
        self._text = text

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
    """Capture what is printed in this context, warnings included. It is still printed as before."""
    text = io.StringIO()
    with (
        contextlib.redirect_stdout(Copy(sys.stdout, text)),
        contextlib.redirect_stderr(Copy(sys.stderr, text)),
    ):
        yield text


def log_printed(task: str, text: str) -> None:
    """Log what a task printed, one message a line."""
    for line in text.splitlines():
        if line.strip():
            LOGGER.info("data, %s: %s", task, line)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
DEATHS = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)
TRIES = 8
"""How often a task is started whose process ends without an error. A node that goes away is not the task's fault, but
a row on which every process dies must not be tried forever.
"""


Task = Callable[..., Callable[[], None] | None]
"""Processes a row. It may return a function for the rest of the work, which is mostly waiting."""
TOGETHER_BYTES = 2**25
"""Bytes of text that one task may process, as several parts in sequence."""
MOST_TOGETHER = 16
"""Maximum number of rows of one task."""


def run_tasks(
    task: Task,
    rows: Sequence[dict[str, Any]],
    cache: str,
    leave: float = 0.0,
    together: int = 1,
    is_done: Callable[[dict[str, Any]], bool] = lambda row: False,
) -> Iterator[int]:
    """Run `task` on each row, on as many CPUs as are free; yield the number of leading rows that are done.

    Args:
        task: what to do with a row. A task whose process or node ends is started again.
        rows: values that JSON can hold.
        cache: where the tasks write, for error messages.
        leave: CPUs to leave free. If none remains, one task shares the CPUs with their users.
        together: largest number of rows of one task. Small rows share a task: the rest of one row (see `Task`)
            overlaps with the next row, and Ray causes no wait in between.
        is_done: whether a row is already done. A restarted task skips such rows at its beginning.

    Raises InputError and Unreachable as the tasks do, if a task's storage fails, and for a row on which the process
    ended TRIES times.
    """
    if not rows:
        return

    def run(task_input: dict[str, Any]) -> dict[str, Any]:
        group = json.loads(task_input["rows"])
        with printed() as text:
            todo = list(dropwhile(is_done, group)) if len(group) > 1 else group
            done, error = run_rows(task, cache, todo)
        return {"done": len(group) - len(todo) + done, "error": error, "printed": text.getvalue()}

    unused = ray.available_resources().get("CPU", 1)
    every = ray.cluster_resources().get("CPU", 1)
    free = int(min(unused, every - leave))
    share = 1.0 if free >= 1 or not leave else 0.0
    workers = max(1, min(free, len(rows)))
    groups = [
        {"rows": json.dumps(rows[group_range.start : group_range.stop])}
        for group_range in grouped(len(rows), workers, together)
    ]
    done = 0
    with _deaths_as_input_errors(cache, "a part"):
        for group in results(run, groups, workers, share, TRIES):
            log_printed(f"part {done + 1} of {len(rows)}", group["printed"])
            for _ in range(group["done"]):
                done += 1
                yield done
            raise_error(group["error"])


def grouped(count: int, workers: int, together: int) -> list[range]:
    """Return the numbers below `count` in consecutive groups of at most `together`.

    Groups shrink towards the end, so that all workers finish at about the same time (guided self-scheduling:
    Polychronopoulos and Kuck, 1987).
    """
    groups: list[range] = []
    first = 0
    while first < count:
        size = max(1, min(together, (count - first) // (2 * workers)))
        groups.append(range(first, first + size))
        first += size
    return groups


def together(part_bytes: int) -> int:
    """Return how many parts of `part_bytes` bytes one task takes, see `run_tasks`."""
    return max(1, min(MOST_TOGETHER, TOGETHER_BYTES // max(part_bytes, 1)))


def run_alone(task: Task, cache: str, *arguments: Any) -> None:
    """Run one task on one CPU, with its arguments as Ray passes them. Raises as `run_tasks`."""
    with _deaths_as_input_errors(cache, "all of the text"):
        error, text = ray.get(_run_alone.remote(task, cache, *arguments))
    log_printed(getattr(task, "__name__", "task"), text)
    raise_error(error)


@contextmanager
def _deaths_as_input_errors(cache: str, of: str) -> Iterator[None]:
    """Turn a process that died too often into an InputError."""
    try:
        yield
    except DEATHS as error:
        problem = f"cannot be made: the process for {of} ended {TRIES} times ({type(error).__name__})"
        hint = "give its machine more memory; on a cluster, Ray's logs of the worker say more"
        raise InputError(problem, cache, hint) from None


@ray.remote(num_cpus=1, max_retries=TRIES - 1, scheduling_strategy=ANYWHERE)
def _run_alone(task: Task, cache: str, *arguments: Any) -> tuple[str, str]:
    with printed() as text:
        error = run_task(task, cache, *arguments)
    return error, text.getvalue()


def run_task(task: Task, cache: str, *arguments: Any) -> str:
    """Run a task and the rest of its work. Return its error as `encode_error` does, or an empty text."""
    try:
        if upload := task(*arguments):
            upload()
    except Exception as error:
        return encode_error(error, cache)
    return ""


def run_rows(task: Task, cache: str, rows: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Run a task on one row after the other until there is an error. The rest of each row's work overlaps with the
    next row.

    Returns the number of leading rows that are done, and the error as `run_task` returns it.
    """
    done = 0
    with ThreadPoolExecutor(1) as pool:
        upload: Future[str] | None = None
        for row in rows:
            started: list[Callable[[], None] | None] = []
            error = run_task(lambda row=row, started=started: started.append(task(row)), cache)
            if upload and (failed := upload.result()):
                return done, failed
            done += upload is not None
            if error:
                return done, error
            upload = pool.submit(run_task, started[0] or (lambda: None), cache)
        error = upload.result() if upload else ""
    return done + (upload is not None and not error), error


def encode_error(error: Exception, cache: str) -> str:
    """Return an error of a task as JSON, because an exception would carry Ray's full stack trace.

    Errors that are not about input or storage are raised.
    """
    if not (isinstance(error, InputError) or storage_failed(error)):
        raise error
    passing = transient(error)
    if isinstance(error, InputError):
        return json.dumps([passing, error.what, error.where, error.hint])
    hint = "keep sources and cache where all nodes see them"
    if getattr(error, "errno", None) in FULL:
        hint = "free space or set another data.cache, then run the same command again"
    reason = getattr(error, "strerror", None) or error
    location = getattr(error, "filename", None) or cache
    # object stores raise it without an errno
    if isinstance(error, FileNotFoundError) and error.errno is None:
        reason = os.strerror(errno.ENOENT)
        location = error
    return json.dumps([passing, f"cannot be used on a worker's node ({reason})", str(location), hint])


def raise_error(text: str) -> None:
    """Raise the error that `encode_error` encoded: InputError, or Unreachable if it is transient. Do nothing for an
    empty text.
    """
    if text:
        passing, *arguments = json.loads(text)
        raise (Unreachable if passing else InputError)(*arguments)
