"""Why a step takes as long as it does, in one line, from the parts that rank 0 has measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from orchestrator.observe.formatting import duration
from orchestrator.storage.row_line import LARGEST, Row

PARTS = {
    "data": "waiting for samples",
    "transfer": "sending weights",
    "generate": "waiting for answers",
    "reward": "computing rewards",
    "forward": "forward pass",
    "backward": "backward pass",
    "communication": "waiting for other ranks",
    "pipeline": "waiting for other stages",
    "optimizer": "optimizer",
    "agreement": "agreeing on the step",
    "commit": "waiting for commits",
    "other": "unattributed time",
}
"""The parts of a step by their keys, without `_seconds`. `other` is the rest."""
MEASURED = tuple(part for part in PARTS if part != "other")
STALLS = {
    "data": "prepare onto a faster disk, or give a worker more CPUs (per_worker.cpu)",
    "generate": "add rollout workers (rollout.workers), set rollout.staleness: 1, or raise rollout.together",
    "reward": "look at answers with `orchestrator data rollouts`; a reward of your own may be slow",
    "transfer": "raise rollout.steps, so that more steps learn from one transfer",
    "communication": "use larger micro-batches, fewer ranks or another layout: see `orchestrator plan`",
    "pipeline": "lower parallel.micro_batch, or use the schedule interleaved or zbv, which wait least",
    "agreement": "ranks do not finish a step together: see `busy_seconds` of each in metrics.jsonl",
    "commit": "commit less often (checkpoint.every), or to faster storage",
    "optimizer": "shard it over the replicas with parallel.zero: 1",
    "other": "see the operators with `orchestrator profile`",
}
"""The advice for each part in which the model is not computed."""
ALONE = {"optimizer": "a larger train.global_batch, in a new run, needs fewer updates for the same samples"}
"""The advice for a run of one rank, which cannot shard anything, where it differs."""
A_STALL = 0.15
"""From this share of a step on, a stall is named as the reason for its slowness."""
A_STRAGGLER = 1.3
"""From this multiple of the median rank's computing time on, a rank is named as slow."""
LATEST = 20
"""Number of latest steps to look at while a run trains."""


class StepParts:
    """Sums of the parts of a step over rows. Rows of earlier versions lack the parts and are ignored."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._sums = dict.fromkeys((*MEASURED, "step"), 0.0)
        self._count = self._rated = self._compared = 0
        self._mfu = self._late = 0.0
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add a row."""
        if not _is_number(row.get("forward_seconds")):
            return
        self._count += 1
        for part in self._sums:
            if _is_number(value := row.get(f"{part}_seconds")):
                self._sums[part] += value
        if _is_number(rate := row.get("mfu")):
            self._mfu = self._mfu + rate
            self._rated = self._rated + 1
        busy: Sequence[float] = row.get("busy_seconds") or ()
        if len(busy) > 1 and all(map(_is_number, busy)):
            self._late = self._late + max(busy) - busy[0]
            self._compared = self._compared + 1

    @property
    def means(self) -> dict[str, float]:
        """Return the mean seconds of a step by part, without parts that take no time; empty without rows."""
        if not self._count:
            return {}
        mean_of = {part: self._sums[part] / self._count for part in MEASURED}
        step_seconds = (self._sums["step"] + self._sums["commit"]) / self._count
        mean_of["other"] = max(step_seconds - sum(mean_of.values()), 0.0)
        return {part: seconds for part, seconds in mean_of.items() if seconds}

    @property
    def late(self) -> float | None:
        """Return the mean seconds by which rank 0 finishes computing before the last rank; None if unknown."""
        return self._late / self._compared if self._compared else None

    @property
    def mfu(self) -> float | None:
        """Return the mean model FLOPs utilisation (Chowdhery et al., 2022, PaLM, appendix B); None if unknown."""
        return self._mfu / self._rated if self._rated else None


def latest(rows: Sequence[Row]) -> list[Row]:
    """Return the latest steps of the current attempt, without its slower first step if there are others."""
    if not rows:
        return []
    attempt = rows[-1].get("attempt")
    mine = [row for row in rows[-LATEST - 1 :] if row.get("attempt") == attempt]
    return mine[1:] or mine


def why_slow(parts: StepParts, rows: Sequence[Row] = ()) -> str:
    """Return one line about what a step takes, where most of it goes, and what would help; empty if nothing is known.

    Parts add up only in the mean, which slow steps and waiting for commits raise above the median that a summary has.
    `rows` are the latest ones, in which ranks are compared.
    """
    means = parts.means
    step_seconds = sum(means.values())
    if not step_seconds:
        return ""
    order = sorted(means, key=lambda part: -means[part])
    shown = ", ".join(f"{PARTS[part]} {means[part] / step_seconds:.0%}" for part in order[:3])
    rate = "" if parts.mfu is None else f"; MFU {parts.mfu:.1%}"
    return f"a step takes {duration(step_seconds)} in the mean: {shown}{rate}. {_verdict(means, step_seconds, rows)}"


def _verdict(means: Mapping[str, float], step_seconds: float, rows: Sequence[Row]) -> str:
    worst = max(STALLS, key=lambda part: means.get(part, 0.0))
    share = means.get(worst, 0.0) / step_seconds
    slow = straggler(rows)
    if (
        slow
        and max(means.get(part, 0.0) for part in ("communication", "agreement")) >= A_STALL / 3 * step_seconds
    ):
        return (
            f"Rank {slow[0]} computes {slow[1]:.1f} times as long as the median rank, and the others wait "
            "for it"
        )
    if share >= A_STALL:
        alone = bool(rows) and len(rows[-1].get("busy_seconds") or ()) == 1
        return f"Slow by {PARTS[worst]}: {ALONE.get(worst, STALLS[worst]) if alone else STALLS[worst]}"
    computed = (means.get("forward", 0.0) + means.get("backward", 0.0)) / step_seconds
    return (
        f"Computing takes {computed:.0%} of the time: a faster machine, more workers or a lower "
        "precision would help"
    )


def straggler(rows: Sequence[Row]) -> tuple[int, float] | None:
    """Return the rank that computes longest, and how many times the median over all; None if no part stands out."""
    busy = [row["busy_seconds"] for row in rows if row.get("busy_seconds")]
    if not busy or len(busy[0]) < 2 or len({len(each) for each in busy}) > 1:
        return None
    of_rank = [statistics.median(values) for values in zip(*busy, strict=True)]
    middle = statistics.median_low(of_rank)
    longest = max(of_rank)
    return (of_rank.index(longest), longest / middle) if middle and longest >= A_STRAGGLER * middle else None


def in_table(parts: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the parts for a table: name, seconds and share, the largest first."""
    total_seconds = sum(parts.values())
    order = sorted(parts, key=lambda part: -parts[part])
    return [
        {"part": part, "name": PARTS[part], "seconds": parts[part], "share": parts[part] / total_seconds}
        for part in order
    ]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST
