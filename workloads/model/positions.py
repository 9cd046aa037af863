"""Position encodings: rotary angles, sinusoids and relative buckets.

Everything is computed from positions in the forward pass, so a model built on the meta device has no buffers to
restore.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from workloads.model.config import TransformerConfig
from workloads.model.parts import RopeScaling

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, fp32, [1 or B, 1, L, rotary_dim]."""


def rotary(config: TransformerConfig, positions: Tensor, windowed: bool = False) -> Rotary:
    """Return the rotary tables (Su et al. 2021, eq. 34) for `positions` [1 or B, L], scaled as configured.

    `windowed` selects the tables of layers with a window.

    Args:
        config: base, scaling and width.
        positions: int64 [1 or B, L].
        windowed: whether the layers have a window.
    """
    even = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    near = config.window_theta if windowed else 0.0
    frequencies = (near or config.rope_theta) ** -(even / config.rotary_dim)
    gain = 1.0
    if config.rope_scaling and not near:
        frequencies, gain = _scaled(frequencies, config.rope_scaling, config)
    # fp32: in bf16 a position beyond 256 is rounded to its neighbours.
    angles = positions[:, None, :, None].float() * frequencies
    # Halves and not neighbours are pairs (as Hugging Face's Llama has them), so each angle stands at i and i + d / 2.
    angles = torch.cat((angles, angles), dim=-1)
    # The gain on query and key alike multiplies every score by gain^2 (YaRN's temperature), without a change of the
    # attention kernel.
    return angles.cos() * gain, angles.sin() * gain


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """Rotate x [B, heads, L, rotary_dim] in the pairs (i, i + rotary_dim / 2), as in Llama.

    Args:
        x: queries or keys.
        table: cosine and sine, [1 or B, 1, L, rotary_dim] each.
    """
    # The tables are cast and not x: a product in fp32 would double the memory of queries and keys.
    cos, sin = (t.to(x.dtype) for t in table)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _scaled(frequencies: Tensor, scaling: RopeScaling, config: TransformerConfig) -> tuple[Tensor, float]:
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, config), _yarn_gain(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate in between (Llama 3.1 release)."""
    # Full rotations of each frequency within the original length.
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    blend = blend.clamp(0, 1)
    return blend * frequencies + (1 - blend) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: TransformerConfig) -> Tensor:
    """Scale frequencies by NTK by parts (Peng et al. 2023, eq. 22 and 23), with the ramp over the frequency index."""
    dim = config.rotary_dim

    def index(turns: float) -> float:
        # The (fractional) index of the frequency with this many rotations within the original length.
        wave = scaling.original_positions / (turns * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(config.rope_theta))

    low = index(scaling.beta_fast)
    high = index(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    steps = torch.arange(dim // 2, device=frequencies.device, dtype=torch.float32)
    ramp = ((steps - low) / ((high - low) or 0.001)).clamp(0, 1)
    return ramp * frequencies / scaling.factor + (1 - ramp) * frequencies


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the attention temperature under YaRN (eq. 25).

    Args:
        factor: by which the length is stretched.
        mscale: weight of the logarithm.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_gain(scaling: RopeScaling) -> float:
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all)
    return yarn_mscale(scaling.factor)


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """Return fixed position vectors (Vaswani et al. 2017, section 3.5), sines first: fp32 [.., L, size].

    Angles are computed in fp64: in fp32 they are off by 3e-5 at position 1000.

    Args:
        positions: int64 [..].
        size: of a vector.
    """
    half = torch.arange(size // 2, device=positions.device, dtype=torch.float64)
    angles = positions[..., None].double() * 10000.0 ** -(half / (size // 2))
    return torch.cat((angles.sin(), angles.cos()), dim=-1).float()


class RelativeBias(nn.Module):
    """T5's learned attention bias by bucketed distance (Raffel et al. 2020, section 2.1).

    weight is [heads, buckets], so that it can be sharded over heads like the projections.
    """

    def __init__(self, config: TransformerConfig, bidirectional: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.heads, config.relative_buckets))
        self.bidirectional = bidirectional
        self.buckets, self.distance = config.relative_buckets, config.relative_distance

    def forward(self, length: int) -> Tensor:
        """Return the bias [1, heads, length, length] that is added to the attention scores."""
        steps = torch.arange(length, device=self.weight.device)
        return self.weight[:, self.bucket(steps[None, :] - steps[:, None])].unsqueeze(0)

    def apart(self, positions: Tensor) -> Tensor:
        """Return the bias [1 or B, heads, L, L] of tokens at `positions` int64 [1 or B, L]."""
        return self.weight[:, self.bucket(positions[:, None, :] - positions[:, :, None])].transpose(0, 1)

    def between(self, positions: Tensor, length: int) -> Tensor:
        """Return the bias [B, heads, L, length] of queries at `positions` int64 [B, L] and keys at 0, 1, ...

        Args:
            positions: of the queries, int64 [B, L].
            length: number of keys.
        """
        steps = torch.arange(length, device=self.weight.device)
        return self.weight[:, self.bucket(steps - positions[:, :, None])].transpose(0, 1)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of key position minus query position: exact when near, logarithmic when far."""
        buckets = self.buckets // 2 if self.bidirectional else self.buckets
        after = (distance > 0) * buckets if self.bidirectional else torch.zeros_like(distance)
        away = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        exact = buckets // 2
        # Share of the logarithmic range, 0 at `exact` and 1 at `distance`. The clamp avoids log 0, which `where`
        # discards.
        far = torch.log(away.float().clamp(min=1) / exact) / math.log(self.distance / exact)
        far = (exact + (far * (buckets - exact)).long()).clamp(max=buckets - 1)
        return after + torch.where(away < exact, away, far)
