"""The parameters that a rank computes with, cut from those of the plain model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.partition import Cut, cut_of


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank under its canonical name.

    `original` is False if an earlier pipeline stage holds the parameter too (a tied embedding, a relative bias). Both
    stages make the same update, but this copy is neither counted in norms nor saved.
    """

    name: str
    parameter: nn.Parameter
    cut: Cut
    original: bool = True


def cut_parameters(
    model: nn.Module, styles: Mapping[str, str], mesh: Mesh, stacks: Container[str]
) -> dict[str, Cut]:
    """Shrink every parameter of a model on the meta device to this rank's part; return the cuts by name.

    Args:
        model: the model; its parameters are replaced in place.
        styles: sharding styles by pattern of module names.
        mesh: the process groups.
        stacks: names of stacks of experts, see `Workload.stacks`.
    """
    cuts = {}
    parts = {}
    for name, parameter in list(model.named_parameters()):
        cuts[name] = cut = cut_of(name, parameter.shape, styles, mesh, stacks)
        if cut.extent != tuple(parameter.shape):
            parts[parameter] = nn.Parameter(torch.empty(cut.extent, device="meta"), parameter.requires_grad)
    for module in model.modules():
        for leaf, full in module._parameters.items():
            if full is not None and full in parts:
                module._parameters[leaf] = parts[full]
    return cuts


def local_parameters(
    model: nn.Module, cuts: Mapping[str, Cut], elsewhere: Container[str]
) -> Iterator[LocalParameter]:
    """Yield the parameters of a model under canonical names; `elsewhere` has the names that an earlier stage holds.

    Args:
        model: a stage, cut to this rank.
        cuts: the cut of each parameter.
        elsewhere: names of parameters that an earlier stage holds.
    """
    for name, parameter in model.named_parameters():
        yield LocalParameter(name, parameter, cuts[name], name not in elsewhere)
