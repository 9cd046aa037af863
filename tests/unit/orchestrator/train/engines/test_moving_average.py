"""The moving average against its definition, and a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestrator.train.engines.moving_average import MovingAverage


def trained(updates: int) -> tuple[MovingAverage, list[nn.Parameter], list[list[Tensor]]]:
    """An average over some updates of two tensors; and the weights after each."""
    random = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(size, generator=random)) for size in ((5, 3), (7,))]
    average = MovingAverage(0.9, weights)
    average.begin()
    seen = []
    for _ in range(updates):
        with torch.no_grad():
            for weight in weights:
                weight += torch.randn(weight.shape, generator=random)
        average.update()
        seen.append([weight.detach().clone() for weight in weights])
    return average, weights, seen


@pytest.mark.parametrize("updates", [1, 2, 40])
def test_it_is_the_weighted_mean_of_all_weights_after_a_step(updates: int) -> None:
    average, weights, seen = trained(updates)
    shares = 0.9 ** torch.arange(updates - 1, -1, -1, dtype=torch.float64)
    for number, weight in enumerate(weights):
        each = torch.stack([step[number] for step in seen]).double()
        wanted = torch.tensordot(shares / shares.sum(), each, dims=1)
        torch.testing.assert_close(average.of[weight].double(), wanted, rtol=1e-6, atol=1e-6)


def test_it_has_the_bits_of_a_plain_loop() -> None:
    average, weights, seen = trained(20)
    for number, weight in enumerate(weights):
        mean = seen[0][number].clone()
        for update, step in enumerate(seen[1:], start=2):
            mean.lerp_(step[number], (1 - 0.9) / (1 - 0.9**update))
        assert average.of[weight].equal(mean)


def test_before_the_first_update_it_is_the_weights() -> None:
    average, weights, _ = trained(0)
    assert all(average.of[weight].equal(weight) for weight in weights)


def test_a_swap_and_another_leave_every_bit() -> None:
    average, weights, seen = trained(5)
    means = [average.of[weight].clone() for weight in weights]
    average.swap()
    assert all(weight.equal(mean) for weight, mean in zip(weights, means, strict=True))
    average.swap()
    assert all(weight.equal(last) for weight, last in zip(weights, seen[-1], strict=True))
    assert all(average.of[weight].equal(mean) for weight, mean in zip(weights, means, strict=True))


def test_one_that_goes_on_from_a_commit_is_the_same() -> None:
    whole, weights, seen = trained(6)
    first, others, _ = trained(3)
    again = MovingAverage(0.9, others)
    again.go_on(3)
    for weight in others:
        again.of[weight].copy_(first.of[weight])
    for step in seen[3:]:
        with torch.no_grad():
            for weight, value in zip(others, step, strict=True):
                weight.copy_(value)
        again.update()
    assert all(again.of[b].equal(whole.of[a]) for a, b in zip(weights, others, strict=True))


def test_without_a_decay_there_is_nothing() -> None:
    weight = nn.Parameter(torch.ones(3))
    average = MovingAverage(None, [weight])
    average.begin()
    average.update()
    average.swap()
    assert average.of == {}
    assert weight.equal(torch.ones(3))
