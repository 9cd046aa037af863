"""The job file's `limits`: what a run may take, over all its attempts. Importable without torch or ray."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.strict import Count, StrictModel


class LimitSpec(StrictModel):
    """Limits of the run, over all its attempts."""

    hours: float | None = Field(
        default=None, gt=0, description="the run stops, with a commit, after so many hours"
    )
    cost_usd: float | None = Field(
        default=None, gt=0, description="the run stops, with a commit, at this cost"
    )
    usd_per_worker_hour: float = Field(
        default=0.0, ge=0, description="price for counting cost_usd; taken from prices if 0"
    )
    prices: str | None = Field(
        default=None,
        description="a CSV with the columns machine,market,zone,usd_per_hour; an empty zone is any zone",
    )
    restarts: Count = Field(default=10, description="failures allowed within restart_window")
    restart_window: float = Field(default=3600.0, gt=0, description="seconds")
    wait: float = Field(default=600.0, gt=0, description="seconds to wait for workers.min workers")
    unsaved: float = Field(
        default=3600.0, gt=0, description="seconds to train on while every save fails; then the run stops"
    )
