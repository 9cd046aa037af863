"""The program of a rank that stops at a point of its code. For tests of hangs."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import time
from typing import Any

from cluster.workers.worker_context import WorkerContext
from orchestrator.train.loop import main as train

PLACE = "STOP_AT"
"""The environment variable with the place as JSON: {"rank", "at", "after", "frozen"}.

`at` is a function, "module:name" or "module:Class.name"; the rank stops at its call after so many others. It is frozen
by SIGSTOP, or it lives and sleeps.
"""


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Train as `orchestrator.train.loop.main` does, up to that place."""
    place = json.loads(os.environ[PLACE])
    if context.rank_info.rank == place["rank"]:
        if place["at"] == "main":
            _stop(place["frozen"])
        _stop_at(**place)
    return train(config, context)


def _stop_at(rank: int, at: str, after: int, frozen: bool) -> None:
    module, _, path = at.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    function, calls = getattr(owner, name), iter(range(after))

    def stopping(*given: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            _stop(frozen)
        return function(*given, **named)

    setattr(owner, name, stopping)


def _stop(frozen: bool) -> None:
    while True:  # the kernel continues a stopped process whose group is orphaned
        if frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(1.0)
