"""Check the user's own code before a run starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.own_code import code_of
from orchestrator.config.spec import JobSpec
from orchestrator.parallel.config import cost_of
from orchestrator.parallel.layout import Layout
from orchestrator.planner.own_cost import check_cost
from orchestrator.resolve.resolved_job import ResolvedJob, wrong_input
from orchestrator.resolve.small_config import narrow

TRIED_TOKENS = 64
"""Tokens of the text that own metrics are tried on."""


def check_own_code(job: ResolvedJob, workload: Any, prepared: str = "") -> None:
    """Check that every `module:name` of the job exists, has its source, and follows its protocol on a first sample.

    Args:
        job: the job.
        workload: its model and objective.
        prepared: the folder with prepared samples, empty if they are not prepared.

    Raises:
        InputError: with the key of the job file.
    """
    from workloads.own.model import OwnModel

    spec, optimizer = job.spec, job.spec.train.optimizer
    code_of(spec)
    if (cost := cost_of(spec.parallel)) is not None:
        check_cost(cost, spec.resources.workers.max)
    if isinstance(optimizer.name, ObjectReference):
        from orchestrator.optim.own import check_own

        check_own(optimizer.name)
    if isinstance(optimizer.schedule, ObjectReference):
        from orchestrator.optim.learning_rate import own_share

        warmup, steps = spec.train.warmup_steps, spec.train.steps
        for step in sorted({warmup, (warmup + steps) // 2, steps - 1}):
            own_share(optimizer.schedule, step, spec.train.steps)
    if spec.evaluate and spec.evaluate.own_metrics:
        _check_metrics(job, workload, prepared)
    if isinstance(workload.config, OwnModel):
        _check_model(job, workload, prepared)


def _check_metrics(job: ResolvedJob, workload: Any, prepared: str) -> None:
    """Check that the metrics exist and return a number for each of two samples.

    The samples are tried only for models of this package. A user's own model is tried later, as a whole.
    """
    import torch

    from workloads.model.config import TransformerConfig
    from workloads.own.metrics import OwnMetrics
    from workloads.workload import Loss

    spec = job.spec
    assert spec.evaluate is not None
    with wrong_input("evaluate.metrics"):
        metrics = OwnMetrics(spec.evaluate.own_metrics)
    if not isinstance(workload.config, TransformerConfig):
        return
    small = replace(workload, config=workload.config.changed(narrow(workload.config, Layout())), adapter=None)
    with wrong_input("evaluate.metrics"), torch.random.fork_rng(devices=[]), torch.no_grad():
        batch = _tried_batch(spec, small, prepared)
        metrics.beside(Loss(torch.zeros(()), torch.ones(())), small.build().eval()(batch), batch)


def _tried_batch(spec: JobSpec, workload: Any, prepared: str) -> Any:
    """Two samples; text is cut short."""
    from orchestrator.data.samples.own_samples import first_samples
    from orchestrator.planner.trace.sample_batch import sample_batch

    if spec.data.samples is not None:
        return first_samples(spec.data.samples, spec.seed, of_set=True, prepared=prepared)
    length = min(spec.data.sequence_length, TRIED_TOKENS)
    short = spec.model_copy(update={"data": spec.data.model_copy(update={"sequence_length": length})})
    return sample_batch(short, workload, 2)


def _check_model(job: ResolvedJob, workload: Any, prepared: str) -> None:
    import torch

    from orchestrator.optim.kinds import kind_of
    from workloads.own.check import check_model, model_of
    from workloads.own.metrics import OwnMetrics
    from workloads.own.model import NETWORK
    from workloads.workload import Loss

    spec = job.spec
    optimizer = str(spec.train.optimizer.name)
    if kind_of(optimizer).matrices_only and not workload.config.has_blocks:
        what = f"{optimizer} updates the matrices of layers, and {workload.name} names none"
        raise InputError(what, "train.optimizer.name", "add blocks() to it, or use adamw")
    if spec.train.compile and not workload.config.has_blocks:
        what = f"{workload.name} names no layers that could be compiled alone"
        raise InputError(what, "train.compile", "add blocks() to it, or set it to false")
    frozen = (name for name, p in workload.config.bare.named_parameters() if not p.requires_grad)
    if left := [name for name in frozen if f"{NETWORK}{name}" not in workload.frozen]:
        what = (
            f"{workload.name} sets requires_grad of {left[0]} to False, and a run trains all but train.freeze"
        )
        raise InputError(
            what, "workload.model", f"add {NETWORK}{left[0]} to train.freeze, which takes patterns"
        )
    if workload.compares and spec.train.global_batch < 2:
        what = f"{workload.name} compares the samples of a global batch, and there is one"
        raise InputError(what, "train.global_batch", "make it larger")
    first = _first(job, workload, prepared)
    with wrong_input("workload.model"):
        plain = replace(workload, adapter=None, frozen=frozenset(), begun=None)
        values = check_model(plain, first, spec.seed, _limits(spec, prepared))
        _check_divided(spec, plain, first)
    if spec.evaluate and spec.evaluate.own_metrics:
        with wrong_input("evaluate.metrics"), torch.no_grad():
            output = model_of(plain, spec.seed)(first)
            OwnMetrics(spec.evaluate.own_metrics).beside(Loss(torch.zeros(()), torch.ones(())), output, first)
    chosen = {"accuracy", "zero_shot"} & {
        (spec.checkpoint.best_metric or "").partition(".")[2],
        (spec.stop_when.metric if spec.stop_when else "").partition(".")[2],
        *((spec.evaluate and spec.evaluate.metrics) or ()),
    }
    if chosen - values:
        what = f"the loss of {workload.name} gives no value of the name {min(chosen - values)}"
        raise InputError(what, "workload.model", "return it, or choose by loss")


def _check_divided(spec: JobSpec, workload: Any, batch: Any) -> None:
    """Check that the model's declared stages and sharding are correct."""
    from orchestrator.parallel.own_check import check_handed, check_sharding, check_stages, least_ways
    from workloads.own.check import shaken

    tp = 1 if spec.parallel == "auto" else spec.parallel.tp
    fits = workload.config.cut % tp == workload.config.whole_heads % tp == 0
    ways = {least_ways(workload), tp if fits else 1} - {1}
    if not ways and not workload.config.stages:
        return
    model = shaken(workload, batch, spec.seed)
    if workload.config.stages:
        check_stages(workload, batch)
        check_handed(workload, model, batch)
    for each in sorted(ways):
        check_sharding(workload, model, batch, each)


def _limits(spec: JobSpec, prepared: str) -> dict[str, int]:
    if spec.data.samples is None:
        return {}
    from orchestrator.data.samples.own_samples import open_samples

    return open_samples(spec.data.samples, spec.seed, prepared or None).limits()


def _first(job: ResolvedJob, workload: Any, prepared: str) -> Any:
    """Two samples. For text, the objective makes them from the ids of ordinary tokens in turn."""
    spec = job.spec
    if spec.data.samples is not None:
        from orchestrator.data.samples.own_samples import first_samples

        return first_samples(spec.data.samples, spec.seed, of_set=True, prepared=prepared)
    import numpy as np

    from workloads.objectives.samples import Samples

    objective = workload.objective
    window = objective.window(spec.data.sequence_length)
    ids = np.array(
        [i for i in range(workload.vocabulary.size) if i not in workload.vocabulary.special] or [0]
    )
    read = Samples(lambda number: ids[np.arange(number, number + window) % len(ids)], 2)
    return objective.collate(read, [0, 1], 0)
