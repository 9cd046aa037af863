"""The interface of a cluster to the controller. Ray implements it, and so do processes on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.workers.gang import Bundle, DrainAnswer, Gang
from cluster.workers.machine import Offer


class RemoteTask(Protocol):
    """A function call that runs in another process."""

    def done(self) -> bool:
        """Return at once whether the call has ended."""

    def result(self) -> Any:
        """Wait for the call and return its value. Raises what it raised."""

    def cancel(self) -> None:
        """Stop the call, with some seconds to clean up. The process is gone when this returns."""


class NodeServices(Protocol):
    """A service that runs once on every node."""

    def ensure_running(self, min_nodes: int = 1) -> list[dict[str, str]]:
        """Start the service on nodes without it, and return {"node", "address"} of each.

        With fewer than `min_nodes` nodes nothing is started, and the list is empty.
        """

    def leave(self, addresses: Set[str]) -> None:
        """Stop the service on the nodes at these addresses, and never start it there again."""

    def stop(self) -> None:
        """Stop the service on all nodes."""


Call = Callable[..., Any]
"""`call(function, *arguments)` calls a function and returns its value."""


def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in this process: the `Call` of a cluster without a process that has the imports done."""
    return function(*arguments)


def _fixed_size(bundle: Bundle, workers: int) -> None:
    """Do nothing: the default for clusters that cannot grow."""


def _unknown(addresses: Sequence[str]) -> list[dict[str, str]]:
    """Return empty values: the default for nodes without labels."""
    return [{"node": address, "machine": "", "market": "", "zone": ""} for address in addresses]


def _one_machine(address: str) -> DrainAnswer:
    """Refuse: the default for clusters without nodes."""
    return DrainAnswer(is_final=True, refusal="the run has no other machine")


@dataclass(frozen=True)
class Cluster:
    """The operations of a cluster, each a function."""

    gang: Callable[[], Gang]
    """`gang()` makes a gang that is not started."""
    offer: Callable[[Bundle, int], Offer | None]
    """`offer(bundle, most)` describes the smallest of up to `most` workers, None if no node can hold one."""
    run_task: Callable[..., RemoteTask]
    """`run_task(function, *arguments)` calls a function in another process."""
    services: Callable[[str, str], NodeServices]
    """`services("module:Class", token)` keeps an object of that class on every node, made with the token and the node's
    address."""
    host: Callable[[], str] = lambda: "127.0.0.1"
    """`host()` returns the address at which all nodes reach this process."""
    call: Call = call_here
    """Calls a function in a process that has the imports of ranks done, if there is one."""
    request_workers: Callable[[Bundle, int], None] = _fixed_size
    """`request_workers(bundle, count)` asks an autoscaler for room. It is called often, and with 0 at the end."""
    machines: Callable[[Sequence[str]], list[dict[str, str]]] = _unknown
    """`machines(addresses)` returns {"node", "machine", "market", "zone"} of each node."""
    drain: Callable[[str], DrainAnswer] = _one_machine
    """`drain(address)` takes a node out of the cluster if nothing runs there."""

    @property
    def run_imported(self) -> Callable[..., RemoteTask] | None:
        """`run_task`, if it calls functions in a process that has the imports of ranks done."""
        return None if self.call is call_here else self.run_task
