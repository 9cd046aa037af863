"""Gradients (ZeRO 2) and parameters too (ZeRO 3) sharded over the replicas, by torch's FSDP2.

Rajbhandari et al., 2020, sections 5.2 and 5.3; Zhao et al., 2023, "PyTorch FSDP". A parameter is sharded over
its first dimension, where the layout says so in each of several copies, between which gradients are summed (HSDP).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import SPLIT
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.parameter_shard import Box, ParameterShard, boxes_of
from orchestrator.parallel.parameters import Held
from orchestrator.parallel.tensor import RowLinear
from workloads.adapters.lora import LoraLinear
from workloads.hf.network import HuggingFaceNetwork
from workloads.model.float8 import Float8Linear
from workloads.model.moe import Experts
from workloads.model.transformer import Layer
from workloads.own.network import OwnNetwork

MATRICES = (nn.Linear, Float8Linear, RowLinear, Experts)
"""Modules whose parameters serve in matrix products alone."""


def shard_fully(model: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, zero: int, device: Device) -> None:
    """Hand the parameters of `model` to FSDP2: experts, then the matrices of each of its blocks, then what else is in a
    block, then the rest.

    Token embeddings stay in the last group, since a tied head reads their weight outside of their module; so do blocks
    of which another module has a parameter too.
    """
    kind, compute = device.device.type, device.compute
    dense, free = _device_mesh(mesh, mesh.data, mesh.shard, kind), zero == 3
    low = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    # A weight that serves several times, or whose gradient waits outside of autograd, has its gradients summed in the
    # type in which it was gathered.
    defers = mesh.layout.pp > 1 and mesh.layout.schedule in SPLIT
    shares = getattr(getattr(model, "config", None), "shared_layers", False)
    lowers = compute is torch.bfloat16 and free and not (defers or shares)
    apart = list(_apart(model, blocks))
    if isinstance(model, OwnNetwork | HuggingFaceNetwork) and not defers:
        inside = {module for layer in apart for module in layer.modules()}
        for layer in apart:
            layer.register_forward_hook(_Reaches(set()))
        model.register_forward_hook(_Reaches(inside))
    for layer in apart:
        if isinstance(model, OwnNetwork):
            layer.register_forward_hook(_without_views)
        experts = getattr(getattr(layer, "feedforward", None), "experts", None)
        if experts is not None and mesh.expert.size > 1 and mesh.expert_data.size > 1:
            whole = _unsharded_frozen(experts, free)
            of_experts = _device_mesh(mesh, mesh.expert_data, mesh.expert_shard, kind)
            policy = low if lowers and isinstance(layer, Layer) else full
            fully_shard(
                experts, mesh=of_experts, reshard_after_forward=free, ignored_params=whole, mp_policy=policy
            )
        left = _left(layer, mesh, free)
        matrices = _matrices(layer, left) if lowers else []
        if matrices:
            fully_shard(matrices, mesh=dense, reshard_after_forward=free, ignored_params=left, mp_policy=low)
        fully_shard(layer, mesh=dense, reshard_after_forward=free, ignored_params=left, mp_policy=full)
    left = _left(model, mesh, free)
    fully_shard(model, mesh=dense, reshard_after_forward=free, ignored_params=left, mp_policy=full)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums here: the loss is already divided by the tokens of the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if kind == "cpu":  # elsewhere they are queued
                module.set_custom_all_gather(_TimedAllGather(mesh.shard))
                module.set_custom_reduce_scatter(_TimedReduceScatter(mesh.shard))


class _Reaches:
    """A forward hook by which every trained parameter of the module, but for those of the modules `apart`, has a
    gradient in each backward pass, of zeros where the samples of this rank do not reach it.

    FSDP2 sums the gradients that there are, in order: those of different parameters with each other, where the ranks'
    samples have not reached the same ones.
    """

    def __init__(self, apart: set[nn.Module]) -> None:
        self._apart = apart

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        trained = [
            parameter
            for inner in module.modules()
            if inner not in self._apart
            for parameter in inner._parameters.values()
            if parameter is not None and parameter.requires_grad
        ]
        leaves, form = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if torch.is_grad_enabled() and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[place] = _WithZeros.apply(leaf, *trained)
                return tree_unflatten(leaves, form)
        return output


class _WithZeros(torch.autograd.Function):
    """A copy of a tensor, whose backward pass gives the parameters behind it gradients of zeros too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        """See the class."""
        ctx.parameters = [(parameter.shape, parameter.dtype) for parameter in parameters]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """The gradient as it is, and zeros that take no memory."""
        zeros = (gradient.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.parameters)
        return gradient, *zeros


def _without_views(_: nn.Module, __: Any, output: Any) -> Any:
    """A layer's output that may be changed in place: of a view FSDP2 would not hear when its backward pass begins."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, output)


def _apart(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The blocks whose parameters no other module has."""
    places = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    for block in blocks:
        inside = Counter(
            p for module in block.modules() for p in module._parameters.values() if p is not None
        )
        if all(places[parameter] == count for parameter, count in inside.items()):
            yield block


def _matrices(layer: nn.Module, left: set[nn.Parameter]) -> list[nn.Module]:
    """The modules of a layer whose parameters serve in matrix products alone, so that they may be gathered in the
    compute dtype, to which such a product casts them anyway: half the bytes, and no second copy that outlives them.

    Only of our own layers, of which that is known, and not beside adapters, which read weights in other ways.
    """
    if not isinstance(layer, Layer) or any(isinstance(module, LoraLinear) for module in layer.modules()):
        return []
    found = [module for module in layer.modules() if type(module) in MATRICES]
    return [
        module
        for module in found
        if not isinstance(module, FSDPModule) and not left.issuperset(module.parameters())
    ]


class _TimedAllGather(DefaultAllGather):
    """What FSDP2 gathers parameters by, its time known to be exposed."""

    def __init__(self, group: ProcessGroup) -> None:
        self._timed = group

    def __call__(self, *given: Any, **rest: Any) -> Any:
        """See FSDP2's own."""
        with self._timed.communicating():
            return super().__call__(*given, **rest)


class _TimedReduceScatter(DefaultReduceScatter):
    """What FSDP2 sums gradients by, in the same way."""

    def __init__(self, group: ProcessGroup) -> None:
        self._timed = group

    def __call__(self, *given: Any, **rest: Any) -> Any:
        """See FSDP2's own."""
        with self._timed.communicating():
            return super().__call__(*given, **rest)


def _left(module: nn.Module, mesh: Mesh, free: bool) -> set[nn.Parameter]:
    """The parameters that FSDP2 does not shard; those without dimensions it cannot."""
    scalars = {p for p in module.parameters() if not p.dim()}
    return scalars | _unsharded_experts(module, mesh) | _unsharded_frozen(module, free)


def _unsharded_frozen(module: nn.Module, free: bool) -> set[nn.Parameter]:
    """Under ZeRO 2 frozen parameters, of which there are no gradients, stay whole, so that they are never gathered."""
    return set() if free else {p for p in module.parameters() if not p.requires_grad}


def _unsharded_experts(module: nn.Module, mesh: Mesh) -> set[nn.Parameter]:
    """Experts that no other rank holds are sharded by expert parallelism already."""
    if mesh.expert.size == 1 or mesh.expert_data.size > 1:
        return set()
    return {p for name, p in module.named_parameters() if ".experts." in f".{name}"}


def _device_mesh(mesh: Mesh, group: ProcessGroup, shard: ProcessGroup, device: str) -> DeviceMesh:
    """The ranks of `group` as FSDP2 has them, of two dimensions if there are several copies."""
    assert shard.handle is not None
    if mesh.copies.size == 1:
        return DeviceMesh.from_group(shard.handle, device)
    assert mesh.copies.handle is not None
    ranks = torch.tensor(group.ranks).view(mesh.copies.size, shard.size)
    return DeviceMesh.from_group(
        [mesh.copies.handle, shard.handle], device, ranks, mesh_dim_names=("copies", "shard")
    )


class Fsdp:
    """See `DataParallel`. FSDP2 reduce-scatters the gradients, and sums them over the copies of the model."""

    def __init__(self, models: Iterable[nn.Module], held: list[Held], mesh: Mesh) -> None:
        self._models, self._has_copies, self._data = list(models), mesh.copies.size > 1, mesh.data
        self._keeps_weights = mesh.layout.zero == 2
        self._parameters: list[nn.Parameter] = []
        self.shards: list[ParameterShard] = []
        for h in held:
            local = local_of(h.parameter)
            if not local.numel():
                continue
            mine = nn.Parameter(local)
            self._parameters.append(h.parameter)
            one = h.original and (h.cut.over_tp or mesh.tp.index == 0)
            same = mesh.copies if local.dim() else mesh.data
            self.shards.append(
                ParameterShard(h.name, h.cut, mine, _rows(h), same, one and same.index == 0, one)
            )

    def begin(self) -> None:
        """See `DataParallel.begin`."""
        self.publish()
        for model in self._models:
            model.zero_grad(set_to_none=True)
        for shard in self.shards:
            shard.parameter.grad = None

    def micro_batch(self, last: bool) -> None:
        """Every micro-batch's gradients are reduce-scattered and added to the shard's; over copies, the last sums.
        Under ZeRO 2 weights are gathered for the first alone: after a forward pass all of them are there anyway."""
        for model in self._models:
            assert isinstance(model, FSDPModule)
            if self._has_copies:
                model.set_requires_all_reduce(last)
            if self._keeps_weights:
                model.set_reshard_after_backward(last)

    def finish(self) -> None:
        """See `DataParallel.finish`."""
        for shard, parameter in zip(self.shards, self._parameters, strict=True):
            gradient = parameter.grad
            shard.parameter.grad = (
                torch.zeros_like(shard.parameter) if gradient is None else local_of(gradient)
            )
        for shard in self.shards:
            if not shard.parameter.dim() and self._data.size > 1:
                with self._data.communicating():
                    dist.all_reduce(shard.parameter.grad, group=self._data.handle)

    def publish(self) -> None:
        """Weights are gathered when they are needed. Those that an evaluation under ZeRO 2 has left, where no backward
        pass frees them, are stale after a step; and a step that begins with them has wrong gradients from then on."""
        for model in self._models:
            reshard(model)


def reshard(model: nn.Module) -> None:
    """Forget the weights that were gathered, which a forward pass without a graph may have left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def frozen_shards(held: Iterable[Held], mesh: Mesh) -> list[ParameterShard]:
    """This rank's parts of the parameters that are not trained, which are neither counted nor saved."""
    alone = ProcessGroup((mesh.rank,), 0, None)
    found = []
    for h in held:
        local = local_of(h.parameter)
        if not h.parameter.requires_grad and local.numel():
            mine = nn.Parameter(local, requires_grad=False)
            found.append(ParameterShard(h.name, h.cut, mine, _rows(h), alone, False, False))
    return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _rows(held: Held) -> tuple[Box, ...]:
    """The box of this rank's rows."""
    cut, parameter = held.cut, held.parameter
    if not isinstance(parameter, DTensor):
        return boxes_of(cut, 0, parameter.numel())
    ways, index = parameter.device_mesh.size(-1), parameter.device_mesh.get_local_rank(-1)
    rows = -(-cut.extent[0] // ways) * index
    row = parameter.numel() // cut.extent[0]
    return boxes_of(cut, rows * row, rows * row + local_of(parameter).numel())
