"""What happens when a loss is no number, or jumps: which samples are left out, and at which learning rate it goes on.

Everything here is a pure function of the job and of what is on record, so that ranks decide alike, a resumed run
decides as the first one did, and a replay reads the same samples. Torch-free.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from orchestrator.job.strict import StrictModel

if TYPE_CHECKING:
    from orchestrator.job.spec import TrainSpec

NAMES = ("NonFinite", "LossSpike")
"""The exceptions that a rank raises; their text ends with what `where` writes."""
NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
LEAST_SPREAD = 0.005
"""Of the median: losses that hardly move do not make a spike of every ripple."""
WHERE = re.compile(rf"(?:{'|'.join(NAMES)}): .* at step (\d+), samples from position (\d+)")


class StabilitySpec(StrictModel):
    """What happens when a loss is no number, or jumps: back to the commit before, and on without those samples."""

    spike: float | None = Field(
        default=None,
        gt=0.0,
        description="a loss so many robust standard deviations above the median of the last ones is a spike; "
        "none is looked for if unset",
    )
    window: int = Field(
        default=32,
        ge=8,
        le=1024,
        description="last losses that a spike is compared with, and steps within which retries are counted",
    )
    skip: int = Field(
        default=1,
        ge=1,
        description="global batches to leave out, from the step's on; every retry takes one before it too",
    )
    retries: int = Field(
        default=3, ge=0, description="instabilities within `window` steps that are overcome so"
    )
    lr_scale: float = Field(
        default=1.0, gt=0.0, le=1.0, description="times the learning rate from that step on, at every retry"
    )


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


def on_record(events: Iterable[dict[str, Any]]) -> tuple[Skip, ...]:
    """The windows that the events of a run name."""
    return merged(event["skipped"] for event in events if event.get("skipped"))


def start_of(position: int, batches: int, size: int, skips: Sequence[Skip]) -> int:
    """Where the batch of `size` samples begins that comes `batches` after the one next to be read at `position`.

    Windows in `skips`, in the order of positions, are passed over; each begins and ends where a batch would.
    """
    start, covered = position + batches * size, 0
    for skip in skips:
        first, end = max(skip.start, covered), skip.start + skip.count
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


def where(step: int, position: int) -> str:
    """The end of a fault's line, from which `next_skip` reads."""
    return f"at step {step}, samples from position {position}"


def spike(loss: float, before: Sequence[float], stability: StabilitySpec) -> str:
    """In words why a loss is a spike after those `before`; empty if it is none, or if they are too few to tell."""
    recent = before[-stability.window :]
    if stability.spike is None or len(recent) < stability.window:
        return ""
    middle = statistics.median(recent)
    deviation = NORMAL * statistics.median(abs(value - middle) for value in recent)
    spread = max(deviation, LEAST_SPREAD * abs(middle))
    if loss <= middle + stability.spike * spread:
        return ""
    return f"loss {loss:.4f} is {(loss - middle) / spread:.1f} deviations above {middle:.4f}, the median"


def is_unstable(fault: str) -> bool:
    """Whether the line of a fault is of this kind."""
    return WHERE.search(fault) is not None


def next_skip(train: TrainSpec, skips: Sequence[Skip], fault: str) -> Skip | None:
    """The window that a fault adds to those there are; None if the retries around its step are spent.

    The loss of a step is measured before its samples are learned from, so that those of the steps before may be the
    cause: every retry leaves out one batch more of them.
    """
    found = WHERE.search(fault)
    assert found is not None
    step, position = int(found[1]), int(found[2])
    stability, size = train.stability, train.global_batch
    tried = sum(abs(skip.step - step) <= stability.window for skip in skips)
    if tried >= stability.retries:
        return None
    start = start_before(position, min(tried, step - 1), size, merged(skips))
    count = position + stability.skip * size - start
    return Skip(max(step - tried, 1), start, count, stability.lr_scale)
