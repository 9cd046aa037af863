"""A gang: the rank processes of a run, which are started, monitored and stopped together, attempt after attempt.

`RayGang` runs them on Ray actors, `ProcessGang` as local processes; tests have a fake. A gang runs one entry point,
"module:function", on every rank with the same configuration. The entry point gets a `WorkerContext` and does not know
what started it. Rank processes live for one attempt. The workers that start them stay between attempts with all imports
done, so the next attempt begins at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from cluster.workers.device_limits import DeviceLimits, limits_of
from cluster.workers.hang_report import HangReport
from cluster.workers.rank_output import OutputTarget
from cluster.workers.worker_context import Stage, Work

RankState = Literal["starting", "running", "done", "failed", "dead"]
End = Literal["raised", "exited", "starved", "lost", "silent", "still", "unplaced", "unknown"]
ErrorKind = Literal[
    "",
    "input",
    "unstable",
    "corrupt_commit",
    "wrong_arithmetic",
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
    """How a rank ended. Holds nothing that varies between repetitions, so equal causes can be counted."""

    end: End = "unknown"
    """
    - raised: an exception of the class `name`.
    - exited: the process exited with `code`.
    - starved: the kernel or Ray killed the process because memory ran out.
    - lost: its worker process or node is gone.
    - silent: no heartbeat for too long.
    - still: no step for too long.
    - unplaced: the cluster had no room for it.
    """
    code: int = 0
    """The exit code, negative for a signal."""
    name: str = ""
    """The class of the exception; of a lost rank, what is gone."""
    kind: ErrorKind = ""
    """The kind of an exception, see `cluster.workers.error_kind`."""
    step: int = -1
    """The optimizer step that an exception refers to, -1 for none."""
    position: int = -1
    """The position of the first sample that an exception refers to, -1 for none."""
    ranks: tuple[int, ...] = ()
    """The ranks that an exception blames, whoever raised it; empty to blame the one that did."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))  # a list in JSON

    @property
    def text(self) -> str:
        """The message for a process that exited or was killed; empty for other ends, which have their own messages."""
        if self.end not in ("exited", "starved"):
            return ""
        text = f"process ended with exit code {self.code}"
        return f"{text}; the kernel killed it because memory ran out" if self.end == "starved" else text


UNKNOWN = Cause()


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank. Times are monotonic seconds of this process."""

    rank: int
    node: str
    """The address of its node."""
    pid: int
    state: RankState
    """`failed` raised an exception and reported it; `dead` ended without a report."""
    step: int = -1
    """The last step that it reported, -1 before the first."""
    error: str = ""
    """Why it ended, for people."""
    failed_at: float = 0.0
    """When it ended."""
    result: Any = None
    """The return value of its entry point."""
    last_heartbeat: float = 0.0
    waiting: bool = False
    """Whether it waits for storage."""
    leaving: bool = False
    """Whether its process or node will be taken away soon."""
    evaluated_batches: int = 0
    """How many batches of held-out text it has evaluated."""
    modules: int = 0
    """How many Python modules it has imported. An import may take longer than a step, on a slow file system."""
    work: Work | None = None
    """Its activity between two steps; None while it trains."""
    stage: Stage = field(default_factory=Stage)
    """What it was doing when it was last heard of."""
    hang: HangReport | None = None
    """Its answer to `Gang.print_stacks`; None before it has answered."""
    cause: Cause = UNKNOWN
    """How it ended."""

    @property
    def activity(self) -> str:
        """What it was doing when it was last heard of, for people."""
        return self.work.name if self.work else self.stage.name


@dataclass(frozen=True)
class GangStatus:
    """One observation of a gang."""

    ranks: tuple[RankStatus, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    """The rows that rank 0 reported since the last observation."""
    gap: float = 0.0
    """The longest recent gap between two heartbeats of a rank, in seconds."""
    at: float = field(default_factory=time.monotonic, compare=False)
    """The monotonic time of the observation, which includes every message that had arrived by then. The silence of a
    rank is measured up to this time, because the observer may itself have been frozen."""
    nodes: tuple[dict[str, Any], ...] = ()
    """Readings of the nodes since the last observation: {"time", "node", "step", "values"}, see `node_metrics`."""


def workers_text(count: int, kind: str = "") -> str:
    """Return a number of workers as text for people: "1 worker", "2 teacher workers".

    Args:
        count: how many.
        kind: what they are called; empty for training workers.
    """
    return f"{count} {kind}{' ' * bool(kind)}worker{'s' * (count != 1)}"


@dataclass(frozen=True)
class Bundle:
    """The resources that one rank occupies: CPUs, GPUs, and a SELECTOR for each label that its node must have."""

    cpu: float = 1.0
    gpu: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def resources(self) -> dict[str, float]:
        """CPUs and GPUs, by Ray's names for them."""
        return {"CPU": self.cpu} | ({"GPU": self.gpu} if self.gpu else {})

    @property
    def limits(self) -> DeviceLimits:
        """The time limits of its device, such as how long a rank may take to end."""
        return limits_of(self.gpu)

    @property
    def stands_by(self) -> bool:
        """Whether to keep a standby process with its device initialised: a GPU takes seconds, a CPU no time."""
        return self.gpu > 0

    def suits(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels matches. As in Ray, a node without a label matches a `!` selector for it."""
        for label, selector in self.labels.items():
            # A plain selector fails if the value is none of its own, one with "!" if it is.
            if (labels.get(label) in values_of(selector)) == selector.startswith("!"):
                return False
        return True

    def __str__(self) -> str:
        parts = [f"{value:g} {key}" for key, value in self.resources.items()]
        return " and ".join([*parts, *(f"{label}={value}" for label, value in self.labels.items())])


def values_of(selector: str) -> list[str]:
    """Return the values that a SELECTOR names."""
    value = selector.removeprefix("!")
    return value[3:-1].split(",") if value.startswith("in(") else [value]


class DrainAnswer(NamedTuple):
    """What became of the request to drain a node."""

    is_final: bool
    """Whether another request would have the same answer."""
    refusal: str = ""
    """Why the node is not drained, as a clause for people; empty if it is drained or gone."""


class Gang(Protocol):
    """The rank processes of a run: start, poll, stop, start again; close at the end."""

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """Return how many ranks could run now, in present workers and on nodes with free resources.

        Args:
            bundle: what one rank occupies.
            avoid: addresses of nodes to leave out.
        """

    def start(
        self,
        world_size: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        ranks_per_group: int = 1,
        avoid: Set[str] = frozenset(),
        output: OutputTarget | None = None,
    ) -> None:
        """Start the ranks of an attempt.

        Args:
            world_size: the number of ranks.
            bundle: what one rank occupies.
            target: the entry point, "module:function".
            config: the configuration that every rank gets.
            ranks_per_group: how many consecutive ranks share a node, if any node is large enough.
            avoid: addresses of nodes that get no ranks.
            output: where the output of the ranks is copied to.

        Raises:
            TimeoutError: the ranks cannot all be placed.
        """

    def prewarm(
        self, count: int, bundle: Bundle | None = None, target: str = "", avoid: Set[str] = frozenset()
    ) -> None:
        """Keep workers with all imports done for `count` ranks, those that run included, as far as there is room.

        Further workers without a rank are released. Polls make the workers.

        Args:
            count: the number of ranks.
            bundle: what one rank occupies. Needed before the first start.
            target: the entry point. Needed before the first start.
            avoid: addresses of nodes that get no workers. Read with a bundle only.
        """

    def occupied_workers(self) -> int:
        """Return how many workers it occupies. The capacity of other gangs does not include them."""

    def ready(self) -> int:
        """Return the number of workers with all imports done, those of running ranks included."""

    def lost_nodes(self) -> Set[str]:
        """Return the addresses of nodes that recently stopped answering."""

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """Return what happened since the last call, as soon as something has.

        Args:
            saved: how many of all rows that polls have returned are safely stored. Ranks may forget those.
            wait: seconds after which to return in any case.
        """

    def request_stop(self) -> None:
        """Ask the ranks to commit and end at the next step boundary."""

    def ask_profile(self, request: dict[str, Any]) -> None:
        """Ask the ranks to profile their next steps, see `orchestrator.train.profile`."""

    def output(self, rank: int) -> str:
        """Return the last output of a rank, even if it has ended; empty if its node does not answer at once.

        Not available after `stop`.
        """

    def print_stacks(self) -> None:
        """Make the ranks print the Python stacks of their threads, which show where a gang hangs.

        Also calls the `on_hang` of their contexts. Polls then show what the ranks answer, see `RankStatus.hang`.
        """

    def stop(self) -> None:
        """Kill the ranks. Their workers stay ready for the next start."""

    def close(self) -> None:
        """End every process and free its resources. Safe to call twice."""
