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
    """A cluster of nodes with room for a number of workers of one CPU each.

    Attributes:
        clock: the time.
        queries: how often all nodes were asked for.
        sent: bytes of arguments of launches, and of objects that were put.
        launched: the arguments of each launch.
        dead: names of nodes that do not answer.
        actors: how many were made.
    """

    def __init__(self, groups: int, ranks: int) -> None:
        """Make nodes.

        Args:
            groups: how many.
            ranks: the CPUs of each.
        """
        self.clock = Clock()
        self.queries = self.sent = self.actors = 0
        self.launched: list[list[Any]] = []
        self.dead: set[str] = set()
        self.names = [f"node-{number:05d}" for number in range(groups)]
        self._ranks = ranks
        self._free = dict.fromkeys(self.names, ranks)
        self._hidden: list[tuple[float, str, int]] = []
        """What nodes still show as free: until when, the node, and for how many workers."""
        self._waiting: list[Any] = []
        """Placement groups that find no room."""
        self._granted = 0.0

    def alive(self) -> list[nodes.Node]:
        """See `nodes.alive`."""
        self.queries += 1
        shown = self._free.copy()
        self._hidden = [each for each in self._hidden if each[0] > self.clock.monotonic()]
        for _, node, workers in self._hidden:
            shown[node] += workers
        total = {"CPU": float(self._ranks)}
        return [nodes.Node(name, f"at-{name}", total, {"CPU": float(shown[name])}) for name in self.names]

    def occupy(self, node: str, workers: int, seen: float) -> None:
        """Take room on a node, as another job does, which is seen at a time."""
        self._free[node] -= workers
        self._hidden.append((seen, node, workers))

    def unreachable(self, ids: Iterable[str], timeout: float) -> frozenset[str]:
        """See `nodes.unreachable`."""
        if found := frozenset(ids) & self.dead:
            self.clock.sleep(timeout)
        return found

    def placement_group(self, bundles: Sequence[dict[str, float]], **_: Any) -> Any:
        """Request a placement group of one bundle. The first node with room gets it."""
        (bundle,) = bundles
        group = SimpleNamespace(node="", workers=int(bundle["CPU"]), reference=Reference(at=None))
        group.ready = lambda: group.reference
        self._waiting.append(group)
        self._grant()
        return group

    def remove_placement_group(self, group: Any) -> None:
        """Free the room of a placement group."""
        if group.node:
            self._free[group.node] += group.workers
        else:
            self._waiting.remove(group)
        self._grant()

    def _grant(self) -> None:
        for group in list(self._waiting):
            if node := next((name for name, free in self._free.items() if free >= group.workers), ""):
                self._waiting.remove(group)
                self._granted = max(self._granted, self.clock.monotonic()) + GRANT
                group.node, group.reference.at = node, self._granted
                self.occupy(node, group.workers, seen=self._granted)

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
    """Put a cluster in Ray's place, see `StandInRay`."""
    of = StandInRay(groups, ranks)
    replaced: dict[Any, dict[str, Callable[..., Any] | Clock]] = {
        ray: {"wait": of.wait, "get": of.get, "put": of.put, "remote": of.remote, "kill": lambda _: None},
        ray.util: {"get_node_ip_address": lambda: "127.0.0.1"},
        nodes: {"alive": of.alive, "draining": frozenset, "unreachable": of.unreachable},
        ray_gang: {"time": of.clock},
        worker_group: {
            "time": of.clock,
            "placement_group": of.placement_group,
            "remove_placement_group": of.remove_placement_group,
            "PlacementGroupSchedulingStrategy": lambda group, _: group,
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, names in replaced.items():
            for name, value in names.items():
                patch.setattr(module, name, value)
        yield of
