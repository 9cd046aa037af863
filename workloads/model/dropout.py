"""Dropout and LayerDrop that do not depend on how batch, sequence and model are sharded.

Dropout zeroes features of the summed embeddings and of each sub-layer's output before the residual addition (Srivastava
et al. 2014; Vaswani et al. 2017, section 5.4). Attention dropout, with its own rate, zeroes attention probabilities
(Devlin et al. 2018, appendix A.2); no fused kernel supports it.

LayerDrop (Fan et al. 2020, section 3; stochastic depth with one rate, Huang et al. 2016) skips layers, here for each
sample independently. Evaluation uses all layers and scales nothing.

Whether a feature is zeroed is a function of (seed, position in the sample order, position in the sequence, stack,
layer, sub-layer, feature). For an attention probability, head and key position replace the feature. Whether a layer is
skipped is a function of (seed, position in the sample order, stack, layer). There is no generator state, so the bits
are the same on every device, for every sharding, and under recomputation. The generator is counter-based (Salmon et al.
2011): number i of key k is SplitMix64's (Steele, Lea and Flood 2014, figure 13).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.workload import Batch

KEYS = "dropout_keys"
"""The batch entry with the key of each row, int64 [B]."""
PLACES = "places"
"""The batch entry with the positions of the batch's tokens in the full sequence, int64 [B, L], if
it holds only a part.
"""
GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""SplitMix64's increment, as int64."""
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
ROW_TOKENS = "row_tokens"
"""The batch entry with the number of tokens of each row, padding left out, int64 [B]."""
SKIPS = -2
"""Replaces the sequence position, which is never negative, in the keys of what is drawn once for a sample: the layers
that it skips, and the gates of heads.
"""
NOISE = -3
"""Replaces the layer in the keys of the noise on embeddings."""
SELF_SCORES, CROSS_SCORES = 3, 4
"""The sites of attention probabilities, after the three sub-layers of a layer."""
NUMBERS = 2**16
"""The number of values of a feature's random number. Rates are rounded to 2**-16, and 64 random bits serve four
features.
"""


def row_keys(seed: int, position: int, count: int) -> Tensor:
    """Return the keys of `count` samples of the run's sample order from `position` on, int64 [count].

    Args:
        seed: of the run.
        position: of the first sample.
        count: number of samples.
    """
    return position_keys(seed, torch.arange(position, position + count))


def position_keys(seed: int, positions: Tensor) -> Tensor:
    """Return the keys of the samples at `positions` of the run's sample order, both int64 [count].

    A position occurs once in a run, so it identifies step and sample.

    Args:
        seed: of the run.
        positions: int64 [count].
    """
    return keyed(_mixed(torch.tensor([seed])), positions)


def token_keys(model: nn.Module, batch: Batch, length: int, stack: int = 0) -> Tensor | None:
    """Return the dropout key of every token in that stack of the model, int64 [B, length]; None without dropout.

    Raises KeyError for a training batch without keys.

    Args:
        model: the model; its mode and its rates are read.
        batch: has `dropout_keys`, and `places` if it holds a part of each sequence.
        length: number of tokens of a row, those of a prompt included.
        stack: 0 for an encoder or the only stack, 1 for a decoder.
    """
    config = model.config
    if not (model.training and (config.dropout or config.attention_dropout)):  # type: ignore[union-attr]
        return None
    rows = batch[KEYS].unsqueeze(1)
    positions = batch.get(PLACES)
    if positions is None:
        positions = torch.arange(length, device=rows.device)
    # One stream a stack, so that encoder and decoder tokens at the same position do not drop alike.
    return keyed(keyed(rows, stack), positions)


def sample_keys(model: nn.Module, batch: Batch, stack: int = 0) -> Tensor | None:
    """Return the key of every sample in that stack, for LayerDrop and gates of heads, int64 [B]; None without these.

    Raises KeyError for a training batch without keys.

    Args:
        model: the model; its mode and its options are read.
        batch: has `dropout_keys`.
        stack: as in `token_keys`.
    """
    config = model.config
    if not (model.training and (config.layer_drop or config.head_gates)):  # type: ignore[union-attr]
        return None
    return keyed(keyed(batch[KEYS], stack), SKIPS)


def noisy(model: nn.Module, vectors: Tensor, batch: Batch) -> Tensor:
    """Add noise to the token vectors [B, L, d] in training (NEFTune; Jain et al. 2023, algorithm 1).

    Each feature gets alpha / sqrt(n d) times a number drawn uniformly from [-1, 1), where n is the number of tokens of
    its row, padding left out. The numbers follow from (seed, position in the sample order, position in the sequence,
    feature). Raises KeyError for a training batch without keys.

    Args:
        model: the model; its mode and `embedding_noise` are read.
        vectors: token vectors, [B, L, d].
        batch: has `dropout_keys`, and `row_tokens` if it holds a part of each sequence.
    """
    alpha: float = model.config.embedding_noise  # type: ignore[union-attr, assignment]
    if not (model.training and alpha):
        return vectors
    rows = batch[KEYS].unsqueeze(1)
    positions = batch.get(PLACES)
    if positions is None:
        positions = torch.arange(vectors.shape[1], device=rows.device)
    drawn = _numbers(keyed(keyed(rows, NOISE), positions), vectors.shape[-1]).to(vectors.dtype) / (
        NUMBERS // 2
    )
    tokens = batch.get(ROW_TOKENS)
    if tokens is None:
        tokens = (
            batch["padding"].sum(1) if "padding" in batch else torch.full_like(batch[KEYS], vectors.shape[1])
        )
    size = alpha / (tokens.clamp(min=1) * vectors.shape[-1]).sqrt()
    return vectors + drawn * size.to(vectors.dtype)[:, None, None]


def keyed(keys: Tensor, number: int | Tensor) -> Tensor:
    """Derive keys from `keys` and `number`, which broadcast.

    Args:
        keys: int64, of any shape.
        number: a non-negative number, or SKIPS or NOISE, which no other use has.
    """
    return _mixed(keys + (torch.as_tensor(number, device=keys.device) + 1) * GAMMA)


def drop(x: Tensor, rate: float, keys: Tensor | None, site: int) -> Tensor:
    """Zero a share `rate` of the features of x [B, L, features] and divide the others by 1 - rate.

    keys int64 [B, L] are the tokens' keys in this layer, None outside training. site is the number of the sub-layer.
    For attention probabilities [B, heads, L, keys], the keys are [B, heads, L].

    Args:
        x: [B, L, features], or [B, heads, L, keys].
        rate: share to zero.
        keys: int64, one for each vector of x; None outside of training.
        site: number of the sub-layer.
    """
    zeroed = round(rate * NUMBERS)
    if keys is None or not zeroed:
        return x
    # int16 numbers begin at -NUMBERS / 2.
    keep = _numbers(keyed(keys, site), x.shape[-1]) >= zeroed - NUMBERS // 2
    return torch.where(keep, x / (1.0 - zeroed / NUMBERS), 0.0)


def uniform_numbers(keys: Tensor, count: int) -> Tensor:
    """Return `count` random numbers in (0, 1) for each key int64 [n], fp64 [n, count].

    Args:
        keys: int64 [n].
        count: numbers for each key.
    """
    numbers = keyed(keys.unsqueeze(-1), torch.arange(count, device=keys.device))
    # 52 bits and a half, so that neither 0 nor 1 occurs.
    return _shifted(numbers, 12).double().add_(0.5).mul_(2.0**-52)


def skip(x: Tensor, before: Tensor, rate: float, keys: Tensor | None) -> Tensor:
    """Return the layer output x [B, L, hidden], with its input `before` in place of the samples that skip the layer.

    keys int64 [B] are the samples' keys in this layer; None if no sample skips it.

    Args:
        x: output of the layer, [B, L, hidden].
        before: its input, [B, L, hidden].
        rate: share of samples that skip the layer.
        keys: int64 [B]; None if no sample skips it.
    """
    if keys is None:
        return x
    # The same comparison as in `drop`, so that rates round alike.
    keep = _numbers(keys, 1).unsqueeze(-1) >= round(rate * NUMBERS) - NUMBERS // 2
    return torch.where(keep, x, before)


def _numbers(keys: Tensor, count: int) -> Tensor:
    """Return `count` random numbers for each key of [..]: int16 [.., count], uniform over the range of the type."""
    # Each draw of 64 bits gives four numbers.
    # Features are numbered from 0: dropout acts on whole hidden vectors, which no layout cuts.
    draws = keyed(keys.unsqueeze(-1), torch.arange(-(-count // 4), device=keys.device))
    return draws.view(torch.int16)[..., :count]


def _mixed(x: Tensor) -> Tensor:
    """Apply SplitMix64's output function. int64 products wrap around, which gives the arithmetic modulo 2**64."""
    x = _shifted(x, 30).bitwise_xor_(x).mul_(FIRST)
    x = _shifted(x, 27).bitwise_xor_(x).mul_(SECOND)
    return _shifted(x, 31).bitwise_xor_(x)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right logically: int64 has only an arithmetic shift, so the copied sign bits are masked."""
    return (x >> by).bitwise_and_(2 ** (64 - by) - 1)
