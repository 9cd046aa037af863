"""Whether a gang is well, from what its ranks say and how long they say nothing: pure, as `decide` is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from cluster.workers.device_limits import CPU, DeviceLimits
from cluster.workers.gang import FINISHED, UNKNOWN, Cause, RankStatus
from orchestrator.storage.row_types import EventFields

GRACE = 1.0
"""Seconds that a lost connection may wait for the death that explains it to be seen."""
STEP_FACTOR = 3.0
"""As many of the longest steps of late may pass without a step, where that is longer than `DeviceLimits.hang`, or
without a beat, than `DeviceLimits.silence`."""
GAP_FACTOR = 4.0
"""As many of the longest gaps between beats of late: on a machine that is short of processors, all is late."""
FIRST_STEP = 900.0
"""Seconds that a gang may take to its first step, or storage to answer: compilation, reading a checkpoint."""
DEATHS = 3
"""Deaths of one rank at one step, in the same way, after which the program is taken to be the cause."""
STRIKES = 3
"""Failures of ranks on one node, within `limits.restart_window`, after which it gets none for a while."""
EXCLUSION = 300.0
"""Seconds of that while, from its last failure on."""


@dataclass(frozen=True)
class Failure:
    """The first fault of an attempt, which ended after optimiser step `step`.

    `cause` is what is decided by. `rank` and `node` are -1 and empty where none is known to be at fault. `time` is
    monotonic seconds. `where` and `why` are for people: nothing reads them but to compare two of them.
    """

    time: float
    step: int
    where: str
    why: str
    cause: Cause = UNKNOWN
    node: str = ""
    rank: int = -1

    @property
    def text(self) -> str:
        """The first fault in one line."""
        return f"{self.where}: {self.why}" if self.where else self.why

    def to_json(self) -> EventFields:
        """What an event tells of it, beside the time."""
        told: EventFields = {"first_fault": self.text, "node": self.node, "rank": self.rank}
        return {**told, "cause": dataclasses.asdict(self.cause)}

    @classmethod
    def on_record(cls, event: Mapping[str, Any], ago: float, now: float) -> Failure:
        """The failure that an earlier controller told of, `ago` seconds before `now`; versions before had no cause."""
        cause = Cause(**event["cause"]) if event.get("cause") else UNKNOWN
        node, rank = event.get("node") or "", event.get("rank", -1)
        return cls(now - max(ago, 0.0), event.get("step") or 0, "", event["first_fault"], cause, node, rank)

    def repeats(self, others: Sequence[Failure]) -> bool:
        """Whether `others` show that it is the program's own: it raised the same at this step before, or this rank
        ended at this step, in the same way, for the DEATHS-th time."""
        alike = [f for f in others if (f.step, f.cause) == (self.step, self.cause)]
        if self.cause.end == "raised":
            return self.cause.kind != "peer_lost" and any(f.why == self.why for f in alike)
        return self.rank >= 0 and sum(f.rank == self.rank for f in alike) + 1 >= DEATHS


def excluded(failures: Sequence[Failure], now: float) -> Set[str]:
    """The nodes that get no ranks for a while, since too many have failed there."""
    nodes = [f.node for f in failures if f.node]
    last = {f.node: f.time for f in failures}
    return frozenset(n for n in set(nodes) if nodes.count(n) >= STRIKES and now - last[n] < EXCLUSION)


@dataclass(frozen=True)
class Vitals:
    """What tells whether a gang is well.

    `moved` is when the last step was seen, and `suspected` since when a rank complains of a peer; all times are
    monotonic, and this host's. `longest_step` is of the latest steps and `gap` of the latest beats, in seconds.
    `starting` before the first step, `ending` once it was asked to. `limits` are those of what it computes on.
    """

    now: float
    ranks: tuple[RankStatus, ...]
    step: int
    moved: float
    suspected: float
    longest_step: float
    gap: float
    starting: bool
    ending: bool
    limits: DeviceLimits = CPU

    @property
    def patience(self) -> float:
        """Seconds without a beat after which a gang in training is not well."""
        return max(self.limits.silence, STEP_FACTOR * self.longest_step, GAP_FACTOR * self.gap)

    @property
    def longest_wait(self) -> float:
        """Seconds without a step after which it hangs, though its beats come."""
        return max(self.limits.hang, self.patience)


def first_fault(seen: Vitals) -> Failure | None:
    """The first fault of the gang: what was raised first, else who died, else who went silent or hangs."""
    return _told(seen) or _died(seen) or _silent(seen) or _hangs(seen)


def _told(seen: Vitals) -> Failure | None:
    told = sorted((r for r in seen.ranks if r.state == "failed"), key=lambda r: r.failed_at)
    root = next((r for r in told if r.cause.kind != "peer_lost"), None)
    # A peer's death makes others raise connection errors: the death came first, whoever was heard first.
    if root is None and told and seen.now - seen.suspected >= GRACE and not _died(seen):
        root = told[0]
    return _failure(seen, root, "", root.error, root.cause) if root else None


def _died(seen: Vitals) -> Failure | None:
    dead = sorted((r for r in seen.ranks if r.state == "dead"), key=lambda r: r.failed_at)
    return _failure(seen, dead[0], " died", dead[0].error, dead[0].cause) if dead else None


def _silent(seen: Vitals) -> Failure | None:
    running = [r for r in seen.ranks if r.state not in FINISHED]
    quiet = min(running, key=lambda r: r.last_heartbeat, default=None)
    if quiet is None:
        return None
    silent = seen.now - quiet.last_heartbeat
    if silent <= (max(seen.limits.first_silence, seen.patience) if seen.starting else seen.patience):
        return None
    return _failure(seen, quiet, "", f"no sign of life for {silent:.1f} s", Cause("silent"))


def _hangs(seen: Vitals) -> Failure | None:
    running = [r for r in seen.ranks if r.state not in FINISHED]
    still = seen.now - seen.moved
    slow = seen.starting or seen.ending or any(r.waiting for r in seen.ranks)
    if not running or still <= (max(FIRST_STEP, seen.longest_wait) if slow else seen.longest_wait):
        return None
    behind = min(running, key=lambda r: r.step)
    if behind.step < seen.step:
        return _failure(seen, behind, "", f"no step for {still:.0f} s", Cause("still"))
    return Failure(seen.now, seen.step, "", f"no step for {still:.0f} s", Cause("still"))


def _failure(seen: Vitals, rank: RankStatus, how: str, why: str, cause: Cause) -> Failure:
    where = f"rank {rank.rank} on {rank.node}{how}"
    return Failure(seen.now, seen.step, where, why, cause, rank.node, rank.rank)
