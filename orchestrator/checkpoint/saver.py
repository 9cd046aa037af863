"""Asynchronous saves: training waits at most for a copy to shared host memory, which another process writes to storage.

The memory is reused and has two generations. While one is being written, the next save fills the other. With snapshots
it has four: one holds the last whole snapshot, one a newer one that other writers may not have made yet, one the
snapshot under way, and one may wait for slow storage.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from cluster.workers.fork_server import START_TIMEOUT
from cluster.workers.program import command_of
from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.committer import CommitOutcome
from orchestrator.checkpoint.config import GENERATIONS, SNAPSHOT_GENERATIONS
from orchestrator.checkpoint.peer_memory import LOCATION
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.shared_memory import SharedBuffer, room_for
from orchestrator.checkpoint.snapshot_writer import Placement


class Saver:
    """One of several writers, each in its own process, that save the same steps to the same store.

    Only writer 0 publishes. The chunks of all writers together must tile every tensor, and their stores must have the
    same `attempt`. Storage errors do not raise here: `poll` returns the outcome of each save.

    Attributes:
        snapshot_step: the step of the last snapshot that this writer has made, -1 before the first. As no writer is
            more than one snapshot ahead, the least of all writers is whole: after a failure it is -1 until two have
            succeeded.
    """

    def __init__(
        self,
        store: Store,
        writer: int = 0,
        writers: int = 1,
        *,
        placement: Placement | None = None,
        retention: Retention | None = None,
        patience: float = 120.0,
        max_wait: float = 60.0,
    ) -> None:
        """
        Args:
            store: where commits go. Only its settings are used: the writing process opens its own.
            writer: this process's number, from 0.
            writers: number of processes that save.
            placement: where snapshots are held in the memory of nodes; None without snapshots.
            retention: which commits writer 0 keeps after each new one.
            patience: seconds without progress of the other writers before writer 0 gives up, see `Committer`.
            max_wait: seconds after which a save is given up because its generation is still being written, and after
                which a writing process that does not answer is replaced.
        """
        self._settings: dict[str, Any] = {
            "store": store.settings(),
            "peers": placement and asdict(placement),
            "writer": writer,
            "writers": writers,
            "retention": asdict(retention or Retention()),
            "patience": patience,
        }
        self._location = store.location
        self._max_wait = max_wait
        generations = GENERATIONS + (SNAPSHOT_GENERATIONS if placement else 0)
        self._buffers = tuple(SharedBuffer() for _ in range(generations))
        self._busy: dict[tuple[int, str], int] = {}
        """The step that is being written from a generation, by generation and kind: "commit" or "snapshot"."""
        self._snapshots: dict[int, int] = {}
        """The step whose snapshot a generation holds."""
        self.snapshot_step = -1
        self._doubts = 0
        """How many more snapshots must succeed before `snapshot_step` counts them."""
        self._complete = -1
        self._outcomes: list[CommitOutcome] = []
        """Outcomes that `poll` has not returned yet."""
        self._failed: list[int] = []
        """Steps whose save to the store failed."""
        self._failed_by_writer: Sequence[int] = ()
        """The `failed_step` of each writer, as last sent to the writing process."""
        self._sidecar = self._start()
        self._preparing: threading.Thread | None = None
        """Pins memory, see `prepare`."""
        self._copier = ThreadPoolExecutor(1, "copy")
        self._copying: Future[float] | None = None
        """The copy of an overlapped save; its result is how many seconds it took."""

    def _start(self) -> _Sidecar:
        self._pieces: Any = None
        """What the writing process was last told about the pieces. It needs nothing else when that has not changed."""
        return _Sidecar(self._settings, self._buffers, self._max_wait)

    def prepare(self, pieces: Iterable[TensorPiece]) -> None:
        """Pin host memory for saves of pieces like these, in the background. Does nothing for pieces on the CPU.

        Pinning takes seconds for every 10 GB, in each process.
        """
        size, on_device = room_for(pieces)
        if on_device:
            self._preparing = threading.Thread(
                target=self._make_room, args=(size, torch.cuda.current_device()), name="pin", daemon=True
            )
            self._preparing.start()

    def _make_room(self, size: int, device: int) -> None:
        torch.cuda.set_device(device)  # the current device is set for each thread
        # The fourth is used only while storage is slow and another writer is late, and has no memory before.
        for buffer in self._buffers[: GENERATIONS + 1]:
            buffer.make_room(size, pin=True)

    @property
    def has_room(self) -> bool:
        """Whether a save could begin now without waiting, neither for `prepare` nor for an earlier save."""
        prepared = self._preparing is None or not self._preparing.is_alive()
        return prepared and self._free_generation() is not None

    @property
    def is_snapping(self) -> bool:
        """Whether a snapshot is under way."""
        return any(kind == "snapshot" for _, kind in self._busy)

    def wait_until_prepared(self) -> None:
        """Wait for `prepare`, so that its time does not count as the time of a save."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def save(
        self,
        step: int,
        pieces: Iterable[TensorPiece],
        meta: dict[str, Any],
        durable: bool = True,
        snapshot: bool = True,
        complete: int = -1,
        overlap: bool = False,
    ) -> float:
        """Copy the pieces and return.

        Args:
            step: optimiser steps done; higher than in the last call.
            pieces: the pieces that this rank writes, on any device.
            meta: as in `Store.publish`. Only writer 0 uses it.
            durable: whether to write to the store.
            snapshot: whether to make a snapshot, if there is a placement for it.
            complete: the last step whose snapshot all writers have made. Its memory is not touched, and what is older
                is forgotten.
            overlap: whether to return before the pieces are copied. They must not change until `finish_copy` has
                returned; a step's forward and backward pass may run meanwhile. Otherwise they may change at once.

        Returns:
            Seconds spent waiting for an earlier save. If `max_wait` was not enough, the save is given up and `poll`
            reports it as failed.
        """
        self.wait_until_prepared()
        self.finish_copy()
        self._complete = complete
        snapshot = snapshot and self._settings["peers"] is not None
        waited = self._wait(lambda: self._can_save(snapshot), self._max_wait)
        generation = self._free_generation() if self._can_save(snapshot) else None
        if generation is None:
            first = min(self._busy.values(), default=complete)
            reason = f"step {first} was still being written after {waited:.1f} s"
            for location in [self._location] * durable + [LOCATION] * snapshot:
                self._take(
                    CommitOutcome(step, location, state="failed", seconds=waited, bytes=0, reason=reason)
                )
            return waited
        request = self._buffers[generation].begin(list(pieces))
        self._snapshots.pop(generation, None)
        if self._sidecar.ended:
            self._sidecar.end(patience=0.0)
            self._sidecar = self._start()
            self._failed_by_writer = ()
        if durable:
            self._busy[generation, "commit"] = step
        if snapshot:
            self._busy[generation, "snapshot"] = step
            self._snapshots[generation] = step
        if request["pieces"] == self._pieces:
            del request["pieces"]
        else:
            self._pieces = request["pieces"]
        request |= {
            "step": step,
            "generation": generation,
            "meta": meta,
            "durable": durable,
            "snapshot": snapshot,
            "complete": complete,
        }
        self._copying = self._copier.submit(self._copy_and_send, self._buffers[generation], request)
        if not overlap:
            self.finish_copy()
        return waited

    def _copy_and_send(self, buffer: SharedBuffer, request: dict[str, Any]) -> float:
        """Finish the copy and hand it to the writing process. Return the seconds of the copy."""
        began = time.perf_counter()
        buffer.finish()
        copied = time.perf_counter()
        # No other thread talks to the process meanwhile: whatever does calls `finish_copy` first, or leaves it out.
        self._sidecar.send(request)
        return copied - began

    def finish_copy(self) -> float:
        """Wait until the pieces of the last save are copied. Return the seconds of the copy, the first time only."""
        if self._copying is None:
            return 0.0
        copying, self._copying = self._copying, None
        return copying.result()

    def _can_save(self, snapshot: bool) -> bool:
        """Whether there is memory to fill. Only one snapshot is under way at a time."""
        return self._free_generation() is not None and not (snapshot and self.is_snapping)

    def _free_generation(self) -> int | None:
        """Return a generation that nothing is written from, and that holds no snapshot that may be restored.

        That may be the last snapshot that is known to be whole, or the newest that this writer has made: it is whole
        once the slowest writer has made it too, which this writer learns only with the next step.
        """
        busy = {generation for generation, _ in self._busy}
        made = {
            generation: step
            for generation, step in self._snapshots.items()
            if (generation, "snapshot") not in self._busy
        }
        needed = {self._complete, max(made.values(), default=-1)}
        for generation in range(len(self._buffers)):
            if generation not in busy and made.get(generation) not in needed:
                return generation
        return None

    @property
    def failed_step(self) -> int:
        """The last step whose save to the store failed, -1 for none.

        A save that was given up counts once the earlier saves that are still being written have ended.
        """
        busy = (step for (_, kind), step in self._busy.items() if kind == "commit")
        first = min(busy, default=math.inf)
        return max((step for step in self._failed if step <= first), default=-1)

    def tell_failed(self, steps: Sequence[int]) -> None:
        """Tell writer 0 the `failed_step` of each writer, so it no longer waits for their notes up to that step."""
        self.finish_copy()
        if self._settings["writer"] == 0 and steps != self._failed_by_writer:
            self._failed_by_writer = steps
            self._sidecar.send({"failed": list(steps)})

    def poll(self) -> list[CommitOutcome]:
        """Return the outcomes of the saves that ended since the last call. Never waits."""
        if (
            self._copying is None or self._copying.done()
        ):  # else the other thread may speak to the writing process
            self._receive(0.0)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self, timeout: float = 120.0) -> list[CommitOutcome]:
        """Wait for the saves in progress, end the writing process, and return the outcomes as `poll` does."""
        self.wait_until_prepared()
        self.finish_copy()
        self._sidecar.send(None)
        self._wait(lambda: not self._busy, timeout)
        self._sidecar.end(patience=0.0 if self._busy else 5.0)
        outcomes = self.poll()
        self._copier.shutdown()
        for buffer in self._buffers:
            buffer.close()
        return outcomes

    def abandon(self) -> None:
        """Kill the writing process at once. Saves in progress are lost; the shared memory stays."""
        self._sidecar.process.kill()

    def _wait(self, done: Callable[[], bool], timeout: float) -> float:
        self._receive(0.0)
        if not done():
            # Tests that the process is alive, since all earlier requests may be answered.
            self._sidecar.send({"ask": True})
        began = time.monotonic()
        while not done() and (left := began + timeout - time.monotonic()) > 0:
            self._receive(left)
        return time.monotonic() - began

    def _receive(self, timeout: float) -> None:
        for answer in self._sidecar.receive(timeout):
            if "free" in answer:
                self._busy.pop((answer["free"], answer["of"]), None)
            else:
                self._take(CommitOutcome(**answer))
        if self._sidecar.ended:
            for (_, kind), step in sorted(self._busy.items(), key=lambda item: item[1]):
                location = self._location if kind == "commit" else LOCATION
                reason = self._sidecar.why_ended
                self._take(CommitOutcome(step, location, state="failed", seconds=0.0, bytes=0, reason=reason))
            self._busy = {}

    def _take(self, outcome: CommitOutcome) -> None:
        self._outcomes.append(outcome)
        if outcome.place == self._location and outcome.state == "failed":
            self._failed.append(outcome.step)
        if outcome.place == LOCATION:
            self._doubts = 2 if outcome.state == "failed" else max(self._doubts - 1, 0)
            self.snapshot_step = -1 if self._doubts else outcome.step


class _Sidecar:
    """The writing process and the two pipes to it.

    The process answers every request at once, whatever storage does. If it gives no answer for `patience` seconds, it
    is stopped or hangs, and is killed.

    Attributes:
        process: the process.
        ended: whether it has ended.
        why_ended: why, for people.
    """

    def __init__(self, settings: dict[str, Any], buffers: Iterable[SharedBuffer], patience: float) -> None:
        memory = [(buffer.fd, buffer.note) for buffer in buffers]
        # a fresh process, not a fork, because threads and accelerator contexts do not survive a fork
        self.process = subprocess.Popen(
            command_of("orchestrator.checkpoint.sidecar"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file for pair in memory for file in pair],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)  # a stopped process does not empty the pipe
        self.ended = False
        self.why_ended = ""
        self._patience = patience
        self._has_started = False
        """Whether the process has answered once."""
        self._unanswered = 0
        """The number of requests without an answer."""
        self._since = 0.0
        """The monotonic time of the last answer, or of the first unanswered request after it."""
        self._partial = b""
        """The beginning of an answer that has not fully arrived."""
        # not passed as arguments, which every user of the machine may read
        self.send(settings | {"memory": memory, "parent": os.getpid()})

    def send(self, request: dict[str, Any] | None) -> None:
        """Send a request, None to end the process. Waits only while the pipe is full, and for a bounded time."""
        assert self.process.stdin is not None
        pipe = self.process.stdin.fileno()
        now = time.monotonic()
        if not self._unanswered:
            self._since = now
        self._unanswered += 1
        data = memoryview(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        end = now + self._limit
        # `receive` notices a process that has ended or takes no more requests
        with contextlib.suppress(BrokenPipeError):
            while data and select.select([], [pipe], [], max(end - time.monotonic(), 0.0))[1]:
                data = data[os.write(pipe, data) :]

    def receive(self, timeout: float) -> list[dict[str, Any]]:
        """Return the answers that arrive within `timeout` seconds, as soon as there are any."""
        assert self.process.stdout is not None
        data = b""
        while not self.ended:
            wait = 0.0 if data else max(min(timeout, self._left()), 0.0)
            if not select.select([self.process.stdout], [], [], wait)[0]:
                break
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            data += part
            if not part:
                self._end()
        *lines, self._partial = (self._partial + data).split(b"\n")
        answers = [json.loads(line) for line in lines]
        if answered := answers.count({}):
            self._unanswered -= answered
            self._since = time.monotonic()
            self._has_started = True
        if not self.ended and self._left() <= 0:
            self.why_ended = f"the writing process gave no answer for {self._limit:.3g} s and was ended"
            self.process.kill()
            self._end()
        return [answer for answer in answers if answer]

    @property
    def _limit(self) -> float:
        """Seconds after which an answer is late. A process that is starting has longer."""
        return self._patience if self._has_started else START_TIMEOUT

    def _left(self) -> float:
        """Seconds until the next answer is late."""
        return self._since + self._limit - time.monotonic() if self._unanswered else math.inf

    def _end(self) -> None:
        assert self.process.stdout is not None
        self.ended = True
        code = self.process.wait()
        self.why_ended = self.why_ended or f"the writing process ended with code {code}"
        self.process.stdout.close()

    def end(self, patience: float) -> None:
        """Wait `patience` seconds for the process to exit, then kill it."""
        assert self.process.stdin is not None
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
