"""Linear layers that train with fake-quantised weights: rounded to a few bits in the forward pass, with the gradient
passed straight through the rounding (Jacob et al., 2018, section 3; Bengio et al., 2013, for the straight-through
estimator).

The arithmetic is that of the formats' own libraries, operation by operation, so that an export has exactly the numbers
that training used.

- int8 and int4 of b bits, over a group: s = max(max(w) / (2^(b-1) - 1), min(w) / -2^(b-1)), torchao's
  `SYMMETRIC_NO_CLIPPING_ERR`; then q = round(clamp(w / s, -2^(b-1), 2^(b-1) - 1)), ties to even, as in
  compressed-tensors, which stores s. Its own scale is max|w| / (2^(b-1) - 0.5). That puts the lowest weight of a group
  on a tie, -7.5 in 4 bits, where its last bit decides between -7 and -8, and a run would depend on the order of sums.
- q8_0: s = max|w| / 127, ties away from zero. q4_0: s = m / -8, where m is the number of largest absolute value with
  its sign, and q = trunc(w / s + 8.5) - 8 (`gguf.quants`). Both store s in fp16, after the integers are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.model.scheme import Scheme

ROUTERS = {"gate", "router", "classifier", "shared_expert_gate"}
"""Names of linear layers of Hugging Face classes that choose experts. They stay in full precision: rounding would
change the choice."""
TOKEN_LEVELS = 127.5
"""compressed-tensors divides the largest absolute value by half of the range, 255 / 2."""


def extremes(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return what the scale of each group follows from, [out, groups, 1].

    It is the scale itself for int8 and int4, else the largest absolute value, for q4_0 with the sign of its number.

    Args:
        weight: fp32 [out, in].
        scheme: the format.
    """
    groups = weight.unflatten(-1, (-1, scheme.group or weight.shape[-1]))
    if scheme.weights == "q4_0":
        return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    if scheme.is_of_gguf:
        return torch.maximum(low.neg(), high)
    half = 2.0 ** (scheme.bits - 1)
    # The range is asymmetric, -8 .. 7 in 4 bits: whichever end needs the larger scale decides, so that nothing is
    # clipped.
    return torch.maximum(low / _on_device(low, -half), high / _on_device(high, half - 1)).clamp_(min=0)


def quantise(weight: Tensor, scheme: Scheme, extreme: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the integers of a weight, as fp32 [out, groups, group], and the scales [out, groups, 1].

    Args:
        weight: fp32 [out, in].
        scheme: the format.
        extreme: the result of `extremes` for whole rows, if `weight` is a part of them.
    """
    extreme = extremes(weight, scheme) if extreme is None else extreme
    groups = weight.unflatten(-1, (-1, scheme.group or weight.shape[-1]))
    if scheme.is_of_gguf:
        return _of_gguf(groups, extreme, scheme.weights == "q4_0")
    half = 2.0 ** (scheme.bits - 1)
    # A group of zeros would divide 0 by 0.
    scale = torch.where(extreme == 0, torch.finfo(extreme.dtype).eps, extreme)
    return groups.div(scale).clamp_(-half, half - 1).round_(), scale


def _of_gguf(groups: Tensor, extreme: Tensor, in_4_bits: bool) -> tuple[Tensor, Tensor]:
    step = extreme / _on_device(extreme, -8.0 if in_4_bits else 127.0)
    inverse = torch.where(step == 0, 0.0, 1.0 / step)
    codes = groups * inverse
    if in_4_bits:
        codes = codes.add_(8.5).trunc_().clamp_(0, 15).sub_(8)
    else:
        size = codes.abs()
        floor = size.floor()
        # C's roundf, ties away from zero: torch's round takes ties to even, and the file would differ from gguf's own
        # in those.
        codes = codes.sign().mul_(floor + size.sub_(floor).mul_(2).floor_())
    # The integers above used the unrounded step, as gguf's writer does; only the stored scale is fp16.
    return codes, step.half().float()


def _on_device(like: Tensor, value: float) -> Tensor:
    """Return a number as a tensor: a GPU multiplies by the reciprocal of a Python number where it should divide."""
    return like.new_full((), value)


def fake_quantised(weight: Tensor, scheme: Scheme, extreme: Tensor | None = None) -> Tensor:
    """Return the numbers [out, in] that the quantised weight stands for; see `quantise`.

    Args:
        weight: fp32 [out, in].
        scheme: the format.
        extreme: as in `quantise`.
    """
    integers, scale = quantise(weight, scheme, extreme)
    return integers.mul_(scale).flatten(-2)


def largest_of_tokens(x: Tensor) -> Tensor:
    """Return the largest absolute value of each token, [.., 1]."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    return torch.maximum(low.neg(), high).clamp_(min=0)


def fake_quantised_tokens(x: Tensor, largest: Tensor) -> Tensor:
    """Return activations [.., in] rounded to int8, for the result of `largest_of_tokens` for whole tokens.

    Args:
        x: [.., in].
        largest: [.., 1].
    """
    scale = largest / _on_device(largest, TOKEN_LEVELS)
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return x.div(scale).clamp_(-128, 127).round_().mul_(scale)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _same(x: Tensor) -> Tensor:
    return x


class FakeQuantiser:
    """The product of a linear layer with fake quantisation, in place of `torch.nn.functional.linear`.

    Attributes:
        scheme: how weights and activations are rounded.
        over_ranks: returns the maximum of its argument over the ranks that hold parts of a row.
        is_on: whether it rounds. Training with full precision before `from_step` switches it off.
    """

    def __init__(self, scheme: Scheme, over_ranks: Callable[[Tensor], Tensor] = _same) -> None:
        self.scheme = scheme
        self.over_ranks = over_ranks
        self.is_on = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [.., in] times weight [out, in]^T plus bias, [.., out], in autocast's dtype."""
        if not self.is_on:
            return F.linear(x, weight, bias)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y: Tensor = _Linear.apply(x, weight, self, dtype)
        return y if bias is None else y + bias.to(dtype)

    def rounded(self, weight: Tensor, extreme: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the fake-quantised weight, and what the backward pass needs to compute it again.

        Args:
            weight: fp32 [out, in].
            extreme: what an earlier call returned for this weight; None to compute it.

        Returns:
            The weight, [out, in], and `extreme`; None if groups lie within this rank's part.
        """
        if self.scheme.group or extreme is not None:
            return fake_quantised(weight, self.scheme, extreme), extreme
        # A scale for a whole row needs the row's maximum, of which a tensor-parallel rank may have a part.
        extreme = self.over_ranks(extremes(weight, self.scheme))
        return fake_quantised(weight, self.scheme, extreme), extreme

    def rounded_tokens(self, x: Tensor) -> Tensor:
        """Return the fake-quantised activations, or the same without a format for them."""
        if not self.scheme.activations:
            return x
        wide = _wide(x)
        return fake_quantised_tokens(wide, self.over_ranks(largest_of_tokens(wide)))


class _Linear(torch.autograd.Function):
    """y = Q(x) Q(W)^T with dx = dy Q(W) and dW = dy^T Q(x). Q(W) is computed again in the backward pass, because it is
    as large as W.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantiser: FakeQuantiser, dtype: torch.dtype) -> Tensor:
        rounded, extreme = quantiser.rounded(weight)
        x = quantiser.rounded_tokens(x).to(dtype)
        ctx.save_for_backward(x, weight, extreme)
        ctx.quantiser = quantiser
        return F.linear(x, rounded.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, extreme = ctx.saved_tensors
        of_x, of_weight = None, None
        if ctx.needs_input_grad[0]:
            rounded, _ = ctx.quantiser.rounded(weight, extreme)
            of_x = gradient @ rounded.to(gradient.dtype)
        if ctx.needs_input_grad[1]:
            # Straight-through: the rounding counts as the identity, so this is the gradient of the rounded weight,
            # given to the full-precision one.
            of_weight = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)
        return of_x, of_weight, None, None


class FakeQuantisedLinear(nn.Linear):
    """A linear layer with fake quantisation."""

    product: FakeQuantiser

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out]."""
        return self.product(x, self.weight, self.bias)


def linear_weights(
    model: nn.Module, blocks: Iterable[nn.Module], kinds: tuple[type, ...]
) -> dict[str, nn.Module]:
    """Return the linear layers of blocks by the name of their weight, without routers.

    Args:
        model: the model, or a stage of it.
        blocks: its layers.
        kinds: the classes of linear layers; classes that users derive from them are excluded.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if id(module) in inside and type(module) in kinds and not is_router(model, name)
    }


def is_router(model: nn.Module, name: str) -> bool:
    """Return whether a layer of a model chooses experts.

    A gate beside an up-projection belongs to a feed-forward network.

    Args:
        model: the model, or a block of it.
        name: name of the layer within it.
    """
    parent, _, leaf = name.rpartition(".")
    return leaf in ROUTERS and not hasattr(model.get_submodule(parent), "up")


def quantised_layers(
    model: nn.Module, blocks: Iterable[nn.Module], scheme: Scheme, kinds: tuple[type, ...] = (nn.Linear,)
) -> Mapping[str, nn.Module]:
    """Return the layers of a model that a scheme quantises, by the name of their weight.

    Args:
        model: the model, or a stage of it.
        blocks: its layers.
        scheme: which layers it quantises.
        kinds: the classes of linear layers.
    """
    every = linear_weights(model, blocks, kinds)
    return {name: every[name] for name in sorted(scheme.chosen(every))}


def check_scheme(model: nn.Module, blocks: Iterable[nn.Module], scheme: Scheme) -> None:
    """Raise WorkloadError if a pattern matches no linear layer of a whole model, or a row has no whole groups.

    Args:
        model: the whole model.
        blocks: its layers.
        scheme: the scheme.
    """
    every = linear_weights(model, blocks, (nn.Linear,))
    if missing := scheme.unmatched(every):
        shown = ", ".join(sorted(every)[:3]) or "none"
        kind = "quantised weight" if missing in scheme.int8 else "weight"
        raise WorkloadError(f"{missing!r} matches no {kind} of a linear layer in a block, such as {shown}")
    chosen = scheme.chosen(every)
    if not chosen:
        raise WorkloadError("keep leaves no linear layer to quantise; leave some patterns out")
    for name in sorted(chosen):
        weight = every[name].weight
        assert isinstance(weight, Tensor)
        if not scheme.fits(weight.shape[1]):
            raise WorkloadError(
                f"{name} has rows of {weight.shape[1]}, which is not a multiple of the group of {scheme.group}; choose "
                "another group, or name it in keep"
            )


@torch.no_grad()
def quantise_for_inference(model: nn.Module, blocks: Iterable[nn.Module], scheme: Scheme) -> None:
    """Round the weights of a whole model in place, and let its layers round their inputs if the scheme does.

    Args:
        model: the whole model; changed in place.
        blocks: its layers.
        scheme: formats and layers.
    """
    for name, module in quantised_layers(model, blocks, scheme).items():
        assert isinstance(module, nn.Linear)
        module.weight.copy_(fake_quantised(module.weight, scheme.of(name)))
        if scheme.activations:
            module.register_forward_pre_hook(_round_tokens)


def _round_tokens(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x = _wide(args[0])
    return (fake_quantised_tokens(x, largest_of_tokens(x)), *args[1:])
