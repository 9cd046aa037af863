"""Activations that are computed again in the backward pass (Chen et al., 2016), and blocks that are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from orchestrator.parallel.layout import Layout
from workloads.hf.as_they_are.dropout import CountedDropout

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


def recompute(blocks: Sequence[nn.Module], layout: Layout, compiled: bool = False) -> None:
    """Recompute the activations of blocks in the backward pass, and compile all blocks if asked.

    A recomputed block keeps only its input (Chen et al., 2016). With `selective` it also keeps the results of matrix
    products and attention (Korthikanti et al., 2022, section 5); if it is compiled, of attention only.

    Args:
        blocks: the layers of a stage, in order.
        layout: says which blocks are recomputed, and how.
        compiled: whether to compile all blocks.
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
    own_code = _OwnCode()
    for layer in blocks[:recomputed]:
        for block in layer.modules():
            if hasattr(block, "gathers_again"):  # see `tensor._enter_sliced`
                block.gathers_again = False  # type: ignore[assignment]
        # The compiled code is inside the checkpoint: torch compiles neither a checkpoint nor the code around it. With
        # static shapes both passes run the same program; a program for all shapes, compiled between the two passes,
        # would save other tensors.
        forward = torch.compile(own_code.of(layer), dynamic=False) if compiled else layer.forward
        if dropouts := [module for module in layer.modules() if isinstance(module, CountedDropout)]:
            layer.forward = partial(_checkpoint_with_dropout, forward, dropouts, options)
            continue
        layer.forward = partial(checkpoint, partial(_without_cast_cache, forward), **options)


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


def _checkpoint_with_dropout(
    forward: Callable[..., Any],
    dropouts: Sequence[CountedDropout],
    options: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block with dropout under recomputation.

    The keys of its dropouts depend on the micro-batch. A later micro-batch may set new ones before this block is
    recomputed, so they are passed as an argument, which the checkpoint keeps.
    """
    inside = partial(_without_cast_cache, partial(_forward_with_rows, forward, dropouts))
    return checkpoint(inside, dropouts[0].rows, *args, **options, **kwargs)


def _forward_with_rows(
    forward: Callable[..., Any],
    dropouts: Sequence[CountedDropout],
    rows: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    for dropout in dropouts:
        dropout.rows = rows
    return forward(*args, **kwargs)


def _without_cast_cache(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block without autocast's cache of casts.

    Several blocks may read one tensor (an encoder's output, shared weights). With the cache only the first of them
    casts it in the forward pass, but each does when it is recomputed. Selective recomputation matches the operators of
    both passes by counting them, so their numbers must be equal.
    """
    kind = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)).device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        return forward(*args, **kwargs)


def _policy(_: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Decide whether selective recomputation keeps the result of an operator."""
    is_saved = any(op.__name__.split(".")[0].startswith(name) for name in SAVED)
    # Compiled code passes products a buffer to write to, and reuses that buffer afterwards.
    is_saved = is_saved and not op._schema.is_mutable
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
