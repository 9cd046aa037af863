"""The results of one function for many small inputs, in order, by as many processes of Ray as are given.

Where the cluster has several nodes it is a dataset of Ray Data. On a single node that would take longer than little
text does: every process imports it for a second, and it looks for what is done ten times a second. There they are plain
tasks of Ray.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray

from orchestrator.data.quiet_logging import quiet

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
