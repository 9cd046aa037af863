"""Nodes that come and go, without Ray: ranks and snapshot servers are real processes, and a node is a group of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import psutil
from lasting_gang import LastingGang
from prepared import prepare_here

from cluster.workers.cluster import Cluster, RemoteTask
from cluster.workers.gang import Bundle, GangStatus
from cluster.workers.machine import Offer
from cluster.workers.process_gang import ForkServer
from cluster.workers.rank_output import OutputTarget
from orchestrator.config.spec import parse
from orchestrator.controller.controller import Controller
from orchestrator.storage.run_directory import RunDir


class Nodes:
    """So many nodes, each with a snapshot server. See `NodeServices`.

    Attributes:
        names: the nodes that are up.
    """

    def __init__(self, count: int) -> None:
        self.names = [f"node-{number}" for number in range(count)]
        self.token = ""
        self._servers: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def services(self, target: str, token: str) -> Nodes:
        """See `Cluster.services`."""
        self.token = token
        return self

    def ensure_running(self, min_nodes: int = 1) -> list[dict[str, str]]:
        """Start the servers of nodes that are new, or were lost."""
        for name in self.names if len(self.names) >= min_nodes else ():
            if name not in self._servers or self._servers[name][0].poll() is not None:
                command = [sys.executable, "-m", "orchestrator.checkpoint.snapshot_server"]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps({"token": self.token}) + "\n")
                process.stdin.flush()
                self._servers[name] = process, process.stdout.readline().strip()
        up = [(name, self._servers[name][1]) for name in self.names if name in self._servers]
        return [{"node": name, "address": address} for name, address in up]

    def kill(self, name: str) -> None:
        """Kill the node's server."""
        if name in self._servers:
            self._servers[name][0].kill()

    def reap(self, name: str) -> None:
        """Wait until the node's killed server is gone."""
        if name in self._servers:
            self._servers[name][0].wait()

    def leave(self, addresses: Set[str]) -> None:
        """See `NodeServices.leave`."""

    def stop(self) -> None:
        """End all servers."""
        for process, _ in self._servers.values():
            process.kill()
            process.wait()
        self._servers = {}


class NodesGang(LastingGang):
    """A gang of local processes whose ranks believe to be on these nodes: rank r on node r modulo their number.

    Attributes:
        pids: the process of each rank.
        places: the node of each rank.
        rows: how often the row of each step has arrived, in all attempts.
        since_start: how many rows of this attempt have arrived.
        reached: the last step that rank 0 has reported, by attempt.
    """

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self.nodes = nodes
        self.pids: list[int] = []
        self.places: list[str] = []
        self.rows: Counter[int] = Counter()
        self.since_start = 0
        self.reached: list[int] = []
        self.restored: list[int] = []

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
        self.pids, self.since_start = [], 0
        self.restored.append(config["restore"] or 0)
        self.reached.append(config["restore"] or 0)
        names = self.nodes.names
        self.places = [names[rank % len(names)] for rank in range(world_size)]
        launch, pids = ForkServer.launch, [0] * world_size

        def on_node(process: ForkServer, /, **rank: Any) -> int:
            number = rank["rank_info"]["rank"]
            rank["rank_info"]["node"] = self.places[number]
            pids[number] = launch(process, **rank)
            return pids[number]

        ForkServer.launch = on_node  # type: ignore[method-assign, assignment]
        try:
            super().start(world_size, bundle, target, config, ranks_per_group, avoid, output)
            self.pids = pids
        finally:
            ForkServer.launch = launch  # type: ignore[method-assign]

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """See `Gang.poll`."""
        status = super().poll(saved, wait)
        self.take(status.rows)
        if status.ranks:
            self.reached[-1] = max(self.reached[-1], status.ranks[0].step)
        return status

    def take(self, rows: tuple[dict[str, Any], ...]) -> None:
        """Note rows that have arrived."""
        self.rows.update(row["step"] for row in rows)
        self.since_start += len(rows)

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """See `Gang.capacity`."""
        return len(self.nodes.names)

    def ready(self) -> int:
        """See `Gang.ready`."""
        return len(self.nodes.names)

    def kill_rank(self, rank: int) -> None:
        """Kill a rank alone: what else is on its node lives on."""
        with contextlib.suppress(ProcessLookupError):
            psutil.Process(self.pids[rank]).kill()

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node: its server, its ranks and the processes that write their snapshots."""
        family: list[psutil.Process] = []
        for pid in self._ranks_on(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                family += [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
        for process in family:  # none of them can act any more while the others are killed
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        self.nodes.kill(name)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.nodes.reap(name)

    def notify(self, name: str) -> None:
        """Tell the ranks of a node that it will be taken away."""
        for pid in self._ranks_on(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _ranks_on(self, name: str) -> list[int]:
        return [pid for pid, place in zip(self.pids, self.places, strict=False) if place == name]


class Killer(threading.Thread):
    """Kills random ranks and nodes at random moments, each time after the attempt has finished a new step.

    Attributes:
        struck: what was killed, "rank" or "node", with the last finished step.
    """

    def __init__(self, gang: NodesGang, kills: int, seed: int, longest: float) -> None:
        super().__init__(daemon=True)
        self._gang, self._kills, self._longest = gang, kills, longest
        self._random = random.Random(seed)
        self.over = threading.Event()
        self.struck: list[tuple[str, int]] = []

    def run(self) -> None:
        """Kill as often as wanted, or until the run is over."""
        attempts = 0
        while len(self.struck) < self._kills and not self.over.is_set():
            gang = self._gang
            # A row counts once its step is held on two nodes.
            if len(gang.restored) == attempts or not gang.since_start:
                time.sleep(0.005)
                continue
            attempts = len(gang.restored)
            time.sleep(self._random.uniform(0.0, self._longest))
            rank = self._random.randrange(len(gang.pids))
            kind = self._random.choice(["rank", "node"])
            self.struck.append((kind, max(gang.rows)))
            if kind == "rank":
                gang.kill_rank(rank)
            else:
                gang.kill_node(gang.places[rank])


def run_on_nodes(
    document: dict[str, Any],
    run: str,
    cache: Path,
    nodes: int = 2,
    kills: int = 0,
    seed: int = 1,
    longest: float = 0.3,
) -> tuple[dict[str, Any], NodesGang, Killer]:
    """Run a job that exports nothing on simulated nodes, and kill at random. Returns the summary too."""
    gang = NodesGang(Nodes(nodes))
    controller = controller_on(document, run, cache, gang)
    killer = Killer(gang, kills, seed, longest)
    killer.start()
    try:
        summary = controller.drive()
    finally:
        killer.over.set()
        killer.join()
        gang.nodes.stop()
        gang.end()
    return summary, gang, killer


def controller_on(
    document: dict[str, Any],
    run: str,
    cache: Path,
    gang: NodesGang,
    run_task: Callable[..., RemoteTask] = lambda *call, **_: None,  # type: ignore[assignment, return-value]
) -> Controller:
    """The controller of a job on simulated nodes, with its data prepared in `cache`. Exports need `run_task`."""
    document["data"]["cache"] = str(cache)
    spec = parse(document)
    prepare_here(spec, str(cache))
    place = RunDir(run)
    place.create()
    cluster = Cluster(
        gang=lambda: gang,
        offer=lambda bundle, most: Offer(8e9),
        run_task=run_task,
        services=gang.nodes.services,
    )
    return Controller(spec, place, None, cluster)
