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
            max_wait: seconds that a save waits for a generation that is still being written, before it is given up.
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
        self._sidecar = _Sidecar(self._settings, self._buffers)
        self._preparing: threading.Thread | None = None

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
            self._sidecar, self._told = _Sidecar(self._settings, self._buffers), ()
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
            reason = f"the writing process ended with code {self._sidecar.process.poll()}"
            for step in sorted(self._busy.values()):
                self._take(CommitOutcome(step, self._location, "failed", 0.0, 0, reason))
            self._busy = {}

    def _take(self, outcome: CommitOutcome) -> None:
        self._outcomes.append(outcome)
        if outcome.place == self._location and outcome.state == "failed":
            self._failed.append(outcome.step)


class _Sidecar:
    """The writing process and the two pipes to it."""

    def __init__(self, settings: dict[str, Any], buffers: Iterable[SharedBuffer]) -> None:
        memory = [buffer.fd for buffer in buffers]
        # it is started anew, not forked: threads and accelerator contexts do not survive a fork
        self.process = subprocess.Popen(
            command_of("orchestrator.checkpoint.sidecar"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=memory,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.ended = False
        self._partial = b""
        # not an argument: any user of the machine may read those
        self.send(settings | {"memory": memory, "parent": os.getpid()})

    def send(self, request: dict[str, Any] | None) -> None:
        assert self.process.stdin is not None
        # that the process has ended is noticed by `receive`
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request, separators=(",", ":")).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self, timeout: float) -> list[dict[str, Any]]:
        """The answers that come within `timeout` seconds; returns as soon as there are any."""
        assert self.process.stdout is not None
        data = b""
        while not self.ended and select.select([self.process.stdout], [], [], 0.0 if data else timeout)[0]:
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            data += part
            if not part:
                self.ended = True
                self.process.wait()
                self.process.stdout.close()
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

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
