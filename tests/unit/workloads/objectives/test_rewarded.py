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


TOKENS = 4
ALL_ANSWERS = torch.tensor(list(itertools.product(range(TOKENS), repeat=2)))
"""All answers of two tokens."""


def of_answers(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [answers, 2] by logits [1 + TOKENS, TOKENS]: of the first token, then of the second by it."""
    log_p = logits.log_softmax(-1)
    first, second = ALL_ANSWERS.unbind(1)
    return torch.stack([log_p[0, first], log_p[1 + first, second]], 1)


def mean_of(value: str, model: torch.Tensor, drawn_by: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The exact divergence of both tokens' distributions, after the first tokens that the drawing weights give."""
    p, q = model.log_softmax(-1), reference.log_softmax(-1)
    each = {
        "model || reference": p.exp() * (p - q),
        "reference || model": q.exp() * (q - p),
        "r^2 / 2": p.exp() * (p - q) ** 2 / 2,
        "nothing": 0 * p,
    }[value].sum(-1)
    return each[0] + drawn_by.softmax(-1)[0] @ each[1:]


@pytest.mark.parametrize(
    ("kl", "corrected", "moved", "gradient_of"),
    [
        *(("k1", True, moved, "model || reference") for moved in (0.0, 0.5)),
        *(("k2", True, moved, "r^2 / 2") for moved in (0.0, 0.5)),
        *(("k3", True, moved, "model || reference") for moved in (0.0, 0.5)),
        ("k1", False, 0.0, "nothing"),
        ("k2", False, 0.0, "model || reference"),
        ("k3", False, 0.0, "reference || model"),
    ],
)
def test_the_gradient_of_each_estimate_is_that_of_its_divergence(
    make, kl: str, corrected: bool, moved: float, gradient_of: str
) -> None:
    """Summed over all answers with their probabilities, by weights that have `moved` from those that drew them."""
    draw = torch.Generator().manual_seed(2)
    drawn_by, reference, direction = torch.randn(3, 1 + TOKENS, TOKENS, generator=draw, dtype=torch.float64)

    def gradients(level: str) -> tuple[torch.Tensor, torch.Tensor]:
        objective = make(
            "grpo", beta=1.0, kl=kl, use_bias_correction_kl=corrected, importance_sampling_level=level
        )
        weights = (drawn_by + moved * direction).requires_grad_()
        log_p, sampled = of_answers(weights), of_answers(drawn_by)
        batch = {
            ADVANTAGE: torch.zeros_like(sampled),
            WEIGHT: sampled.sum(1, keepdim=True).exp().expand_as(sampled),
            COUNTED: torch.ones_like(sampled),
            SAMPLED: sampled,
            REFERENCE_TOKENS: of_answers(reference),
        }
        loss = loss_of(objective, log_p, batch, torch.ones_like(sampled, dtype=torch.bool))
        (found,) = torch.autograd.grad(loss.total, weights)
        (exact,) = torch.autograd.grad(mean_of(gradient_of, weights, drawn_by, reference), weights)
        return found, exact

    torch.testing.assert_close(*gradients("token"), atol=1e-12, rtol=0.0)
    found, exact = gradients("sequence")
    if corrected:
        assert (found - exact).abs().max() > 0.01, "the ratio of an answer is not that of its tokens"
    else:
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=0.0)
