"""What a controller needs of a cluster, whether that is Ray or processes on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.workers.gang import Bundle, Gang
from cluster.workers.machine import Offer


class RemoteTask(Protocol):
    """A function call that runs in another process."""

    def done(self) -> bool:
        """Whether it has ended; returns at once."""

    def result(self) -> Any:
        """Wait for the call and return its value; raises what it raised."""

    def cancel(self) -> None:
        """End it, with some seconds to clean up; the process is gone when this returns."""


class NodeServices(Protocol):
    """A service that runs once on every node."""

    def ensure_running(self, min_nodes: int = 1) -> list[dict[str, str]]:
        """Start it on nodes that lack it; returns {"node", "address"} of each. Nothing is started, and the list is
        empty, while there are fewer than `min_nodes` nodes."""

    def stop(self) -> None:
        """End the service on all nodes."""


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """For a cluster without a process that has the imports: here."""
    return function(*arguments)


def _fixed_size(bundle: Bundle, workers: int) -> None:
    """For a cluster that cannot grow."""


def _unknown(addresses: Sequence[str]) -> list[dict[str, str]]:
    """For nodes without labels."""
    return [{"node": address, "machine": "", "market": "", "zone": ""} for address in addresses]


@dataclass(frozen=True)
class Cluster:
    """The operations of a cluster, each a function.

    `gang()` makes a gang that is not started. `offer(bundle, most)` is what the smallest of so many workers has, None
    if no node can hold one. `run_task(function, *arguments)` calls a function in another process.
    `services("module:Class", token)` keeps an object of that class on every node, made with the token and the node's
    address. `call(function, *arguments)` returns what that does, and has its imports done already where it can.
    `request_workers(bundle, count)` asks an autoscaler for room; it is called often, with 0 once no workers are needed.
    `machines(addresses)` is {"node", "machine", "market", "zone"} of each node.
    """

    gang: Callable[[], Gang]
    offer: Callable[[Bundle, int], Offer | None]
    run_task: Callable[..., RemoteTask]
    services: Callable[[str, str], NodeServices]
    call: Callable[..., Any] = _call
    request_workers: Callable[[Bundle, int], None] = _fixed_size
    machines: Callable[[Sequence[str]], list[dict[str, str]]] = _unknown
