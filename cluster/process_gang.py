"""A gang of local processes: for replaying a run, rehearsing it, and testing without a cluster."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from cluster.gang import FINISHED, Beat, Bundle, RankStatus
from cluster.host import RankHost, die_with_parent
from cluster.link import Seat

START_TIMEOUT = 120.0
"""Seconds for a fresh process to import torch and answer, on a slow and busy disk."""


class ProcessGang:
    """Ranks as spawned processes that die with this one, on loopback."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._status: list[RankStatus] = []
        self._received = 0
        self._asked = 0

    def start(self, world: int, bundle: Bundle, target: str, config: dict[str, Any]) -> None:
        """See `Gang.start`."""
        context = multiprocessing.get_context("spawn")
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, os.getpid()), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._status.append(
                RankStatus(rank, "local", process.pid or 0, "starting", heard=time.monotonic())
            )
        port = self._ask(0, "open_store", "127.0.0.1")
        for rank in range(world):
            self._ask(rank, "launch", Seat(rank, world, rank, "127.0.0.1", port), target, config)

    def poll(self, saved: int) -> Beat:
        """See `Gang.poll`."""
        rows: tuple[dict[str, Any], ...] = ()
        for rank, status in enumerate(self._status):
            if status.state in FINISHED:
                continue
            answer = self._ask(rank, "beat", self._received, saved, timeout=1.0)
            if answer is None:
                continue
            fields = {k: answer[k] for k in ("state", "error", "failed_at", "result", "step")}
            self._status[rank] = dataclasses.replace(status, heard=time.monotonic(), **fields)
            if rank == 0:
                rows = tuple(answer["rows"])
                self._received += len(rows)
        return Beat(tuple(self._status), rows)

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        for rank in range(len(self._processes)):
            self._ask(rank, "request_stop", timeout=1.0)

    def stop(self) -> None:
        """See `Gang.stop`."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _ask(self, rank: int, method: str, *arguments: Any, timeout: float = START_TIMEOUT) -> Any:
        """Call a method of a rank's host. None, and the rank marked dead, if its process is gone."""
        pipe = self._pipes[rank]
        self._asked += 1
        deadline = time.monotonic() + timeout
        dead = False
        try:
            pipe.send((self._asked, method, arguments))
            while wait([pipe], max(deadline - time.monotonic(), 0)):
                number, answer = pipe.recv()
                if number == self._asked:  # else the late answer to a question that was given up
                    return answer
            dead = not self._processes[rank].is_alive()
        except (EOFError, OSError):
            dead = True
            self._processes[rank].join(timeout=5)
        if dead:
            code = self._processes[rank].exitcode
            self._status[rank] = dataclasses.replace(
                self._status[rank],
                state="dead",
                error=f"process ended with exit code {code}",
                failed_at=time.time(),
            )
        return None


def _serve(pipe: Connection, parent: int) -> None:
    """A child's life: answer the parent until it is gone."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    host = RankHost()
    try:
        while True:
            number, method, arguments = pipe.recv()
            pipe.send((number, getattr(host, method)(*arguments)))
    except (EOFError, OSError):
        os._exit(0)
