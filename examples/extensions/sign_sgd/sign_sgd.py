"""SignSGD with momentum (Signum; Bernstein et al., 2018, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class SignSGD:
    """Moves every weight by the learning rate, in the direction of the sign of an averaged gradient.

    Args:
        momentum: decay of the average.
    """

    slots = ("mean_gradient",)

    def __init__(self, momentum: float = 0.9) -> None:
        self.momentum = momentum

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Change the parameter, or the part of it that this rank holds, in place."""
        mean = state["mean_gradient"].lerp_(gradient, 1 - self.momentum)
        parameter.mul_(1 - lr * weight_decay).sub_(mean.sign(), alpha=lr)
