"""The job file's `train.stability`: what to do if a loss is not a number, or jumps."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.strict import StrictModel


class StabilitySpec(StrictModel):
    """What to do if a loss is not a number, or jumps: return to the last commit, and continue without those samples."""

    spike: float | None = Field(
        default=None,
        gt=0.0,
        description="a loss this many robust standard deviations above the median of recent losses is a spike; "
        "unset: spikes are not looked for",
    )
    window: int = Field(
        default=32,
        ge=8,
        le=1024,
        description="number of recent losses to compare with, and of steps within which retries are counted",
    )
    skip: int = Field(
        default=1,
        ge=1,
        description="global batches to skip from the unstable step on; each retry also skips one batch before it",
    )
    retries: int = Field(
        default=3,
        ge=0,
        description="number of retries for instabilities within `window` steps; the next one ends the run",
    )
    lr_scale: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="factor on the learning rate from that step on, applied at every retry",
    )
