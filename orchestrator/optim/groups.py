"""Parameter groups: the learning rate and the weight decay of each parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from orchestrator.optim.config import OptimizerSpec
from orchestrator.parallel.parameter_shard import ParameterShard
from workloads.workload import Workload

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters without weight decay even if they are matrices, such as T5's table of distances: the patterns of
`transformers.Trainer.get_decay_parameter_names`.
"""
BY_NAME = 6
"""The first data format of a run from which parameter names decide about weight decay."""


class Rate(NamedTuple):
    """The factors of a parameter's learning rate, by its width (muP), its depth (`layer_decay`) and its group, and the
    group's weight decay; None for the optimizer's.
    """

    width: float = 1.0
    depth: float = 1.0
    group: float = 1.0
    decay: float | None = None


def default_rate(name: str) -> Rate:
    """Return the job's learning rate for every parameter."""
    return Rate()


def rates_of(spec: OptimizerSpec, workload: Workload) -> Callable[[str], Rate]:
    """Return the factors by parameter name. A run on data of an earlier format also decays tables of biases.

    Args:
        spec: the job's optimizer.
        workload: says the width and the depth of each parameter.
    """
    rule = getattr(getattr(workload, "objective", None), "rule", 0)

    def rate(name: str) -> Rate:
        decay = spec.layer_decay
        rate_factors = Rate(workload.lr_scale(name), 1.0 if decay == 1.0 else decay ** workload.depth(name))
        if rule >= BY_NAME and NOT_DECAYED.search(name.lower()):
            rate_factors = rate_factors._replace(decay=0.0)
        for group in spec.groups:
            if any(fnmatchcase(name, pattern) for pattern in group.match):
                weight_decay = rate_factors.decay if group.weight_decay is None else group.weight_decay
                return rate_factors._replace(group=group.lr_scale, decay=weight_decay)
        return rate_factors

    return rate


def names_in_layers(workload: Workload) -> list[str]:
    """Return the parameters of the layers: no embeddings, and nothing after the last layer."""
    outside = workload.embeddings
    return [name for name in workload.shapes if name not in outside and workload.depth(name) > 0]


def groups_of(
    spec: OptimizerSpec, parameters: Iterable[tuple[nn.Parameter, bool, Rate]]
) -> list[dict[str, Any]]:
    """Return parameter groups for tuples (parameter, whether it is a matrix, the factors of its learning rate).

    Weight decay applies only to matrices that NOT_DECAYED does not match. It is divided by the width factor, so that
    learning rate times decay does not depend on the width (Wang and Aitchison, 2024; the mup package does the same). It
    is not divided by the factors of the depth (as in Clark et al., 2020, and Bao et al., 2022) and of the group (as in
    torch).

    Args:
        spec: the job's optimizer.
        parameters: (parameter, whether it is a matrix, the factors of its learning rate) of each.
    """
    members: dict[tuple[bool, Rate], list[nn.Parameter]] = {}
    for parameter, is_matrix, rate in parameters:
        members.setdefault((is_matrix, rate), []).append(parameter)

    def group_settings(matrix: bool, rate: Rate) -> dict[str, Any]:
        scale = rate.width * rate.depth * rate.group
        decay = spec.weight_decay if rate.decay is None else rate.decay
        return {
            "params": members[matrix, rate],
            "lr": spec.lr * scale,
            "lr_scale": scale,
            # The update decays by lr * scale * this, so the width's factor cancels.
            "weight_decay": decay / rate.width if matrix else 0.0,
        }

    def order(key: tuple[bool, Rate]) -> tuple[bool, Rate]:  # deterministic on all ranks
        return key[0], key[1]._replace(decay=-1.0 if key[1].decay is None else key[1].decay)

    return [group_settings(*key) for key in sorted(members, key=order, reverse=True)]


def groups_of_shards(
    spec: OptimizerSpec, shards: Iterable[ParameterShard], rate: Callable[[str], Rate]
) -> list[dict[str, Any]]:
    """Return parameter groups of these shards, see `groups_of`.

    Args:
        spec: the job's optimizer.
        shards: the parameters.
        rate: returns the factors of a parameter.
    """
    return groups_of(spec, [(shard.parameter, shard.matrix, rate(shard.name)) for shard in shards])


def groups_of_each_shard(
    spec: OptimizerSpec, shards: Iterable[ParameterShard], rate: Callable[[str], Rate]
) -> list[dict[str, Any]]:
    """Return one parameter group for each shard, in the order of the shards, see `groups_of`.

    Args:
        spec: the job's optimizer.
        shards: the parameters.
        rate: returns the factors of a parameter.
    """
    return [group for shard in shards for group in groups_of_shards(spec, [shard], rate)]


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Set the learning rate of the next step.

    Args:
        groups: the optimizer's groups, changed in place.
        lr: the schedule's rate; each group multiplies it by its `lr_scale`.
    """
    for group in groups:
        group["lr"] = lr * group["lr_scale"]
