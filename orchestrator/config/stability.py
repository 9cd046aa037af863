"""The job file's `train.stability`: what happens when a loss is not a number, or jumps."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.strict import StrictModel


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
