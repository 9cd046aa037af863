"""A gang of processes on this machine, without Ray: for replaying a run, rehearsing it, and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.workers.fork_server import ForkServer, end_ranks, fork_servers
from cluster.workers.gang import Bundle, Cause, GangStatus, RankStatus
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.rank_output import FLUSH_TIMEOUT, TRACE, OutputTarget, RankOutput, log_of
from cluster.workers.worker_context import RankInfo

LOOPBACK = "127.0.0.1"
MOST_SERVERS = 8
"""Fork servers that start ranks at the same time, at most: each takes a processor while it forks."""


class ProcessGang:
    """`Gang` on loopback: the ranks are forked from a few fork servers, which die with this process."""

    def __init__(self) -> None:
        self._heartbeats = HeartbeatServer(LOOPBACK)
        self._fork_servers: list[ForkServer] = []
        """They start the ranks, each in its turn. None before the first start, and after one has failed."""
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

        def launch(rank: int) -> int:
            rank_info = RankInfo(rank=rank, world_size=world_size, local_rank=rank, host=LOOPBACK)
            pid = self._server_of(rank).launch(
                rank_info=dataclasses.asdict(rank_info),
                target=target,
                config=config,
                server=self._heartbeats.address,
                token=token,
                output=self._outputs[rank].path,
            )
            self._heartbeats.mark(rank, pid=pid, last_heartbeat=time.monotonic())
            return pid

        try:
            if not self._fork_servers or self._fork_servers[0].target != target:
                self._close_fork_servers()
                self._fork_servers = fork_servers(target, min(os.cpu_count() or 1, MOST_SERVERS))
            self._pids = self._by_server(launch, world_size)
        except OSError as error:
            self._close_fork_servers()
            raise TimeoutError(f"workers did not start: {error}") from None

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        """See `Gang.prewarm`. Does nothing, because the fork servers start any number of ranks."""

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
        self._heartbeats.broadcast({"hangs": True})
        with contextlib.suppress(OSError):
            exits = set[int]().union(*(server.exits() for server in self._fork_servers))
            for pid in self._pids:
                if pid not in exits:
                    os.kill(pid, TRACE)

    def stop(self) -> None:
        """See `Gang.stop`."""
        try:
            end_ranks(self._fork_servers)  # all at once: a rank whose peer ends earlier would report that
        except OSError:
            self._close_fork_servers()
        for output in self._outputs:
            output.close()
        for output in self._outputs:
            output.join(FLUSH_TIMEOUT)
        self._outputs, self._pids = [], []

    def close(self) -> None:
        """See `Gang.close`."""
        self.stop()
        self._close_fork_servers()
        self._heartbeats.close()

    def _server_of(self, rank: int) -> ForkServer:
        return self._fork_servers[rank % len(self._fork_servers)]

    def _by_server(self, launch: Callable[[int], int], ranks: int) -> list[int]:
        """Launch the ranks, those of different fork servers at the same time. Return what `launch` returns for each.

        Raises:
            OSError: the first that `launch` raises; it names the rank. No rank is launched after that.
        """
        servers = len(self._fork_servers)
        failed = threading.Event()
        pids = [0] * ranks

        def launch_all(first: int) -> None:
            for rank in range(first, ranks, servers):
                if failed.is_set():
                    return
                try:
                    pids[rank] = launch(rank)
                except OSError as error:
                    failed.set()
                    raise OSError(f"rank {rank}: {error}") from None

        with ThreadPoolExecutor(servers, "launch") as pool:
            for launched in [pool.submit(launch_all, first) for first in range(servers)]:
                launched.result()
        return pids

    def _close_fork_servers(self) -> None:
        for server in self._fork_servers:
            server.close()
        self._fork_servers = []

    def _cause(self, rank: RankStatus) -> tuple[Cause, str]:
        """Return how the process of a dead rank ended, and a line for people."""
        deadline = time.monotonic() + self._limits.end
        with contextlib.suppress(OSError):
            while self._fork_servers and time.monotonic() < deadline:
                if (cause := self._server_of(rank.rank).cause(rank.pid)) is not None:
                    return cause, cause.text
                time.sleep(0.002)  # the kernel closes the connection just before the process can be reaped
        return Cause("lost"), "the process that starts ranks has ended"
