"""The job of a trial: that of the search with the trial's values, without exports and tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from orchestrator.checkpoint.config import NO_EXPORT
from orchestrator.config.spec import JobSpec
from orchestrator.evaluate.config import without_tasks
from orchestrator.observe.formatting import run_name, trial_name
from orchestrator.resolve.prepared_data import data_cache
from orchestrator.storage.run_directory import RunDir
from orchestrator.tune.config import POPULATION
from orchestrator.tune.rung_steps import interval_of, longest_warmup, rungs
from orchestrator.tune.space import job_of


def job_of_trial(base: JobSpec, sweep: RunDir, name: str, params: Mapping[str, Any]) -> JobSpec:
    """Return the job of a trial's run, which has an evaluation at each rung if the metric is one of an evaluation.

    Args:
        base: the job of the search.
        sweep: the directory of the search.
        name: the name of the trial's run.
        params: the values of the trial, by key.
    """
    assert base.tune is not None
    evaluate = without_tasks(base.evaluate, base.set_names)
    unregistered = {"tracking__register_as": None} if base.tracking else {}
    spec = job_of(
        base.model_copy(update={"evaluate": evaluate, "notify": None}),
        params,
        name=trial_name(run_name(base.name, sweep.name), name),
        **{f"checkpoint__{key}": value for key, value in NO_EXPORT.items()},
        data__cache=data_cache(base.data, sweep),
        **unregistered,
    )
    if spec.evaluate is not None and any("." in metric for metric in base.tune.metrics):
        warmup = longest_warmup(base.tune, base.train)
        at = sorted({*spec.evaluate.at, *rungs(base.tune, spec.train.steps, warmup)})
        spec = spec.model_copy(update={"evaluate": spec.evaluate.model_copy(update={"at": at})})
    if base.tune.scheduler in POPULATION:
        # When another trial takes over a commit, this trial may be two decisions ahead of it.
        kept = 1 + 3 * math.ceil(interval_of(base.tune, spec.train.steps) / spec.checkpoint.every)
        checkpoint = spec.checkpoint.model_copy(update={"keep": max(kept, spec.checkpoint.keep)})
        spec = spec.model_copy(update={"checkpoint": checkpoint})
    return spec
