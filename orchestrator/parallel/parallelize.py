"""Apply every kind of parallelism to the plain model, in a fixed order.

The order is: cut the pipeline, cut tensors and experts, spread the context, recompute, compile, shard over the
replicas. Each step transforms the module that the steps before it returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.parallel.ddp import Ddp
from orchestrator.parallel.deterministic_reduction import DeterministicReduction
from orchestrator.parallel.device import Device
from orchestrator.parallel.divided_model import divide
from orchestrator.parallel.fsdp import Fsdp, frozen_shards, local_of, shard_fully
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.low_precision import fake_quantise, keep_in_4_bits, multiply_in_8_bits
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.offload import Offload
from orchestrator.parallel.parameter_shard import DataParallel, ParameterShard
from orchestrator.parallel.parameters import LocalParameter, local_parameters
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.recompute import recompute
from orchestrator.parallel.stage_models import plain_stage, stages_with
from orchestrator.parallel.zero1 import Zero1
from orchestrator.train.config import TrainSpec
from workloads.adapters.nf4 import QuantisedWeight
from workloads.model.scheme import Scheme
from workloads.workload import Workload


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


@dataclass(frozen=True)
class Parallel:
    """This rank's part of a model.

    Attributes:
        stages: the pipeline stages that this rank runs, in order; one without a pipeline.
        cuts: this rank's part of each trained parameter, by name.
        shared: sums the gradients of parameters that several stages hold.
        data: reduces gradients over the replicas.
        frozen: this rank's parts of the parameters that are not trained.
        quantised: the weights in 4 bits by name, each with its cut.
    """

    stages: list[nn.Module]
    cuts: dict[str, Cut]
    shared: TiedGradients
    data: DataParallel
    frozen: list[ParameterShard]
    quantised: dict[str, tuple[Cut, QuantisedWeight]]

    def weights(self) -> list[Tensor]:
        """Return the memory of this rank's parameters and of its weights in 4 bits."""
        parameters = [local_of(p) for stage in self.stages for p in stage.parameters()]
        return parameters + [buffer for _, weight in self.quantised.values() for buffer in weight.buffers()]

    def gradients(self) -> list[Tensor]:
        """Return the memory of the parameters' gradients."""
        return [local_of(p.grad) for stage in self.stages for p in stage.parameters() if p.grad is not None]


def parallelize(
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    device: Device,
    train: TrainSpec,
    scheme: Scheme | None = None,
) -> Parallel:
    """Build this rank's part of the workload's model, in uninitialised memory.

    Args:
        workload: the model and its objective.
        layout: how the ranks divide the work.
        mesh: the process groups of the layout.
        device: this rank's device and compute dtype.
        train: the job's training options; read for determinism, dtype and compilation.
        scheme: how trained weights are rounded; None if they are not.
    """
    stages_by_name = stages_with(workload, layout)
    stages: list[nn.Module] = []
    every: list[LocalParameter] = []
    quantised: dict[str, tuple[Cut, QuantisedWeight]] = {}
    for number in layout.stages_of(mesh.coordinate["pp"]):
        model = plain_stage(workload, layout, number)
        cuts = divide(model, workload, layout, mesh)
        if scheme is not None:
            fake_quantise(model, workload, scheme, mesh.tp)
        stage = _prepare(model, workload, layout, mesh=mesh, device=device, train=train, cuts=cuts)
        stages.append(stage)
        quantised |= {
            name: (cuts[name], module)
            for name, module in stage.named_modules()
            if isinstance(module, QuantisedWeight)
        }
        earlier = {name for name, numbers in stages_by_name.items() if numbers[0] < number}
        every += local_parameters(stage, cuts, earlier)
    trained = [local for local in every if local.parameter.requires_grad]
    # Sorted by name, because all ranks must create the groups in the same order.
    tied_ranks = {
        name: frozenset(layout.pipeline_rank_of(number) for number in stages_by_name[name])
        for name in sorted(stages_by_name)
        if len(stages_by_name[name]) > 1 and name not in workload.frozen
    }
    shared = TiedGradients(
        trained, mesh, {name: mesh.stage_group(ranks) for name, ranks in tied_ranks.items()}
    )
    # Buckets may be reduced during the backward pass only if nothing adds to a gradient after it: a schedule decides
    # itself which micro-batch is last, and tied gradients are summed over stages first.
    overlap = layout.pp == 1 and not shared.any
    sharded = layout.zero if mesh.data.size > 1 else 0
    data: DataParallel
    if train.determinism == "bitwise":
        data = DeterministicReduction(trained, mesh, device.device)
    elif sharded >= 2:
        data = Fsdp(stages, trained, mesh)
    elif sharded == 1:
        data = Zero1(trained, mesh, overlap)
    else:
        data = Ddp(trained, mesh, overlap)
    # Last: the optimizer then sees shards on the host, while gradients were reduced on the device.
    data = data if layout.offload == "none" else Offload(data)
    return Parallel(
        stages=stages,
        cuts={local.name: local.cut for local in trained},
        shared=shared,
        data=data,
        frozen=frozen_shards(every, mesh),
        quantised=quantised,
    )


def _prepare(
    model: nn.Module,
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    device: Device,
    train: TrainSpec,
    cuts: dict[str, Cut],
) -> nn.Module:
    """Return a divided stage as the engine runs it, in uninitialised memory."""
    keep_in_4_bits(model, workload.quantised, cuts)
    if train.dtype == "fp8":
        multiply_in_8_bits(workload.blocks(model))
    recompute(workload.blocks(model), layout, train.compile)
    if layout.zero >= 2 and mesh.data.size > 1:
        # On the meta device: sharded first and allocated afterwards, a rank never holds the whole model.
        shard_fully(model, workload.blocks(model), mesh, layout.zero, device)
    model.to_empty(device=device.device)
    model.train()
    return model
