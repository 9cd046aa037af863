"""The blocks of a vision transformer and of CLIP's text encoder (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from workloads.workload import Batch


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), the activation of OpenAI's CLIP."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"quick_gelu": quick_gelu, "gelu": functional.gelu}


class Width(NamedTuple):
    """The sizes of a stack of blocks.

    std: the initial standard deviations of the matrices that read the residual stream, of those that write it, and of
    the feed-forward network's first matrix.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    activation: str
    eps: float
    std: tuple[float, float, float]
    bias: bool = True


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.heads = width.heads
        self.q_proj, self.k_proj, self.v_proj = (
            linear(width.hidden, width.hidden, width.std[0], width.bias) for _ in range(3)
        )
        self.out_proj = linear(width.hidden, width.hidden, width.std[1])

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        """Map [B, L, hidden] to [B, L, hidden]. With `causal`, a position attends to no later position."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.out_proj(result.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.fc1 = linear(width.hidden, width.intermediate, width.std[2])
        self.fc2 = linear(width.intermediate, width.hidden, width.std[0])
        self.activation = ACTIVATIONS[width.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, hidden] to [B, L, hidden]."""
        return self.fc2(self.activation(self.fc1(x)))


class Block(nn.Module):
    """Attention and feed-forward network, each after a layer normalisation. Names are those of CLIP in transformers."""

    def __init__(self, width: Width, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.layer_norm1 = nn.LayerNorm(width.hidden, eps=width.eps)
        self.self_attn = Attention(width)
        self.layer_norm2 = nn.LayerNorm(width.hidden, eps=width.eps)
        self.mlp = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, hidden] to [B, L, hidden]."""
        x = x + self.self_attn(self.layer_norm1(x), self.causal)
        return x + self.mlp(self.layer_norm2(x))


def stack(width: Width, causal: bool = False) -> nn.ModuleList:
    """Return a stack of blocks."""
    return nn.ModuleList(Block(width, causal) for _ in range(width.layers))


def linear(inputs: int, outputs: int, std: float, bias: bool = True) -> nn.Linear:
    """Return a linear layer with normal weights and a zero bias."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def check_width(name: str, hidden: int, heads: int, intermediate: int, activation: str) -> None:
    """Raise ValueError for sizes that no block supports."""
    if min(hidden, heads, intermediate) < 1:
        raise ValueError(f"{name}: sizes are {hidden}, {heads} and {intermediate}; give at least 1 of each")
    if hidden % heads:
        raise ValueError(f"{name}: {heads} heads do not divide {hidden} features")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation {activation} is not among {', '.join(ACTIVATIONS)}")


def check_pixels(batch: Batch, config: Mapping[str, Any]) -> None:
    """Raise ValueError if the samples' images do not have the model's size."""
    size, channels = config["image_size"], config["num_channels"]
    if "pixels" not in batch or batch["pixels"].shape[1:] != (channels, size, size):
        shape = tuple(batch["pixels"].shape[1:]) if "pixels" in batch else "none"
        raise ValueError(
            f"images of {channels} channels and {size} x {size} pixels are read, but those of samples are "
            f"{shape}; set size and channels of data.samples.options, or image_size and num_channels"
        )


def check_patches(image_size: int, patch_size: int) -> int:
    """Return the number of patches of an image. Raises ValueError if patches do not divide it evenly."""
    if patch_size < 1 or image_size < 1 or image_size % patch_size:
        raise ValueError(f"patches of {patch_size} pixels do not fill an image of {image_size}")
    return (image_size // patch_size) ** 2
