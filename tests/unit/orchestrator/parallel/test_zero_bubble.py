"""Gradients of weights that wait are the gradients that do not, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orchestrator.parallel.low_precision import multiply_in_8_bits
from orchestrator.parallel.pipeline import DeferredGradients


class Layer(nn.Module):
    """A feed-forward layer beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16, bias=False), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_gradients_that_wait_are_the_same(recompute: bool, precision: str) -> None:
    torch.manual_seed(0)
    plain, half = nn.Sequential(Layer(), Layer()), precision != "fp32"
    if precision == "fp8":
        multiply_in_8_bits(plain)
    waiting = copy.deepcopy(plain)
    if recompute:
        for layer in waiting:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    deferred = DeferredGradients(waiting)
    inputs = [torch.randn(2, 3, 16, requires_grad=True) for _ in range(2)]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        losses = [
            [model(x).float().square().sum() for x in xs]
            for model, xs in ((plain, inputs), (waiting, copies))
        ]
    for loss in losses[0]:
        loss.backward()
    left = []
    for loss in losses[1]:  # both backward passes go before either micro-batch's weights get theirs
        loss.backward()
        left.append(deferred.take())
    assert all(layer.up.weight.grad is None for layer in waiting), "they wait"
    for complete in left:
        complete()
    for ours, theirs in zip(copies, inputs, strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for (name, ours), theirs in zip(waiting.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_what_is_frozen_gets_none() -> None:
    layer = Layer()
    layer.up.weight.requires_grad_(False)
    deferred = DeferredGradients(layer)
    layer(torch.ones(1, 16)).sum().backward()
    deferred.take()()
    assert layer.up.weight.grad is None
    assert layer.down.weight.grad is not None


class Scaled(nn.Linear):
    """A linear layer of somebody's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * super().forward(x)


def normed() -> nn.Module:
    """One whose weight is computed."""
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@pytest.mark.parametrize("make", [partial(Scaled, 4, 4), normed])
def test_what_is_derived_from_linear_layers_is_left_as_it_is(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(make(), nn.Linear(4, 4))
    waiting = copy.deepcopy(plain)
    deferred = DeferredGradients(waiting)
    x = torch.randn(3, 4)
    for model in (plain, waiting):
        model(x).square().sum().backward()
    deferred.take()()
    for (name, ours), theirs in zip(waiting.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert torch.equal(ours.grad, theirs.grad), name
