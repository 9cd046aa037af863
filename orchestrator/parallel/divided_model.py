"""A model reduced to this rank's part of its tensors, under tensor, expert and context parallelism."""

from __future__ import annotations

from torch import nn

from orchestrator.parallel.context import apply_context
from orchestrator.parallel.expert import apply_expert
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.own_tensor import apply_own_tensor
from orchestrator.parallel.parameters import cut_parameters
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.tensor import apply_tensor
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.own.network import OwnNetwork
from workloads.workload import Workload


def divide(model: nn.Module, workload: Workload, layout: Layout, mesh: Mesh) -> dict[str, Cut]:
    """Reduce a stage to this rank's part of its tensors, and return the cut of every parameter.

    Args:
        model: a stage on the meta device; changed in place.
        workload: says how each tensor is cut, and what is trained.
        layout: read for sequence parallelism.
        mesh: the process groups.

    Returns:
        The cut of each parameter by name.
    """
    styles = workload.sharding()
    # Before the cut: cut parameters are new tensors and take over `requires_grad`.
    freeze(model, workload)
    cuts = cut_parameters(model, styles, mesh, workload.stacks)
    if mesh.tp.size > 1 and isinstance(model, OwnNetwork | HuggingFaceNetwork):
        apply_own_tensor(model, styles, mesh.tp)
    elif mesh.tp.size > 1:
        apply_tensor(model, styles, mesh.tp, layout.sequence)
    # After tensor parallelism, so that the exchange wraps the experts with their sums over tensor-parallel ranks
    # inside.
    if mesh.expert.size > 1:
        apply_expert(model, mesh.expert)
    if mesh.cp.size > 1:
        apply_context(model, mesh.cp)
    return cuts


def freeze(model: nn.Module, workload: Workload) -> None:
    """Turn off the gradients of the parameters that the workload does not train.

    Args:
        model: the model; changed in place.
        workload: `frozen` has the names of the parameters that are not trained.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in workload.frozen)
