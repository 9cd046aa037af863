"""A gang of processes on this machine, without Ray: for replaying a run, rehearsing it, and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Set
from typing import Any

from cluster.workers.fork_server import ForkServer
from cluster.workers.gang import Bundle, Cause, GangStatus, RankStatus
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.rank_output import FLUSH_TIMEOUT, TRACE, OutputTarget, RankOutput, log_of
from cluster.workers.worker_context import RankInfo

LOOPBACK = "127.0.0.1"


class ProcessGang:
    """`Gang` on loopback: the ranks are forked from one fork server, which dies with this process."""

    def __init__(self) -> None:
        self._heartbeats = HeartbeatServer(LOOPBACK)
        self._fork_server: ForkServer | None = None
        """Starts the ranks. None before the first start, and after the server failed."""
        self._outputs: list[RankOutput] = []
        """The output of each rank."""
        self._pids: list[int] = []
        """The process id of each rank."""
        self._limits = Bundle().limits
        """How long a rank may take to end."""

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`. The CPUs of this machine set the number; `start` accepts more ranks."""
        return int((os.cpu_count() or 1) / bundle.cpu)

    def start(
        self,
        world_size: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        ranks_per_group: int = 1,
        avoid: Set[str] = frozenset(),
        output: OutputTarget | None = None,
    ) -> None:
        """See `Gang.start`."""
        self.stop()
        self._limits = bundle.limits
        token = self._heartbeats.expect(["local"] * world_size)
        self._outputs = [RankOutput(log_of(rank), output) for rank in range(world_size)]

        rank = 0
        try:
            fork_server = self._fork_server_of(target)
            for rank in range(world_size):
                rank_info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, host=LOOPBACK)
                pid = fork_server.launch(
                    rank_info=dataclasses.asdict(rank_info),
                    target=target,
                    config=config,
                    server=self._heartbeats.address,
                    token=token,
                    output=self._outputs[rank].path,
                )
                self._pids.append(pid)
                self._heartbeats.mark(rank, pid=pid, last_heartbeat=time.monotonic())
        except OSError as error:
            self._close_fork_server()
            raise TimeoutError(f"workers did not start: rank {rank}: {error}") from None

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        """See `Gang.prewarm`. Does nothing, because one fork server starts any number of ranks."""

    def occupied_workers(self) -> int:
        """See `Gang.occupied_workers`. Always 0, because `capacity` counts the whole machine."""
        return 0

    def ready(self) -> int:
        """See `Gang.ready`."""
        return os.cpu_count() or 1

    def lost_nodes(self) -> Set[str]:
        """See `Gang.lost_nodes`."""
        return frozenset()

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        return self._heartbeats.poll(saved, wait, self._cause)

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        self._heartbeats.broadcast({"stop": True})

    def ask_profile(self, request: dict[str, Any]) -> None:
        """See `Gang.ask_profile`."""
        self._heartbeats.broadcast({"profile": request})

    def output(self, rank: int) -> str:
        """See `Gang.output`."""
        return self._outputs[rank].tail() if rank < len(self._outputs) else ""

    def print_stacks(self) -> None:
        """See `Gang.print_stacks`."""
        self._heartbeats.ask_what_hangs()
        with contextlib.suppress(OSError):
            exits = self._fork_server.exits() if self._fork_server is not None else {}
            for pid in self._pids:
                if pid not in exits:
                    os.kill(pid, TRACE)

    def stop(self) -> None:
        """See `Gang.stop`."""
        if self._fork_server is not None:
            try:
                self._fork_server.end_ranks()
            except OSError:
                self._close_fork_server()
        for output in self._outputs:
            output.close()
        for output in self._outputs:
            output.join(FLUSH_TIMEOUT)
        self._outputs, self._pids = [], []

    def close(self) -> None:
        """See `Gang.close`."""
        self.stop()
        self._close_fork_server()
        self._heartbeats.close()

    def _fork_server_of(self, target: str) -> ForkServer:
        """Return the fork server that has imported the module of `target`; start it unless it runs."""
        if self._fork_server is None or self._fork_server.target != target:
            self._close_fork_server()
            self._fork_server = ForkServer(target)
        return self._fork_server

    def _close_fork_server(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def _cause(self, rank: RankStatus) -> tuple[Cause, str]:
        """Return how the process of a dead rank ended, and a line for people."""
        deadline = time.monotonic() + self._limits.end
        with contextlib.suppress(OSError):
            while self._fork_server is not None and time.monotonic() < deadline:
                if (cause := self._fork_server.cause(rank.pid)) is not None:
                    return cause, cause.text
                time.sleep(0.002)  # the kernel closes the connection just before the process can be reaped
        return Cause("lost"), "the process that starts ranks has ended"
