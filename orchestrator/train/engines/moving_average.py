"""An exponential moving average of the weights, which is evaluated and exported in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MovingAverage:
    """Averages of the tensors that an optimizer updates, with the same sizes and dtypes.

    With decay d, after update t of the weights w:

        average_t = average_{t-1} + (1 - d) / (1 - d^t) * (w_t - average_{t-1})

    which is the mean of w_1 ... w_t weighted by d^(t-i). torch.optim.swa_utils uses 1 - d throughout, which gives the
    first weights the share d^(t-1): most of a short run's average. The division is Adam's for its moments (Kingma and
    Ba, 2015, section 3); averaging itself is Polyak and Juditsky, 1992.
    """

    def __init__(self, decay: float | None, weights: Sequence[Tensor]) -> None:
        """Without a decay there are no averages, and every method does nothing.

        `of` maps each of the weights to its average.
        """
        self._decay = decay or 0.0
        self._weights = list(weights) if decay is not None else []
        self._averages = [torch.zeros_like(weight.detach()) for weight in self._weights]
        self.of = dict(zip(self._weights, self._averages, strict=True))
        self._updates = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first update the average is the weights themselves."""
        self.go_on(0)
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.copy_(weight)

    def go_on(self, updates: int) -> None:
        """Continue from a commit after `updates` updates, whose averages were copied to `of`."""
        self._updates = updates

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an optimizer step."""
        self._updates += 1
        if self._averages:
            # 1 at the first update, so the average begins as the first weights and never contains the initial ones.
            share = (1 - self._decay) / (1 - self._decay**self._updates)
            torch._foreach_lerp_(self._averages, self._weights, share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the averages and the weights; a second call restores both. Needs memory for the largest tensor."""
        for average, weight in zip(self._averages, self._weights, strict=True):
            # Tensor by tensor: a copy of all weights would not fit where the job just fits.
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
