"""The job file's `sinks`: where else the rows and events of a run go. Importable without torch or ray."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from orchestrator.job.strict import StrictModel


class WandbSpec(StrictModel):
    """Weights & Biases; the key is in its own environment variable or netrc, never in a job file."""

    project: str = Field(min_length=1, description="the project that the run is shown in")
    entity: str | None = Field(
        default=None, description="the team or user; that of your key if it is not said"
    )
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: into the run directory, for `wandb sync`"
    )


class OpenTelemetrySpec(StrictModel):
    """Spans of a run and of its phases, by OTLP over HTTP; headers are in OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: str = Field(description="where spans are posted, such as http://collector:4318/v1/traces")

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        place = urlsplit(value)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise ValueError("is no http or https URL")
        return value


class SinkSpec(StrictModel):
    """Copies of a run's rows and events beside MLflow, made by a process of their own that the run never waits for."""

    tensorboard: bool = Field(default=False, description="event files in `tensorboard/` of the run directory")
    wandb: WandbSpec | None = None
    opentelemetry: OpenTelemetrySpec | None = None
