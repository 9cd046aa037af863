"""Where the ranks of a Ray gang run: placement groups with an actor in each bundle, which starts one rank after
another."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.workers import nodes
from cluster.workers.fork_server import ForkServer
from cluster.workers.gang import Bundle, Cause
from cluster.workers.rank_process import FENCE

REACH = 5.0
"""Seconds between tries to reach the head, and for one of them."""


def until_out_of_reach(address: str, patience: float = FENCE, every: float = REACH) -> None:
    """Return once nobody at `address` ("host:port") has accepted a connection for `patience` seconds."""
    host, _, port = address.rpartition(":")
    reached = time.monotonic()
    while True:
        try:
            socket.create_connection((host, int(port)), every).close()
            reached = time.monotonic()
        except OSError:  # only then, for this process may itself have been frozen meanwhile
            if time.monotonic() - reached > patience:
                return
        time.sleep(every)


class WorkerHost:
    """An actor in a bundle. It starts ranks and sees how they end; it imports nothing heavy."""

    def __init__(self, target: str) -> None:
        self._zygote = ForkServer(target)
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._end_when_cut_off, args=(head,), name="fence", daemon=True).start()

    def _end_when_cut_off(self, head: str) -> None:
        """Ray would keep this place for some minutes more, and nobody can want it."""
        until_out_of_reach(head)
        os._exit(1)

    def place(self) -> tuple[str, str]:
        """The id and the address of its node."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def launch(self, rank: dict[str, Any]) -> int:
        """End the rank before, fork the next; returns its process id."""
        self.end_ranks()
        return self._zygote.launch(**rank)

    def end_ranks(self) -> None:
        """Kill the rank. Raises OSError if its fork server is gone, which took it along."""
        self._zygote.end_ranks()

    def exits(self) -> dict[int, int]:
        """See `ForkServer.exits`."""
        return self._zygote.exits()

    def cause(self, pid: int) -> Cause | None:
        """How the rank of that process id ended; None while it has not. "lost" if its fork server is gone too."""
        try:
            return self._zygote.cause(pid)
        except OSError:
            return Cause("lost", name="fork server")


@dataclass(frozen=True, eq=False)
class WorkerGroup:
    """A granted placement group with an actor in each of its bundles; `places` are their nodes and addresses."""

    group: PlacementGroup
    bundle: Bundle
    target: str
    hosts: tuple[Any, ...]
    places: tuple[tuple[str, str], ...]

    @property
    def kind(self) -> tuple[int, Bundle, str]:
        """How many ranks it is for, of which size, and the entry point that is imported there."""
        return len(self.hosts), self.bundle, self.target

    def give_up(self) -> None:
        """Kill its actors and release what they occupied."""
        release(self.group, self.hosts)


class UnresponsiveGroup:
    """A room that was asked to end its ranks, until it has answered or is given up."""

    def __init__(self, room: WorkerGroup) -> None:
        self.room, self.since = room, time.monotonic()
        self.answers: list[Any] = [host.end_ranks.remote() for host in room.hosts]

    def has_answered(self) -> bool:
        """Whether all of it has. Raises RayError if some of it is gone."""
        missing = ray.wait(self.answers, num_returns=len(self.answers), timeout=0)[1]
        if not missing:
            ray.get(self.answers)
        return not missing


class PendingGroup:
    """A room on its way: its placement group is granted, its actors start, their imports end."""

    def __init__(self, together: int, bundle: Bundle, target: str, avoid: Set[str]) -> None:
        present = nodes.alive()
        packed = any(nodes.room(n.total, n.labels, bundle) >= together for n in present)
        refused = sorted(n.id for n in present if n.id in avoid or n.address in avoid)
        labels = dict(bundle.labels) | ({"ray.io/node-id": f"!in({','.join(refused)})"} if refused else {})
        self.group = placement_group(
            [bundle.resources] * together,
            strategy="STRICT_PACK" if packed else "PACK",
            bundle_label_selector=[labels] * together if labels else None,
        )
        self._together, self.bundle, self._target = together, bundle, target
        self._ready: Any = self.group.ready()
        self._hosts: list[Any] = []
        self._answers: list[Any] = []

    def advance(self, wait: float) -> WorkerGroup | None:
        """The room, once it is there. Raises RayError if its actors die before."""
        if not self._hosts and self._is_granted(wait):
            remote: Any = ray.remote(WorkerHost)
            for number in range(self._together):
                where = PlacementGroupSchedulingStrategy(self.group, number)
                worker = remote.options(
                    num_cpus=self.bundle.cpu, num_gpus=self.bundle.gpu, scheduling_strategy=where
                )
                self._hosts.append(worker.remote(self._target))
            self._answers = [h.place.remote() for h in self._hosts] + [h.exits.remote() for h in self._hosts]
        if not self._hosts or ray.wait(self._answers, num_returns=len(self._answers), timeout=wait)[1]:
            return None
        places = [tuple(place) for place in ray.get(self._answers[: self._together])]
        return WorkerGroup(self.group, self.bundle, self._target, tuple(self._hosts), tuple(places))

    def give_up(self) -> None:
        """Release what is there of it."""
        release(self.group, self._hosts)

    def _is_granted(self, wait: float) -> bool:
        return bool(ray.wait([self._ready], timeout=wait)[0])

    @property
    def granted(self) -> int:
        """For how many ranks it occupies places already; 0 while its placement group is not there."""
        return len(self._hosts)


def release(group: PlacementGroup, hosts: Iterable[Any]) -> None:
    """Kill the actors and give up what they occupied."""
    for host in hosts:
        with contextlib.suppress(RayError):
            ray.kill(host)
    with contextlib.suppress(RayError):
        remove_placement_group(group)
