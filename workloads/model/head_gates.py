"""Gates of attention heads, which training opens or closes: the hard concrete distribution.

Voita et al., 2019, "Analyzing Multi-Head Self-Attention: Specialized Heads Do the Heavy Lifting, the Rest Can Be
Pruned", section 6.1: every head's output is multiplied by a gate, and the loss has a penalty for the expected number of
open gates. The distribution is that of Louizos et al., 2018, "Learning Sparse Neural Networks through L0
Regularization", section 2.2: a sample z of log alpha is

    s = sigmoid((log u - log(1 - u) + log alpha) / beta), u uniform in (0, 1)
    z = min(1, max(0, s (zeta - gamma) + gamma))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workloads.model.dropout import keyed, uniform_numbers
from workloads.model.stored import GATES, Part, StoredTensor, whole

TEMPERATURE, LOWEST, HIGHEST = 2 / 3, -0.1, 1.1
"""beta, gamma and zeta of the distribution (Louizos et al., 2018, section 4)."""
START = 2.5
"""log alpha at first: the least round number for which a gate is exactly 1 in evaluation, so a run begins as its
base.
"""
OUTPUT = "attention.output.weight"
"""The end of the names of output projections [hidden, heads * width], which read the gated outputs of heads."""


class HeadGates(nn.Module):
    """The gates of the heads of one attention. In training each sample draws its own.

    Attributes:
        part: the index of a tensor-parallel rank's share of the heads.
    """

    def __init__(self, heads: int, site: int) -> None:
        """Make the gates of `heads` heads. `site` tells the draws of self-attention from those of cross-attention."""
        super().__init__()
        self.log_alpha = nn.Parameter(torch.empty(heads))
        self.part = 0
        self._heads = heads
        self._site = site

    def forward(self, mixed: Tensor, keys: Tensor | None) -> Tensor:
        """Return the heads' outputs, each multiplied by its gate.

        Args:
            mixed: outputs of this rank's heads, [B, heads, L, D].
            keys: keys of the samples in this layer, int64 [B]; None outside of training.
        """
        log_alpha = self.log_alpha.float()
        if keys is None:
            gates = gates_of(log_alpha).unsqueeze(0)
        else:
            # Heads have global numbers, so that a tensor-parallel rank draws what one process draws for them.
            first = self.part * len(log_alpha)
            uniform = uniform_numbers(keyed(keys, self._site), self._heads)
            gates = drawn_gates(log_alpha, uniform[:, first : first + len(log_alpha)])
        return mixed * gates.to(mixed.dtype)[:, :, None, None]


def drawn_gates(log_alpha: Tensor, uniform: Tensor) -> Tensor:
    """Return the samples z in [0, 1] of numbers u in (0, 1).

    Args:
        log_alpha: fp32 [heads].
        uniform: fp64 [B, heads].

    Returns:
        fp32 [B, heads].
    """
    noise = (uniform.log() - (-uniform).log1p()).float()
    return _stretched(torch.sigmoid((noise + log_alpha) / TEMPERATURE))


def gates_of(log_alpha: Tensor) -> Tensor:
    """Return the gates of evaluation and of exports, in [0, 1]: z with s = sigmoid(log alpha) (section 2.2)."""
    return _stretched(torch.sigmoid(log_alpha))


def open_probability(log_alpha: Tensor) -> Tensor:
    """Return the probability that a sample is not 0: sigmoid(log alpha - beta log(-gamma / zeta)) (section 2.2)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOWEST / HIGHEST))


def _stretched(values: Tensor) -> Tensor:
    return (values * (HIGHEST - LOWEST) + LOWEST).clamp(0.0, 1.0)


def gates_name(name: str) -> str:
    """Return the name of the gates that are folded into the tensor `name`; empty if none can be."""
    return name.removesuffix(".output.weight") + GATES if name.endswith(OUTPUT) else ""


def folded_reader(names: Mapping[str, object], read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return a reader of the tensors of the model without gates that computes the same.

    Args:
        names: the tensors of the model with gates.
        read: returns them.
    """

    def plain(name: str) -> Tensor:
        tensor = read(name)
        gates = gates_name(name)
        return tensor * column_factors(read(gates), tensor.shape[1]) if gates in names else tensor

    return plain


def column_factors(log_alpha: Tensor, columns: int) -> Tensor:
    """Return the factors [columns] of an output projection's columns: the gates of their heads, fp32."""
    gates = gates_of(log_alpha.float())
    return gates.repeat_interleave(columns // len(gates))


@dataclass(frozen=True)
class FoldedOutput:
    """A stored output projection with the stored gates of its heads folded in: a `StoredTensor`."""

    stored: StoredTensor
    gates: StoredTensor

    @property
    def shape(self) -> torch.Size:
        """See `StoredTensor`."""
        return self.stored.shape

    def __getitem__(self, part: Part) -> Tensor:
        """See `StoredTensor`."""
        factors = column_factors(self.gates[whole(self.gates.shape)], self.shape[1])
        return self.stored[part].float() * factors[part[1]]
