"""Linear layers of an ONNX model with the integers that training used.

A weight is stored as int8 with a scale for each output. Without rounded activations it is multiplied in fp32. With
them, each token is rounded to integers as in training (`workloads.model.fake_quantise.fake_quantised_tokens`), and
MatMulInteger multiplies integers by integers, which is exact: the scales are applied to the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.model.fake_quantise import TOKEN_LEVELS, fake_quantised_tokens, largest_of_tokens, quantise
from workloads.model.scheme import Scheme

UINT8, FLOAT = 2, 1
"""Types of numbers in ONNX (`onnx.TensorProto`)."""
ZERO = 128
"""The offset that makes factors of -128 .. 127 unsigned. onnxruntime is four times as fast if both are unsigned.
Signed weights would be twice as fast again, but then large sums saturate on processors without VNNI instructions.
"""
WEIGHT = ".weight"


def round_layers(model: nn.Module, chosen: Mapping[str, Scheme]) -> list[str]:
    """Replace linear layers of a model of transformers by rounded ones.

    Args:
        model: the model.
        chosen: the names of their weights, with their scheme: int8, and a scale for each row.

    Returns the names of the linear layers that stay in full precision. Raises WorkloadError if a weight belongs to no
    linear layer.
    """
    for name, scheme in chosen.items():
        path = name.removesuffix(WEIGHT)
        layer = model.get_submodule(path)
        if type(layer) is not nn.Linear:
            raise WorkloadError(
                f"{type(model).__name__} of transformers stores {path} outside a linear layer; export it without "
                "quantisation"
            )
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _RoundedLinear(layer, scheme.activations))
    return sorted(name for name, module in model.named_modules() if type(module) is nn.Linear)


class _RoundedLinear(nn.Module):
    """A linear layer with integers [in, out] and scales [out]. The integers have ZERO added if tokens are rounded."""

    integers: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, rounds_tokens: bool) -> None:
        super().__init__()
        integers, scale = quantise(layer.weight.detach().float(), Scheme("int8", 0))
        integers = integers.flatten(1)
        stored = (integers + ZERO).to(torch.uint8) if rounds_tokens else integers.to(torch.int8)
        self.register_buffer("integers", stored.t().contiguous())
        self.register_buffer("scale", scale.flatten())
        self.bias = layer.bias
        self.product = _WithRoundedTokens if rounds_tokens else _WithTokens

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out]."""
        y: Tensor = self.product.apply(x, self.integers, self.scale)
        return y if self.bias is None else y + self.bias


class _WithTokens(torch.autograd.Function):
    """x [.., in] times the weight, and how ONNX writes that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
        return x @ (integers * scale)

    @staticmethod
    def symbolic(g: Any, x: Any, integers: Any, scale: Any) -> Any:
        # Not DequantizeLinear: onnxruntime 1.32 merges that with MatMul and rounds the activations too (1 % of the
        # largest logit of a small BERT), and 1.26 refuses it where a Transpose comes between.
        weight = g.op("Mul", g.op("Cast", integers, to_i=FLOAT), scale)
        return g.op("MatMul", x, weight)


class _WithRoundedTokens(torch.autograd.Function):
    """The same for tokens that are rounded to int8, each with its own scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
        rounded = fake_quantised_tokens(x, largest_of_tokens(x))
        return rounded @ ((integers.float() - ZERO) * scale)

    @staticmethod
    def symbolic(g: Any, x: Any, integers: Any, scale: Any) -> Any:
        def number(value: float, dtype: torch.dtype = torch.float32) -> Any:
            return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))

        largest = g.op("ReduceMax", g.op("Abs", x), axes_i=[-1], keepdims_i=1)
        step = g.op("Div", largest, number(TOKEN_LEVELS))
        # A token of zeros would divide 0 by 0.
        is_zero = g.op("Equal", step, number(0.0))
        step = g.op("Where", is_zero, number(torch.finfo(torch.float32).eps), step)
        tokens = g.op("Clip", g.op("Round", g.op("Div", x, step)), number(-128.0), number(127.0))
        tokens = g.op("Cast", g.op("Add", tokens, number(ZERO)), to_i=UINT8)
        zeros = (number(ZERO, torch.uint8), number(ZERO, torch.uint8))
        sums = g.op("Cast", g.op("MatMulInteger", tokens, integers, *zeros), to_i=FLOAT)
        return g.op("Mul", g.op("Mul", sums, step), scale)
