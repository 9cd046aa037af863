"""Makes the job's optimizer for shards: this rank's, or another rank's whose update is computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orchestrator.optim.blocks import block_counts, names_in_8_bits
from orchestrator.optim.build import OptimizerContext, build_optimizer, slots_of
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import names_in_layers, rates_of
from orchestrator.optim.kinds import Slot, kind_of
from orchestrator.parallel.block_maxima import BlockMaxima
from orchestrator.parallel.device import Device
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.norms import GlobalNorms
from orchestrator.parallel.parallelize import Parallel
from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.parallel.partition import Cut
from workloads.workload import Workload


class OptimizerMaker:
    """Makes optimizers of one job under one layout.

    Attributes:
        device: where the shards are; a rank may have none.
    """

    def __init__(
        self, spec: OptimizerSpec, workload: Workload, parallel: Parallel, mesh: Mesh, device: Device
    ) -> None:
        """Prepare what all optimizers share.

        Args:
            spec: the job's optimizer.
            workload: the model.
            parallel: this rank's part of it.
            mesh: the process groups of the layout.
            device: this rank's device.
        """
        self._spec = spec
        self._workload = workload
        self._full = FullMatrices(
            matrices_of(workload, parallel.cuts), parallel.data.shards, mesh, device.device
        )
        self.device = self._full.device
        is_in_8_bits = kind_of(str(spec.name)).in_8_bits
        self._in_8_bits = names_in_8_bits(workload) if is_in_8_bits else frozenset()
        self._special = self._in_8_bits if is_in_8_bits else self._full.names
        self._mesh = mesh
        # bf16 for fp16 jobs too: the iteration is published and tried in bf16 (Jordan et al., 2024).
        self._matmul_dtype = torch.float32 if device.compute is torch.float32 else torch.bfloat16

    def make(self, shards: Sequence[ParameterShard]) -> torch.optim.Optimizer:
        """Return an optimizer of these shards, without states."""
        stacks = self._workload.stacks
        # Matrices per tensor: a stack of experts [experts, rows, columns] has a norm for each of its matrices.
        experts = {n: shape[0] if n in stacks else 1 for n, shape in self._workload.shapes.items()}
        context = OptimizerContext(
            spec=self._spec,
            shards=shards,
            norms=GlobalNorms(shards, experts, self.device),
            rate=rates_of(self._spec, self._workload),
            full=self._full,
            matmul_dtype=self._matmul_dtype,
            in_8_bits=self._in_8_bits,
            maxima=BlockMaxima(block_counts(self._workload, self._in_8_bits), self._mesh),
            device=self.device,
        )
        return build_optimizer(context)

    def slots(self, name: str) -> Sequence[Slot]:
        """Return the optimizer states of a parameter."""
        return slots_of(self._spec, name, special=self._special)


def matrices_of(workload: Workload, cuts: dict[str, Cut]) -> dict[str, Cut]:
    """Return the cuts of the matrices that Muon updates: trained matrices of layers, stacks of experts included.

    Args:
        workload: names the parameters of layers.
        cuts: the cut of every parameter of this rank.
    """
    layer_names = frozenset(names_in_layers(workload)) - workload.frozen
    return {
        name: cut
        for name, cut in cuts.items()
        if name in layer_names and cut.matrix and (len(cut.shape) == 2 or cut.stack)
    }
