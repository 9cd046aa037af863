"""Whether a gang is well, from what its ranks say and how long they say nothing: pure, as `decide` is."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from cluster.gang import FINISHED, RankStatus

GRACE = 1.0
"""Seconds that a lost connection may wait for the death that explains it to be seen."""
SILENCE = 2.0
"""Seconds without a beat, or without a step, after which a gang in training is not taken to be well; at least."""
STEPS = 3.0
"""As many of the longest steps of late, where those are longer."""
GAPS = 4.0
"""As many of the longest gaps between beats of late: on a machine that is short of processors, all is late."""
FIRST_SILENCE = 30.0
"""Seconds without a beat before the first step: some libraries hold the interpreter while they are loaded."""
FIRST_STEP = 900.0
"""Seconds that a gang may take to its first step, or storage to answer: compilation, reading a checkpoint."""
STRIKES = 3
"""Failures of ranks on one node, within `limits.restart_window`, after which it gets none for a while."""
EXCLUSION = 300.0
"""Seconds of that while, from its last failure on."""


@dataclass(frozen=True)
class Failure:
    """One attempt that ended badly after `step` steps: which rank, where, and why; `told` if the rank raised it,
    `node` where it was, if one is known."""

    time: float
    step: int
    where: str
    why: str
    told: bool
    node: str = ""

    @property
    def text(self) -> str:
        """The first fault in one line."""
        return f"{self.where}: {self.why}" if self.where else self.why


def excluded(failures: Sequence[Failure], now: float) -> Set[str]:
    """The nodes that get no ranks for a while, since too many have failed there."""
    nodes = [f.node for f in failures if f.node]
    last = {f.node: f.time for f in failures}
    return frozenset(n for n in set(nodes) if nodes.count(n) >= STRIKES and now - last[n] < EXCLUSION)


@dataclass(frozen=True)
class Vital:
    """What tells whether a gang is well.

    `clock` is the monotonic time that `RankStatus.heard` is in; `moved` is when the last step was seen, and
    `suspected` since when a rank complains of a peer, both in the time of `now`. `longest_step` is of the latest
    steps and `gap` of the latest beats, in seconds. `starting` before the first step, `ending` once it was asked to.
    """

    now: float
    clock: float
    ranks: tuple[RankStatus, ...]
    step: int
    moved: float
    suspected: float
    longest_step: float
    gap: float
    starting: bool
    ending: bool

    @property
    def patience(self) -> float:
        """Seconds without a beat or a step after which a gang in training is not well."""
        return max(SILENCE, STEPS * self.longest_step, GAPS * self.gap)


def first_fault(seen: Vital) -> Failure | None:
    """The first fault of the gang: what was raised first, else who died, else who went silent or hangs."""
    return _told(seen) or _died(seen) or _silent(seen) or _hangs(seen)


def _told(seen: Vital) -> Failure | None:
    told = sorted((r for r in seen.ranks if r.state == "failed"), key=lambda r: r.failed_at)
    root = next((r for r in told if not is_consequence(r.error)), None)
    # A peer's death makes others raise connection errors: the death came first, whoever was heard first.
    if root is None and told and seen.now - seen.suspected >= GRACE and not _died(seen):
        root = told[0]
    return _failure(seen, root, "", root.error, told=True) if root else None


def _died(seen: Vital) -> Failure | None:
    dead = sorted((r for r in seen.ranks if r.state == "dead"), key=lambda r: r.failed_at)
    return _failure(seen, dead[0], " died", dead[0].error) if dead else None


def _silent(seen: Vital) -> Failure | None:
    running = [r for r in seen.ranks if r.state not in FINISHED]
    quiet = min(running, key=lambda r: r.heard, default=None)
    if quiet is None:
        return None
    silent = seen.clock - quiet.heard
    if silent <= (max(FIRST_SILENCE, seen.patience) if seen.starting else seen.patience):
        return None
    return _failure(seen, quiet, "", f"no sign of life for {silent:.1f} s")


def _hangs(seen: Vital) -> Failure | None:
    running = [r for r in seen.ranks if r.state not in FINISHED]
    still = seen.now - seen.moved
    slow = seen.starting or seen.ending or any(r.waiting for r in seen.ranks)
    if not running or still <= (max(FIRST_STEP, seen.patience) if slow else seen.patience):
        return None
    behind = min(running, key=lambda r: r.step)
    if behind.step < seen.step:
        return _failure(seen, behind, "", f"no step for {still:.0f} s")
    return Failure(seen.now, seen.step, "", f"no step for {still:.0f} s", told=False)


def _failure(seen: Vital, rank: RankStatus, how: str, why: str, told: bool = False) -> Failure:
    where = f"rank {rank.rank} on {rank.node}{how}"
    return Failure(seen.now, seen.step, where, why, told, node=rank.node)


def is_consequence(text: str) -> bool:
    """Whether an exception only says that a peer is gone."""
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Connection refused",
        "Broken pipe",
        "Timed out",
        "DistNetworkError",
        "NCCL",
    )
    return any(sign in text for sign in signs)


def bad_commit(text: str) -> int | None:
    """The step of the commit that a rank found corrupt, from its error."""
    _, found, rest = text.partition("CorruptCommit: step ")
    digits = rest.split(":")[0].split(" ")[0] if found else ""
    return int(digits) if digits.isdigit() else None
