"""A learning-rate range test: the rate rises from step to step, and the loss shows from where to where it learns.

Smith, 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3. The rate rises by equal factors, as in
fastai's `lr_find`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.config import NO_EXPORT
from orchestrator.config.errors import InputError
from orchestrator.config.records import REWARDED
from orchestrator.config.spec import JobSpec, parse

OPTION = "--lr-range"
SUFFIX = "-lr-range"
STEPS = 100
LEAST_STEPS = 20
"""Fewer points have no slope that noise does not make."""
SHARE = 10
"""A loss is smoothed over a tenth of the points around it, so that the curve is not shifted to larger rates."""
DIVERGED = 4.0
"""A smoothed loss this many times the least one before it has diverged, as in fastai and Lightning."""
LEFT_OUT = ("tune", "stop_when", "evaluate", "prune", "tracking", "sinks", "notify")
"""Sections of a job that a range test has no use for."""


@dataclass(frozen=True)
class RateRange:
    """The first and the last learning rate of a test, and its steps."""

    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test.

    Attributes:
        rates: the learning rate of each step.
        losses: its training loss.
        smoothed: the loss smoothed over the steps around it, up to where it diverged.
        suggested: the rate at which the smoothed loss falls fastest per factor of the rate, below that of the least
            loss; None if it never falls.
        lowest: the rate of the least smoothed loss.
        diverged: the rate from which the loss has diverged, or it or the gradient was no number; None if neither.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggested: float | None
    lowest: float
    diverged: float | None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "rates": self.rates,
            "losses": self.losses,
            "smoothed": self.smoothed,
            "suggested": self.suggested,
            "lowest": self.lowest,
            "diverged": self.diverged,
        }

    @property
    def line(self) -> str:
        """Return the finding as a sentence."""
        end = (
            f"it diverges at {self.diverged:.2g}"
            if self.diverged is not None
            else "it does not diverge in this range"
        )
        if self.suggested is None:
            return f"the loss does not fall in this range; {end}. Try another range"
        where_lowest = f"it is least at {self.lowest:.2g}, and {end}"
        return f"suggested lr: {self.suggested:.2g}, where the loss falls fastest; {where_lowest}"


def range_of(text: str) -> RateRange:
    """Parse LOW:HIGH or LOW:HIGH:STEPS. Raises InputError."""
    low, _, rest = text.partition(":")
    high, _, steps = rest.partition(":")
    hint = f"write LOW:HIGH or LOW:HIGH:STEPS, as in {OPTION} 1e-6:1"
    try:
        result = RateRange(float(low), float(high), int(steps) if steps else STEPS)
    except ValueError:
        raise InputError(f"{text!r} is no range of learning rates", OPTION, hint) from None
    if not (0.0 < result.low < result.high < math.inf):
        raise InputError("the first rate must be above 0 and below the last", OPTION, hint)
    if result.steps < LEAST_STEPS:
        raise InputError(
            f"{result.steps} steps are too few for a curve", OPTION, f"give at least {LEAST_STEPS}"
        )
    return result


def job_of_range(job: Mapping[str, Any], wanted: RateRange) -> JobSpec:
    """Return the job of a range test: the same model, data, batch, objective and layout, in some steps, exporting
    nothing. A loss that is no number ends it.

    Args:
        job: the job, as a document with all of its keys.
        wanted: the rates and the steps.

    Raises:
        InputError: the job continues another run, or learns from rewards.
    """
    if (objective := job["workload"]["objective"]) in REWARDED:
        hint = "try rates with `orchestrator tune` and the metric reward"
        raise InputError(f"the loss of {objective} does not say how well it learns", OPTION, hint)
    if job["train"]["continue_from"] is not None:
        hint = "begin with its weights: replace train.continue_from by workload.init_from"
        raise InputError("begins anew, and this job continues another run", OPTION, hint)
    document = copy.deepcopy(dict(job)) | dict.fromkeys(LEFT_OUT)
    document["name"] = job["name"][: 63 - len(SUFFIX)] + SUFFIX
    document["train"] |= {"steps": wanted.steps, "thaw": {}, "sequence_warmup": None}
    document["train"]["stability"] |= {"spike": None, "retries": 0}
    document["train"]["optimizer"] |= {
        "schedule": "range_test",
        "lr": wanted.high,
        "first_lr": wanted.low / wanted.high,
        "warmup": 0,
        "decay": 0,
    }
    document["checkpoint"] |= {
        **NO_EXPORT,
        "every": wanted.steps,
        "keep_every": None,
        "keep_best": False,
        "average": None,
    }
    if job["train"]["thaw"]:  # it may train the parameters that a group matches
        document["train"]["optimizer"]["groups"] = []
    return parse(document, OPTION)


def found_in(rows: Sequence[dict[str, Any]], unstable: bool = False) -> RangeTest:
    """Return what a range test found.

    Args:
        rows: those of its steps, in order. A step whose loss or gradient is no number has none.
        unstable: whether such a step came after the last one.

    Raises:
        InputError: they are too few, or rows of steps are missing.
    """
    steps = [row["step"] for row in rows]
    if missing := sorted(set(range(1, max(steps, default=0) + 1)).difference(steps)):
        problem = f"the rows of {len(missing)} steps are missing, the first of step {missing[0]}"
        raise InputError(problem, OPTION, "run the test again")
    # The rate rises by equal factors.
    after = [float(row["lr"]) for row in rows[-2:]]
    rows = [row for row in rows if row.get("loss") is not None]
    rates = [float(row["lr"]) for row in rows]
    losses = [float(row["loss"]) for row in rows]
    if len(losses) < LEAST_STEPS // 2:
        problem = f"the loss is a number in {len(losses)} steps only"
        raise InputError(problem, OPTION, "begin with a lower rate, or see the run's report")
    smoothed = _smoothed(losses)
    end = _end(smoothed)
    kept = smoothed[:end]
    diverged = rates[end] if end < len(rates) else after[1] ** 2 / after[0] if unstable else None
    lowest = min(range(end), key=kept.__getitem__)
    # Up to the least loss: after it the loss may rise, and fall again from higher, at rates that are too large.
    slopes = [_slope(rates, kept, n) for n in range(1, lowest)]
    steepest = min(range(len(slopes)), key=slopes.__getitem__, default=None)
    falls = steepest is not None and slopes[steepest] < 0.0
    return RangeTest(
        rates,
        losses,
        kept,
        suggested=rates[steepest + 1] if steepest is not None and falls else None,
        lowest=rates[lowest],
        diverged=diverged,
    )


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of the losses around each one; towards the ends around fewer, as many on both sides."""
    reach = max(len(losses) // SHARE // 2, 1)
    result = []
    for n in range(len(losses)):
        near = min(reach, n, len(losses) - 1 - n)
        around = losses[n - near : n + near + 1]
        result.append(sum(around) / len(around))
    return result


def _end(smoothed: Sequence[float]) -> int:
    """Return the number of points before the loss has diverged."""
    lowest = math.inf
    for n, loss in enumerate(smoothed):
        lowest = min(lowest, loss)
        # A loss that may be negative has no multiple to compare with.
        if lowest > 0.0 and loss > DIVERGED * lowest:
            return n
    return len(smoothed)


def _slope(rates: Sequence[float], losses: Sequence[float], n: int) -> float:
    """Return the slope of the loss over the logarithm of the rate at point `n`, from the points beside it."""
    return (losses[n + 1] - losses[n - 1]) / math.log(rates[n + 1] / rates[n - 1])
