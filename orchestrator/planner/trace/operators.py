"""Properties of ATen operators that decide their time: kind, floating-point operations, and bytes moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from orchestrator.planner.step_trace import Kind

MATMUL = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "mv", "dot")
COPY = ("copy_", "clone", "_to_copy", "_foreach_copy_", "contiguous")


def kind_of(name: str, in_optimizer: bool) -> Kind:
    """Return the kind of the operator `name`, for example `addmm`.

    Args:
        name: of the operator.
        in_optimizer: whether it runs in the update.
    """
    if name in MATMUL:
        return "matmul"
    if "attention" in name:
        return "attention"
    if in_optimizer and name.startswith(("_foreach_", "_fused_")):
        return "optimizer"
    return "copy" if name in COPY else "elementwise"


def flops_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the floating-point operations of a matrix product or of attention, two per multiply-add; 0 for others.

    Causal attention counts half, which is what kernels compute.

    Args:
        func: the operator.
        name: its name.
        args: its arguments.
        kwargs: its keyword arguments.
        out: its result.
    """
    if "attention" in name:
        return _attention(name, args, kwargs)
    if name == "_grouped_mm":
        rows = args[0]
        weight = args[1]
        # Rows [R, in] by expert and weights [experts, in, out], or for the weights' gradient [in, R] and [R, out]: both
        # have R x in x out multiply-adds, however the rows are divided.
        return 2.0 * rows.numel() * weight.shape[-1]
    if name in MATMUL and func.overloadpacket in flop_registry:
        return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
    return 0.0


def _attention(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Return the floating-point operations of attention; queries, keys and values are [B, heads, tokens, head size].

    Forward has two products, scores and weighted values. Backward has five, since it recomputes the scores (Dao et al.,
    2022): 2.5 times as many.
    """
    backward = "backward" in name
    tensors = [a for a in args if isinstance(a, Tensor) and a.dim() == 4]
    query, key, value = tensors[1:4] if backward else tensors[:3]
    products = math.prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])
    causal = kwargs.get("is_causal", any(a is True for a in args))
    return 2.0 * products * (2.5 if backward else 1.0) * (0.5 if causal else 1.0)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return tensors_in(list(value.values())) if isinstance(value, dict) else []


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes to.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    result: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        result += tensors_in(value)
    return result


def dtype_of(tensors: Sequence[Tensor]) -> str:
    """Return the dtype of the first floating-point tensor, or of the first tensor."""
    floats = [t for t in tensors if t.is_floating_point()] or list(tensors)
    return str(floats[0].dtype).removeprefix("torch.") if floats else "float32"


def is_free(func: Any) -> bool:
    """Return whether the operator takes no time: it creates a view or empty memory, or returns metadata of a tensor."""
    name = func._schema.name
    return func.is_view or name.startswith(
        ("prim::", "aten::empty", "aten::new_empty", "aten::detach", "aten::lift")
    )
