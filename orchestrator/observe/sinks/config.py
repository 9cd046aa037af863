"""The job file's `sinks`: where else the rows and events of a run go. Importable without torch or ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.strict import StrictModel, WebAddress


class WandbSpec(StrictModel):
    """Weights & Biases; the key is in its own environment variable or netrc, never in a job file."""

    project: str = Field(min_length=1, description="the project that the run is shown in")
    entity: str | None = Field(default=None, description="the team or user; default: that of your key")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: into the run directory, for `wandb sync`"
    )


class OpenTelemetrySpec(StrictModel):
    """Spans of a run and of its phases, by OTLP over HTTP; headers are in OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: WebAddress = Field(
        description="where spans are posted, such as http://collector:4318/v1/traces"
    )


class SinkSpec(StrictModel):
    """Further copies of a run's rows and events, besides MLflow. A separate process makes them, and the run never
    waits for it.

    Each key but `own` is the name of a module of `orchestrator.observe.sinks`.
    """

    tensorboard: bool = Field(default=False, description="event files in `tensorboard/` of the run directory")
    wandb: WandbSpec | None = None
    opentelemetry: OpenTelemetrySpec | None = None
    own: list[ObjectReference] = Field(
        default_factory=list,
        description="your own sinks: module:name of a class that takes a `SinkContext` and has the methods of "
        "`orchestrator.observe.sinks.sink.Sink`",
    )


OF_WANDB = (
    "not here, because W&B gets the whole job as its configuration; sinks.wandb has project, entity and mode"
)
"""The hint for every other argument of `wandb.init`."""
BY_PLACE: Mapping[str, str] = {"sinks.wandb": OF_WANDB}
"""The hint for an unknown key that is not a misspelled one."""
OTHER_NAMES: Mapping[str, str] = {
    "tracking is MLflow; sinks.tensorboard and sinks.wandb work in addition": (
        "report_to logger loggers trackio_space_id trackio_bucket_id trackio_static_space_id use_mlflow "
        "use_comet use_trackio trackio_project_name trackio_run_name comet_api_key comet_workspace "
        "comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config"
    ),
    "sinks.wandb, as in {project: demo}": "enable_wandb wandb_project use_wandb",
    "sinks.wandb.entity": "wandb_entity wandb_team",
    "sinks.wandb.mode": "wandb_mode",
    "sinks.tensorboard: true": "enable_tensorboard tensorboard_dir use_tensorboard",
    "name": "wandb_name wandb_run_name wandb_run_id",
    "tracking.register_as": "wandb_log_model",
    OF_WANDB: "tags notes job_type wandb_tags wandb_notes wandb_group",
    "not here, because every row has the norm of the gradient already": "wandb_watch",
}
"""Names of other systems for what sinks do, by the hint; `orchestrator.config.other_names` has those of all keys."""
