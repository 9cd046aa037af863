"""A gang: the processes of a run, started together, watched together, ended together, attempt after attempt.

The same contract on Ray actors (`RayGang`), on local processes (`ProcessGang`) and on a fake for tests. A gang
runs one entry point, named "module:function", on every rank with the same configuration; the entry point gets a
`WorkerContext` and knows nothing of what started it. Ranks are disposable; the places that they run in stay between
attempts, with a process that has all imports done, so that the next attempt begins at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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
"""Names of labels of nodes, as Ray has them."""
SELECTOR = re.compile(rf"!?({_WORD}|in\({_WORD}(,{_WORD})*\))")
"""What is wanted of a label: `value`, `!value`, `in(a,b)`, `!in(a,b)`, as Ray has it but for its white space."""

FINISHED: frozenset[str] = frozenset({"done", "failed", "dead"})


@dataclass(frozen=True)
class Cause:
    """How a rank ended, as data to decide by; two equal causes are the same way to end.

    `end` is how: it raised an exception of the class `name`; it exited with `code`, negative for a signal; the
    kernel or Ray ended it because memory ran out (starved); its node or worker process was lost; it sent no
    heartbeat (silent); it made no step (still); it could not be placed. Of an exception, `kind` is what sort of
    error it is, as found by `cluster.workers.error_kind`; `step` and `position` are the optimiser step and the
    position of the first sample that it is about, -1 for none.
    """

    end: End = "unknown"
    code: int = 0
    name: str = ""
    kind: ErrorKind = ""
    step: int = -1
    position: int = -1

    @property
    def text(self) -> str:
        """What an exit code says, in words; empty for what has words of its own."""
        starved = "; the kernel ended it for want of memory" * (self.end == "starved")
        return (
            f"process ended with exit code {self.code}{starved}" if self.end in ("exited", "starved") else ""
        )


UNKNOWN = Cause()


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank.

    `failed` raised an exception and told; `dead` is gone without a word. `result` is what the entry point
    returned. `waiting` if the rank waits for storage, `leaving` if its process or node will be taken away soon.
    `heard` is the local monotonic time in seconds of the last sign of life, and `failed_at` of its end. `cause` is how
    it ended, and `error` that in words.
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
    waiting: bool = False
    leaving: bool = False
    cause: Cause = UNKNOWN


@dataclass(frozen=True)
class GangStatus:
    """One look at a gang: the ranks, the rows that rank 0 reported since the last look, and the largest gap in
    seconds between two signs of life of a rank lately.

    `at` is the monotonic time of the look: all that had come by then is in it. Silence is counted up to there, since
    whoever looks may itself have been frozen.
    """

    ranks: tuple[RankStatus, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    gap: float = 0.0
    at: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True)
class Bundle:
    """What one rank occupies, and a SELECTOR for each label that its node must have."""

    cpu: float = 1.0
    gpu: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def resources(self) -> dict[str, float]:
        """By Ray's names."""
        return {"CPU": self.cpu} | ({"GPU": self.gpu} if self.gpu else {})

    def suits(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels will do. One without the label is none of those excluded, as for Ray."""
        for label, wanted in self.labels.items():
            if (labels.get(label) in values_of(wanted)) == wanted.startswith("!"):
                return False
        return True

    def __str__(self) -> str:
        parts = [f"{value:g} {key}" for key, value in self.resources.items()]
        return " and ".join([*parts, *(f"{label}={value}" for label, value in self.labels.items())])


def values_of(selector: str) -> list[str]:
    """The values that a SELECTOR wants or, with a !, does not."""
    value = selector.removeprefix("!")
    return value[3:-1].split(",") if value.startswith("in(") else [value]


class Gang(Protocol):
    """Start, poll, stop, start again; close."""

    def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
        """How many ranks of that size could run now: in the places held, and in what is free on other nodes than
        those to `avoid`, named by address."""

    def start(
        self,
        world: int,
        bundle: Bundle,
        target: str,
        config: dict[str, Any],
        together: int = 1,
        avoid: Set[str] = frozenset(),
    ) -> None:
        """Run `target` on `world` ranks; each `together` consecutive ones share a node where one is large enough.

        Raises TimeoutError if they cannot all be placed.
        """

    def hold(self, count: int) -> None:
        """Make places ready for that many ranks in all, beside those that run, as far as there is room."""

    def ready(self) -> int:
        """For how many ranks there are places with all imports done."""

    def lost(self) -> Set[str]:
        """Addresses of nodes that were found to be gone lately."""

    def poll(self, saved: int, wait: float = 0.0) -> GangStatus:
        """What happened since the last call; returns as soon as there is news, at the latest after `wait` seconds.

        `saved` is the number of rows, of all that polls have returned, which are safely stored: ranks need not
        hold those any more.
        """

    def request_stop(self) -> None:
        """Ask the ranks to commit and end at the next step boundary."""

    def stop(self) -> None:
        """End the ranks now. What they ran in stays ready for the next start."""

    def close(self) -> None:
        """End every process and release what it occupied. Safe to call twice."""
