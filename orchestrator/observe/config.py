"""Where a run is shown, and where messages about it are sent: `tracking` (MLflow) and `notify`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from orchestrator.config.outcome import Outcome
from orchestrator.config.resources import ResourceSpec
from orchestrator.config.strict import StrictModel, web_address
from orchestrator.controller.config import LimitSpec


class TrackingSpec(StrictModel):
    """Experiment tracking in MLflow."""

    uri: str = Field(default="sqlite:///mlflow.db", description="an MLflow tracking URI")
    experiment: str = Field(default="default", description="the experiment to show the run in")
    register_as: str | None = Field(
        default=None,
        min_length=1,
        description="model name in MLflow's registry: the exported model becomes a version of it; if "
        "checkpoint.keep_best is a metric, the version gets the alias best if it is better than the version "
        "that has it",
    )


@dataclass(frozen=True)
class TrackedJob:
    """The parts of a job that MLflow shows, and the server.

    Attributes:
        name: of the run.
        tracking: the server; None to show the run nowhere.
        parameters: the job as JSON, which MLflow lists.
        held_out: the share of the text that is held out; None if none is.
        evaluates_beside: whether commits are evaluated beside the run.
    """

    name: str
    tracking: TrackingSpec | None
    parameters: Mapping[str, Any]
    held_out: float | None
    evaluates_beside: bool


@dataclass(frozen=True)
class SummarisedJob:
    """The parts of a job that the summary of its run contains, and the prices of its cost.

    Attributes:
        name, objective: of the job.
        metrics: the metrics that it asks for; None for the objective's own, and without evaluations.
        steps: steps of the run.
        precision: the precision of training.
        limits: the prices of workers.
        resources: the workers.
        evaluates_beside: whether commits are evaluated beside the run.
    """

    name: str
    objective: str
    metrics: list[str] | None
    steps: int
    precision: str
    limits: LimitSpec
    resources: ResourceSpec
    evaluates_beside: bool


VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
"""An environment variable on the node where a run's controller is."""

Occasion = Literal["done", "failed", "stopped", "stalled", "attention"]
OCCASIONS: tuple[Occasion, ...] = ("done", "failed", "stopped", "stalled", "attention")


def _by_present_name(value: object) -> object:
    """Return occasions by their present names: `stopped` was `landed` in earlier job files."""
    if not isinstance(value, list | tuple):
        return value
    return [Outcome.STOPPED.value if each == "landed" else each for each in value]


def _address(value: str) -> str:
    return value if VARIABLE.fullmatch(value) else web_address(value)


class NotifySpec(StrictModel):
    """Messages about a run to a webhook, in the format of Slack."""

    webhook: Annotated[str, AfterValidator(_address)] = Field(
        description="an http or https URL, or $NAME for an environment variable on the controller's node that "
        "holds it. The URL is a secret: reports and trackers show ***"
    )
    on: Annotated[tuple[Occasion, ...], BeforeValidator(_by_present_name)] = Field(
        default=OCCASIONS,
        min_length=1,
        description="events to report: stopped, with a checkpoint, by a limit or the user; stalled, a gang hung "
        "or fell silent; attention, saving fails, samples are skipped, rows are lost, a limit is "
        "near, or the controller had died",
    )
