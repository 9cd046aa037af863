"""Dropout whose masks do not depend on how batch, sequence and model are cut.

Zeroed are features of the sum of the embeddings and of what every sub-layer adds to the residual (Srivastava et al.
2014; Vaswani et al. 2017, section 5.4). Scores of attention are left alone, so that fused kernels serve.

Which features those are is a function of (seed, position in the order of samples, position in the sequence, stack,
layer, sub-layer, feature): no state, and the same bits on every device, at every width and when recomputed. The
generator counts (Salmon et al. 2011): number i of key k is SplitMix64's (Steele, Lea and Flood 2014, figure 13).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.workload import Batch

KEYS = "dropout_keys"
"""The batch's entry with a key of each row, int64 [B]."""
PLACES = "places"
"""That with the positions in the sequence that a row holds, int64 [B, L], where it does not hold all of them."""
GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""SplitMix64's increment, as int64."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
NUMBERS = 2**16
"""That a feature's number is one of, so that rates are rounded to 2**-16; one of 64 bits gives four."""


def row_keys(seed: int, position: int, count: int) -> Tensor:
    """Keys of the samples at `count` positions of a run's order from `position` on: int64 [count].

    A position is used once in a run, so it says which step and which sample it is.
    """
    return keyed(_mixed(torch.tensor([seed])), torch.arange(position, position + count))


def token_keys(model: nn.Module, batch: Batch, length: int, stack: int = 0) -> Tensor | None:
    """Keys of every token in that stack of the model: int64 [B, length]; None if nothing is dropped now.

    Raises KeyError for a batch in training that came without keys.
    """
    if not (model.training and model.config.dropout):  # type: ignore[union-attr]
        return None
    rows = batch[KEYS].unsqueeze(1)
    places = batch.get(PLACES)
    places = torch.arange(length, device=rows.device) if places is None else places
    return keyed(keyed(rows, stack), places)


def keyed(keys: Tensor, number: int | Tensor) -> Tensor:
    """The keys of what has that number within those of `keys`, which it broadcasts with."""
    return _mixed(keys + (torch.as_tensor(number, device=keys.device) + 1) * GAMMA)


def drop(x: Tensor, rate: float, keys: Tensor | None, site: int) -> Tensor:
    """x [B, L, features] with a share `rate` of its features zeroed and the others divided by what is left of 1.

    keys int64 [B, L] are those of its tokens in this layer, None outside training; site tells sub-layers apart.
    """
    zeroed = round(rate * NUMBERS)
    if keys is None or not zeroed:
        return x
    kept = _numbers(keyed(keys, site), x.shape[-1]) >= zeroed - NUMBERS // 2
    return torch.where(kept, x / (1.0 - zeroed / NUMBERS), 0.0)


def _numbers(keys: Tensor, count: int) -> Tensor:
    """Numbers of each key in [..]: int16 [.., count], uniform over all that the type has."""
    draws = keyed(keys.unsqueeze(-1), torch.arange(-(-count // 4), device=keys.device))
    return draws.view(torch.int16)[..., :count]


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's output function, modulo 2**64, which is how int64 products wrap around."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (x >> by) & (2 ** (64 - by) - 1)
