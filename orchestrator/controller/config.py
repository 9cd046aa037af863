"""The job file's `limits`: what a run may use over all its attempts. Imports neither torch nor Ray."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.strict import Count, StrictModel


class LimitSpec(StrictModel):
    """Limits of the run over all its attempts."""

    hours: float | None = Field(
        default=None, gt=0, description="the run commits and stops after this many hours"
    )
    cost_usd: float | None = Field(default=None, gt=0, description="the run commits and stops at this cost")
    usd_per_worker_hour: float = Field(
        default=0.0, ge=0, description="price for counting cost_usd; 0: taken from prices"
    )
    prices: str | None = Field(
        default=None,
        description="a CSV file with the columns machine,market,zone,usd_per_hour; an empty zone matches any zone",
    )
    restarts: Count = Field(default=10, description="number of failures allowed within restart_window")
    restart_window: float = Field(default=3600.0, gt=0, description="seconds")
    wait: float = Field(default=600.0, gt=0, description="seconds to wait for workers.min workers")
    unsaved: float = Field(
        default=3600.0,
        gt=0,
        description="seconds to continue training while every save fails; then the run stops",
    )
