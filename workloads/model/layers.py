"""Norms, embeddings and activations by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.config import TransformerConfig


def norm(config: TransformerConfig, size: int = 0, eps: float = 0.0) -> nn.Module:
    """The norm of the model over the last dimension: LayerNorm or RMSNorm (Zhang and Sennrich 2019)."""
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(size or config.hidden, eps=eps or config.norm_eps)


def embedding(count: int, size: int) -> nn.Embedding:
    """An embedding [count, size] without torch's own initialisation, which takes seconds even on the meta device."""
    return nn.Embedding.from_pretrained(torch.empty(count, size), freeze=False)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """gelu (exact), gelu_tanh (Hendrycks and Gimpel, eq. 2), relu or silu."""
    if name == "gelu_tanh":
        return lambda x: F.gelu(x, approximate="tanh")
    plain: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
    return plain[name]
