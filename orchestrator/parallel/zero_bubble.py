"""Gradients of weights that wait until a schedule has time for them (Qi et al., 2024, "Zero Bubble Pipeline
Parallelism", section 2).

The backward pass of a stage goes on to its input at once, and each linear map leaves what the gradient of its weight
is made of in a queue. Torch's own split walks the graph twice instead, which costs a quarter more of the backward
pass and cannot be done where a weight is used twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.parallel.tensor import RowLinear
from workloads.adapters.lora import Factor, LoraLinear
from workloads.adapters.nf4 import QuantisedWeight, product
from workloads.model import float8
from workloads.model.float8 import Float8Linear
from workloads.model.heads import VocabularyProjection

Waiting = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Input [.., in] and gradient of the output [.., out] of a linear map, its weight and its bias."""


class DeferredGradients:
    """The queue of one stage. Experts are not in it, nor what users derive from linear layers: the gradients of their
    weights come with the backward pass."""

    def __init__(self, stage: nn.Module) -> None:
        self._waiting: list[Waiting] = []
        for module in stage.modules():
            # A class of its own computes something else, and a weight that is computed has no gradient of its own.
            known = type(module) in (nn.Linear, Float8Linear)
            if known and isinstance(module, nn.Linear) and isinstance(module.weight, nn.Parameter):
                linear = partial(self.linear, in_8_bits=isinstance(module, Float8Linear))
                module.forward = partial(_of, module, linear)  # type: ignore[method-assign]
            elif isinstance(module, RowLinear | VocabularyProjection | LoraLinear | Factor):
                module.product = partial(self.linear, in_8_bits=module.product is float8.linear)

    def take(self) -> Callable[[], None]:
        """What is left to do for the backward pass that ended last: torch's `dw_builder`."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return partial(_add_gradients, waiting)

    def linear(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        bias: Tensor | None = None,
        in_8_bits: bool = False,
    ) -> Tensor:
        """As `torch.nn.functional.linear`, or `float8.linear`."""
        if isinstance(weight, QuantisedWeight):
            return product(x, weight)
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return (float8.linear if in_8_bits else F.linear)(x, weight, bias)
        found: Tensor = _Linear.apply(x, weight, bias, self._waiting.append, in_8_bits)
        return found


def _of(module: nn.Linear, linear: Callable[..., Tensor], x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    """A linear map whose backward pass hands on the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wait: Callable[..., None],
        in_8_bits: bool,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x = x.to(dtype)
        ctx.save_for_backward(x)
        # The parameters themselves: recomputation would give back a saved one as another tensor.
        ctx.weight, ctx.bias, ctx.wait, ctx.in_8_bits = weight, bias, wait, in_8_bits
        if in_8_bits:
            y = float8.forward(x, weight)
            return y if bias is None else y + bias.to(dtype)
        return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.wait((x, gradient, ctx.weight, ctx.bias))
        back = float8.backward if ctx.in_8_bits else _of_input
        return back(gradient, ctx.weight), None, None, None, None


def _of_input(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient @ weight.to(gradient.dtype)


@torch.no_grad()
def _add_gradients(waiting: list[Waiting]) -> None:
    """Into the parameters, in the order of the backward pass, with the products that autograd would make."""
    while waiting:
        x, gradient, weight, bias = waiting.pop(0)
        rows = gradient.flatten(0, -2)
        _add(weight, rows.t() @ x.flatten(0, -2))
        if bias is not None and bias.requires_grad:
            _add(bias, rows.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)
