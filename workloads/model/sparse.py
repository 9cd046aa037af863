"""Sparse attention: which tokens attend to each other in layers with a window.

A token attends to the window's tokens on either side. With a dilation, only every n-th of them counts, so the window
reaches further (Longformer; Beltagy et al., 2020, figure 2). The first global tokens attend to all others, and all
attend to them (Longformer; BigBird's ITC; Zaheer et al., 2020, section 2). Each block of tokens also attends to some
random blocks, drawn once among those outside its window and the global tokens (BigBird's random attention). Causal
models hide all later tokens and draw only among earlier blocks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from workloads.model.config import TransformerConfig


def near(config: TransformerConfig, query: Tensor, key: Tensor, length: int) -> Tensor:
    """Return whether a query attends to a key, bool, ignoring causality. query and key are positions, int64, that
    broadcast, below `length`.

    Args:
        config: window, dilation, global tokens and random blocks.
        query: positions of queries.
        key: positions of keys.
        length: tokens of the row.
    """
    apart = query - key
    attends = apart.abs() < config.window * config.window_dilation
    if config.window_dilation > 1:
        attends = attends & (apart % config.window_dilation == 0)
    if config.global_tokens:
        attends = attends | (key < config.global_tokens) | (query < config.global_tokens)
    if config.random_blocks:
        size = config.block_size
        drawn = torch.from_numpy(_drawn(config, -(-length // size))).to(query.device, non_blocking=True)
        attends = attends | drawn[query // size, key // size]
    return attends


@lru_cache(maxsize=16)
def _drawn(config: TransformerConfig, blocks: int) -> np.ndarray:
    """Return which blocks of keys each block of queries draws, bool [blocks, blocks].

    The draw of a causal model does not depend on the number of blocks, so a token attends to the same ones while a text
    grows.
    """
    drawn = np.zeros((blocks, blocks), bool)
    size = config.block_size
    reach = config.window * config.window_dilation
    for block in range(blocks):
        order = np.random.default_rng(block).random(blocks).argsort(kind="stable")
        # The smallest distance between tokens of the two blocks; negative or zero for the block itself.
        apart = (abs(order - block) - 1) * size + 1
        free = (apart >= reach) & ((order + 1) * size > config.global_tokens)
        if config.causal:
            free &= order < block
        drawn[block, order[free][: config.random_blocks]] = True
    return drawn
