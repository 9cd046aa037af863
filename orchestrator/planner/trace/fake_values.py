"""Answers for a step that reads values of tensors, where the tensors of a trace have none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule

from orchestrator.parallel import block_maxima, expert, fsdp, losses
from orchestrator.planner.trace.replaced import replaced
from orchestrator.prune.config import PruneSpec
from workloads.model import moe

BALANCED = "experts are equally loaded"


def scalar(tensor: Tensor) -> float | int | bool:
    """Return the value of a tensor of one element.

    A constant has its own value. Otherwise a floating-point tensor is a measurement (loss, norm) and gets 1.0, which
    is finite; an integer is a count of exceptions (dropped tokens, padding) and gets 0; a bool is False.
    """
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        value: float = constant.item()
        return value
    if tensor.is_floating_point():
        return 1.0
    return False if tensor.dtype is torch.bool else 0


def replacement_results(predicted: float) -> Callable[[Any, Sequence[Any], dict[str, Any]], Any]:
    """Return a function that computes operators which torch cannot run on tensors without values.

    The function takes an operator and its arguments. It returns the result, or None if torch can run the operator.

    Args:
        predicted: the share of a sample's tokens that are predicted; indexing by a mask selects this share.
    """

    def result(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return scalar(args[0])
        if func is torch.ops.aten.index.Tensor:
            indices = [
                _selected_indices(i, predicted) if i is not None and i.dtype is torch.bool else i
                for i in args[1]
            ]
            if any(a is not b for a, b in zip(indices, args[1], strict=True)):
                return func(
                    args[0],
                    [i for index in indices for i in (index if isinstance(index, tuple) else [index])],
                )
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped(args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None))
        return None

    return result


def _selected_indices(mask: Tensor, share: float) -> tuple[Tensor, ...]:
    """Return index tensors that select `share` of the mask's elements, one for each of its dimensions."""
    count = round(share * mask.numel())
    return tuple(torch.empty(count, dtype=torch.int64, device=mask.device) for _ in range(mask.dim()))


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
    """Return the result of a grouped product by expert; torch infers its shape in bf16 only."""
    assert ends is not None
    if rows.dim() == weight.dim() == 2:  # a gradient of the weights
        return rows.new_empty(len(ends), rows.shape[0], weight.shape[1])
    return rows.new_empty(rows.shape[0], weight.shape[-1])


def divide_evenly(count: int, parts: int) -> list[int]:
    """Divide `count` into `parts` that differ by at most one; the larger ones come first.

    Args:
        count: what to divide.
        parts: number of parts.
    """
    share, remainder = divmod(count, parts)
    return [share + (number < remainder) for number in range(parts)]


@contextlib.contextmanager
def assumed_values(note: Callable[[str], None], on_cpu: bool) -> Iterator[None]:
    """Within the context, code that reads values or asks about the device gets an assumed answer.

    Args:
        note: called with each assumption, as a sentence for the user.
        on_cpu: whether the job runs on CPUs; otherwise questions about the device are answered as for a GPU.
    """

    def balanced(counts: Tensor, rows: Tensor) -> list[int]:
        note(BALANCED)
        return divide_evenly(len(rows), counts.shape[0])

    def exchanged(sent: Tensor, received: Tensor, rows: Tensor) -> tuple[list[int], list[int]]:
        return balanced(sent, rows), balanced(received, rows)

    def gathered(value: Any) -> list[Any]:
        return [value, ["loss", "count"]]  # the last stage of a pipeline measures at least these

    make_mesh = fsdp._device_mesh

    def real_mesh(*args: Any) -> Any:
        with unset_fake_temporarily():  # a mesh reads the numbers of its ranks from a tensor
            return make_mesh(*args)

    def static_shapes(self: Any, stages: Any, *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC  # our stages receive their shapes in advance

    with (
        replaced(_PipelineSchedule, "_warmup_p2p", static_shapes),
        replaced(expert, "rows_by_rank", exchanged),
        replaced(moe, "rows_by_expert", balanced),
        contextlib.nullcontext() if on_cpu else replaced(moe, "compiles_by_size", lambda rows: False),
        replaced(losses, "gather_json", gathered),
        # Which weights are pruned follows from their values. Steps that choose them are few, and are not traced.
        replaced(PruneSpec, "is_due", lambda self, step: False),
        replaced(fsdp, "_device_mesh", real_mesh),
        # Other ranks hold parts of about as many blocks again, whose scales are a small vector.
        replaced(block_maxima, "union", lambda numbers, groups, device: np.unique(numbers)),
        # `Module.to_empty` swaps tensors only if no weak reference to them exists, and fake tensors hold such
        # references to each other.
        replaced(torch.utils, "weakref", _NoWeakReferences),
    ):
        yield


class _NoWeakReferences:
    """Stands in for the module weakref where torch looks for weak references."""

    @staticmethod
    def getweakrefs(_: object) -> list[object]:
        """Return no references."""
        return []
