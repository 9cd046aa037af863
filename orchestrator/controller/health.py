"""Find faults of a gang from the messages of its ranks and from their silence. Pure, as `decide` is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from cluster.workers.device_limits import CPU, DeviceLimits
from cluster.workers.gang import FINISHED, UNKNOWN, Cause, RankStatus
from orchestrator.controller.hang_diagnosis import missing_ranks, ranks_text, shared_wait
from orchestrator.storage.row_types import EventFields

GRACE = 1.0
"""Seconds to wait, after a rank reports a lost connection, for the death of a peer that explains it."""
STEP_FACTOR = 3.0
"""A gang may go this many times its longest recent step without a step or a heartbeat, if that is longer than
`DeviceLimits.hang` or `DeviceLimits.silence`."""
GAP_FACTOR = 4.0
"""A gang may go this many times its longest recent gap between heartbeats without one: a busy machine delays all."""
FIRST_STEP = 900.0
"""Seconds for the first step, which includes compilation and reading a checkpoint, or for storage to answer."""
DEATHS = 3
"""Equal deaths of one rank at one step after which the program counts as the cause."""
STRIKES = 3
"""Failures of ranks on one node, within `limits.restart_window`, after which the node gets no ranks for a while."""
EXCLUSION = 300.0
"""Seconds for which it gets none, from its last failure on."""


@dataclass(frozen=True)
class Failure:
    """The first fault of an attempt."""

    time: float
    """When it happened, monotonic seconds."""
    step: int
    """The optimizer step after which the attempt ended."""
    where: str
    """The rank and its node, for people."""
    why: str
    """The event, as text for people. No decision depends on it, except that two of them are compared."""
    cause: Cause = UNKNOWN
    """The value that decisions depend on."""
    node: str = ""
    """The address of the node at fault, empty if none is known to be."""
    rank: int = -1
    """The rank at fault, -1 if none is known to be."""
    wrong_nodes: tuple[str, ...] = ()
    """The nodes of ranks that compute wrongly."""

    @property
    def is_hang(self) -> bool:
        """Whether the living ranks of the gang can tell what they wait for."""
        return self.cause.end in ("silent", "still")

    @property
    def text(self) -> str:
        """The fault in one line."""
        return f"{self.where}: {self.why}" if self.where else self.why

    def to_json(self) -> EventFields:
        """Return the fields of an event that describe the fault, without its time."""
        return {
            "first_fault": self.text,
            "node": self.node,
            "rank": self.rank,
            "cause": dataclasses.asdict(self.cause),
            **({"wrong_nodes": list(self.wrong_nodes)} if self.wrong_nodes else {}),
        }

    @classmethod
    def on_record(cls, event: Mapping[str, Any], ago: float, now: float) -> Failure:
        """Return the failure that an event describes. Events of earlier versions have no cause.

        Args:
            event: the row of the event.
            ago: how long ago it happened, in seconds.
            now: the present monotonic time, in seconds.
        """
        return cls(
            time=now - max(ago, 0.0),
            step=event.get("step") or 0,
            where="",
            why=event["first_fault"],
            cause=Cause(**event["cause"]) if event.get("cause") else UNKNOWN,
            node=event.get("node") or "",
            rank=event.get("rank", -1),
            wrong_nodes=tuple(event.get("wrong_nodes") or ()),
        )

    def repeats(self, earlier: Sequence[Failure]) -> bool:
        """Whether earlier failures show that the program itself is the cause.

        That is so if it raised the same exception at this step before, or if this rank ended at this step in the same
        way for the DEATHS-th time.
        """
        same_cause = [f for f in earlier if (f.step, f.cause) == (self.step, self.cause)]
        if self.cause.end == "raised":
            return self.cause.kind != "peer_lost" and any(f.why == self.why for f in same_cause)
        return self.rank >= 0 and sum(f.rank == self.rank for f in same_cause) + 1 >= DEATHS


def excluded(failures: Sequence[Failure], now: float) -> Set[str]:
    """Return the nodes that get no ranks for a while, because too many ranks have failed there."""
    nodes = [f.node for f in failures if f.node]
    last = {f.node: f.time for f in failures}
    return frozenset(n for n in set(nodes) if nodes.count(n) >= STRIKES and now - last[n] < EXCLUSION)


@dataclass(frozen=True)
class Vitals:
    """The measurements by which the health of a gang is judged. All times are monotonic seconds of this host."""

    now: float
    ranks: tuple[RankStatus, ...]
    step: int
    """The last step of any rank."""
    moved: float
    """When the gang last made progress."""
    suspected: float
    """Since when a rank has reported an error, 0 if none has."""
    longest_step: float
    """Seconds of the longest recent step."""
    gap: float
    """Seconds of the longest recent gap between heartbeats."""
    starting: bool
    """Whether the first step is still to come."""
    ending: bool
    """Whether the gang was asked to end."""
    limits: DeviceLimits = CPU
    """The time limits of the device."""

    @property
    def patience(self) -> float:
        """Seconds without a heartbeat after which a rank of a training gang counts as silent."""
        return max(self.limits.silence, STEP_FACTOR * self.longest_step, GAP_FACTOR * self.gap)

    @property
    def longest_wait(self) -> float:
        """Seconds without a step after which the gang counts as hanging, although heartbeats arrive."""
        return max(self.limits.hang, self.patience)


def first_fault(vitals: Vitals) -> Failure | None:
    """Return the first fault of the gang: an exception, or else a death, a silence or a hang. None if it is healthy."""
    return _raised(vitals) or _died(vitals) or _silent(vitals) or _hangs(vitals)


def _raised(vitals: Vitals) -> Failure | None:
    failed = sorted((r for r in vitals.ranks if r.state == "failed"), key=lambda r: r.failed_at)
    root = next((r for r in failed if r.cause.kind != "peer_lost"), None)
    # The death of a rank makes its peers raise connection errors, which may arrive before the death is seen.
    if root is None and failed and vitals.now - vitals.suspected >= GRACE and not _died(vitals):
        root = failed[0]
    if root is not None and root.cause.ranks:
        return _blamed(vitals, root)
    return _failure(vitals, root, "", root.error, root.cause) if root else None


def _blamed(vitals: Vitals, root: RankStatus) -> Failure:
    """Return the failure of the ranks that an exception blames, whoever raised it."""
    blamed = [r for r in vitals.ranks if r.rank in root.cause.ranks]
    return Failure(
        time=vitals.now,
        step=vitals.step,
        where=" and ".join(f"rank {r.rank} on {r.node}" for r in blamed),
        why=root.error,
        cause=root.cause,
        node=blamed[0].node,
        rank=blamed[0].rank,
        wrong_nodes=tuple(dict.fromkeys(r.node for r in blamed)),
    )


def _died(vitals: Vitals) -> Failure | None:
    dead = sorted((r for r in vitals.ranks if r.state == "dead"), key=lambda r: r.failed_at)
    return _failure(vitals, dead[0], " died", dead[0].error, dead[0].cause) if dead else None


def _silent(vitals: Vitals) -> Failure | None:
    running = [r for r in vitals.ranks if r.state not in FINISHED]
    quiet = min(running, key=lambda r: r.last_heartbeat, default=None)
    if quiet is None:
        return None
    silent = vitals.now - quiet.last_heartbeat
    if silent <= (max(vitals.limits.first_silence, vitals.patience) if vitals.starting else vitals.patience):
        return None
    failure = _failure(vitals, quiet, "", f"no sign of life for {silent:.1f} s", Cause("silent"))
    missing = missing_ranks(vitals.ranks, silent=True)
    others_missing = [missing_rank for missing_rank in missing if missing_rank.rank != quiet.rank]
    also = (
        f"; {ranks_text(others_missing)} {'is' if len(others_missing) == 1 else 'are'} missing too"
        if others_missing
        else ""
    )
    reason = "".join(f"; {missing_rank.why}" for missing_rank in missing if missing_rank.rank == quiet.rank)
    return dataclasses.replace(failure, why=failure.why + reason + also)


def _hangs(vitals: Vitals) -> Failure | None:
    running = [r for r in vitals.ranks if r.state not in FINISHED]
    still = vitals.now - vitals.moved
    slow = vitals.starting or vitals.ending or any(r.waiting for r in vitals.ranks)
    if not running or still <= (max(FIRST_STEP, vitals.longest_wait) if slow else vitals.longest_wait):
        return None
    behind = min(running, key=lambda r: r.step)
    why = f"no step for {still:.0f} s"
    if missing := missing_ranks(vitals.ranks):
        first = missing[0]
        why += f"; rank {first.rank}: {first.why}" if len(missing) > 1 else f"; {first.why}"
        where, cause = ranks_text(missing), Cause("still")
        return Failure(vitals.now, vitals.step, where, why, cause, node=first.node, rank=first.rank)
    if wait := shared_wait(vitals.ranks):
        why += f"; {wait}"
    if behind.step < vitals.step:
        return _failure(vitals, behind, "", why, Cause("still"))
    return Failure(vitals.now, vitals.step, "", why, Cause("still"))


def _failure(vitals: Vitals, rank: RankStatus, how: str, why: str, cause: Cause) -> Failure:
    where = f"rank {rank.rank} on {rank.node}{how}"
    return Failure(
        time=vitals.now, step=vitals.step, where=where, why=why, cause=cause, node=rank.node, rank=rank.rank
    )
