"""Try a model on a few samples before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from orchestrator.config.errors import InputError
from orchestrator.data.config import DataSpec
from orchestrator.optim.check import check_matrices
from orchestrator.parallel.config import ParallelChoice
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.train.config import TrainSpec

if TYPE_CHECKING:
    from workloads.workload import Batch, Workload

TRIED_TOKENS = 64
"""Tokens of the text that own metrics are tried on."""


def check_trial(
    workload: Workload,
    prepared: str = "",
    *,
    data: DataSpec,
    train: TrainSpec,
    seed: int,
    draws: bool,
    parallel: ParallelChoice,
    own_metrics: Sequence[str],
    chosen_by: Collection[str],
    continues: bool,
    any_length: bool,
) -> None:
    """Check on a few samples that a model, and the user's own metrics, compute what the run needs.

    Args:
        workload: the model and its objective.
        prepared: the folder with prepared samples, empty if they are not prepared.
        data: what a sample is made of.
        train: how the run trains.
        seed: the seed of the run.
        draws: whether rows need keys for random numbers.
        parallel: the layout, which may divide the user's model.
        own_metrics: the user's own metrics of evaluations.
        chosen_by: the metrics that the job computes or chooses by, without the names of their sets.
        continues: whether the run continues texts or scores them.
        any_length: whether these texts have any length, and not that of samples.

    Raises:
        InputError: with the key of the job file.
    """
    from orchestrator.parallel.own_check import check_divided
    from workloads import trial as trials

    check_matrices(train.optimizer, workload)
    if train.compile and not workload.config.has_blocks:
        problem = f"{workload.name} has no layers that could be compiled alone"
        hint = "name them in blocks() if it is an own model, or set it to false"
        raise InputError(problem, "train.compile", hint)
    if workload.compares and train.global_batch < 2:
        problem = f"{workload.name} compares the samples of a global batch, but this batch has only one"
        raise InputError(problem, "train.global_batch", "make it larger")
    trial = trials.Trial(
        seed=seed,
        first=partial(_first, data, seed, workload, prepared),
        short=lambda small: _short(data, seed, draws, small, prepared),
        limits=partial(_limits, data, seed, prepared),
        check_divided=partial(check_divided, parallel, continues=continues),
        measure=_measure_of(own_metrics) if own_metrics else None,
        continues=continues,
        any_length=any_length,
    )
    with wrong_input("workload.model"):
        values = trials.check_trial(workload, trial)
    chosen = {"accuracy", "zero_shot"} & {*chosen_by}
    if values is not None and chosen - values:
        problem = f"the loss of {workload.name} returns no value named {min(chosen - values)}"
        raise InputError(problem, "evaluate", f"return it, or leave out {min(chosen - values)}")


def _measure_of(names: Sequence[str]) -> Callable[[Any, Batch], None]:
    """Return a function that raises InputError if the user's metrics return no number for each sample of an output."""
    import torch

    from workloads.own.metrics import OwnMetrics
    from workloads.workload import Loss

    with wrong_input("evaluate.metrics"):
        metrics = OwnMetrics(names)

    def measure(output: Any, batch: Batch) -> None:
        with wrong_input("evaluate.metrics"):
            metrics.beside(Loss(torch.zeros(()), torch.ones(())), output, batch)

    return measure


def _short(data: DataSpec, seed: int, draws: bool, workload: Workload, prepared: str) -> Batch:
    """Return two samples; text is cut short."""
    from orchestrator.data.samples.own_samples import first_samples
    from orchestrator.planner.trace.sample_batch import sample_batch

    if data.samples is not None:
        return first_samples(data.samples, seed, with_set_values=True, prepared=prepared)
    length = min(data.sequence_length, TRIED_TOKENS)
    short = data.model_copy(update={"sequence_length": length})
    return sample_batch(short, seed, draws, workload, 2)


def _limits(data: DataSpec, seed: int, prepared: str) -> Mapping[str, int]:
    if data.samples is None:
        return {}
    from orchestrator.data.samples.own_samples import open_samples

    return open_samples(data.samples, seed, prepared or None).limits()


def _first(data: DataSpec, seed: int, workload: Workload, prepared: str) -> Batch:
    """Return two samples. For text, the objective makes them from the ids of ordinary tokens, one after the other."""
    if data.samples is not None:
        from orchestrator.data.samples.own_samples import first_samples

        return first_samples(data.samples, seed, with_set_values=True, prepared=prepared)
    import numpy as np

    from workloads.objectives.samples import Samples

    objective = workload.objective
    window = objective.window(data.sequence_length)
    ids = np.array(
        [i for i in range(workload.vocabulary.size) if i not in workload.vocabulary.special] or [0]
    )
    read = Samples(lambda number: ids[np.arange(number, number + window) % len(ids)], 2)
    return objective.collate(read, [0, 1], 0)
