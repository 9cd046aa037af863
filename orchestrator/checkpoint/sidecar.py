"""The process that writes commits, so that writing never holds the trainer's interpreter lock.

It reads its settings and then one JSON line per save from standard input. The bytes are in shared memory that it
inherited. It answers in JSON lines: at once with an empty answer, which shows that it is alive whatever storage does,
and later with the outcome of the save. It does not import torch, runs at low priority and exits with its parent, but
for the snapshots that it was given before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.committer import Committer
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.checkpoint.snapshot_writer import Placement, SnapshotWriter
from orchestrator.storage.retry import Retry

PR_SET_PDEATHSIG = 1
LAST_SNAPSHOT = 2.0
"""Seconds that this process may take for the snapshots that its parent has handed over before it died."""


def main() -> None:
    """Serve one trainer until it sends null or ends. The first line holds the settings."""
    settings = json.loads(sys.stdin.readline())
    snapshots: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    commits: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    _die_with(settings["parent"])
    # Checksums of gigabytes must not slow down the trainer's threads.
    os.nice(5)
    # output of libraries goes to standard error, so that it does not mix with the answers
    pipe = os.fdopen(os.dup(1), "w")
    one_at_a_time = threading.Lock()
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        # Nobody reads on after the death of the parent.
        with one_at_a_time, contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps(value) + "\n")
            pipe.flush()

    generations = Generations(settings["memory"])
    committer = _committer(settings)
    writer = _snapshot_writer(settings)
    if committer.writer == 0:
        import_module("numpy")  # merging needs it; imported later, it would delay the answer to a request
    answer({})
    receiver = threading.Thread(
        target=_receive, args=(snapshots, commits, committer, answer), name="requests", daemon=True
    )
    receiver.start()
    # Snapshots do not wait for storage, which may take minutes.
    snapping = threading.Thread(target=_snap, args=(snapshots, writer, generations, answer), name="snapshots")
    snapping.start()
    while (request := commits.get()) is not None:
        pieces = [_piece(generations.memory(request), *entry) for entry in request["pieces"]]
        answer(asdict(committer.commit(request["step"], pieces, request["meta"])))
        answer({"free": request["generation"], "of": "commit"})
    snapping.join()


class Generations:
    """The memory that the trainer fills, mapped once for each size."""

    def __init__(self, files: list[tuple[int, int]]) -> None:
        self._files = files
        self._mapped: dict[int, memoryview] = {}
        self._lock = threading.Lock()

    def memory(self, request: dict[str, Any]) -> memoryview:
        """Return the bytes of a request."""
        generation = request["generation"]
        size = request["bytes"]
        with self._lock:
            if generation not in self._mapped or len(self._mapped[generation]) != size:
                file = self._files[generation][0]
                self._mapped[generation] = memoryview(mmap.mmap(file, size, prot=mmap.PROT_READ))
            return self._mapped[generation]


def _snap(
    inbox: queue.SimpleQueue[dict[str, Any] | None],
    writer: SnapshotWriter | None,
    generations: Generations,
    answer: Callable[[dict[str, Any]], None],
) -> None:
    """Write snapshots until None arrives."""
    while (request := inbox.get()) is not None:
        if "done" in request:
            request["done"].set()
            continue
        assert writer is not None
        outcome = writer.save(
            request["step"],
            request["generation"],
            generations.memory(request),
            request["pieces"],
            meta=request["meta"],
            complete=request["complete"],
        )
        answer(asdict(outcome))
        answer({"free": request["generation"], "of": "snapshot"})


def _committer(settings: dict[str, Any]) -> Committer:
    store = Store(**settings["store"] | {"retry": Retry(**settings["store"]["retry"])})
    retention = Retention(**settings["retention"])
    return Committer(store, settings["writer"], settings["writers"], retention, settings["patience"])


def _snapshot_writer(settings: dict[str, Any]) -> SnapshotWriter | None:
    if settings["peers"] is None:
        return None
    placement = Placement(**settings["peers"])
    return SnapshotWriter(placement, settings["writer"], settings["writers"], settings["memory"])


def _die_with(parent: int) -> None:
    """Exit LAST_SNAPSHOT after the parent process has ended, whatever else this process does."""

    def exit_if_orphaned(*_: object) -> None:
        # the kernel also sends the signal when only the thread that started this process ends
        if os.getppid() != parent:
            threading.Thread(target=_exit_after, args=(threading.Event(),), daemon=True).start()

    signal.signal(signal.SIGTERM, exit_if_orphaned)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    exit_if_orphaned()


def _exit_after(done: threading.Event) -> None:
    """Exit once `done` is set, or after LAST_SNAPSHOT."""
    done.wait(LAST_SNAPSHOT)
    os._exit(1)


def _receive(
    snapshots: queue.SimpleQueue[dict[str, Any] | None],
    commits: queue.SimpleQueue[dict[str, Any] | None],
    committer: Committer,
    answer: Callable[[dict[str, Any]], None],
) -> None:
    """Pass requests on until null arrives. Each line gets an empty `answer` at once.

    Lines about failed saves of other writers go to the committer. If the pipe ends before null, the parent is dead.
    """
    pieces: list[Any] = []
    for line in sys.stdin:
        request = json.loads(line)
        answer({})
        if request is None:
            snapshots.put(None)
            commits.put(None)
            return
        if "failed" in request:
            committer.failed = dict(enumerate(request["failed"]))
        elif "step" in request:
            pieces = request.setdefault("pieces", pieces)  # as in the request before, unless they are new
            for inbox, is_asked_for in ((snapshots, request["snapshot"]), (commits, request["durable"])):
                if is_asked_for:
                    inbox.put(request)
    # What was handed over before is in the queue of snapshots already. A commit is not waited for.
    done = threading.Event()
    snapshots.put({"done": done})
    _exit_after(done)


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
