"""Sparse attention: which tokens see each other in layers with a window.

A token sees the window's tokens to either side, of which with a dilation only every so many-th counts, so that it
reaches further (Longformer; Beltagy et al., 2020, figure 2). The first global tokens see all others and are seen by all
(Longformer; BigBird's ITC; Zaheer et al., 2020, section 2). Each block of tokens sees so many more blocks, drawn once
and for all among those that neither its window nor the global tokens reach (BigBird's random attention). Causal models
see nothing of it that comes after a token, and draw among earlier blocks alone.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from workloads.model.config import TransformerConfig


def near(config: TransformerConfig, query: Tensor, key: Tensor, length: int) -> Tensor:
    """Whether a query sees a key, but for causality: bool, of places that broadcast, int64, all below `length`."""
    apart = query - key
    seen = apart.abs() < config.window * config.window_dilation
    if config.window_dilation > 1:
        seen = seen & (apart % config.window_dilation == 0)
    if config.global_tokens:
        seen = seen | (key < config.global_tokens) | (query < config.global_tokens)
    if config.random_blocks:
        size = config.block_size
        drawn = torch.from_numpy(_drawn(config, -(-length // size))).to(query.device, non_blocking=True)
        seen = seen | drawn[query // size, key // size]
    return seen


@lru_cache(maxsize=16)
def _drawn(config: TransformerConfig, blocks: int) -> np.ndarray:
    """Which blocks of keys a block of queries draws: bool [blocks, blocks]. A causal model's does not depend on how
    many there are, so that a token sees the same while a text grows."""
    found, size = np.zeros((blocks, blocks), bool), config.block_size
    reach = config.window * config.window_dilation
    for block in range(blocks):
        order = np.random.default_rng(block).random(blocks).argsort(kind="stable")
        apart = (abs(order - block) - 1) * size + 1
        free = (apart >= reach) & ((order + 1) * size > config.global_tokens)
        if config.causal:
            free &= order < block
        found[block, order[free][: config.random_blocks]] = True
    return found
