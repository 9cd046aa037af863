"""What is checked of a class of transformers that is run as it is, before a run starts."""

from __future__ import annotations

from functools import partial
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec
from orchestrator.resolve.resolved_job import wrong_input


def check_hugging_face_class(spec: JobSpec, workload: Any) -> None:
    """A class of transformers that is run as it is computes what the job says."""
    from workloads.hf.behaviour import check_behaviour

    with wrong_input("workload"):
        check_behaviour(workload, partial(_check_divided, spec))
    if spec.train.compile and not workload.config.has_blocks:
        raise InputError(
            f"{spec.workload.model} has no layers that could be compiled alone",
            "train.compile",
            "set it to false",
        )


def _check_divided(spec: JobSpec, trial: Any, model: Any, batch: Any) -> None:
    """A small copy of a class of transformers is the same divided as whole, if the job divides it."""
    from orchestrator.parallel.own_check import check_layers, check_sharding
    from workloads.errors import WorkloadError

    if spec.parallel == "auto":
        return
    try:
        halves = all(n % 2 == 0 for n in (*trial.config.head_counts, trial.config.cut))
        if spec.parallel.tp > 1 and trial.sharding():
            if not halves:
                raise WorkloadError(f"{trial.name}: no small copy of it can be cut over 2 ranks, to try that")
            check_sharding(trial, model, batch, 2, "the plan of transformers")
        if spec.parallel.pp > 1 and trial.stages():
            check_layers(trial, model, batch)
    except WorkloadError as error:
        raise WorkloadError(f"{error}; set parallel to auto") from None
