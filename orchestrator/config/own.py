"""What a job with the user's own code may say."""

from __future__ import annotations

from typing import Any

from orchestrator.config.evaluate import SAMPLES
from workloads.own.object_reference import is_object_reference


def completed(document: Any) -> Any:
    """A job whose samples are the user's own has an objective of that name."""
    if not isinstance(document, dict):
        return document
    data = document.get("data")
    workload = document.get("workload")
    of_samples = isinstance(data, dict) and data.get("samples") is not None
    if of_samples and isinstance(workload, dict) and "objective" not in workload:
        return {**document, "workload": {**workload, "objective": SAMPLES}}
    return document


def problem_of(spec: Any) -> str:
    """What a job, see `orchestrator.config.spec.JobSpec`, says that is not for own code; empty if there is nothing."""
    own = is_object_reference(spec.workload.model)
    asked = spec.workload
    if (spec.data.samples is not None) != (asked.objective == SAMPLES):
        return (
            f"data.samples are for a model that has its own loss, and workload.objective is {asked.objective}; leave "
            "one of them out"
        )
    if spec.data.samples is not None and not own:
        return (
            f"data.samples are for an own model, and workload.model is {asked.model}; name one as module:name"
        )
    if not own:
        return ""
    for key in ("mup", "dropout", "attention_dropout", "layer_drop", "grow"):
        if getattr(asked, key) not in (None, 0.0):
            return (
                f"workload.{key} is for models of this project, and {asked.model} is an own one; leave it out"
            )
    for key in ("z_loss", "label_smoothing"):
        if getattr(spec.train, key):
            return f"train.{key} is for losses of this project, and {asked.model} has its own; set it to 0"
    if spec.evaluate and (spec.evaluate.samples or spec.evaluate.tasks):
        return f"evaluate.samples and tasks need a model that generates, and {asked.model} is an own one"
    if spec.parallel != "auto" and spec.parallel.engine != "torch":
        return f"own models are run by the torch engine, and parallel.engine is {spec.parallel.engine}; leave it out"
    return ""
