"""Weights of routers' losses: in transformers all layers have one loss together, here each with experts has its own."""

from __future__ import annotations

DIGITS = 12
"""Of a weight that was multiplied and divided again, so that one that was read is written as it stood."""


def of_each(weight: float, layers: int, chosen: int = 1, stacks: int = 1) -> float:
    """What the loss of each layer weighs where that of transformers weighs `weight`.

    There a loss is of the means over the `layers` with experts of each of the `stacks`, and `chosen` (experts a token)
    where all experts are used alike (`load_balancing_loss_func`); here a layer's is 1 then (Switch, equations 4 to 6).
    """
    return weight * chosen * stacks / max(layers, 1)


def of_all(weight: float, layers: int, chosen: int = 1, stacks: int = 1) -> float:
    """The inverse of `of_each`."""
    return float(f"{weight * layers / (chosen * stacks):.{DIGITS}g}")
