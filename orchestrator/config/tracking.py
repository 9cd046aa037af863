"""The job file's `tracking`: where a run is followed. Importable without torch or ray."""

from __future__ import annotations

from pydantic import Field

from orchestrator.config.strict import StrictModel


class TrackingSpec(StrictModel):
    """Experiment tracking in MLflow."""

    uri: str = Field(default="sqlite:///mlflow.db", description="an MLflow tracking URI")
    experiment: str = Field(default="default", description="the experiment that the run is shown in")
    register_as: str | None = Field(
        default=None,
        min_length=1,
        description="name in MLflow's registry of which the exported model becomes a version; with "
        "checkpoint.keep_best a metric, the alias best goes to it if it is better than what has it",
    )
