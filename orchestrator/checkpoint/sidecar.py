"""The process that writes commits, so that writing never holds the trainer's interpreter lock.

It reads its settings and then one JSON line per save from standard input. The bytes are in shared memory that it
inherited. It answers in JSON lines: at once with an empty answer, which shows that it is alive whatever storage does,
and later with the outcome of the save. It does not import torch, runs at low priority and exits with its parent.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.commit_writer import Committer
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.storage.retry import Retry

PR_SET_PDEATHSIG = 1
PEER_PATIENCE = 10.0
"""The `patience` for snapshots, in seconds: the memory of a peer is fast, unless the peer is gone."""


def main() -> None:
    """Serve one trainer until it sends null or ends. The first line holds the settings."""
    settings = json.loads(sys.stdin.readline())
    _die_with(settings["parent"])
    os.nice(5)
    # output of libraries goes to standard error, so that it does not mix with the answers
    pipe = os.fdopen(os.dup(1), "w")
    one_at_a_time = threading.Lock()
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        with one_at_a_time:
            pipe.write(json.dumps(value) + "\n")
            pipe.flush()

    peers, durable = _committers(settings)
    answer({})
    for request in _requests(durable, answer):
        memory = memoryview(
            mmap.mmap(settings["memory"][request["generation"]], request["bytes"], prot=mmap.PROT_READ)
        )
        pieces = [_piece(memory, *entry) for entry in request["pieces"]]
        committers = [*(peers if request["snapshot"] else []), *(durable if request["durable"] else [])]
        for committer in committers:
            outcome = committer.commit(request["step"], pieces, request["meta"])
            answer(asdict(outcome))
        answer({"free": request["generation"]})


def _committers(settings: dict[str, Any]) -> tuple[list[Committer], list[Committer]]:
    """Return the committers for the memory of peers, if any, and for the durable store."""

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
    """Exit when the parent process ends."""

    def gone(*_: object) -> None:
        # the kernel also sends the signal when only the thread that started this process ends
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGTERM, gone)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    gone()


def _requests(durable: list[Committer], answer: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """Yield requests to save until null arrives. Each line gets an empty `answer` at once.

    Lines about failed saves of other writers go to the committers. If the pipe ends before null, the parent is dead,
    and this process exits at once.
    """
    inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def receive() -> None:
        for line in sys.stdin:
            request = json.loads(line)
            answer({})
            if request and "ask" in request:
                continue
            if request and "failed" in request:
                for committer in durable:
                    committer.failed = dict(enumerate(request["failed"]))
                continue
            inbox.put(request)
            if request is None:
                return
        os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    while (request := inbox.get()) is not None:
        yield request


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
    return RawPiece(
        name, dtype, shape=tuple(shape), start=tuple(start), extent=tuple(extent), data=memory[at : at + size]
    )


if __name__ == "__main__":
    main()
