"""Linear layers in fewer bits: weights stored in 4 bits, products in 8 bits, and rounded weights."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial

import torch
from torch import nn

from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.partition import Cut
from orchestrator.parallel.tensor import RowLinear
from workloads.adapters.lora import LoraLinear
from workloads.adapters.nf4 import QuantisedLinear, QuantisedWeight, product
from workloads.errors import WorkloadError
from workloads.model import float8
from workloads.model.fake_quantise import FakeQuantisedLinear, FakeQuantiser, is_router, quantised_layers
from workloads.model.float8 import Float8Linear
from workloads.model.scheme import Scheme
from workloads.workload import Workload


def keep_in_4_bits(model: nn.Module, names: Container[str], cuts: Mapping[str, Cut]) -> None:
    """Replace the named weights of a model on the meta device by weights in 4 bits, which are buffers.

    Args:
        model: a stage on the meta device, cut to this rank; changed in place.
        names: the weights to replace.
        cuts: this rank's part of each weight. A block of columns with one scale may reach into another rank's part;
            this rank then stores the whole block.
    """
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

    Args:
        model: a stage of the model; changed in place.
        workload: names the blocks whose layers are quantised.
        scheme: bits, groups and layers.
        tp: the tensor-parallel group; None for a model that is whole.

    Raises:
        WorkloadError: a rank's part of a row has no whole groups.
    """
    divided = (
        partial(FakeQuantiser, over_ranks=partial(_largest_over, tp)) if tp and tp.size > 1 else FakeQuantiser
    )
    kinds = (nn.Linear, RowLinear)
    for name, module in quantised_layers(model, workload.blocks(model), scheme, kinds).items():
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if not scheme.fits(weight.shape[1]):
            raise WorkloadError(
                f"a rank's part of {name} has rows of {weight.shape[1]}, which is not a multiple of the group of "
                f"{scheme.group} weights with one scale; lower tp, or choose a smaller quantize.group or row"
            )
        # A row-parallel layer has a part of each row [out, in / tp], so the largest number of a group of type row is
        # found over the ranks. A column-parallel layer has whole rows [out / tp, in].
        if isinstance(module, RowLinear):
            module.product = divided(scheme.of(name))
        else:
            module.__class__ = FakeQuantisedLinear
            module.product = FakeQuantiser(scheme.of(name))  # type: ignore[assignment]


def _largest_over(tp: ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Return the maximum of values over the ranks of a group."""
    values = values.contiguous()
    tp.sent(values)
    with tp.communicating():
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=tp.handle)
    tp.received(values)
    return values
