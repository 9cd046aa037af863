"""The job file's `resources`: what a run may use of a cluster. Importable without torch or ray."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cluster.workers.gang import LABEL, SELECTOR, Bundle
from orchestrator.config.strict import Count, Positive, StrictModel


class Workers(StrictModel):
    """Least and most workers of the run."""

    min: Positive = Field(description="the run waits rather than train with fewer")
    max: Positive = Field(description="most that it takes; it grows and shrinks between")

    @model_validator(mode="after")
    def min_is_at_most_max(self) -> Workers:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; swap them")
        return self


class PerWorker(StrictModel):
    """What one worker needs."""

    cpu: float = Field(default=1, gt=0, le=10_000, description="processors that Ray keeps for a worker")
    gpu: float = Field(default=0, ge=0, description="GPUs of a worker: 0, or 1")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="what the labels of its node must be: by label a value, !value, in(a,b) or !in(a,b), as for Ray",
    )

    @field_validator("gpu")
    @classmethod
    def gpu_is_whole(cls, value: float) -> float:
        if value not in (0, 1):
            raise ValueError("a worker is one rank and has 0 or 1 GPU; raise workers instead")
        return value

    @field_validator("labels")
    @classmethod
    def labels_are_ray_s(cls, value: dict[str, str]) -> dict[str, str]:
        for label, wanted in value.items():
            if not LABEL.fullmatch(label) or not SELECTOR.fullmatch(wanted):
                raise ValueError(
                    f"{label}={wanted} selects nothing; write value, !value, in(a,b) or !in(a,b)"
                )
        return value

    @property
    def bundle(self) -> Bundle:
        """The resources of one worker, as the cluster is asked for them."""
        return Bundle(self.cpu, self.gpu, self.labels)


class ResourceSpec(StrictModel):
    """What the run may use of a cluster."""

    workers: Workers = Field(
        default=Workers(min=1, max=1), description="ranks of the run; one number is min and max"
    )
    per_worker: PerWorker = Field(default_factory=PerWorker)
    must_fit: bool = Field(
        default=True,
        description="whether a run is refused that is predicted to need more memory than its workers have",
    )
    objective: Literal["time", "cost"] = Field(
        default="time",
        description="how many workers are taken: time takes all that make a step faster; cost as many as take least of "
        "all workers' time together, if the run is then predicted to end within limits.hours",
    )
    spares: Count = Field(default=0, description="idle workers, started and with all imports done")
    notices: str | None = Field(
        default=None,
        description="source of preemption notices: aws, gcp, azure, or a path or URL that exists once the machine will "
        "be taken away",
    )

    @field_validator("workers", mode="before", json_schema_input_type=Workers | int)
    @classmethod
    def one_number_is_both(cls, value: Any) -> Any:
        return {"min": value, "max": value} if isinstance(value, int) else value
