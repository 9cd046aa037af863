"""How evenly the routers of a step spread tokens over experts, over all ranks and layers; equal under every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestrator.parallel.mesh import Mesh
from workloads.workload import Workload


class RouterLoad:
    """Collects the routing statistics of this rank's stages, which `StepLosses` sums over all ranks."""

    def __init__(self, workload: Workload, mesh: Mesh, device: torch.device) -> None:
        self._workload = workload
        self._mesh = mesh
        self._device = device
        experts = (
            [] if not workload.config.moe else [n for n in workload.shapes if n.endswith(".router.weight")]
        )
        self._names = experts
        self._width = workload.shapes[experts[0]][0] + 3 if experts else 0

    @torch.no_grad()
    def take(self, stages: Sequence[nn.Module]) -> Tensor:
        """Return this rank's sums of `Workload.routing` since the last call, fp64 [routers, experts + 3].

        Taken in every step, also in one that is skipped, so that no step sees anything of another.
        """
        sums = torch.zeros(len(self._names), self._width, dtype=torch.float64, device=self._device)
        for stage in stages if self._names else ():
            for name, counts in self._workload.routing(stage).items():
                if self._mesh.tp.index == 0:  # the others of a tensor group see the same tokens
                    # fp64 [routers, experts + 3]: choices that found no room, choices of each expert, entropy, tokens.
                    # Counts stay exact in any order of additions.
                    sums[self._names.index(name)] += counts
        return sums

    def named(self, sums: Tensor) -> dict[str, Tensor]:
        """Return the rows of `take`, or of their sum over ranks, by the names of the routers."""
        return dict(zip(self._names, sums, strict=True))


def ratios(routed: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics of a step, means over the layers; empty for a model without experts.

    `router_load` is the most loaded expert's tokens over the mean; `router_dropped` the share of choices that found no
    room; `router_entropy` the mean entropy of a token's scores, in nats. Each is a ratio within its layer: one that is
    recomputed has counted every token twice.
    """
    if not routed:
        return {}
    sums = torch.stack(list(routed.values()))
    dropped = sums[:, 0]
    chosen = sums[:, 1:-2]
    entropy = sums[:, -2]
    tokens = sums[:, -1]
    load = chosen.amax(1) / chosen.mean(1).clamp(min=1e-9)
    return {
        "router_load": float(load.mean()),
        "router_dropped": float((dropped / (dropped + chosen.sum(1)).clamp(min=1.0)).mean()),
        "router_entropy": float((entropy / tokens.clamp(min=1.0)).mean()),
    }
