"""The router balancing loss of a Hugging Face class, computed for each sequence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.errors import WorkloadError

WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the loss's weight in the model's class or its configuration."""
CHOSEN = ("num_experts_per_tok", "top_k", "num_experts_per_token")


@dataclass(frozen=True)
class Balance:
    """weight * experts * sum over experts of (choices per token * mean score), mean over the sequences.

    Same as transformers (`load_balancing_loss_func`; Switch, Fedus et al., 2022, equations 4 to 6, over all routers
    together), but for each sequence separately, so that it does not depend on how a batch is split.
    """

    weight: float
    chosen: int

    def __call__(self, logits: Sequence[Tensor] | None, sequences: int) -> Tensor | None:
        """Return the loss of all routers' logits, each [sequences * L, experts] or [sequences, L, experts]; fp32
        scalar.

        None if the class has no routers in this configuration.
        """
        if not logits:
            return None
        scores = [layer.reshape(sequences, -1, layer.shape[-1]).float().softmax(-1) for layer in logits]
        score = torch.stack([s.mean(1) for s in scores]).mean(0)
        experts = score.shape[-1]
        chosen = [
            F.one_hot(s.topk(self.chosen, dim=-1).indices, experts).sum(2).float().mean(1) for s in scores
        ]
        return self.weight * experts * (torch.stack(chosen).mean(0) * score).sum(-1).mean()


def balance_of(network: nn.Module) -> Balance | None:
    """Return the balancing loss of the class; None if it has none or its weight is zero.

    Raises WorkloadError if the number of experts per token is unknown.
    """
    if not hasattr(sys.modules[type(network).__module__], "load_balancing_loss_func"):
        return None
    weight = _first(network, WEIGHTS) or 0.0
    if not weight:
        return None
    chosen = chosen_of(network)
    if chosen is None:
        raise WorkloadError(
            f"{type(network).__name__} balances its routers in a way that is not known here; "
            "set workload.changes.router_aux_loss_coef to 0"
        )
    return Balance(float(weight), chosen)


def chosen_of(network: nn.Module) -> int | None:
    """Return the number of experts that a token chooses; None if the class does not say it."""
    chosen = _first(network, CHOSEN)
    return None if chosen is None else int(chosen)


def _first(network: nn.Module, names: Sequence[str]) -> Any:
    """Return the first of these attributes that the class or its configuration has; None without any."""
    text = network.config.get_text_config()  # type: ignore[operator, union-attr]
    found = (getattr(holder, name, None) for holder in (network, text) for name in names)
    return next((value for value in found if value is not None), None)
