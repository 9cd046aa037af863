"""Tensor parallelism of own models and of classes of transformers.

Nothing is known about a layer's surroundings, so each cut layer has its own collectives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.parallel.collectives import copy, join, reduce, split
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.partition import span, style_of
from orchestrator.parallel.tensor import RowLinear, VocabularyEmbedding, copy_first, sum_rows
from workloads.adapters.lora import LoraLinear
from workloads.errors import WorkloadError
from workloads.hf.as_they_are.tensor_plan import ROTATED


def apply_own_tensor(model: nn.Module, styles: Mapping[str, str], tp: ProcessGroup) -> None:
    """Insert the collectives into a model whose parameters are already sharded.

    A column-cut layer returns this rank's part of its outputs. A row-cut layer takes such a part, or cuts it from a
    full input, and returns the sum over all ranks. Logits over a vocabulary are gathered, because the loss is the
    model's own.

    Args:
        model: the model; changed in place.
        styles: sharding styles by pattern of module names.
        tp: the tensor-parallel group.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        style, (parent, _, leaf) = style_of(styles, name), name.rpartition(".")
        if module not in replaced:
            replaced[module] = _divided(module, style, model.get_submodule(parent), tp)
        if replaced[module] is not module:
            setattr(model.get_submodule(parent), leaf, replaced[module])


def _divided(module: nn.Module, style: str | None, parent: nn.Module, tp: ProcessGroup) -> nn.Module:
    """Return a module with its collectives, or the module that replaces it."""
    linear = isinstance(module, nn.Linear | LoraLinear)
    if style == "vocab" and isinstance(module, nn.Embedding):
        return VocabularyEmbedding(module, tp)
    if style in ("column", "vocab", "joined") and linear:
        module.register_forward_pre_hook(copy_first(tp))
    if style == "vocab" and isinstance(module, nn.Linear):
        module.register_forward_hook(_gather_outputs(module.out_features, tp))
    elif style == "joined" and linear:
        module.register_forward_hook(lambda _, __, out: join(out, -1, tp))
    elif style == "row" and type(module) is nn.Linear:
        row_linear = RowLinear(module, tp, False)
        row_linear.register_forward_pre_hook(_own_part(module.in_features, tp))
        return row_linear
    elif style == "row" and isinstance(module, LoraLinear):
        sum_rows(module, tp, False)
        module.register_forward_pre_hook(_own_part(module.lora_a.weight.shape[1] * tp.size, tp))
    elif style == "latent":
        module.register_forward_hook(_shared_end(getattr(parent, ROTATED), tp))
    elif style == "stack":
        _own_experts(module, tp)
    return module


def _own_part(size: int, tp: ProcessGroup) -> Callable[..., Any]:
    """Return a pre-hook for a row-cut layer with `size` inputs in all: it cuts this rank's part from a full input."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (split(args[0], -1, tp), *args[1:]) if args[0].shape[-1] == size else args

    return hook


def _shared_end(size: int, tp: ProcessGroup) -> Callable[..., Tensor]:
    """Return a hook for an uncut layer whose last `size` outputs are read by the heads of every rank.

    Their gradients are summed over the ranks. The layer that reads the other outputs sums its own.
    """
    return lambda _, __, out: torch.cat((out[..., :-size], copy(out[..., -size:], tp)), -1)


def _own_experts(experts: nn.Module, tp: ProcessGroup) -> None:
    """Make a stack of experts of transformers compute only this rank's experts.

    The stack receives all tokens. It skips choices beyond its last expert, as under transformers' own expert
    parallelism.
    """
    count = int(experts.num_experts)  # type: ignore[arg-type]
    start, local_count = span(count, tp.index, tp.size)
    experts.num_experts = local_count  # type: ignore[assignment]
    experts._is_expert_parallel = True  # type: ignore[assignment]
    signature = inspect.signature(experts.forward)

    def enter(
        _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, chosen, weights = signature.bind(*args, **named).arguments.values()
        if chosen.shape != weights.shape or chosen.is_floating_point():
            raise WorkloadError("its experts are called in an unknown way")
        mine = (chosen >= start) & (chosen < start + local_count)
        # Index `local_count` is one beyond the last local expert: the stack skips such choices, and their weights
        # become zero.
        local = torch.where(mine, chosen - start, local_count)
        return (copy(hidden, tp), local, copy(weights, tp) * mine), {}

    experts.register_forward_pre_hook(enter, with_kwargs=True)
    experts.register_forward_hook(lambda _, __, out: reduce(out, tp))


def _gather_outputs(size: int | Any, tp: ProcessGroup) -> Callable[..., Tensor]:
    """Return a hook that gathers `size` outputs over the ranks, whose parts may differ by one in size."""
    parts = [span(size, index, tp.size)[1] for index in range(tp.size)]
    widest = max(parts)

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        if widest == min(parts):
            return join(out, -1, tp)
        # all-gather needs equal sizes: pad each part to the widest, and cut the padding off afterwards.
        every = join(F.pad(out, (0, widest - out.shape[-1])), -1, tp).split(widest, -1)
        return torch.cat([output[..., :part] for output, part in zip(every, parts, strict=True)], -1)

    return hook
