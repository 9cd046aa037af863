"""The importance of feed-forward columns and attention heads, by which a smaller model keeps the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workloads.model.attention import Attention
from workloads.model.config import TransformerConfig
from workloads.model.feedforward import FeedForward
from workloads.workload import Batch, Loss


def units_of(model: nn.Module, config: TransformerConfig) -> Iterator[tuple[str, nn.Linear, int]]:
    """Yield (name, module that reads the units, number of units) of every feed-forward network and attention.

    The units of an attention are the groups of heads that share a key and a value. Experts are left out.

    Args:
        model: the model.
        config: its configuration.
    """
    for name, module in model.named_modules():
        if isinstance(module, FeedForward) and ".feedforward." not in name:
            yield name, module.down, module.down.in_features
        elif isinstance(module, Attention):
            yield name, module.output, config.kv_heads


def magnitude(model: nn.Module, config: TransformerConfig) -> dict[str, Tensor]:
    """Return the Euclidean norm of all weights of each unit, by the names of `units_of`.

    A column has a row of up and of gate with their biases, and a column of down; a group of heads its rows of query,
    key and value with their biases, and its columns of output.

    Args:
        model: the model.
        config: its configuration.
    """
    norms = {}
    for name, module, count in units_of(model, config):
        parent = model.get_submodule(name)
        squares = _by_unit(module.weight.T, count)
        sources = ("up", "gate") if isinstance(parent, FeedForward) else ("query", "key", "value")
        for part in (getattr(parent, source) for source in sources):
            for tensor in (part.weight, part.bias) if part is not None else ():
                if tensor is not None:
                    squares = squares + _by_unit(tensor, count)
        norms[name] = squares.sqrt()
    return norms


def _by_unit(tensor: Tensor, count: int) -> Tensor:
    """Return the sums of squares of the rows of each of `count` units, fp64."""
    return tensor.detach().double().square().reshape(count, -1).sum(1)


def gradient(
    model: nn.Module,
    config: TransformerConfig,
    loss: Callable[[nn.Module, Batch], Loss],
    batches: Iterable[Batch],
) -> dict[str, Tensor]:
    """Return the importance I = E_x |dL(x) / dm| of each unit, fp64, by the names of `units_of`.

    m is a factor of the unit's output, which is 1 (Michel et al., 2019, "Are Sixteen Heads Really Better than One?",
    equation 2; for columns likewise). L(x) is the sum of the losses of a sample's predicted tokens. The gradient of
    every sample is taken alone: each has factors of its own, [B, units].

    Args:
        model: the model, whose parameters get no gradients.
        config: its configuration.
        loss: returns the loss of a batch.
        batches: the samples.
    """
    units = list(units_of(model, config))
    factors: dict[str, Tensor] = {}
    sums = {name: torch.zeros(count, dtype=torch.float64) for name, _, count in units}
    samples = 0
    handles = [
        module.register_forward_pre_hook(_Factor(name, count, factors)) for name, module, count in units
    ]
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            factors.clear()
            # A sum over tokens, so the gradient of a sample's factors is that of the sample's own loss, whatever batch
            # it is in.
            total = loss(model, batch).total
            names = list(factors)
            for name, each in zip(
                names, torch.autograd.grad(total, [factors[n] for n in names]), strict=True
            ):
                # [B, units] to [units]. The magnitude of each sample first (equation 2): signs of different samples
                # would cancel.
                sums[name] += each.detach().double().abs().sum(0).cpu()
            samples += len(next(iter(batch.values())))
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return {name: each / max(1, samples) for name, each in sums.items()}


class _Factor:
    """A hook that multiplies a module's input [B, L, units * width] by factors of one, [B, units], and keeps them."""

    def __init__(self, name: str, count: int, factors: dict[str, Tensor]) -> None:
        self._name = name
        self._count = count
        self._factors = factors

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        (values,) = inputs
        factor = self._factors.get(self._name)
        if factor is None:  # layers that share weights have one factor
            factor = torch.ones(len(values), self._count, device=values.device, requires_grad=True)
            self._factors[self._name] = factor
        width = values.shape[-1] // self._count
        # [B, units] to [B, 1, units x width]: one factor for all positions and for all of a unit's neighbouring inputs.
        return (values * factor.repeat_interleave(width, dim=1).unsqueeze(1),)


def scores_as_json(scores: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return scores as plain data with seven digits, those of fp32."""
    return {name: [float(f"{value:.7g}") for value in each.tolist()] for name, each in scores.items()}
