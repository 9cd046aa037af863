"""When training is unstable: a loss that is not a number, or that jumps.

What follows is decided by `orchestrator.controller.decide`; which samples are left out then, by
`orchestrator.data.samples.skips`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from orchestrator.train.config import StabilitySpec

NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
LEAST_SPREAD = 0.005
"""Of the median: losses that hardly move do not make a spike of every ripple."""


class NonFinite(ArithmeticError):
    """The loss or the gradient norm is not a number.

    Every rank raises it at the same optimiser step `step`, before any commit; `position` is that of the first sample of
    the step's global batch.
    """

    kind = "unstable"

    def __init__(self, what: str, step: int, position: int) -> None:
        self.step, self.position = step, position
        super().__init__(f"{what} at step {step}, samples from position {position}")


class LossSpike(ArithmeticError):
    """The loss is far above the last ones, by the job's measure; raised as `NonFinite` is."""

    kind = "unstable"

    def __init__(self, what: str, step: int, position: int) -> None:
        self.step, self.position = step, position
        super().__init__(f"{what}, at step {step}, samples from position {position}")


def check_stable(
    loss: float | None,
    grad_norm: float,
    before: Sequence[float],
    stability: StabilitySpec,
    step: int,
    position: int,
) -> None:
    """Raise NonFinite or LossSpike if the numbers of a step show that training is unstable; a step that predicts
    nothing has no loss.

    `before` are the losses of the steps before. All ranks have the same numbers, so that all raise or none.
    """
    for name, value in (("loss", loss), ("grad_norm", grad_norm)):
        if value is not None and not math.isfinite(value):
            raise NonFinite(f"{name} is {value}", step, position)
    if loss is not None and (why := spike(loss, before, stability)):
        raise LossSpike(why, step, position)


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
