"""Apply every kind of parallelism to the plain model, in a fixed order.

The order is: cut the pipeline, cut tensors and experts, spread the context, recompute, compile, shard over the
replicas. Each step transforms the module that the steps before it returned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from orchestrator.parallel.context import apply_context
from orchestrator.parallel.ddp import Ddp
from orchestrator.parallel.deterministic_reduction import DeterministicReduction
from orchestrator.parallel.device import Device
from orchestrator.parallel.expert import apply_expert
from orchestrator.parallel.fsdp import Fsdp, frozen_shards, shard_fully
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.offload import Offload
from orchestrator.parallel.own_tensor import apply_own_tensor
from orchestrator.parallel.parameter_shard import DataParallel, ParameterShard
from orchestrator.parallel.parameters import Held, cut_parameters, held_by
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.tensor import RowLinear, apply_tensor
from orchestrator.parallel.tied_gradients import TiedGradients
from orchestrator.parallel.zero1 import Zero1
from orchestrator.train.config import TrainSpec
from workloads.adapters.lora import LoraLinear
from workloads.adapters.nf4 import QuantisedLinear, QuantisedWeight, product
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.dropout import CountedDropout
from workloads.hf.as_they_are.network import HuggingFaceNetwork
from workloads.model import float8
from workloads.model.fake_quantise import FakeQuantisedLinear, FakeQuantiser, is_router, quantised_layers
from workloads.model.float8 import Float8Linear
from workloads.model.scheme import Scheme
from workloads.own.network import OwnNetwork
from workloads.workload import Workload

SAVED = (
    "mm",
    "addmm",
    "bmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_varlen_attn",
)
"""Prefixes of operators whose results selective recomputation keeps, because they are expensive to compute."""
PROFILED = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""Operators of the profiler, which compute nothing."""


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
    stages_by_name = _stages_with(workload, layout)
    stages: list[nn.Module] = []
    every: list[Held] = []
    quantised: dict[str, tuple[Cut, QuantisedWeight]] = {}
    for number in layout.stages_of(mesh.coordinate["pp"]):
        model = plain_stage(workload, layout, number)
        cuts = _divide(model, workload, layout, mesh)
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
        every += held_by(stage, cuts, earlier)
    held = [h for h in every if h.parameter.requires_grad]
    # Sorted by name, because all ranks must create the groups in the same order.
    tied_ranks = {
        name: frozenset(layout.pipeline_rank_of(number) for number in stages_by_name[name])
        for name in sorted(stages_by_name)
        if len(stages_by_name[name]) > 1 and name not in workload.frozen
    }
    shared = TiedGradients(held, mesh, {name: mesh.of_stages(ranks) for name, ranks in tied_ranks.items()})
    # Buckets may be reduced during the backward pass only if nothing adds to a gradient after it: a schedule decides
    # itself which micro-batch is last, and tied gradients are summed over stages first.
    overlap = layout.pp == 1 and not shared.any
    sharded = layout.zero if mesh.data.size > 1 else 0
    data: DataParallel
    if train.determinism == "bitwise":
        data = DeterministicReduction(held, mesh, device.device)
    elif sharded >= 2:
        data = Fsdp(stages, held, mesh)
    elif sharded == 1:
        data = Zero1(held, mesh, overlap)
    else:
        data = Ddp(held, mesh, overlap)
    data = data if layout.offload == "none" else Offload(data)
    return Parallel(
        stages=stages,
        cuts={h.name: h.cut for h in held},
        shared=shared,
        data=data,
        frozen=frozen_shards(every, mesh),
        quantised=quantised,
    )


def _divide(model: nn.Module, workload: Workload, layout: Layout, mesh: Mesh) -> dict[str, Cut]:
    """Reduce a stage to this rank's part of its tensors, and return the cut of every parameter."""
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


def freeze(model: nn.Module, workload: Workload) -> None:
    """Turn off the gradients of the parameters that the workload does not train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in workload.frozen)


def keep_in_4_bits(model: nn.Module, names: Container[str], cuts: Mapping[str, Cut]) -> None:
    """Replace the named weights of a model on the meta device by weights in 4 bits, which are buffers."""
    for name, parameter in list(model.named_parameters()):
        if name not in names:
            continue
        path = name.rpartition(".")[0]
        layer = model.get_submodule(path)
        columns = cuts[name].slices()[1]
        weight = QuantisedWeight(len(parameter), columns)
        weight.to("meta")
        if isinstance(layer, nn.Linear):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantisedLinear(weight, layer.bias))
        else:
            assert isinstance(layer, LoraLinear | RowLinear)
            del layer.weight
            layer.weight = weight
            layer.product = product


def multiply_in_8_bits(blocks: Iterable[nn.Module]) -> None:
    """Let the linear layers of blocks multiply in 8 bits if this rank's part has sizes that allow it.

    Routers, experts and classes that users derive from linear layers are excluded.
    """
    for block in blocks:
        for name, module in block.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not float8.fits(weight):
                continue
            if type(module) is nn.Linear and not is_router(block, name):
                # The class and not the module is exchanged, since other modules and tied heads refer to this object.
                module.__class__ = Float8Linear
            elif isinstance(module, RowLinear | LoraLinear):
                module.product = float8.linear


def fake_quantise(
    model: nn.Module, workload: Workload, scheme: Scheme, tp: ProcessGroup | None = None
) -> None:
    """Let the linear layers of blocks that a scheme names round their weights.

    A rank with a part of each row needs the largest number of the whole row: that of all ranks in the group `tp`.
    Raises WorkloadError if its part has no whole groups.
    """
    whole = FakeQuantiser(scheme)
    divided = FakeQuantiser(scheme, partial(_largest_over, tp)) if tp and tp.size > 1 else whole
    kinds = (nn.Linear, RowLinear)
    for name, module in quantised_layers(model, workload.blocks(model), scheme, kinds).items():
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if not scheme.fits(weight.shape[1]):
            raise WorkloadError(
                f"a rank's part of {name} has rows of {weight.shape[1]}, which is no multiple of the group of "
                f"{scheme.group} weights with one scale; lower tp, or choose a smaller quantize.group or row"
            )
        if isinstance(module, RowLinear):
            module.product = divided
        else:
            module.__class__ = FakeQuantisedLinear
            module.product = whole  # type: ignore[assignment]


def _largest_over(tp: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Return the maximum of values over the ranks of a group."""
    values = values.contiguous()
    tp.sent(values)
    with tp.communicating():
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=tp.handle)
    tp.received(values)
    return values


def plain_stage(workload: Workload, layout: Layout, number: int) -> nn.Module:
    """Return stage `number` of the workload's model, uncut, on the meta device."""
    # A model may be larger than a rank's memory; only its shapes are needed until it is cut.
    with torch.device("meta"):
        model = workload.build()
    return _kept(model, workload, layout, number) if layout.pp > 1 else model


def _kept(model: nn.Module, workload: Workload, layout: Layout, number: int) -> nn.Module:
    """Reduce the model to the layers of a stage."""
    start, count = layout.layers_of(len(workload.stages()) + 1, number)
    model.keep(start, start + count)  # type: ignore[operator]
    return model


def _stages_with(workload: Workload, layout: Layout) -> dict[str, list[int]]:
    """Return the numbers of the stages that hold each parameter, ascending; empty without a pipeline."""
    stages: dict[str, list[int]] = {}
    if layout.pp == 1:
        return stages
    with torch.device("meta"):
        whole = workload.build()
    # Layers of these models may change when the model is cut, so every stage is built separately.
    is_foreign = isinstance(whole, OwnNetwork | HuggingFaceNetwork)
    same = {id(each): each for each in (*workload.blocks(whole), *whole.parameters(), *whole.buffers())}
    for number in range(layout.stages):
        # Building layers is slow. A stage keeps some of them unchanged, so a copy of the model shares its layers.
        stage = (
            plain_stage(workload, layout, number)
            if is_foreign
            else _kept(copy.deepcopy(whole, dict(same)), workload, layout, number)
        )
        for name, _ in stage.named_parameters():
            stages.setdefault(name, []).append(number)
    return stages


def recompute(blocks: Sequence[nn.Module], layout: Layout, compiled: bool = False) -> None:
    """Recompute the activations of blocks in the backward pass, and compile all blocks if asked.

    A recomputed block keeps only its input (Chen et al., 2016). With `selective` it also keeps the results of matrix
    products and attention (Korthikanti et al., 2022, section 5); if it is compiled, of attention only.
    """
    recomputed = 0 if layout.recompute == "none" else layout.recompute_layers or len(blocks)
    if compiled:
        for layer in blocks[recomputed:]:
            layer.compile()
    # Dropout is a function of counters and draws no random numbers, so there is no random state to restore.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if layout.recompute == "selective":
        # FSDP2 names what it does in experts within a layer for profilers, more often where they are computed again.
        SAC_IGNORED_OPS.update(PROFILED)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    own = _OwnCode()
    for layer in blocks[:recomputed]:
        # The compiled code is inside the checkpoint: torch compiles neither a checkpoint nor the code around it. With
        # static shapes both passes run the same program; a program for all shapes, compiled between the two passes,
        # would save other tensors.
        forward = torch.compile(own.of(layer), dynamic=False) if compiled else layer.forward
        if dropouts := [each for each in layer.modules() if isinstance(each, CountedDropout)]:
            layer.forward = partial(_of_micro_batch, forward, dropouts, options)
            continue
        layer.forward = partial(checkpoint, partial(_with_own_casts, forward), **options)


class _OwnCode:
    """Gives each kind of layer (dense, with experts, ..) a copy of the code object of its forward.

    Dynamo keeps compiled programs per code object and uses the first whose guards hold. A program that was compiled
    from the start of another kind's forward may match this kind too. If it is compiled between the forward pass and
    its recomputation, the two passes would run different programs.
    """

    def __init__(self) -> None:
        self._code: dict[tuple[tuple[str, type], ...], CodeType] = {}

    def of(self, layer: nn.Module) -> Callable[..., Any]:
        """Return the layer's forward, with the code object of its kind."""
        forward = layer.forward
        if not isinstance(forward, MethodType):
            return forward
        function = forward.__func__
        kind = tuple((name, type(module)) for name, module in layer.named_modules())
        code = self._code.setdefault(kind, function.__code__.replace())
        copied = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
        copied.__kwdefaults__ = function.__kwdefaults__
        return MethodType(copied, layer)


def _of_micro_batch(
    forward: Callable[..., Any],
    dropouts: Sequence[CountedDropout],
    options: dict[str, Any],
    *given: Any,
    **named: Any,
) -> Any:
    """Run a block with dropout under recomputation.

    The keys of its dropouts depend on the micro-batch. A later micro-batch may set new ones before this block is
    recomputed, so they are passed as an argument, which the checkpoint keeps.
    """
    inside = partial(_with_own_casts, partial(_of_rows, forward, dropouts))
    return checkpoint(inside, dropouts[0].rows, *given, **options, **named)


def _of_rows(
    forward: Callable[..., Any],
    dropouts: Sequence[CountedDropout],
    rows: torch.Tensor | None,
    *given: Any,
    **named: Any,
) -> Any:
    for each in dropouts:
        each.rows = rows
    return forward(*given, **named)


def _with_own_casts(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run a block without autocast's cache of casts.

    Several blocks may read one tensor (an encoder's output, shared weights). With the cache only the first of them
    casts it in the forward pass, but each does when it is recomputed. Selective recomputation matches the operators of
    both passes by counting them, so their numbers must be equal.
    """
    kind = next(each for each in tree_leaves((given, named)) if isinstance(each, torch.Tensor)).device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        return forward(*given, **named)


def _policy(_: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Decide whether selective recomputation keeps the result of an operator."""
    kept = any(op.__name__.split(".")[0].startswith(name) for name in SAVED)
    # Compiled code passes products a buffer to write to, and reuses that buffer afterwards.
    kept = kept and not op._schema.is_mutable
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
