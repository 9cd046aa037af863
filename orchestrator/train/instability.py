"""Detection of unstable training: a loss that is not finite or that jumps, or weights that generate no answers.

`orchestrator.controller.decide` decides what follows, and `orchestrator.data.samples.skips` which samples are left out
then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from orchestrator.train.config import StabilitySpec
from workloads.errors import LogitsNotFinite

NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""
MIN_SPREAD = 0.005
"""Minimum spread as a share of the median, so that ripples of a nearly constant loss are no spikes."""


class NonFinite(ArithmeticError):
    """The loss, the gradient norm or the logits of generated answers are not finite.

    It is raised before the commit of optimizer step `step`: by every rank, or, where answers are generated, by each
    rank that does not get its own. `position` is that of the first sample of the step's global batch.
    """

    kind = "unstable"

    def __init__(self, problem: str, step: int, position: int) -> None:
        self.step, self.position = step, position
        super().__init__(f"{problem} at step {step}, samples from position {position}")


class LossSpike(ArithmeticError):
    """The loss is far above recent losses, by the job's measure. It is raised like `NonFinite`."""

    kind = "unstable"

    def __init__(self, problem: str, step: int, position: int) -> None:
        self.step, self.position = step, position
        super().__init__(f"{problem}, at step {step}, samples from position {position}")


def check_stable(
    loss: float | None,
    grad_norm: float,
    earlier_losses: Sequence[float],
    stability: StabilitySpec,
    step: int,
    position: int,
) -> None:
    """Raise NonFinite or LossSpike if the numbers of a step show that training is unstable.

    All ranks have the same numbers, so all of them raise or none does.

    Args:
        loss, grad_norm: of the step; a step that predicts nothing has no loss.
        earlier_losses: losses of the earlier steps.
        stability: the job's thresholds.
        step, position: the step, and the position of its first sample.
    """
    for name, value in (("loss", loss), ("grad_norm", grad_norm)):
        if value is not None and not math.isfinite(value):
            raise NonFinite(f"{name} is {value}", step, position)
    if loss is not None and (reason := spike(loss, earlier_losses, stability)):
        raise LossSpike(reason, step, position)


@contextmanager
def watched_answers(step: int, position: int) -> Iterator[None]:
    """Raise NonFinite for a step if the model's logits are not finite while it generates answers.

    The job's stability policy then decides, as after a loss that is not finite.

    Args:
        step, position: the step, and the position of its first sample.
    """
    try:
        yield
    except LogitsNotFinite as error:
        raise NonFinite("logits of generated answers are not finite", step, position) from error


def spike(loss: float, earlier_losses: Sequence[float], stability: StabilitySpec) -> str:
    """Return why a loss is a spike after the losses `earlier_losses`; empty if it is none, or if there are too few.

    Args:
        loss: of the step.
        earlier_losses: in order.
        stability: the window, and how many deviations make a spike.
    """
    recent = earlier_losses[-stability.window :]
    if stability.spike is None or len(recent) < stability.window:
        return ""
    # Median and median absolute deviation ignore earlier outliers, which would inflate mean and variance.
    middle = statistics.median(recent)
    deviation = NORMAL * statistics.median(abs(value - middle) for value in recent)
    spread = max(deviation, MIN_SPREAD * abs(middle))
    if loss <= middle + stability.spike * spread:
        return ""
    return f"loss {loss:.4f} is {(loss - middle) / spread:.1f} deviations above {middle:.4f}, the median"
