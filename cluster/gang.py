"""A gang: the processes of one attempt, started together, watched together, stopped together.

The same contract on Ray actors (`RayGang`), on local processes (`ProcessGang`) and on a fake for tests. A gang
runs one entry point, named "module:function", on every rank with the same configuration; the entry point gets a
`Link` and knows nothing of what started it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

RankState = Literal["starting", "running", "done", "failed", "dead"]

FINISHED: frozenset[str] = frozenset({"done", "failed", "dead"})


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank.

    `failed` raised an exception and told; `dead` is gone without a word. `result` is what the entry point
    returned. `saving` if the rank waits for storage. `heard` is the local monotonic time in seconds of the last
    sign of life.
    """

    rank: int
    node: str
    pid: int
    state: RankState
    step: int = -1
    error: str = ""
    failed_at: float = 0.0
    result: Any = None
    heard: float = 0.0
    saving: bool = False


@dataclass(frozen=True)
class Beat:
    """One look at a gang: the ranks, and the rows that rank 0 reported since the last look."""

    ranks: tuple[RankStatus, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Bundle:
    """What one rank occupies."""

    cpu: float = 1.0
    gpu: float = 0.0


class Gang(Protocol):
    """Start, poll, stop."""

    def start(self, world: int, bundle: Bundle, target: str, config: dict[str, Any]) -> None:
        """Place `world` ranks and run `target` on them. Raises TimeoutError if they cannot all be placed."""

    def poll(self, saved: int) -> Beat:
        """What happened since the last call; never blocks for long. `saved` is the number of rows, of all
        that polls have returned, which are safely stored: ranks need not hold those any more."""

    def request_stop(self) -> None:
        """Ask the ranks to commit and end at the next step boundary."""

    def stop(self) -> None:
        """End every process of the gang now and release what it occupied. Safe to call twice."""
