"""A gang of Ray actors in a placement group."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.gang import FINISHED, Beat, Bundle, RankStatus
from cluster.host import RankHost
from cluster.link import Seat

PLACEMENT_TIMEOUT = 30.0
"""Seconds for a placement group that should fit to be granted."""
START_TIMEOUT = 180.0
"""Seconds for actors to start and import torch, on a node that has never done so."""
BEAT_TIMEOUT = 0.25
"""Seconds that one poll waits for answers; a rank that is slower is read by the next poll."""


class RayRankHost(RankHost):
    """A `RankHost` that can say where it is."""

    def hello(self) -> dict[str, Any]:
        """Node, its address, and this process; torch is imported, so that it counts as started."""
        import os

        import torch  # noqa: F401

        return {
            "node": ray.get_runtime_context().get_node_id(),
            "ip": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
        }


class RayGang:
    """Ranks as Ray actors, packed on as few nodes as possible and numbered node by node.

    The actors belong to the process that started them: if it dies, Ray ends them.
    """

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._status: list[RankStatus] = []
        self._beats: dict[Any, int] = {}
        self._received = 0

    def start(self, world: int, bundle: Bundle, target: str, config: dict[str, Any]) -> None:
        """See `Gang.start`."""
        resources = {"CPU": bundle.cpu} | ({"GPU": bundle.gpu} if bundle.gpu else {})
        self._group = placement_group([resources] * world, strategy="PACK")
        if not self._group.wait(PLACEMENT_TIMEOUT):
            self.stop()
            raise TimeoutError(f"no room for {world} workers of {resources} within {PLACEMENT_TIMEOUT:.0f} s")
        remote: Any = ray.remote(RayRankHost)
        actors = [
            remote.options(
                num_cpus=bundle.cpu,
                num_gpus=bundle.gpu,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=i
                ),
            ).remote()
            for i in range(world)
        ]
        self._actors = actors
        try:
            places = ray.get([a.hello.remote() for a in actors], timeout=START_TIMEOUT)
            order = sorted(range(world), key=lambda i: (places[i]["ip"], places[i]["node"], i))
            self._actors = [actors[i] for i in order]
            self._launch([places[i] for i in order], target, config)
        except RayError as error:
            self.stop()
            raise TimeoutError(f"workers did not start: {type(error).__name__}: {error}") from None

    def poll(self, saved: int) -> Beat:
        """See `Gang.poll`."""
        waiting = set(self._beats.values())
        for rank, status in enumerate(self._status):
            if status.state not in FINISHED and rank not in waiting:
                self._beats[self._actors[rank].beat.remote(self._received, saved)] = rank
        rows: tuple[dict[str, Any], ...] = ()
        if not self._beats:
            return Beat(tuple(self._status))
        ready, _ = ray.wait(list(self._beats), num_returns=len(self._beats), timeout=BEAT_TIMEOUT)
        for reference in ready:
            rank = self._beats.pop(reference)
            try:
                answer = ray.get(reference)
            except ActorUnavailableError:
                continue  # a lost connection, perhaps: the next poll tells
            except RayActorError as error:
                self._mark(rank, state="dead", error=_cause(error), failed_at=time.time())
                continue
            fields = {k: answer[k] for k in ("state", "error", "failed_at", "result", "step")}
            self._mark(rank, heard=time.monotonic(), **fields)
            if rank == 0:
                rows = tuple(answer["rows"])
                self._received += len(rows)
        return Beat(tuple(self._status), rows)

    def request_stop(self) -> None:
        """See `Gang.request_stop`."""
        for actor in self._actors:
            actor.request_stop.remote()

    def stop(self) -> None:
        """See `Gang.stop`."""
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        self._actors, self._beats, self._group = [], {}, None

    def _launch(self, places: list[dict[str, Any]], target: str, config: dict[str, Any]) -> None:
        host = places[0]["ip"]
        port = ray.get(self._actors[0].open_store.remote(host), timeout=START_TIMEOUT)
        seen: dict[str, int] = {}
        launches = []
        for rank, (actor, place) in enumerate(zip(self._actors, places, strict=True)):
            local_rank = seen[place["node"]] = seen.get(place["node"], -1) + 1
            seat = Seat(rank, len(places), local_rank, host, port, place["ip"])
            launches.append(actor.launch.remote(seat, target, config))
            self._status.append(
                RankStatus(rank, place["ip"], place["pid"], "starting", heard=time.monotonic())
            )
        ray.get(launches, timeout=START_TIMEOUT)

    def _mark(self, rank: int, **fields: Any) -> None:
        self._status[rank] = dataclasses.replace(self._status[rank], **fields)


def _cause(error: RayActorError) -> str:
    """Why Ray says that an actor is gone, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next(
        (line for line in lines if "cause" in line.lower() or "killed" in line.lower()),
        lines[0] if lines else "",
    )
    return cause[:300] or "the actor died"


def capacity(bundle: Bundle) -> int:
    """How many workers of that size the alive nodes could hold right now."""
    from ray._private.state import available_resources_per_node  # no public call tells it by node

    count = 0
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for node, free in available_resources_per_node().items():
        if node in alive:
            fits = [free.get("CPU", 0.0) / bundle.cpu] + (
                [free.get("GPU", 0.0) / bundle.gpu] if bundle.gpu else []
            )
            count += int(min(fits) + 1e-6)
    return count
