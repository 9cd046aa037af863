"""A gang: the rank processes of a run, started, monitored and ended together, attempt after attempt.

There is one on Ray actors (`RayGang`), one on local processes (`ProcessGang`), and a fake for tests. A gang runs one
entry point, named "module:function", on every rank with the same configuration; the entry point is given a
`WorkerContext` and does not know what started it. Rank processes are disposable; the workers that start them stay
between attempts with all imports done, so that the next attempt begins at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from cluster.workers.device_limits import DeviceLimits, limits_of
from cluster.workers.rank_output import OutputTarget

RankState = Literal["starting", "running", "done", "failed", "dead"]
End = Literal["raised", "exited", "starved", "lost", "silent", "still", "unplaced", "unknown"]
ErrorKind = Literal[
    "",
    "input",
    "unstable",
    "corrupt_commit",
    "peer_lost",
    "gpu_memory",
    "memory",
    "storage_full",
    "storage_refused",
    "gpu",
]

_WORD = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL = re.compile(rf"([A-Za-z0-9.-]{{1,253}}/)?{_WORD}")
"""A node label's name, by Ray's rules."""
SELECTOR = re.compile(rf"!?({_WORD}|in\({_WORD}(,{_WORD})*\))")
"""What a node label must be: `value`, `!value`, `in(a,b)` or `!in(a,b)`; Ray's syntax without white space."""

FINISHED: frozenset[str] = frozenset({"done", "failed", "dead"})


@dataclass(frozen=True)
class Cause:
    """How a rank ended, without what differs from one time to the next, so that equal causes can be counted.

    `end` is how. raised: an exception of the class `name`. exited: with `code`, negative for a signal. starved: the
    kernel or Ray killed it because memory ran out. lost: its worker process or node is gone. silent: no heartbeat for
    too long. still: no step for too long. unplaced: the cluster had no room for it. Of an exception, `kind` is the sort
    of error (see `cluster.workers.error_kind`); `step` and `position` are the optimiser step and the position of the
    first sample that it is about, -1 for none.
    """

    end: End = "unknown"
    code: int = 0
    name: str = ""
    kind: ErrorKind = ""
    step: int = -1
    position: int = -1

    @property
    def text(self) -> str:
        """The message for a process that exited; empty for other ends, whose message comes from elsewhere."""
        starved = "; the kernel ended it for want of memory" * (self.end == "starved")
        return (
            f"process ended with exit code {self.code}{starved}" if self.end in ("exited", "starved") else ""
        )


UNKNOWN = Cause()


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank.

    `failed` raised an exception and reported it; `dead` ended without a report. `result` is what the entry point
    returned. `evaluated_batches` counts those of its evaluations. `waiting` while the rank waits for storage,
    `leaving` if its process or node will be taken away soon. `last_heartbeat` and `failed_at` (its end) are monotonic
    times of this process in seconds. `cause` is how it ended, and `error` the message that goes with it.
    """

    rank: int
    node: str
    pid: int
    state: RankState
    step: int = -1
    error: str = ""
    failed_at: float = 0.0
    result: Any = None
    last_heartbeat: float = 0.0
    waiting: bool = False
    leaving: bool = False
    evaluated_batches: int = 0
    cause: Cause = UNKNOWN


@dataclass(frozen=True)
class GangStatus:
    """One observation of a gang: its ranks, the rows that rank 0 reported since the last one, the longest recent
    gap in seconds between two heartbeats of a rank, and what was read of its `nodes` since the last one: {"time",
    "node", "step", "values"}, see `node_metrics`.

    `at` is its monotonic time: every message that had arrived by then is included. The silence of a rank is measured
    up to `at`, since the observer may itself have been frozen.
    """

    ranks: tuple[RankStatus, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    gap: float = 0.0
    at: float = field(default_factory=time.monotonic, compare=False)
    nodes: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Bundle:
    """What one rank occupies: CPUs, GPUs, and a SELECTOR for each label that its node must have."""

    cpu: float = 1.0
    gpu: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def resources(self) -> dict[str, float]:
        """CPUs and GPUs by Ray's names."""
        return {"CPU": self.cpu} | ({"GPU": self.gpu} if self.gpu else {})

    @property
    def limits(self) -> DeviceLimits:
        """How long its rank may take to end."""
        return limits_of(self.gpu)

    @property
    def stands_by(self) -> bool:
        """Whether a process with its device ready waits for its next rank: a GPU takes seconds, a CPU nothing."""
        return self.gpu > 0

    def suits(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels matches. As in Ray, a node without a label matches its `!` selectors."""
        for label, wanted in self.labels.items():
            if (labels.get(label) in values_of(wanted)) == wanted.startswith("!"):
                return False
        return True

    def __str__(self) -> str:
        parts = [f"{value:g} {key}" for key, value in self.resources.items()]
        return " and ".join([*parts, *(f"{label}={value}" for label, value in self.labels.items())])


def values_of(selector: str) -> list[str]:
    """The values that a SELECTOR names."""
    value = selector.removeprefix("!")
    return value[3:-1].split(",") if value.startswith("in(") else [value]


class Gang(Protocol):
    """The processes of a run: start, poll, stop, start again; close at the end."""

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """How many ranks of that size could run now: in the workers there are, and on nodes with free resources;
        without the nodes at the addresses in `avoid`."""

    def start(
        self,
        world: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        ranks_per_group: int = 1,
        avoid: Set[str] = frozenset(),
        output: OutputTarget | None = None,
    ) -> None:
        """Run `target` on `world_size` ranks; every `ranks_per_group` consecutive ones share a node if one is large
        enough. What they print is kept in `output`.

        Raises TimeoutError if they cannot all be placed.
        """

    def prewarm(self, count: int, bundle: Bundle | None = None, target: str = "") -> None:
        """Keep workers with all imports done for `count` ranks in all, those that run included, as room allows. A gang
        that has not been started is told their size and what they will run; polls make them."""

    def held(self) -> int:
        """How many workers it occupies, which the capacity of any other gang leaves out."""

    def ready(self) -> int:
        """The number of workers with all imports done, those of running ranks included."""

    def lost_nodes(self) -> Set[str]:
        """Addresses of nodes that recently stopped answering."""

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """What happened since the last call; returns as soon as something has, at the latest after `wait` seconds.

        `saved` is the number of rows, of all that polls have returned, which are safely stored: ranks may forget
        those.
        """

    def request_stop(self) -> None:
        """Ask the ranks to commit and end at the next step boundary."""

    def ask_profile(self, asked: dict[str, Any]) -> None:
        """Ask the ranks to profile their next steps, see `orchestrator.train.profile`."""

    def output(self, rank: int) -> str:
        """The last of what a rank printed, which may have ended; empty if its node does not answer at once. Not after
        `stop`."""

    def print_stacks(self) -> None:
        """Have the ranks print the Python stacks of their threads: of a gang that hangs they tell where. Calls the
        `on_hang` of their contexts too."""

    def stop(self) -> None:
        """Kill the ranks. Their workers stay ready for the next start."""

    def close(self) -> None:
        """End every process and free its resources. Safe to call twice."""
