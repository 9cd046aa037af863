"""What a controller needs of a cluster, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.workers.gang import Bundle, Gang
from cluster.workers.machine import Offer


class RemoteTask(Protocol):
    """A function at work in another process."""

    def done(self) -> bool:
        """Whether it has ended; returns at once."""

    def result(self) -> Any:
        """What it returned, waited for; raises what it raised."""

    def cancel(self) -> None:
        """End it, with time to clean up; it is gone when this returns."""


class NodeServices(Protocol):
    """The same object on every node."""

    def everywhere(self, at_least: int = 1) -> list[dict[str, str]]:
        """{"node", "address"} of each, started where there is none yet; none where there are fewer nodes than that."""

    def stop(self) -> None:
        """End them all."""


def _want_nothing(bundle: Bundle, workers: int) -> None:
    """For a cluster whose size is what it is."""


def _unknown(addresses: Sequence[str]) -> list[dict[str, str]]:
    """For nodes of which nothing is known."""
    return [{"node": address, "machine": "", "market": "", "zone": ""} for address in addresses]


@dataclass(frozen=True)
class Cluster:
    """`gang` makes a gang that is not started, `offer` tells what the least of the workers has, `errand` runs a
    function in another process, and `services` keeps an object, "module:Class" made with a token and an address, on
    every node. `want` says how many workers the job would use if the cluster had room for them, so that one which
    can grow does; it is called often, with 0 once none are needed. `machines` tells node, machine, market and zone
    of the nodes at some addresses."""

    gang: Callable[[], Gang]
    offer: Callable[[Bundle], Offer | None]
    errand: Callable[..., RemoteTask]
    services: Callable[[str, str], NodeServices]
    want: Callable[[Bundle, int], None] = _want_nothing
    machines: Callable[[Sequence[str]], list[dict[str, str]]] = _unknown
