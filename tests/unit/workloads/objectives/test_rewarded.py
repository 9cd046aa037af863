"""The loss over rewards."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from workloads.errors import WorkloadError
from workloads.objectives.rewarded import (
    ADVANTAGE,
    COUNTED,
    DRAWN,
    REFERENCE_TOKENS,
    SAMPLED,
    WEIGHT,
    Grpo,
    loss_of,
)

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


ESTIMATES = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (q - p) ** 2 / 2,
    "k3": lambda p, q: torch.exp(q - p) - (q - p) - 1,
}
"""By the log-probabilities p of the model and q of the reference (Schulman 2020)."""


def plain_loss(
    name: str,
    options: dict[str, object],
    *,
    given: torch.Tensor,
    sampled: torch.Tensor,
    reference: torch.Tensor,
    advantages: list[float],
    lengths: list[int],
) -> torch.Tensor:
    """The loss of answers, token by token, from the papers: the mean of each answer, then of answers."""
    answers = []
    for row, length in enumerate(lengths):
        ratios = [torch.exp(given[row, t] - sampled[row, t]) for t in range(length)]
        if options["importance_sampling_level"] == "sequence":
            mean = sum(given[row, t] - sampled[row, t] for t in range(length)) / length
            ratios = [torch.exp(mean)] * length
        tokens = []
        for t, ratio in enumerate(ratios):
            advantage = advantages[row]
            if name == "reinforce":
                token = -given[row, t] * advantage
            else:
                # A bound holds only where the ratio has gone too far in the direction of the advantage.
                over = ratio > 1.3 if advantage > 0 else ratio < 0.9
                token = -advantage * ((1.3 if advantage > 0 else 0.9) if over else ratio)
                if advantage < 0 and "delta" in options:  # Ye et al. 2020: max(min(..), delta x advantage)
                    token = min(token, -float(str(options["delta"])) * advantage)
            divergence = ESTIMATES[str(options["kl"])](given[row, t], reference[row, t])
            tokens.append(token + 0.2 * divergence * (ratio if options["use_bias_correction_kl"] else 1.0))
        answers.append(sum(tokens) / length)
    return torch.as_tensor(sum(answers) / len(answers))


@pytest.mark.parametrize(
    ("name", "level", "kl", "corrected", "delta"),
    [
        *itertools.product(["grpo"], ["token", "sequence"], ["k1", "k2", "k3"], [True, False], [0.0]),
        *itertools.product(["grpo"], ["token", "sequence"], ["k3"], [True], [1.5]),
        *itertools.product(["reinforce"], ["token"], ["k1", "k2", "k3"], [True, False], [0.0]),
    ],
)
def test_each_option_is_the_plain_derivation(
    make, name: str, level: str, kl: str, corrected: bool, delta: float
) -> None:
    """Losses and gradients of answers of 5, 1 and 3 tokens, of either sign, some far from what they were."""
    options: dict[str, object] = {"beta": 0.2, "kl": kl, "use_bias_correction_kl": corrected}
    if name == "grpo":
        options |= {"epsilon": 0.1, "epsilon_high": 0.3, "importance_sampling_level": level}
        options |= {"delta": delta} if delta else {}
    objective = make(name, loss_type="grpo", **options)
    draw = torch.Generator().manual_seed(3)
    sampled, reference = (-torch.rand(SHAPE, generator=draw, dtype=torch.float64) - 0.1 for _ in range(2))
    lengths, advantages = [5, 1, 3], [1.5, -0.7, -2.0]
    predicted = torch.arange(SHAPE[1]) < torch.tensor(lengths).unsqueeze(1)
    moved = sampled + torch.randn(SHAPE, generator=draw, dtype=torch.float64)
    batch = {
        ADVANTAGE: torch.tensor(advantages, dtype=torch.float64).unsqueeze(1).expand(SHAPE),
        WEIGHT: predicted / torch.tensor(lengths, dtype=torch.float64).unsqueeze(1),
        COUNTED: predicted & (torch.arange(SHAPE[1]) == 0),
        SAMPLED: sampled,
        REFERENCE_TOKENS: reference,
    }
    ours, plain = (moved.clone().requires_grad_() for _ in range(2))
    # Padding may have any log-probability, and enters neither loss nor gradient.
    loss = loss_of(objective, ours.where(predicted, -math.inf), batch, predicted)
    mean = loss.total / loss.count
    mean.backward()
    expected = plain_loss(
        name,
        {**options, "importance_sampling_level": level},
        given=plain,
        sampled=sampled,
        reference=reference,
        advantages=advantages,
        lengths=lengths,
    )
    expected.backward()
    assert mean.item() == pytest.approx(expected.item(), abs=1e-9)
    assert torch.allclose(ours.grad, plain.grad, atol=1e-9)
    if name == "grpo" and level == "token":
        assert 0 < loss.sums["clip_share"][0].item() < sum(lengths)
    if delta:
        without = loss_of(make(name, **{**options, "delta": 0.0}), moved, batch, predicted)
        assert loss.total.item() < without.total.item(), "some ratio is above the bound"
        assert loss.sums["clip_share"][0] > without.sums["clip_share"][0]


def test_a_bound_within_the_clipped_range_is_refused(make) -> None:
    with pytest.raises(WorkloadError, match=r"delta is 1\.2; make it above 1\.3, the upper bound"):
        make("grpo", epsilon_high=0.3, delta=1.2)
    with pytest.raises(WorkloadError, match=r"delta is 0\.5; make it 0, or above 1"):
        make("grpo", delta=0.5)
