"""Gradients (ZeRO 2) and also parameters (ZeRO 3) sharded over the replicas, by torch's FSDP2.

Rajbhandari et al., 2020, sections 5.2 and 5.3; Zhao et al., 2023, "PyTorch FSDP". A parameter is sharded over its first
dimension. With several copies of the model (HSDP) each copy is sharded, and gradients are summed between copies.
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
from orchestrator.parallel.parameters import LocalParameter
from orchestrator.parallel.tensor import RowLinear
from workloads.adapters.lora import LoraLinear
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.model.fake_quantise import FakeQuantiser
from workloads.model.float8 import Float8Linear
from workloads.model.moe import Experts
from workloads.model.transformer import Layer
from workloads.own.network import OwnNetwork

MATRICES = (nn.Linear, Float8Linear, RowLinear, Experts)
"""Modules whose parameters are used in matrix products only."""


def shard_fully(model: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, zero: int, device: Device) -> None:
    """Hand the parameters of `model` to FSDP2.

    FSDP2 gathers parameters in groups. The groups of a block are its experts, its matrices, and its other parameters.
    The last group has the rest of the model. Token embeddings belong to it, because a tied head reads their weight
    outside of their module, and so do blocks that share a parameter with another module.

    Args:
        model: a stage of the model, on the meta device and already cut to this rank.
        blocks: its layers.
        mesh: the process groups.
        zero: the ZeRO stage, 2 or 3.
        device: this rank's device and compute dtype.
    """
    kind = device.device.type
    compute = device.compute
    dense = _device_mesh(mesh, mesh.data, mesh.shard, kind)
    # Under ZeRO 2 parameters stay gathered from the first forward pass to the end of the step: only gradients and
    # optimizer state are sharded.
    free = zero == 3  # whether gathered parameters are freed after a forward pass
    # `low` gathers parameters in the compute dtype and reduces gradients in fp32; `full` does both in fp32.
    low = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    # Gradients of a weight that is used several times, or that come from outside autograd (the W of zero-bubble
    # schedules), are summed in the dtype of the gathered weight. That weight must then be fp32.
    defers = mesh.layout.pp > 1 and mesh.layout.schedule in SPLIT
    shares = getattr(getattr(model, "config", None), "shared_layers", False)
    lowers = compute is torch.bfloat16 and free and not (defers or shares)
    apart = list(_separate_blocks(model, blocks))
    if isinstance(model, OwnNetwork | HuggingFaceNetwork) and not defers:
        inside = {module for layer in apart for module in layer.modules()}
        for layer in apart:
            layer.register_forward_hook(_ZeroGradients(set()))
        model.register_forward_hook(_ZeroGradients(inside))
    for layer in apart:
        if isinstance(model, OwnNetwork):
            layer.register_forward_hook(_without_views)
        experts = getattr(getattr(layer, "feedforward", None), "experts", None)
        if experts is not None and mesh.expert.size > 1 and mesh.expert_data.size > 1:
            fully_shard(
                experts,
                mesh=_device_mesh(mesh, mesh.expert_data, mesh.expert_shard, kind),
                reshard_after_forward=free,
                ignored_params=_unsharded_frozen(experts, free),
                mp_policy=low if lowers and isinstance(layer, Layer) else full,
            )
        ignored = _unsharded(layer, mesh, free)
        matrices = _matrices(layer, ignored) if lowers else []
        if matrices:
            fully_shard(
                matrices, mesh=dense, reshard_after_forward=free, ignored_params=ignored, mp_policy=low
            )
        fully_shard(layer, mesh=dense, reshard_after_forward=free, ignored_params=ignored, mp_policy=full)
    ignored = _unsharded(model, mesh, free)
    fully_shard(model, mesh=dense, reshard_after_forward=free, ignored_params=ignored, mp_policy=full)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum gradients, do not average them: the loss is already divided by the labels of the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if kind == "cpu":  # on a GPU collectives are queued, so their calls take no time
                module.set_custom_all_gather(_TimedAllGather(mesh.shard))
            module.set_custom_reduce_scatter(_TimedReduceScatter(mesh.shard))


class _ZeroGradients:
    """A forward hook that gives every trained parameter of a module a gradient in each backward pass.

    FSDP2 concatenates the gradients that exist and reduces them together. If the samples of two ranks use different
    parameters of a user's model, gradients of different parameters would be summed. Unused parameters therefore get
    gradients of zeros.
    """

    def __init__(self, excluded: set[nn.Module]) -> None:
        """`excluded`: inner modules whose parameters belong to another group."""
        self._excluded = excluded

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        trained = [
            parameter
            for inner in module.modules()
            if inner not in self._excluded
            for parameter in inner._parameters.values()
            if parameter is not None and parameter.requires_grad
        ]
        leaves, form = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if torch.is_grad_enabled() and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[index] = _WithZeros.apply(leaf, *trained)
                return tree_unflatten(leaves, form)
        return output


class _WithZeros(torch.autograd.Function):
    """A copy of a tensor whose backward pass also gives the listed parameters gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        """See the class."""
        ctx.parameters = [(parameter.shape, parameter.dtype) for parameter in parameters]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient unchanged, and zeros that are expanded from one element."""
        zeros = (gradient.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.parameters)
        return gradient, *zeros


def _without_views(_: nn.Module, __: Any, output: Any) -> Any:
    """Clone the views in a layer's output: an in-place change of a view would remove FSDP2's backward hook."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor._is_view() else tensor, output)


def _separate_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the blocks that share no parameter with a module outside of them."""
    uses = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    for block in blocks:
        inside = Counter(
            p for module in block.modules() for p in module._parameters.values() if p is not None
        )
        if all(uses[parameter] == count for parameter, count in inside.items()):
            yield block


def _matrices(layer: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Return the modules of a layer whose parameters are used in matrix products only.

    They may be gathered in the compute dtype, because the product casts them to it anyway. That halves the bytes sent,
    and no cast outlives the gathered weight. Only our own layers qualify, whose use of parameters is known, and no
    layer with adapters, which read weights in other ways.
    """
    if not isinstance(layer, Layer) or any(isinstance(module, LoraLinear) for module in layer.modules()):
        return []
    # A weight that is rounded to few bits is rounded from fp32, as in the export.
    candidates = [
        module
        for module in layer.modules()
        if type(module) in MATRICES and not isinstance(getattr(module, "product", None), FakeQuantiser)
    ]
    return [
        module
        for module in candidates
        if not isinstance(module, FSDPModule) and not ignored.issuperset(module.parameters())
    ]


class _TimedAllGather(DefaultAllGather):
    """FSDP2's all-gather of parameters, timed as communication."""

    def __init__(self, group: ProcessGroup) -> None:
        self._timed = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See FSDP2's own."""
        with self._timed.communicating():
            return super().__call__(*args, **kwargs)


class _TimedReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter of gradients, timed as communication; its input is recorded in a verified step."""

    def __init__(self, group: ProcessGroup) -> None:
        self._timed = group

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See FSDP2's own."""
        self._timed.sent(input_tensor)
        if not self._timed.sums_gradients:
            # Zeros, because the copies of a sharded model still add what this returns.
            output_tensor.zero_()
            return None
        with self._timed.communicating():
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)


def _unsharded(module: nn.Module, mesh: Mesh, free: bool) -> set[nn.Parameter]:
    """Return the parameters that FSDP2 must ignore; it cannot shard scalars."""
    scalars = {p for p in module.parameters() if not p.dim()}
    return scalars | _unsharded_experts(module, mesh) | _unsharded_frozen(module, free)


def _unsharded_frozen(module: nn.Module, free: bool) -> set[nn.Parameter]:
    """Under ZeRO 2 frozen parameters stay whole: they have no gradient to shard, and need no gather then."""
    return set() if free else {p for p in module.parameters() if not p.requires_grad}


def _unsharded_experts(module: nn.Module, mesh: Mesh) -> set[nn.Parameter]:
    """Return experts that no other rank holds: expert parallelism has sharded them already."""
    if mesh.expert.size == 1 or mesh.expert_data.size > 1:
        return set()
    return {p for name, p in module.named_parameters() if ".experts." in f".{name}"}


def _device_mesh(mesh: Mesh, group: ProcessGroup, shard: ProcessGroup, device: str) -> DeviceMesh:
    """Return `group` as a mesh for FSDP2: [shard], or with several copies [copies, shard]."""
    assert shard.handle is not None
    if mesh.copies.size == 1:
        return DeviceMesh.from_group(shard.handle, device)
    assert mesh.copies.handle is not None
    ranks = torch.tensor(group.ranks).view(mesh.copies.size, shard.size)
    return DeviceMesh.from_group(
        [mesh.copies.handle, shard.handle], device, ranks, mesh_dim_names=("copies", "shard")
    )


class Fsdp:
    """A `DataParallel` by FSDP2, which reduce-scatters gradients and sums them over the copies of the model."""

    def __init__(self, models: Iterable[nn.Module], parameters: list[LocalParameter], mesh: Mesh) -> None:
        self._models = list(models)
        self._has_copies = mesh.copies.size > 1
        self._data = mesh.data
        self._keeps_weights = mesh.layout.zero == 2
        self._parameters: list[nn.Parameter] = []
        self.shards: list[ParameterShard] = []
        for local_parameter in parameters:
            local = local_of(local_parameter.parameter)
            if not local.numel():
                continue
            mine = nn.Parameter(local)
            self._parameters.append(local_parameter.parameter)
            # Copies on other stages (tied) or tensor-parallel ranks (not cut) are neither counted nor saved.
            is_first = local_parameter.original and (local_parameter.cut.over_tp or mesh.tp.index == 0)
            # FSDP2 leaves scalars whole, so all ranks hold them.
            replicas = mesh.copies if local.dim() else mesh.data
            self.shards.append(
                ParameterShard(
                    name=local_parameter.name,
                    cut=local_parameter.cut,
                    parameter=mine,
                    boxes=_row_boxes(local_parameter),
                    replica_group=replicas,
                    counted=is_first and replicas.index == 0,
                    saved=is_first,
                )
            )

    def begin(self) -> None:
        """See `DataParallel.begin`."""
        self.publish()
        for model in self._models:
            model.zero_grad(set_to_none=True)
        for shard in self.shards:
            shard.parameter.grad = None

    def micro_batch(self, last: bool) -> None:
        """See `DataParallel.micro_batch`.

        Every micro-batch's gradients are reduce-scattered and added to the shard's. The sum over copies is made once,
        in the last micro-batch. ZeRO 2 keeps the weights that the first micro-batch gathered until the last one ends.
        """
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
                # An expert without a token in the whole step, or an unused parameter, has no gradient.
                torch.zeros_like(shard.parameter) if gradient is None else local_of(gradient)
            )
        for shard in self.shards:
            scalar = shard.parameter.grad
            if scalar is not None and not scalar.dim() and self._data.size > 1:
                self._data.sent(scalar)
                if not self._data.sums_gradients:
                    continue
                with self._data.communicating():
                    dist.all_reduce(scalar, group=self._data.handle)

    def publish(self) -> None:
        """Free gathered weights; the next forward pass gathers the updated shards.

        An evaluation under ZeRO 2 leaves gathered weights, because no backward pass frees them. They are stale after
        the next update, and a step that starts with them has wrong gradients.
        """
        for model in self._models:
            reshard(model)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward pass without a graph may have left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def frozen_shards(parameters: Iterable[LocalParameter], mesh: Mesh) -> list[ParameterShard]:
    """Return this rank's parts of the frozen parameters, which are neither counted in norms nor saved.

    Args:
        parameters: all parameters of the rank's stages, trained ones too.
        mesh: the process groups.
    """
    alone = ProcessGroup((mesh.rank,), 0, None)
    shards = []
    for local_parameter in parameters:
        local = local_of(local_parameter.parameter)
        if not local_parameter.parameter.requires_grad and local.numel():
            mine = nn.Parameter(local, requires_grad=False)
            shards.append(
                ParameterShard(
                    name=local_parameter.name,
                    cut=local_parameter.cut,
                    parameter=mine,
                    boxes=_row_boxes(local_parameter),
                    replica_group=alone,
                    counted=False,
                    saved=False,
                )
            )
    return shards


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _row_boxes(local_parameter: LocalParameter) -> tuple[Box, ...]:
    """Return the boxes of this rank's rows: FSDP2 gives rank i the rows i x ceil(rows / ranks) and following."""
    cut = local_parameter.cut
    parameter = local_parameter.parameter
    if not isinstance(parameter, DTensor):
        return boxes_of(cut, 0, parameter.numel())
    ways = parameter.device_mesh.size(-1)
    index = parameter.device_mesh.get_local_rank(-1)
    first_row = -(-cut.extent[0] // ways) * index
    row_size = parameter.numel() // cut.extent[0]  # elements of a row
    return boxes_of(cut, first_row * row_size, first_row * row_size + local_of(parameter).numel())
