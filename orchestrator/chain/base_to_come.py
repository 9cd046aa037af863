"""Whether the weights that an earlier stage will make will fit a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.launch.init_checks import check_rows
from orchestrator.models.base import check_future_base, check_future_own_base
from orchestrator.models.base_text import text_notes, text_of_workload
from orchestrator.resolve.resolved_job import ResolvedJob
from orchestrator.resolve.training_inputs import load_workload, vocabulary_before_data


def check_to_come(base: ResolvedJob, job: ResolvedJob, where: str) -> None:
    """Check that the future initial weights of a stage will fit it."""
    from orchestrator.data.store.manifest import FORMAT
    from workloads.errors import WorkloadError

    loaded: list[Any] = [
        load_workload(
            spec=each.spec.workload,
            data=each.spec.data,
            train=each.spec.train,
            seed=each.spec.seed,
            vocabulary=vocabulary_before_data(each),
            data_format=FORMAT,
            model=each.model,
        )
        for each in (base, job)
    ]
    theirs, ours = loaded
    if theirs.config.divided_by == ours.config.divided_by == "declaration":
        check_future_own_base(replace(theirs, adapter=None), replace(ours, adapter=None), where)
        return
    for each, workload in ((base, theirs), (job, ours)):
        if workload.config.as_transformer is None:
            raise WorkloadError(
                f"{each.spec.workload.model} is not a model of this project: a class of transformers can begin only "
                "with its folder, and an own model only with another own model"
            )
    check_rows(job.spec.workload, ours, theirs.shapes, where)
    plain = replace(theirs, adapter=None), replace(ours, adapter=None)  # a base's adapter is merged
    # An adapter is exported merged into its base.
    merged = base.spec.model_copy(
        update={"workload": base.spec.workload.model_copy(update={"adapter": None})}
    )
    check_future_base(
        merged.workload,
        merged.data.labels,
        plain[0],
        workload=job.spec.workload,
        labels=job.spec.data.labels,
        ours=plain[1],
        where=where,
    )
    text_notes(ours, job.spec.workload, text_of_workload(theirs, base.spec.workload.objective, where))
