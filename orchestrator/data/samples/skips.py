"""Windows of samples that are skipped after an instability, as arithmetic on positions.

Everything here is a pure function of recorded events, so all ranks make the same decision, a resumed run decides as
the original did, and a replay reads the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.train.config import StabilitySpec


@dataclass(frozen=True)
class Skip:
    """`count` samples from global position `start` on are skipped. From optimizer step `step` on, counted from 1, the
    learning rate is multiplied by `lr_scale`.
    """

    step: int
    start: int
    count: int
    lr_scale: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the skip as plain data."""
        return asdict(self)


def merged(*records: Iterable[dict[str, Any] | Skip]) -> tuple[Skip, ...]:
    """Return the skips of several records without duplicates, ordered by position."""
    skips = {s if isinstance(s, Skip) else Skip(**s) for record in records for s in record}
    return tuple(sorted(skips, key=lambda skip: skip.start))


def on_record(events: Iterable[dict[str, Any]], before: tuple[Skip, ...] = ()) -> tuple[Skip, ...]:
    """Return the skips named by a run's events, together with those from `before` the events.

    If a run was extended, skips within a decay phase that the longer run does not have are dropped.
    """
    skips = before
    for event in events:
        if event.get("skipped"):
            skips = merged(skips, [event["skipped"]])
        if extended := event.get("extended"):
            skips = tuple(skip for skip in skips if skip.step <= extended["settled"])
    return skips


def start_of(position: int, batches: int, size: int, skips: Sequence[Skip]) -> int:
    """Return where a batch of `size` samples begins, `batches` after the next batch to be read at `position`.

    Windows in `skips`, ordered by position, are passed over. Each begins and ends at a batch boundary.
    """
    start = position + batches * size
    covered = 0
    for skip in skips:
        first = max(skip.start, covered)
        end = skip.start + skip.count
        if position <= first <= start and first < end:
            start += end - first
        covered = max(covered, end)
    return start


def start_before(position: int, batches: int, size: int, skips: Sequence[Skip]) -> int:
    """Return where the batch began that was read `batches` before the one at `position`; 0 if there are fewer."""
    for _ in range(batches):
        position -= size
        for skip in reversed(skips):
            if skip.start <= position < skip.start + skip.count:
                position = skip.start - size
    return max(position, 0)


def is_before(position: int, commit_skips: Iterable[Skip], skips: Iterable[Skip]) -> bool:
    """Return whether a commit at `position` with the skips `commit_skips` used no sample of `skips`."""
    left_out = set(commit_skips)
    return all(position <= skip.start or skip in left_out for skip in skips)


def lr_factor(step: int, skips: Iterable[Skip]) -> float:
    """Return the factor on the learning rate of the `step`-th update, counted from 1."""
    return math.prod(skip.lr_scale for skip in skips if skip.step <= step)


def next_skip(
    stability: StabilitySpec, batch: int, skips: Sequence[Skip], step: int, position: int
) -> Skip | None:
    """Return the skip that an instability at optimizer step `step` adds; None if the retries around the step are used
    up.

    Args:
        stability: the job's settings.
        batch: the global batch in samples.
        skips: the skips so far.
        step: the step, counted from 1.
        position: the position of the step's first sample.

    A step's loss is measured before its samples are learnt from, so earlier steps may be the cause: each retry skips
    one more batch before it.
    """
    tried = sum(abs(skip.step - step) <= stability.window for skip in skips)
    if tried >= stability.retries:
        return None
    start = start_before(position, min(tried, step - 1), batch, merged(skips))
    count = position + stability.skip * batch - start
    return Skip(max(step - tried, 1), start, count, stability.lr_scale)
