"""Check that a model has what a job prunes."""

from __future__ import annotations

from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.prune.config import PruneSpec
from orchestrator.resolve.resolved_job import wrong_input


def check_prune(prune: PruneSpec | None, workload: Any) -> None:
    """Check that there are matrices to prune, and that their rows divide into the groups of a pattern.

    Args:
        prune: the key `prune` of the job; None without.
        workload: the model.

    Raises:
        InputError: there are none, or they do not.
    """
    if prune is None:
        return
    from orchestrator.prune.names import pruned_names
    from workloads.hf.tables.our_names import in_our_names

    with wrong_input("prune.match"), in_our_names(workload.config):
        names = pruned_names(prune, workload)
    if not names:
        problem = f"no layer of {workload.name} has a trainable weight matrix"
        raise InputError(problem, "prune", "unfreeze one, or name other matrices in prune.match")
    if prune.pattern is None:
        return
    if workload.config.divided_by == "plan":
        problem = (
            f"{workload.name} runs as a class of transformers, some of which store the input dimension first"
        )
        raise InputError(problem, "prune.pattern", "set prune.sparsity instead")
    of = prune.group[1]
    for name in names:
        shape = workload.shapes[name]
        # [out, in], or [experts, out, in] of a stack: groups are along the last dimension, the input, as 2:4 kernels
        # need them. Convolutions have more dimensions.
        if shape[-1] % of or len(shape) > 2 + (name in workload.stacks):
            problem = f"{name} {list(shape)} has no rows of whole groups of {of}"
            raise InputError(
                problem, "prune.pattern", "leave it out of prune.match, or choose another pattern"
            )
