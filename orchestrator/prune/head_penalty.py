"""The penalty of open attention heads: its gradient, and what a step reports of the gates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.parallel.rank_messages import sum_over_ranks
from workloads.model.head_gates import gates_of, open_probability
from workloads.model.stored import is_gates


class HeadPenalty:
    """Adds the gradient of `penalty` times the expected number of open gates (Voita et al., 2019, section 6.1).

    The gradient is that of the sigmoid, penalty * p * (1 - p) for a gate that is open with probability p, so the
    penalty does not pass through the model, and enters once for a step under any layout. Reported losses exclude it.
    Without a penalty every method does nothing.
    """

    def __init__(self, penalty: float, shards: Sequence[ParameterShard], device: torch.device) -> None:
        """Find the gates.

        Args:
            penalty: of each open head; 0 for a model without gates.
            shards: this rank's shards of the trained parameters.
            device: this rank's device.
        """
        self._penalty = penalty
        self._shards = [shard for shard in shards if is_gates(shard.name)]
        self._device = device
        self.metrics: dict[str, float] = {}
        """`open_heads`, the gates that are not 0 in evaluation, and `head_penalty`, the penalty before the update."""

    @torch.no_grad()
    def add_gradients(self, scale: float) -> None:
        """Add to gradients that are complete, and that `StepSums.factor` will multiply. All ranks call it together.

        Args:
            scale: the loss scale, by which the gradients are multiplied.
        """
        if not self._penalty:
            return
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for shard in self._shards:
            log_alpha = shard.parameter
            probability = open_probability(log_alpha)
            gradient = self._penalty * scale * probability * (1.0 - probability)
            log_alpha.grad = gradient if log_alpha.grad is None else log_alpha.grad.add_(gradient)
            # Copies of a shard on other ranks would be counted twice.
            if shard.counted:
                # Offloaded shards are elsewhere.
                sums += torch.stack([(gates_of(log_alpha) > 0.0).sum(), probability.sum()]).to(sums)
        is_open, probable = sum_over_ranks(sums.cpu()).tolist()
        self.metrics = {"open_heads": is_open, "head_penalty": self._penalty * probable}
