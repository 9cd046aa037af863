"""The job file's `tracking`: the experiment tracker. Imports neither torch nor Ray."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.strict import StrictModel


class TrackingSpec(StrictModel):
    """Experiment tracking in MLflow."""

    uri: str = Field(default="sqlite:///mlflow.db", description="an MLflow tracking URI")
    experiment: str = Field(default="default", description="the experiment to show the run in")
    register_as: str | None = Field(
        default=None,
        min_length=1,
        description="model name in MLflow's registry: the exported model becomes a version of it; if "
        "checkpoint.keep_best is a metric, the version gets the alias best if it is better than the "
        "present holder",
    )
