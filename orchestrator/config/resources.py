"""The job file's `resources`: what a run may use of a cluster. Imports neither torch nor Ray."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cluster.workers.gang import LABEL, SELECTOR, Bundle, workers_text
from orchestrator.config.strict import Count, Positive, StrictModel


class Workers(StrictModel):
    """Minimum and maximum number of workers."""

    min: Positive = Field(description="the run waits rather than train with fewer")
    max: Positive = Field(description="maximum; the run grows and shrinks between min and max")

    @model_validator(mode="after")
    def min_is_at_most_max(self) -> Workers:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; swap them")
        return self

    @property
    def text(self) -> str:
        """Return the numbers as text for people: "1 worker", "1 to 2 workers"."""
        between = f"{self.min} to " if self.min < self.max else ""
        return between + workers_text(self.max)


def one_number(value: Any) -> Any:
    """Read a number of workers from a job file: a single number means both min and max."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return {"min": value, "max": value} if is_number else value


class PerWorker(StrictModel):
    """The resources of one worker."""

    cpu: float = Field(default=1, gt=0, le=10_000, description="CPUs that Ray reserves for a worker")
    gpu: float = Field(default=0, ge=0, description="GPUs of a worker: 0 or 1")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="required labels of the worker's node: for each label a value, !value, in(a,b) or !in(a,b), "
        "as in Ray",
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
        """Return the resources of one worker as a cluster request."""
        return Bundle(self.cpu, self.gpu, self.labels)


class VerifySpec(StrictModel):
    """How often a step is computed again, to find a machine that computes wrongly."""

    every: Positive = Field(default=200, description="one step in so many is computed again")
    by: Literal["other", "same"] = Field(
        default="other",
        description="who computes it again: other, the next data-parallel replica, which also finds a machine that is "
        "always wrong; same, the same rank, which finds only transient errors, under any layout",
    )


class ResourceSpec(StrictModel):
    """The resources of a cluster that the run may use."""

    workers: Workers = Field(
        default=Workers(min=1, max=1), description="number of ranks; a single number is both min and max"
    )
    per_worker: PerWorker = Field(default_factory=PerWorker)
    must_fit: bool = Field(
        default=True,
        description="refuse to start the run if its predicted memory exceeds that of its workers",
    )
    objective: Literal["time", "cost"] = Field(
        default="time",
        description="how many workers to use: time uses every worker that makes a step faster; cost uses the "
        "number with the least total worker time, as long as the run is predicted to end within "
        "limits.hours",
    )
    verify: VerifySpec | None = Field(
        default=None,
        description="compute one step in so many again, compare the results, and leave out a machine that computes "
        "wrongly",
    )
    spares: Count = Field(
        default=0, description="idle spare workers, already started and with all imports done"
    )
    notices: str | None = Field(
        default=None,
        description="source of preemption notices: aws, gcp, azure, or a path or URL that appears when the "
        "machine is about to be taken away",
    )

    @field_validator("workers", mode="before", json_schema_input_type=Workers | int)
    @classmethod
    def one_number_is_both(cls, value: Any) -> Any:
        return one_number(value)
