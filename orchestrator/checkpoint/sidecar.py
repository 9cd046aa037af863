"""The process that writes commits beside training: its own interpreter takes no lock from the trainer's.

It reads one JSON line per save from its standard input, finds the bytes in shared memory that it inherited,
and answers each with one JSON line. It imports no torch, runs at low priority and dies with its parent.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from orchestrator.checkpoint.committer import Committer, Retention
from orchestrator.checkpoint.retry import Retry
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.checkpoint.store import Store

PR_SET_PDEATHSIG = 1


def main(settings: dict[str, Any]) -> None:
    """Serve one trainer until it says that there is no more, or is gone."""
    _die_with(settings["parent"])
    os.nice(10)
    # what a library prints must not get between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = Store(**settings["store"] | {"retry": Retry(**settings["store"]["retry"])})
    retention = Retention(**settings["retention"])
    committer = Committer(store, settings["writer"], settings["writers"], retention, settings["patience"])
    for order in _orders():
        memory = memoryview(
            mmap.mmap(settings["memory"][order["generation"]], order["bytes"], prot=mmap.PROT_READ)
        )
        pieces = [_piece(memory, *entry) for entry in order["pieces"]]
        answers.write(json.dumps(asdict(committer.commit(order["step"], pieces, order["meta"]))) + "\n")
        answers.flush()


def _die_with(parent: int) -> None:
    def gone(*_: object) -> None:
        # the signal also comes when only the thread that started this process ends
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGTERM, gone)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    gone()


def _orders() -> Iterator[dict[str, Any]]:
    """Orders until null. If the pipe ends before that the parent is dead: stop in the middle of it all."""
    inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def receive() -> None:
        for line in sys.stdin:
            order = json.loads(line)
            inbox.put(order)
            if order is None:
                return
        os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    while (order := inbox.get()) is not None:
        yield order


def _piece(
    memory: memoryview,
    name: str,
    dtype: str,
    shape: list[int],
    start: list[int],
    extent: list[int],
    at: int,
    size: int,
) -> RawPiece:
    return RawPiece(name, dtype, tuple(shape), tuple(start), tuple(extent), memory[at : at + size])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
