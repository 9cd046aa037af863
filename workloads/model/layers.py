"""Norms, embeddings and activations by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.config import TransformerConfig


def norm(config: TransformerConfig, size: int = 0, eps: float = 0.0) -> nn.Module:
    """The norm of the model over the last dimension: LayerNorm or RMSNorm (Zhang and Sennrich 2019)."""
    kind = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "rms_offset": OffsetRMSNorm}[config.norm]
    return kind(size or config.hidden, eps=eps or config.norm_eps)


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by one plus its weight (Gemma), so that weight decay pulls it to the plain norm."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] to the same."""
        return F.rms_norm(x, self.normalized_shape, 1.0 + self.weight, self.eps)


class CutRMSNorm(nn.Module):
    """RMSNorm of vectors of which a tensor-parallel rank has a part: `total` makes the sum of squares that of all."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.size, self.eps = size, eps
        self.total: Callable[[Tensor], Tensor] = lambda squares: squares

    def forward(self, x: Tensor) -> Tensor:
        """[.., size / ranks] to the same; computed in fp32."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        squares = self.total(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self.size + self.eps)).to(x.dtype) * self.weight


def capped(x: Tensor, cap: float) -> Tensor:
    """c tanh(x / c): values within -c and c (Gemma 2, section 2); x itself if `cap` is 0."""
    return cap * torch.tanh(x / cap) if cap else x


def embedding(count: int, size: int) -> nn.Embedding:
    """An embedding [count, size] without torch's own initialisation, which takes seconds even on the meta device."""
    return nn.Embedding.from_pretrained(torch.empty(count, size), freeze=False)


def joined(config: TransformerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """What a gated feed-forward makes of gate and up [.., n]: act(gate) * up (Shazeer 2020); with a swiglu_limit
    (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up on both sides (gpt-oss release)."""
    limit, alpha, act = config.swiglu_limit, config.swiglu_alpha, activation(config.activation)
    if not limit:
        return lambda gate, up: act(gate) * up

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(alpha * gate))

    return clamped


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """gelu (exact), gelu_tanh (Hendrycks and Gimpel, eq. 2), relu or silu."""
    if name == "gelu_tanh":
        return lambda x: F.gelu(x, approximate="tanh")
    plain: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
    return plain[name]
