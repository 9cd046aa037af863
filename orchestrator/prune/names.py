"""Which parameters a job prunes."""

from __future__ import annotations

import re

from orchestrator.optim.groups import NOT_DECAYED, names_in_layers
from orchestrator.prune.config import PruneSpec
from workloads.adapters.frozen import matching, parameters_of
from workloads.workload import Workload

NOT_PRUNED = re.compile(
    r"(^|\.)(router|classifier|shared_gate|shared_expert_gate|relative)\.|(mlp|block_sparse_moe)\.gate\."
)
"""Names of weights that are not linear maps of layers: routers and gates of experts, and biases of relative keys."""


def pruned_names(prune: PruneSpec | None, workload: Workload) -> list[str]:
    """Return the names of the parameters to prune, ascending: trained matrices that `match` names; without it, those of
    the layers, stacks of experts included.

    Raises:
        Unmatched: a pattern matches no trained matrix.

    Args:
        prune: the key `prune` of the job; None without.
        workload: the model.
    """
    if prune is None:
        return []
    shapes = workload.shapes
    matrices = [
        name
        for name in parameters_of(workload)
        # A stack [experts, hidden] has a vector for each expert, such as a bias: no matrix.
        if name not in workload.frozen and len(shapes[name]) > 1 + (name in workload.stacks)
    ]
    if prune.match:
        return sorted(matching(prune.match, matrices, "trained matrix"))
    of_layers = frozenset(names_in_layers(workload))
    return sorted(
        name
        for name in matrices
        if name in of_layers and not NOT_DECAYED.search(name.lower()) and not NOT_PRUNED.search(name)
    )
