"""Which numbers the rows of metrics.jsonl can have: a search that decides by another would fail only after training."""

from __future__ import annotations

from typing import get_args, get_type_hints

from orchestrator.config.errors import InputError
from orchestrator.config.evaluate import SAMPLES, metrics_of
from orchestrator.config.metric_names import Metric, OfAnswers, OfWords
from orchestrator.config.records import PREFERENCES
from orchestrator.config.spec import JobSpec
from orchestrator.storage.row_types import StepRow
from workloads.own.object_reference import is_object_reference

COORDINATES = {"step", "attempt", "time"}
OF_STEPS = {
    key for key, kind in get_type_hints(StepRow).items() if kind in (int, float, float | None)
} - COORDINATES
OF_EXPERTS = {"router_loss", "router_load", "router_dropped", "router_entropy"}
OF_HEADS = {
    "sentence_loss",
    "sentence_accuracy",
    "discriminator_loss",
    "discriminator_accuracy",
    "replaced",
}
"""Of objectives with a second loss."""
OF_PRECISION = {"loss_scale", "skipped"}
NAMED_FIRST = ("loss", "grad_norm", "tokens_per_second", "step_seconds")


def check_metric(spec: JobSpec, metric: str) -> None:
    """Raise InputError if no row of a step can have the metric. Own code may give any."""
    objective = spec.workload.objective
    is_own = (
        objective == SAMPLES or is_object_reference(spec.workload.model) or is_object_reference(objective)
    )
    known = OF_STEPS | OF_EXPERTS | OF_HEADS | OF_PRECISION
    if objective in PREFERENCES:
        known |= {"accuracy", "divergence", *get_args(OfAnswers), *get_args(OfWords)}
    elif objective == "sequence_classification":
        known |= {"accuracy"}
    if "." in metric or is_own or metric in known:
        return
    others = ", ".join(sorted(known - set(NAMED_FIRST)))
    hint = f"name one of {', '.join(NAMED_FIRST)}; {others}"
    if metric in {*get_args(Metric), *metrics_of(objective)}:
        hint = f"it is of evaluations: name a set and it, as in validation.{metric}"
    raise InputError(f"no step has the metric {metric!r}", "tune.metric", hint)
