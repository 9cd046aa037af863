"""The loss over rewards."""

from __future__ import annotations

import math

import pytest
import torch

from workloads.objectives.rewarded import ADVANTAGE, COUNTED, DRAWN, SAMPLED, WEIGHT, Grpo, loss_of

SHAPE = (3, 5)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("drawn", [0.0, math.nan])
def test_what_the_sampler_says_of_probabilities_enters_no_loss(make, drawn: float, is_first: bool) -> None:
    """A log-probability that is missing or 0.0 there changes no loss and no gradient. The row shows the difference.

    Asked for in NeMo-RL#4218.
    """
    objective = make("grpo")
    assert isinstance(objective, Grpo)
    draw = torch.Generator().manual_seed(1)
    given = -torch.rand(SHAPE, generator=draw) - 0.1
    ones = torch.ones(SHAPE)
    batch = {ADVANTAGE: torch.randn(SHAPE, generator=draw), WEIGHT: ones, COUNTED: ones}
    if not is_first:
        batch[SAMPLED] = given + 0.1
    found = []
    for said in (given, torch.full(SHAPE, drawn)):
        log_p = given.clone().requires_grad_()
        loss = loss_of(objective, log_p, batch | {DRAWN: said}, torch.ones(SHAPE, dtype=torch.bool))
        loss.total.backward()
        found.append((loss.total.item(), log_p.grad, loss.sums.get("sampler_difference")))
    (good, good_gradient, no_difference), (bad, bad_gradient, difference) = found
    assert good == bad
    assert torch.equal(good_gradient, bad_gradient)
    assert bool(good_gradient.any())
    if is_first:
        assert no_difference[0] == 0.0
        assert not difference[0] < 1.0
