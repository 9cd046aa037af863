"""Gradients of parameters that several ranks have, where each rank computes a part of the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.fsdp import local_of
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.parameters import LocalParameter


class TiedGradients:
    """Sums gradients over tensor-parallel ranks and over pipeline stages, before they are summed over replicas.

    A norm inside an attention head, or on a slice of the sequence, sees a part of the activations. A tied weight is
    the embedding on one stage and the output projection on another. `among` gives for each name the ranks of the
    stages that hold it.
    """

    def __init__(
        self, parameters: Sequence[LocalParameter], mesh: Mesh, among: Mapping[str, ProcessGroup]
    ) -> None:
        self._tp = mesh.tp
        self._partial = [local for local in parameters if local.cut.partial]
        self._copies = {name: [local for local in parameters if local.name == name] for name in sorted(among)}
        self._among = among

    @property
    def any(self) -> bool:
        """Whether there is anything to sum. If so, the sums over replicas must wait for it."""
        return bool(self._partial or self._among)

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the parameters' gradients in place."""
        _sum_over([_gradient(local) for local in self._partial], self._tp)
        for name, copies in self._copies.items():
            if copies:
                # Under ZB-V the first and the last stage are on one rank, and interleaved stages of one rank may share
                # a relative bias. Their sum enters the all-reduce once.
                first, *copies_here = [_gradient(local) for local in copies]
                for other in copies_here:  # two stages of one rank
                    first.add_(other)
                _sum_over([first], self._among[name])
                for other in copies_here:
                    other.copy_(first)


def _gradient(local: LocalParameter) -> Tensor:
    if local.parameter.grad is None:
        # Every rank of the group must enter the all-reduce, also one whose micro-batches did not reach the parameter.
        local.parameter.grad = torch.zeros_like(local.parameter)
    return local_of(local.parameter.grad)


def _sum_over(gradients: list[Tensor], group: ProcessGroup) -> None:
    """Sum in place, as one message."""
    if not gradients or group.size == 1:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    group.sent(flat)
    dist.all_reduce(flat, group=group.handle)
    group.received(flat)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
