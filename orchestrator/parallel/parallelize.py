"""Applying every kind of parallelism to the plain model, in one order.

Cut the pipeline, cut tensors and experts, spread the context, recompute, compile, shard over the replicas. Each
step is a function of the module that the ones before it left.
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

from orchestrator.config.train import TrainSpec
from orchestrator.parallel.context import apply_context
from orchestrator.parallel.ddp import Ddp
from orchestrator.parallel.deterministic_reduction import DeterministicReduction
from orchestrator.parallel.device import Device
from orchestrator.parallel.expert import apply_expert
from orchestrator.parallel.fsdp import Fsdp, frozen_shards, shard_fully
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.offload import Offload
from orchestrator.parallel.own_tensor import apply_own_tensor
from orchestrator.parallel.parameter_shard import DataParallel, ParameterShard
from orchestrator.parallel.parameters import Held, cut_parameters, held_by
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.tensor import RowLinear, apply_tensor
from orchestrator.parallel.tied_gradients import TiedGradients
from orchestrator.parallel.zero1 import Zero1
from workloads.adapters.lora import LoraLinear
from workloads.adapters.nf4 import QuantisedLinear, QuantisedWeight, product
from workloads.hf.dropout import CountedDropout
from workloads.hf.network import HuggingFaceNetwork
from workloads.model import float8
from workloads.model.float8 import Float8Linear
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
"""Operators whose results selective recomputation keeps: what is dear to compute."""
ROUTERS = {"gate", "router", "classifier", "shared_expert_gate"}
"""How classes of transformers call a linear layer that chooses experts, which 8 bits would have choose others."""
PROFILED = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""Operators that compute nothing."""


@dataclass(frozen=True)
class Parallel:
    """The pipeline stages that this rank runs, in order, the cuts of their trained parameters by name, how gradients
    are reduced, and this rank's parts of the parameters that are not trained; of those in 4 bits with their cuts."""

    stages: list[nn.Module]
    cuts: dict[str, Cut]
    shared: TiedGradients
    data: DataParallel
    frozen: list[ParameterShard]
    quantised: dict[str, tuple[Cut, QuantisedWeight]]


def parallelize(workload: Workload, layout: Layout, mesh: Mesh, device: Device, train: TrainSpec) -> Parallel:
    """This rank's part of the workload's model, with uninitialised memory."""
    at = _stages_with(workload, layout)
    stages: list[nn.Module] = []
    every: list[Held] = []
    quantised: dict[str, tuple[Cut, QuantisedWeight]] = {}
    for number in layout.stages_of(mesh.coordinate["pp"]):
        stage, cuts = _stage(workload, layout, mesh, device, train, number)
        stages.append(stage)
        small = {n: m for n, m in stage.named_modules() if isinstance(m, QuantisedWeight)}
        quantised |= {name: (cuts[name], weight) for name, weight in small.items()}
        every += held_by(stage, cuts, {name for name, numbers in at.items() if numbers[0] < number})
    held = [h for h in every if h.parameter.requires_grad]
    # In the order of the names, since groups are made by all ranks together.
    places = {
        name: frozenset(layout.pipeline_rank_of(n) for n in at[name])
        for name in sorted(at)
        if len(at[name]) > 1 and name not in workload.frozen
    }
    shared = TiedGradients(held, mesh, {name: mesh.of_stages(ranks) for name, ranks in places.items()})
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
    frozen = frozen_shards(every, mesh)
    return Parallel(stages, {h.name: h.cut for h in held}, shared, data, frozen, quantised)


def _stage(
    workload: Workload, layout: Layout, mesh: Mesh, device: Device, train: TrainSpec, number: int
) -> tuple[nn.Module, dict[str, Cut]]:
    styles = workload.sharding()
    model = plain_stage(workload, layout, number)
    freeze(model, workload)
    cuts = cut_parameters(model, styles, mesh, workload.stacks)
    if mesh.tp.size > 1 and isinstance(model, OwnNetwork | HuggingFaceNetwork):
        apply_own_tensor(model, styles, mesh.tp)
    elif mesh.tp.size > 1:
        apply_tensor(model, styles, mesh.tp, layout.sequence)
    if mesh.expert.size > 1:
        apply_expert(model, mesh.expert)
    if mesh.cp.size > 1:
        apply_context(model, mesh.cp)
    keep_in_4_bits(model, workload.quantised, cuts)
    if train.dtype == "fp8":
        multiply_in_8_bits(workload.blocks(model))
    recompute(workload.blocks(model), layout, train.compile)
    if layout.zero >= 2 and mesh.data.size > 1:
        shard_fully(model, workload.blocks(model), mesh, layout.zero, device)
    model.to_empty(device=device.device)
    model.train()
    return model, cuts


def freeze(model: nn.Module, workload: Workload) -> None:
    """Have no gradients computed of the parameters that the workload does not train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in workload.frozen)


def keep_in_4_bits(model: nn.Module, names: Container[str], cuts: Mapping[str, Cut]) -> None:
    """Have those weights of a model on the meta device in 4 bits, which are no parameters then."""
    for name, parameter in list(model.named_parameters()):
        if name not in names:
            continue
        where = name.rpartition(".")[0]
        layer, columns = model.get_submodule(where), cuts[name].slices()[1]
        weight = QuantisedWeight(len(parameter), columns)
        weight.to("meta")
        if isinstance(layer, nn.Linear):
            parent, _, leaf = where.rpartition(".")
            setattr(model.get_submodule(parent), leaf, QuantisedLinear(weight, layer.bias))
        else:
            assert isinstance(layer, LoraLinear | RowLinear)
            del layer.weight
            layer.weight, layer.product = weight, product


def multiply_in_8_bits(blocks: Iterable[nn.Module]) -> None:
    """Have the linear layers of blocks compute in 8 bits, those of which a rank has sizes for that: what is made of
    linear layers by users is their own, and experts are no linear layers."""
    for name, module in (each for block in blocks for each in block.named_modules()):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not float8.fits(weight):
            continue
        if type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS:
            module.__class__ = Float8Linear
        elif isinstance(module, RowLinear | LoraLinear):
            module.product = float8.linear


def plain_stage(workload: Workload, layout: Layout, number: int) -> nn.Module:
    """Stage `number` of the workload's model, on the meta device."""
    with torch.device("meta"):
        model = workload.build()
    return _kept(model, workload, layout, number) if layout.pp > 1 else model


def _kept(model: nn.Module, workload: Workload, layout: Layout, number: int) -> nn.Module:
    """The model cut down to the layers of a stage."""
    start, count = layout.layers_of(len(workload.stages()) + 1, number)
    model.keep(start, start + count)  # type: ignore[operator]
    return model


def _stages_with(workload: Workload, layout: Layout) -> dict[str, list[int]]:
    """The stages that hold each parameter, ascending."""
    found: dict[str, list[int]] = {}
    if layout.pp == 1:
        return found
    with torch.device("meta"):
        whole = workload.build()
    foreign = isinstance(whole, OwnNetwork | HuggingFaceNetwork)  # whose layers may be changed within
    same = {id(each): each for each in (*workload.blocks(whole), *whole.parameters(), *whole.buffers())}
    for number in range(layout.stages):
        # What takes long is to build the layers, of which a stage keeps some as they are.
        stage = (
            plain_stage(workload, layout, number)
            if foreign
            else _kept(copy.deepcopy(whole, dict(same)), workload, layout, number)
        )
        for name, _ in stage.named_parameters():
            found.setdefault(name, []).append(number)
    return found


def recompute(blocks: Sequence[nn.Module], layout: Layout, compiled: bool = False) -> None:
    """Keep of each block that the layout recomputes only its input, or where it is selective also the results of matrix
    products and attention (Chen et al., 2016; Korthikanti et al., 2022, section 5). All are compiled if that is asked
    for; what is compiled by Inductor keeps attention alone."""
    again = 0 if layout.recompute == "none" else layout.recompute_layers or len(blocks)
    for layer in blocks[again:] if compiled else ():
        layer.compile()
    # Dropout counts instead of drawing, so there is no random state to put back.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if layout.recompute == "selective":
        # FSDP2 names what it does in experts within a layer for profilers, more often where they are computed again.
        SAC_IGNORED_OPS.update(PROFILED)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    own = _OwnCode()
    for layer in blocks[:again]:
        # A checkpoint is not compiled, nor what is around it: what is compiled stands inside. Of one shape both passes
        # take the same program; one for all shapes, made between the two, keeps other tensors.
        forward = torch.compile(own.of(layer), dynamic=False) if compiled else layer.forward
        if dropouts := [each for each in layer.modules() if isinstance(each, CountedDropout)]:
            layer.forward = partial(_of_micro_batch, forward, dropouts, options)
            continue
        layer.forward = partial(checkpoint, partial(_with_own_casts, forward), **options)


class _OwnCode:
    """The forwards of layers, with code of its own for each kind of them, as those of experts beside dense ones.

    Dynamo has a list of programs for each code, and takes the first whose guards hold: one that was made of the
    beginning of another kind's forward also serves this one, in the second pass if it was not there in the first.
    """

    def __init__(self) -> None:
        self._code: dict[tuple[tuple[str, type], ...], CodeType] = {}

    def of(self, layer: nn.Module) -> Callable[..., Any]:
        """The layer's forward."""
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
    """A block whose dropouts are told the keys of a micro-batch: another one may be told them before it is computed
    again, so that they are among what a checkpoint keeps."""
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
    """Run a block without autocast's memory of what is cast already.

    What several blocks read (a decoder's memory that came from another stage, shared weights) is else cast by the first
    of them alone, but by each when it is computed again, and selective recomputation matches the two by counting.
    """
    kind = next(each for each in tree_leaves((given, named)) if isinstance(each, torch.Tensor)).device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        return forward(*given, **named)


def _policy(_: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = any(op.__name__.split(".")[0].startswith(name) for name in SAVED)
    # What is compiled hands products the memory that they write, which it uses for others after them.
    kept = kept and not op._schema.is_mutable
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
