"""Initial weights as published, each from (seed, parameter name) alone."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor, nn

from workloads.config import TransformerConfig


def generator(seed: int, name: str) -> torch.Generator:
    """The random numbers of one tensor: the same in every process and layout."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initial(config: TransformerConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    """The tensor `name` of `shape`, fp32 on CPU.

    Norm weights are one; biases, buffers and T5-style norm biases zero; the rest has the spread of `spread`.
    """
    if is_norm(name):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    std = spread(config, name, shape)
    values = torch.empty(shape)
    random = generator(seed, name)
    if config.initial == "truncated":
        # As tf.truncated_normal: nothing beyond two standard deviations.
        return nn.init.trunc_normal_(values, std=std, a=-2 * std, b=2 * std, generator=random)
    return values.normal_(std=std, generator=random)


def is_norm(name: str) -> bool:
    """Whether `name` is the weight of a norm."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.endswith("norm")


def spread(config: TransformerConfig, name: str, shape: torch.Size) -> float:
    """Standard deviation of a weight's initial values.

    GPT-2 (release, model.py): 0.02, positions 0.01, and projections into the residual stream divided by the
    root of their number (paper, section 2.3). BERT, ALBERT, ELECTRA: truncated 0.02. BART, RoBERTa, Llama:
    0.02. DeepSeek-V3: 0.006 (section 4.2). fan_in is T5's (Mesh TensorFlow): initial_std over the root of the
    inputs, queries also over the root of the head size since scores are not scaled, embeddings one.
    """
    std = config.initial_std
    if config.initial == "fan_in":
        return _fan_in(config, name, shape)
    if not config.residual_scaling:
        return std
    if name == "embeddings.positions.weight":
        return std / 2
    if name.endswith(("attention.output.weight", "down.weight", "experts.down")):
        return std / (2 * config.all_layers) ** 0.5
    return std


def _fan_in(config: TransformerConfig, name: str, shape: torch.Size) -> float:
    std = config.initial_std
    if name in ("tokens.weight", "head.weight"):
        return 1.0
    if name.endswith("relative_bias.weight"):
        return std * config.hidden**-0.5
    if name.endswith("attention.query.weight"):
        return std * (config.hidden * config.head_dim) ** -0.5
    return std * shape[-1] ** -0.5
