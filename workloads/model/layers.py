"""Norms, embeddings and activations by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.config import TransformerConfig


def norm(config: TransformerConfig, size: int = 0, eps: float = 0.0) -> nn.Module:
    """Return the model's norm over the last dimension: LayerNorm or RMSNorm (Zhang and Sennrich 2019).

    Args:
        config: names the kind.
        size: of the last dimension; 0 for the hidden size.
        eps: 0 for the model's.
    """
    kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "rms_offset": OffsetRMSNorm}[config.norm]
    return kind(size or config.hidden, eps=eps or config.norm_eps)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by one plus its weight (Gemma), so that weight decay pulls it towards the plain norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., size] to [.., size]."""
        return F.rms_norm(x, self.normalized_shape, 1.0 + self.weight, self.eps)


class CutRMSNorm(nn.Module):
    """RMSNorm of vectors that are sharded over tensor-parallel ranks. `total` sums the squares over all ranks."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.size, self.eps = size, eps
        self.total: Callable[[Tensor], Tensor] = lambda squares: squares

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., size / ranks] to the same shape. Computes in fp32."""
        # The sum over thousands of squares loses too many bits in 16-bit numbers.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        squares = self.total(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self.size + self.eps)).to(x.dtype) * self.weight


def capped(x: Tensor, cap: float) -> Tensor:
    """Return c tanh(x / c), which lies between -c and c (Gemma 2, section 2); x itself if `cap` is 0.

    Args:
        x: of any shape.
        cap: c; 0 for no cap.
    """
    return cap * torch.tanh(x / cap) if cap else x


def embedding(count: int, size: int) -> nn.Embedding:
    """Return an embedding [count, size] without torch's own initialisation, which takes seconds even on the meta
    device.

    Args:
        count: number of rows.
        size: of a row.
    """
    return nn.Embedding.from_pretrained(torch.empty(count, size), freeze=False)


def joined(config: TransformerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that joins gate and up [.., n] in a gated feed-forward network.

    It is act(gate) * up (Shazeer 2020). With a swiglu_limit it is (up + 1) * gate * sigmoid(alpha * gate), with gate
    clamped from above and up on both sides (gpt-oss release).
    """
    limit = config.swiglu_limit
    alpha = config.swiglu_alpha
    act = activation(config.activation)
    if not limit:
        return lambda gate, up: act(gate) * up

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(alpha * gate))

    return clamped


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return gelu (exact), gelu_tanh (Hendrycks and Gimpel, eq. 2), relu or silu by its name."""
    if name == "gelu_tanh":
        return lambda x: F.gelu(x, approximate="tanh")
    plain: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
    return plain[name]
