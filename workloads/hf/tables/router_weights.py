"""Weights of router losses. In transformers, all layers share one loss; here, each layer with experts has its own."""

from __future__ import annotations

DIGITS = 12
"""Digits kept after multiplying and dividing a weight, so that a weight that was read is written unchanged."""


def of_each(weight: float, layers: int, chosen: int = 1, stacks: int = 1) -> float:
    """Return the weight of each layer's loss for transformers' weight `weight`.

    transformers computes one loss from means over the `layers` with experts of each of the `stacks`. It equals
    `chosen` (experts per token) if all experts are used equally (`load_balancing_loss_func`). Here a layer's loss is
    1 in that case (Switch, equations 4 to 6).
    """
    return weight * chosen * stacks / max(layers, 1)


def of_all(weight: float, layers: int, chosen: int = 1, stacks: int = 1) -> float:
    """Return the weight in transformers; the inverse of `of_each`."""
    return float(f"{weight * layers / (chosen * stacks):.{DIGITS}g}")
