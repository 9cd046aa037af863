"""Ray as far as a gang uses it, without processes: what is asked of it is counted, and only waits take time."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from cluster.workers import nodes, ray_gang, worker_group

GRANT, READY = 0.001, 0.5
"""Seconds from one placement group that is granted to the next, and from an actor's start to its first answer."""


class Clock:
    """A clock that stands still while this process computes, so that no figure depends on the machine."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """Return the time."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance it."""
        self._now += seconds


class Reference:
    """An answer that is there at a time; never, without one."""

    def __init__(self, value: Any = None, at: float | None = 0.0) -> None:
        self.value, self.at = value, at


class Host:
    """An actor on a node."""

    def __init__(self, of: StandInRay, node: str) -> None:
        self._of, self._node, self._at = of, node, of.clock.monotonic() + READY

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._ask(name, arguments))

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Reference:
        if self._node in self._of.dead:
            return Reference(at=None)
        if name == "launch":
            ranks, *more = (each.value if isinstance(each, Reference) else each for each in arguments)
            self._of.launched += [[rank, *more] for rank in ranks]
            sent = (each for each in arguments if not isinstance(each, Reference))
            self._of.sent += sum(len(pickle.dumps(each)) for each in sent)
        return Reference((self._node, f"at-{self._node}") if name == "location" else {}, self._at)


class StandInRay:
    """A cluster of nodes with room for one group each.

    Attributes:
        clock: the time.
        queries: how often all nodes were asked for.
        sent: bytes of arguments of launches, and of objects that were put.
        launched: the arguments of each launch.
        dead: names of nodes that do not answer.
        actors: how many were made.
    """

    def __init__(self, groups: int, ranks: int) -> None:
        self.clock = Clock()
        self.queries = self.sent = self.actors = 0
        self.launched: list[list[Any]] = []
        self.dead: set[str] = set()
        self.names = [f"node-{number:05d}" for number in range(groups)]
        self._room = {"CPU": float(ranks)}
        self._made = 0
        self._granted = 0.0

    def alive(self) -> list[nodes.Node]:
        """See `nodes.alive`."""
        self.queries += 1
        free = [self._room if number >= self._made else {} for number in range(len(self.names))]
        return [
            nodes.Node(name, f"at-{name}", self._room, room)
            for name, room in zip(self.names, free, strict=True)
        ]

    def unreachable(self, ids: Iterable[str], timeout: float) -> frozenset[str]:
        """See `nodes.unreachable`."""
        if found := frozenset(ids) & self.dead:
            self.clock.sleep(timeout)
        return found

    def placement_group(self, *_: Any, **__: Any) -> Any:
        """Request a placement group, on the next node."""
        self._granted = max(self._granted, self.clock.monotonic()) + GRANT
        self._made += 1
        at = self._granted
        return SimpleNamespace(node=self.names[self._made - 1], ready=lambda: Reference(at=at))

    def remote(self, _: type) -> Any:
        """See `ray.remote`. The strategy of an actor is its placement group."""

        def options(scheduling_strategy: Any, **_: Any) -> Any:
            self.actors += 1
            return SimpleNamespace(remote=lambda *_: Host(self, scheduling_strategy.node))

        return SimpleNamespace(options=options)

    def put(self, value: Any) -> Reference:
        """See `ray.put`."""
        self.sent += len(pickle.dumps(value))
        return Reference(value)

    def wait(
        self, references: Sequence[Reference], num_returns: int = 1, timeout: float = 0.0
    ) -> tuple[list[Reference], list[Reference]]:
        """See `ray.wait`."""
        times = sorted(each.at for each in references if each.at is not None)
        end = self.clock.monotonic() + timeout
        if len(times) >= num_returns:
            end = min(end, times[num_returns - 1])
        self.clock.sleep(max(end - self.clock.monotonic(), 0.0))
        ready, rest = list[Reference](), list[Reference]()
        for each in references:
            (rest if each.at is None or each.at > self.clock.monotonic() else ready).append(each)
        return ready, rest

    def get(self, asked: Any, timeout: float = 0.0) -> Any:
        """See `ray.get`."""
        found = asked if isinstance(asked, list) else [asked]
        if self.wait(found, len(found), timeout)[1]:
            raise GetTimeoutError
        return [each.value for each in found] if isinstance(asked, list) else asked.value


@contextlib.contextmanager
def stand_in_ray(groups: int, ranks: int) -> Iterator[StandInRay]:
    """Put a cluster with room for so many groups of so many ranks in Ray's place."""
    of = StandInRay(groups, ranks)
    replaced: dict[Any, dict[str, Callable[..., Any] | Clock]] = {
        ray: {"wait": of.wait, "get": of.get, "put": of.put, "remote": of.remote, "kill": lambda _: None},
        ray.util: {"get_node_ip_address": lambda: "127.0.0.1"},
        nodes: {"alive": of.alive, "draining": frozenset, "unreachable": of.unreachable},
        ray_gang: {"time": of.clock},
        worker_group: {
            "time": of.clock,
            "placement_group": of.placement_group,
            "remove_placement_group": lambda _: None,
            "PlacementGroupSchedulingStrategy": lambda group, _: group,
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, names in replaced.items():
            for name, value in names.items():
                patch.setattr(module, name, value)
        yield of
