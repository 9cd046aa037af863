"""Dropout and skipped layers that do not depend on how batch, sequence and model are split.

It zeroes features of the sum of the embeddings and of the output that every sub-layer adds to the residual (Srivastava
et al. 2014; Vaswani et al. 2017, section 5.4), and at a rate of its own probabilities of attention (Devlin et al. 2018,
appendix A.2), for which no fused kernel serves.

LayerDrop (Fan et al. 2020, section 3; stochastic depth with one rate, Huang et al. 2016) skips layers, here each for
every sample alone: outside of training all layers are there, and nothing is scaled.

Which features are zeroed is a function of (seed, position in the order of samples, position in the sequence, stack,
layer, sub-layer, feature), of probabilities one of head and key's position in place of the feature, and which layers
are skipped one of (seed, position in the order, stack, layer): there is no state, and the bits are the same on every
device, at every width and when recomputed. The generator is counter-based
(Salmon et al. 2011): number i of key k is SplitMix64's (Steele, Lea and Flood 2014, figure 13).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.workload import Batch

KEYS = "dropout_keys"
"""The batch's entry with the key of each row, int64 [B]."""
PLACES = "places"
"""The batch's entry with the positions of its tokens in the full sequence, int64 [B, L], if it holds only a part."""
GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""SplitMix64's increment, as int64."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
SKIPS = -2
"""In place of a position in the sequence, which is never negative: the key of a sample's skipped layers."""
SELF_SCORES, CROSS_SCORES = 3, 4
"""Sites of the probabilities of attention, after those of a layer's three sub-layers."""
NUMBERS = 2**16
"""Number of values that a feature's random number has: rates are rounded to 2**-16, and 64 random bits serve four
features."""


def row_keys(seed: int, position: int, count: int) -> Tensor:
    """Keys of the samples at `count` positions of the run's sample order from `position` on: int64 [count].

    A position occurs once in a run, so it identifies step and sample.
    """
    return keyed(_mixed(torch.tensor([seed])), torch.arange(position, position + count))


def token_keys(model: nn.Module, batch: Batch, length: int, stack: int = 0) -> Tensor | None:
    """Keys of every token in that stack of the model: int64 [B, length]; None if there is no dropout now.

    Raises KeyError for a training batch without keys.
    """
    config = model.config
    if not (model.training and (config.dropout or config.attention_dropout)):  # type: ignore[union-attr]
        return None
    rows = batch[KEYS].unsqueeze(1)
    places = batch.get(PLACES)
    places = torch.arange(length, device=rows.device) if places is None else places
    return keyed(keyed(rows, stack), places)


def sample_keys(model: nn.Module, batch: Batch, stack: int = 0) -> Tensor | None:
    """Keys of every sample for the layers that it skips in that stack: int64 [B]; None if none is skipped now.

    Raises KeyError for a training batch without keys.
    """
    if not (model.training and model.config.layer_drop):  # type: ignore[union-attr]
        return None
    return keyed(keyed(batch[KEYS], stack), SKIPS)


def keyed(keys: Tensor, number: int | Tensor) -> Tensor:
    """Keys derived from `keys` and `number`, which broadcast."""
    return _mixed(keys + (torch.as_tensor(number, device=keys.device) + 1) * GAMMA)


def drop(x: Tensor, rate: float, keys: Tensor | None, site: int) -> Tensor:
    """x [B, L, features] with a share `rate` of its features zeroed and the others divided by 1 - rate.

    keys int64 [B, L] are the keys of its tokens in this layer, None outside training; site is the sub-layer's number.
    Probabilities [B, heads, L, keys] have keys of [B, heads, L].
    """
    zeroed = round(rate * NUMBERS)
    if keys is None or not zeroed:
        return x
    kept = _numbers(keyed(keys, site), x.shape[-1]) >= zeroed - NUMBERS // 2
    return torch.where(kept, x / (1.0 - zeroed / NUMBERS), 0.0)


def skip(x: Tensor, before: Tensor, rate: float, keys: Tensor | None) -> Tensor:
    """A layer's output x [B, L, hidden], and its input `before` for the share `rate` of the samples that skip it.

    keys int64 [B] are the keys of the samples in this layer, None where none is skipped.
    """
    if keys is None:
        return x
    kept = _numbers(keys, 1).unsqueeze(-1) >= round(rate * NUMBERS) - NUMBERS // 2
    return torch.where(kept, x, before)


def _numbers(keys: Tensor, count: int) -> Tensor:
    """Random numbers of each key of [..]: int16 [.., count], uniform over the range of the type."""
    draws = keyed(keys.unsqueeze(-1), torch.arange(-(-count // 4), device=keys.device))
    return draws.view(torch.int16)[..., :count]


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's output function, modulo 2**64, which is how int64 products wrap around."""
    x = _shifted(x, 30).bitwise_xor_(x).mul_(FIRST)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(SECOND)
    return _shifted(x, 31).bitwise_xor_(x)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> by).bitwise_and_(2 ** (64 - by) - 1)
