"""Try a workload on a few samples before a run: each kind of model checks that it computes what a run needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from workloads.hf.check.behaviour import check_behaviour
from workloads.model.small_config import narrow
from workloads.own.check import check_logits, check_model, check_trained, model_of, shaken
from workloads.workload import Batch, Workload


@dataclass(frozen=True)
class Trial:
    """The arguments that the trainer passes to `check_trial`.

    Attributes:
        seed: the seed of the run.
        first: returns two samples of the run.
        short: returns two short samples for a workload.
        limits: returns the limits of own samples, see `Samples.limits`.
        check_divided: called with a workload, a way to make its model, and samples; raises WorkloadError if ranks that
            divide the model compute something else.
        measure: called with a model's output on samples; raises an error if the run's own metrics cannot read it. None
            without own metrics.
        continues: whether the run continues texts or scores them.
        any_length: whether these texts have any length, and not that of samples.
    """

    seed: int
    first: Callable[[], Batch]
    short: Callable[[Workload], Batch]
    limits: Callable[[], Mapping[str, int]]
    check_divided: Callable[[Any, Callable[[], nn.Module], Batch], None]
    measure: Callable[[Any, Batch], None] | None = None
    continues: bool = False
    any_length: bool = False


def check_trial(workload: Workload, trial: Trial) -> frozenset[str] | None:
    """Raise WorkloadError if the model, tried on a few samples, does not compute what a run needs.

    Args:
        workload: the model and its objective.
        trial: what the trainer needs of it.

    Returns:
        The names of the values that its loss returns besides the loss; None if the objective defines them.

    Raises:
        WorkloadError: with the problem.
    """
    return _CHECKS[workload.config.divided_by](workload, trial)


def _check_transformer(workload: Any, trial: Trial) -> None:
    """Try the own metrics on a small model. Layers of this project need no trial."""
    if trial.measure is None:
        return
    small = replace(workload, config=workload.config.changed(narrow(workload.config)), adapter=None)
    batch = trial.short(small)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        output = small.build().eval()(batch)
    trial.measure(output, batch)


def _check_class(workload: Any, trial: Trial) -> None:
    """Try a small copy of a transformers class."""
    check_behaviour(workload, lambda small, model, batch: trial.check_divided(small, lambda: model, batch))


def _check_own(workload: Any, trial: Trial) -> frozenset[str]:
    """Try a user's own model, without its adapter."""
    check_trained(workload)
    plain = replace(workload, adapter=None, frozen=frozenset(), begun=None)
    first = trial.first()
    values = check_model(plain, first, trial.seed, trial.limits())
    trial.check_divided(plain, lambda: shaken(plain, first, trial.seed), first)
    if trial.measure is not None:
        with torch.no_grad():
            output = model_of(plain, trial.seed)(first)
        trial.measure(output, first)
    if trial.continues:
        check_logits(plain.name, shaken(plain, first, trial.seed), first, trial.any_length)
    return frozenset(values)


_CHECKS: Mapping[str, Callable[[Any, Trial], frozenset[str] | None]] = {
    "rules": _check_transformer,
    "plan": _check_class,
    "declaration": _check_own,
}
"""The check of each kind of model, by what divides it."""
