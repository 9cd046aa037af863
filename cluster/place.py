"""What a controller needs of a cluster, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.gang import Bundle, Gang
from cluster.machine import Offer


class Errand(Protocol):
    """A function at work in another process."""

    def done(self) -> bool:
        """Whether it has ended; returns at once."""

    def result(self) -> Any:
        """What it returned, waited for; raises what it raised."""


class Services(Protocol):
    """The same object on every node."""

    def everywhere(self) -> list[dict[str, str]]:
        """{"node", "address"} of each, started where there is none yet."""

    def stop(self) -> None:
        """End them all."""


@dataclass(frozen=True)
class Cluster:
    """`gang` makes a gang that is not started, `offer` tells what the least of the workers has, `errand` runs a
    function in another process, and `services` keeps an object, "module:Class" made with a token and an address, on
    every node."""

    gang: Callable[[], Gang]
    offer: Callable[[Bundle], Offer | None]
    errand: Callable[..., Errand]
    services: Callable[[str, str], Services]
