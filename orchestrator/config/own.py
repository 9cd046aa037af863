"""Rules for jobs with the user's own code."""

from __future__ import annotations

from typing import Any

from orchestrator.evaluate.config import SAMPLES
from workloads.own.object_reference import is_object_reference


def completed(document: Any) -> Any:
    """Set the objective of a job whose samples are the user's own."""
    if not isinstance(document, dict):
        return document
    data = document.get("data")
    workload = document.get("workload")
    of_samples = isinstance(data, dict) and data.get("samples") is not None
    if of_samples and isinstance(workload, dict) and "objective" not in workload:
        return {**document, "workload": {**workload, "objective": SAMPLES}}
    return document


def problem_of(spec: Any) -> str:
    """Return the first setting of a job that does not work with own code; empty if all do.

    For the rules see `orchestrator.config.spec.JobSpec`.
    """
    is_own = is_object_reference(spec.workload.model)
    workload = spec.workload
    if (spec.data.samples is not None) != (workload.objective == SAMPLES):
        return (
            f"data.samples are for a model that has its own loss, and workload.objective is {workload.objective}; "
            "leave one of them out"
        )
    if spec.data.samples is not None and not is_own:
        return f"data.samples are for an own model, and workload.model is {workload.model}; name one as module:name"
    if not is_own:
        return ""
    for key in ("mup", "dropout", "attention_dropout", "layer_drop", "embedding_noise", "grow"):
        if getattr(workload, key) not in (None, 0.0):
            return f"workload.{key} is for models of this project, and {workload.model} is an own one; leave it out"
    for key in ("z_loss", "label_smoothing"):
        if getattr(spec.train, key):
            return f"train.{key} is for losses of this project, and {workload.model} has its own; set it to 0"
    if spec.evaluate and (spec.evaluate.samples or spec.evaluate.tasks):
        return f"evaluate.samples and tasks need a model that generates, and {workload.model} is an own model"
    if spec.parallel != "auto" and spec.parallel.engine != "torch":
        return f"own models are run by the torch engine, and parallel.engine is {spec.parallel.engine}; leave it out"
    return ""
