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
        self._outputs: list[tuple[RankOutput, int]] = []
        self._limits = Bundle().limits

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`. As many as there are CPUs for; `start` accepts more."""
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
        if self._fork_server is None or self._fork_server.target != target:
            self._end()
            self._fork_server = ForkServer(target)
        self._limits = bundle.limits
        token = self._heartbeats.expect(["local"] * world_size)
        arguments = {"target": target, "config": config, "server": self._heartbeats.address, "token": token}
        try:
            for rank in range(world_size):
                rank_info = dataclasses.asdict(RankInfo(rank, world_size, rank, LOOPBACK))
                printed = RankOutput(log_of(rank), output)
                pid = self._fork_server.launch(rank_info=rank_info, **arguments, output=printed.path)
                self._outputs.append((printed, pid))
                self._heartbeats.mark(rank, pid=pid, last_heartbeat=time.monotonic())
        except OSError as error:
            self._end()
            raise TimeoutError(f"workers did not start: {error}") from None

    def prewarm(self, count: int, bundle: Bundle | None = None, target: str = "") -> None:
        """See `Gang.prewarm`. Nothing to do: one fork server starts any number of ranks."""

    def held(self) -> int:
        """See `Gang.held`. None: `capacity` is that of the machine."""
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

    def ask_profile(self, asked: dict[str, Any]) -> None:
        """See `Gang.ask_profile`."""
        self._heartbeats.broadcast({"profile": asked})

    def output(self, rank: int) -> str:
        """See `Gang.output`."""
        return self._outputs[rank][0].tail() if rank < len(self._outputs) else ""

    def print_stacks(self) -> None:
        """See `Gang.print_stacks`."""
        self._heartbeats.broadcast({"hangs": True})
        with contextlib.suppress(OSError):
            ended = self._fork_server.exits() if self._fork_server is not None else {}
            for _, pid in self._outputs:
                if pid not in ended:
                    os.kill(pid, TRACE)

    def stop(self) -> None:
        """See `Gang.stop`."""
        if self._fork_server is not None:
            try:
                self._fork_server.end_ranks()
            except OSError:
                self._end()
        for output, _ in self._outputs:
            output.close()
        for output, _ in self._outputs:
            output.join(FLUSH_TIMEOUT)
        self._outputs = []

    def close(self) -> None:
        """See `Gang.close`."""
        self.stop()
        self._end()
        self._heartbeats.close()

    def _end(self) -> None:
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def _cause(self, rank: RankStatus) -> tuple[Cause, str]:
        deadline = time.monotonic() + self._limits.end
        with contextlib.suppress(OSError):
            while self._fork_server is not None and time.monotonic() < deadline:
                if (cause := self._fork_server.cause(rank.pid)) is not None:
                    return cause, cause.text
                time.sleep(0.002)  # the kernel closes the connection just before the process can be reaped
        return Cause("lost"), "the process that starts ranks has ended"
