"""Windows of samples that are left out after an instability, as arithmetic on positions.

Everything here is a pure function of what is recorded, so that ranks decide alike, a resumed run decides as the first
one did, and a replay reads the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.config.stability import StabilitySpec


@dataclass(frozen=True)
class Skip:
    """`count` samples from global position `start` on are left out; from optimiser step `step` on, counted from 1,
    the learning rate is multiplied by `lr_scale`."""

    step: int
    start: int
    count: int
    lr_scale: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """The window as plain data."""
        return asdict(self)


def merged(*records: Iterable[dict[str, Any] | Skip]) -> tuple[Skip, ...]:
    """The windows of several records, each once, in the order of positions."""
    found = {s if isinstance(s, Skip) else Skip(**s) for record in records for s in record}
    return tuple(sorted(found, key=lambda skip: skip.start))


def on_record(events: Iterable[dict[str, Any]], before: tuple[Skip, ...] = ()) -> tuple[Skip, ...]:
    """The windows that the events of a run name, and those from `before` these events.

    Where a run was extended, windows of a decay that the longer run does not have are forgotten.
    """
    found = before
    for event in events:
        if event.get("skipped"):
            found = merged(found, [event["skipped"]])
        if extended := event.get("extended"):
            found = tuple(skip for skip in found if skip.step <= extended["settled"])
    return found


def start_of(position: int, batches: int, size: int, skips: Sequence[Skip]) -> int:
    """Where the batch of `size` samples begins that comes `batches` after the one next to be read at `position`.

    Windows in `skips`, in the order of positions, are passed over; each begins and ends where a batch would.
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
    """Where the batch began that was read `batches` before the one at `position`; 0 if there were not so many."""
    for _ in range(batches):
        position -= size
        for skip in reversed(skips):
            if skip.start <= position < skip.start + skip.count:
                position = skip.start - size
    return max(position, 0)


def is_before(position: int, known: Iterable[Skip], skips: Iterable[Skip]) -> bool:
    """Whether a commit at `position`, which left out the windows `known`, has used no sample of `skips`."""
    left_out = set(known)
    return all(position <= skip.start or skip in left_out for skip in skips)


def lr_factor(step: int, skips: Iterable[Skip]) -> float:
    """What the learning rate of the `step`-th update, counted from 1, is multiplied by."""
    return math.prod(skip.lr_scale for skip in skips if skip.step <= step)


def next_skip(
    stability: StabilitySpec, batch: int, skips: Sequence[Skip], step: int, position: int
) -> Skip | None:
    """The window that an instability at optimiser step `step` adds; None if the retries around its step are spent.

    `position` is that of the first sample of the step and `batch` the global batch in samples. The loss of a step is
    measured before its samples are learned from, so that those of the steps before may be the cause: every retry leaves
    out one batch more of them.
    """
    tried = sum(abs(skip.step - step) <= stability.window for skip in skips)
    if tried >= stability.retries:
        return None
    start = start_before(position, min(tried, step - 1), batch, merged(skips))
    count = position + stability.skip * batch - start
    return Skip(max(step - tried, 1), start, count, stability.lr_scale)
