"""What a step asks of its data, and what is answered where there are none: the values that tensors do not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule

from orchestrator.parallel import expert, fsdp, losses
from workloads.model import moe

BALANCED = "experts are equally loaded"


def scalar(tensor: Tensor) -> float | int | bool:
    """The value of a tensor of one element: its own where it has one, else 1.0 of what is measured (a loss, a count of
    labels, a norm, all finite) and 0 of what is counted (no token is dropped, none is padding)."""
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        found: float = constant.item()
        return found
    if tensor.is_floating_point():
        return 1.0
    return False if tensor.dtype is torch.bool else 0


def stand_in(predicted: float) -> Callable[[Any, Sequence[Any], dict[str, Any]], Any]:
    """Operators whose results have a shape that only data tell, or that torch cannot run without memory.

    Returns a function of an operator and its arguments that gives its result, or None where torch does it. `predicted`
    is the share of a sample's tokens that are predicted, which masks choose.
    """

    def result(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return scalar(args[0])
        if func is torch.ops.aten.index.Tensor:
            chosen = [
                _chosen(i, predicted) if i is not None and i.dtype is torch.bool else i for i in args[1]
            ]
            if any(a is not b for a, b in zip(chosen, args[1], strict=True)):
                return func(
                    args[0], [i for each in chosen for i in (each if isinstance(each, tuple) else [each])]
                )
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped(args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None))
        return None

    return result


def _chosen(mask: Tensor, share: float) -> tuple[Tensor, ...]:
    count = round(share * mask.numel())
    return tuple(torch.empty(count, dtype=torch.int64, device=mask.device) for _ in range(mask.dim()))


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor | None) -> Tensor:
    """The result of products by expert: torch knows its shape in bf16 alone."""
    assert ends is not None
    if rows.dim() == weight.dim() == 2:  # a gradient of the weights
        return rows.new_empty(len(ends), rows.shape[0], weight.shape[1])
    return rows.new_empty(rows.shape[0], weight.shape[-1])


def evenly(count: int, parts: int) -> list[int]:
    """So many things in parts of one size, the first of them one larger where it does not divide."""
    each, left = divmod(count, parts)
    return [each + (number < left) for number in range(parts)]


@contextlib.contextmanager
def values_assumed(note: Callable[[str], None], on_cpu: bool) -> Iterator[None]:
    """Within it, what a step reads from its data to go on has an answer, and what it asks of a device that is none here
    has that of a GPU unless it is `on_cpu`; `note` is told what was assumed."""

    def balanced(counts: Tensor, rows: Tensor) -> list[int]:
        note(BALANCED)
        return evenly(len(rows), counts.shape[0])

    def exchanged(sent: Tensor, received: Tensor, rows: Tensor) -> tuple[list[int], list[int]]:
        return balanced(sent, rows), balanced(received, rows)

    def gathered(value: Any) -> list[Any]:
        return [value, ["loss", "count"]]  # what the last stage of a pipeline measures at least

    made = fsdp._device_mesh

    def real_mesh(*given: Any) -> Any:
        with unset_fake_temporarily():  # a mesh reads the numbers of its ranks
            return made(*given)

    def agreed(self: Any, stages: Any, *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC  # every stage is given its shapes

    with (
        patch.object(_PipelineSchedule, "_warmup_p2p", agreed),
        patch.object(expert, "rows_by_rank", exchanged),
        patch.object(moe, "rows_by_expert", balanced),
        contextlib.nullcontext() if on_cpu else patch.object(moe, "compiles_by_size", lambda rows: False),
        patch.object(losses, "gather_json", gathered),
        patch.object(fsdp, "_device_mesh", real_mesh),
        # A module exchanges its tensors with those on its device only where nothing refers to them weakly, as fake
        # tensors do among themselves.
        patch.object(torch.utils, "weakref", _NoWeakReferences),
    ):
        yield


class _NoWeakReferences:
    """In place of the module weakref where torch looks for weak references."""

    @staticmethod
    def getweakrefs(_: object) -> list[object]:
        """None."""
        return []
