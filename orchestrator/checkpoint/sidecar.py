"""The process that writes commits beside training: its own interpreter takes no lock from the trainer's.

It reads its settings and then one JSON line per save from its standard input, finds the bytes in shared memory
that it inherited, and answers in JSON lines. It imports no torch, runs at low priority and dies with its parent.
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

from orchestrator.checkpoint.committer import Committer
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.checkpoint.store import Store
from orchestrator.storage.retry import Retry

PR_SET_PDEATHSIG = 1
PEER_PATIENCE = 10.0  # seconds for the shards of other writers: memory is fast or it is gone


def main() -> None:
    """Serve one trainer until it says that there is no more, or is gone. The first line holds the settings."""
    settings = json.loads(sys.stdin.readline())
    _die_with(settings["parent"])
    os.nice(5)
    # what a library prints must not get between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peers, durable = _committers(settings)
    for order in _orders():
        memory = memoryview(
            mmap.mmap(settings["memory"][order["generation"]], order["bytes"], prot=mmap.PROT_READ)
        )
        pieces = [_piece(memory, *entry) for entry in order["pieces"]]
        for committer in [*(peers if order["held"] else []), *(durable if order["durable"] else [])]:
            outcome = committer.commit(order["step"], pieces, order["meta"])
            answers.write(json.dumps(asdict(outcome)) + "\n")
            answers.flush()
        answers.write(json.dumps({"free": order["generation"]}) + "\n")
        answers.flush()


def _committers(settings: dict[str, Any]) -> tuple[list[Committer], list[Committer]]:
    """To the memory of peers, if there are any, and to the durable store."""

    def opened(name: str, retention: Retention, patience: float) -> list[Committer]:
        if settings[name] is None:
            return []
        store = Store(**settings[name] | {"retry": Retry(**settings[name]["retry"])})
        return [Committer(store, settings["writer"], settings["writers"], retention, patience)]

    patience = settings["patience"]
    return (
        opened("peers", Retention(keep=2), min(patience, PEER_PATIENCE)),
        opened("store", Retention(**settings["retention"]), patience),
    )


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
    main()
