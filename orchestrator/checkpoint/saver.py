"""Asynchronous saves: the training step waits for a copy to shared host memory only; another process writes it.

The memory is reused and has two generations: while one is being written, the next save fills the other.
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
from dataclasses import asdict
from typing import Any

import torch

from cluster.workers.fork_server import START_TIMEOUT
from cluster.workers.program import command_of
from orchestrator.checkpoint.committer import CommitOutcome
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.retention import Retention
from orchestrator.checkpoint.shared_memory import SharedBuffer, room_for
from orchestrator.checkpoint.store import Store


class Saver:
    """Writer `writer` of `writers`, each in its own process, saving the same steps to the same store.

    Only writer 0 publishes: the chunks of all writers together must tile every tensor. The stores of all writers must
    have the same `attempt`. A storage error never raises here: `poll` returns the outcome of each save.
    """

    def __init__(
        self,
        store: Store,
        writer: int = 0,
        writers: int = 1,
        *,
        peers: Store | None = None,
        retention: Retention | None = None,
        patience: float = 120.0,
        max_wait: float = 60.0,
    ) -> None:
        """
        Args:
            store: where commits go. Only its settings are used: the writing process opens its own.
            writer: this process's number, from 0.
            writers: number of processes that save.
            peers: snapshots go here first, into the memory of other nodes; the last two are kept.
            retention: what writer 0 keeps after each commit to the store.
            patience: seconds without progress of the other writers before writer 0 gives up, see `Committer`.
            max_wait: seconds that a save waits for a generation that is still being written, before it is given up; and
                without an answer of the writing process, before that is replaced.
        """
        self._settings: dict[str, Any] = {
            "store": store.settings(),
            "peers": peers and peers.settings(),
            "writer": writer,
            "writers": writers,
            "retention": asdict(retention or Retention()),
            "patience": patience,
        }
        self._location, self._max_wait = store.location, max_wait
        self._buffers = (SharedBuffer(), SharedBuffer())
        self._busy: dict[int, int] = {}  # generation -> the step being written from it
        self._next_generation = 0
        self._outcomes: list[CommitOutcome] = []
        self._failed: list[int] = []
        self._told: Sequence[int] = ()
        self._sidecar = self._start()
        self._preparing: threading.Thread | None = None

    def _start(self) -> _Sidecar:
        return _Sidecar(self._settings, self._buffers, self._max_wait)

    def prepare(self, pieces: Iterable[TensorPiece]) -> None:
        """Pin the memory of saves like this one while training goes on, if the pieces are on a device: that takes
        seconds for every 10 GB, in each process anew."""
        size, on_device = room_for(pieces)
        if on_device:
            self._preparing = threading.Thread(
                target=self._make_room, args=(size, torch.cuda.current_device()), name="pin", daemon=True
            )
            self._preparing.start()

    def _make_room(self, size: int, device: int) -> None:
        torch.cuda.set_device(device)  # which a thread has of its own
        for buffer in self._buffers:
            buffer.make_room(size, pin=True)

    @property
    def is_prepared(self) -> bool:
        """Whether a save now would not wait for `prepare`."""
        return self._preparing is None or not self._preparing.is_alive()

    def wait_until_prepared(self) -> None:
        """Wait for `prepare`, which is no part of what a save costs."""
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
    ) -> float:
        """Copy the pieces and return; they may change as soon as this returns.

        Args:
            step: optimiser steps done; higher than in the last call.
            pieces: what this rank writes of which tensors; on any device.
            meta: as in `Store.publish`; only writer 0's is used.
            durable: write to the store.
            snapshot: write to the peers, if there are any.

        Returns:
            Seconds spent waiting for an earlier save. If `max_wait` was not enough, the save is given up and `poll`
            reports it as failed.
        """
        self.wait_until_prepared()
        generation = self._next_generation
        waited = self._wait(lambda: generation not in self._busy, self._max_wait)
        if generation in self._busy:
            reason = f"step {self._busy[generation]} was still being written after {waited:.1f} s"
            self._take(CommitOutcome(step, self._location, "failed", waited, 0, reason))
            return waited
        self._next_generation = 1 - generation
        request = self._buffers[generation].fill(list(pieces))
        if self._sidecar.ended:
            self._sidecar.end(patience=0.0)
            self._sidecar, self._told = self._start(), ()
        self._busy[generation] = step
        request |= {
            "step": step,
            "generation": generation,
            "meta": meta,
            "durable": durable,
            "snapshot": snapshot,
        }
        self._sidecar.send(request)
        return waited

    @property
    def failed_step(self) -> int:
        """The last step whose save to the store failed, -1 for none. A save that was given up counts when those before
        it, which are still being written, have ended."""
        first = min(self._busy.values(), default=math.inf)
        return max((step for step in self._failed if step <= first), default=-1)

    def tell_failed(self, steps: Sequence[int]) -> None:
        """The `failed_step` of each writer: writer 0 waits for none of their notes up to it any more."""
        if self._settings["writer"] == 0 and steps != self._told:
            self._told = steps
            self._sidecar.send({"failed": list(steps)})

    def poll(self) -> list[CommitOutcome]:
        """The outcomes of the saves that ended since the last call."""
        self._receive(0.0)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self, timeout: float = 120.0) -> list[CommitOutcome]:
        """Wait for the saves under way, end the writing process, and return what `poll` would."""
        self.wait_until_prepared()
        self._sidecar.send(None)
        self._wait(lambda: not self._busy, timeout)
        self._sidecar.end(patience=0.0 if self._busy else 5.0)
        outcomes = self.poll()
        for buffer in self._buffers:
            buffer.close()
        return outcomes

    def abandon(self) -> None:
        """Kill the writing process and wait for nothing; what is being written is lost, and the memory stays."""
        self._sidecar.process.kill()

    def _wait(self, done: Callable[[], bool], timeout: float) -> float:
        self._receive(0.0)
        if not done():
            self._sidecar.send({"ask": True})  # whether it is there: all sent before may have been answered
        began = time.monotonic()
        while not done() and (left := began + timeout - time.monotonic()) > 0:
            self._receive(left)
        return time.monotonic() - began

    def _receive(self, timeout: float) -> None:
        for answer in self._sidecar.receive(timeout):
            if "free" in answer:
                self._busy.pop(answer["free"], None)
            else:
                self._take(CommitOutcome(**answer))
        if self._sidecar.ended:
            for step in sorted(self._busy.values()):
                self._take(CommitOutcome(step, self._location, "failed", 0.0, 0, self._sidecar.why_ended))
            self._busy = {}

    def _take(self, outcome: CommitOutcome) -> None:
        self._outcomes.append(outcome)
        if outcome.place == self._location and outcome.state == "failed":
            self._failed.append(outcome.step)


class _Sidecar:
    """The writing process and the two pipes to it.

    It answers every request at once, whatever storage does. One that gives no answer for `patience` seconds is stopped
    or hangs, and is killed.
    """

    def __init__(self, settings: dict[str, Any], buffers: Iterable[SharedBuffer], patience: float) -> None:
        memory = [buffer.fd for buffer in buffers]
        # it is started anew, not forked: threads and accelerator contexts do not survive a fork
        self.process = subprocess.Popen(
            command_of("orchestrator.checkpoint.sidecar"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=memory,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)  # a stopped process empties no pipe
        self.ended, self.why_ended = False, ""
        self._patience, self._has_started = patience, False
        self._unanswered, self._since = 0, 0.0  # requests, and since when none of them is answered
        self._partial = b""
        # not an argument: any user of the machine may read those
        self.send(settings | {"memory": memory, "parent": os.getpid()})

    def send(self, request: dict[str, Any] | None) -> None:
        assert self.process.stdin is not None
        pipe, now = self.process.stdin.fileno(), time.monotonic()
        self._since = self._since if self._unanswered else now
        self._unanswered += 1
        data = memoryview(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        end = now + self._limit
        # that the process has ended, or takes no more, is noticed by `receive`
        with contextlib.suppress(BrokenPipeError):
            while data and select.select([], [pipe], [], max(end - time.monotonic(), 0.0))[1]:
                data = data[os.write(pipe, data) :]

    def receive(self, timeout: float) -> list[dict[str, Any]]:
        """The answers that come within `timeout` seconds; returns as soon as there are any."""
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
            self._unanswered, self._since = self._unanswered - answered, time.monotonic()
            self._has_started = True
        if not self.ended and self._left() <= 0:
            self.why_ended = f"the writing process gave no answer for {self._limit:.3g} s and was ended"
            self.process.kill()
            self._end()
        return [answer for answer in answers if answer]

    @property
    def _limit(self) -> float:
        """Seconds until an answer is late; a process that starts has longer."""
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
