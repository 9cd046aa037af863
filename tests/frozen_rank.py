"""The program of ranks that stop at a point of their code. For tests of hangs."""

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
"""The environment variable with the places as JSON, a list of {"rank", "at", "after", "how"}.

`at` is a function, "module:name" or "module:Class.name"; the rank stops at its call after so many others. See `_stop`.
"""


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Train as `orchestrator.train.loop.main` does, up to those places."""
    for place in json.loads(os.environ[PLACE]):
        if context.rank_info.rank == place["rank"]:
            if place["at"] == "main":
                _stop(place["how"])
            _stop_at(place["at"], place["after"], place["how"])
    return train(config, context)


def _stop_at(at: str, after: int, how: str) -> None:
    module, _, path = at.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    function, calls = getattr(owner, name), iter(range(after))

    def stopping(*given: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            _stop(how)
        return function(*given, **named)

    setattr(owner, name, stopping)


def _stop(how: str) -> None:
    """Stop this thread for ever: by SIGSTOP, which stops the whole process, or it sleeps, or it computes."""
    while True:  # the kernel continues a stopped process whose group is orphaned
        if how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "sleep":
            time.sleep(1.0)
        else:
            sum(range(10_000))
