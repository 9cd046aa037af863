"""Check an optimizer, its schedule and its groups of parameters before a run starts."""

from __future__ import annotations

from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.object_reference import ObjectReference
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.kinds import kind_of
from orchestrator.resolve.resolved_job import wrong_input


def check_groups(optimizer: OptimizerSpec, workload: Any) -> None:
    """Check that each group of parameters matches a parameter. Raises InputError.

    Args:
        optimizer: the job's optimizer.
        workload: has the names of the parameters.
    """
    from workloads.adapters import frozen
    from workloads.hf.tables.our_names import in_our_names

    with wrong_input("train.optimizer.groups"), in_our_names(workload.config):
        frozen.check_groups([group.match for group in optimizer.groups], workload)


def check_own_update(optimizer: OptimizerSpec, warmup: int, steps: int) -> None:
    """Check that the user's own optimizer and schedule follow their protocols.

    Args:
        optimizer: the job's optimizer.
        warmup: steps of its warm-up.
        steps: steps of the run.

    Raises:
        InputError: one of them fails, or returns something else than its protocol says.
    """
    if isinstance(optimizer.name, ObjectReference):
        from orchestrator.optim.own import check_own

        check_own(optimizer.name)
    if isinstance(optimizer.schedule, ObjectReference):
        from orchestrator.optim.learning_rate import own_share

        for step in sorted({warmup, (warmup + steps) // 2, steps - 1}):
            own_share(optimizer.schedule, step, steps)


def check_matrices(optimizer: OptimizerSpec, workload: Any) -> None:
    """Check that the model names the layers whose matrices alone the optimizer updates. Raises InputError.

    Args:
        optimizer: the job's optimizer.
        workload: the model.
    """
    name = str(optimizer.name)
    if kind_of(name).matrices_only and not workload.config.has_blocks:
        problem = f"{name} updates the matrices of layers, and {workload.name} names none"
        hint = "name them in blocks() if it is an own model, or use adamw"
        raise InputError(problem, "train.optimizer.name", hint)
