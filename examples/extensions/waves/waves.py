"""Noisy sine waves, and a recurrent network that predicts their next value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn


class Waves:
    """A dataset of sine waves of random frequency and phase.

    Args:
        count: samples.
        length: values of a sample.
        noise: standard deviation of what is added to each value.
    """

    def __init__(self, count: int = 1000, length: int = 32, noise: float = 0.05) -> None:
        self.count = count
        self.length = length
        self.noise = noise

    def __len__(self) -> int:
        return self.count

    def sample(self, number: int, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
        """values: float [length + 1]. Each reading draws its own noise; the wave depends on the number alone."""
        wave = np.random.default_rng(number)
        times = np.arange(self.length + 1) * wave.uniform(0.1, 0.5) + wave.uniform(0, 2 * np.pi)
        return {"values": np.sin(times) + self.noise * rng.standard_normal(self.length + 1)}

    def fingerprint(self) -> str:
        """Which data this is; a run refuses another."""
        return f"waves-1-{self.count}-{self.length}-{self.noise}"


class WaveGRU(nn.Module):
    """A GRU with a linear head.

    Args:
        width: hidden units.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean squared error of each sample, [B]."""
        values = batch["values"]
        hidden, _ = self.gru(values[:, :-1, None])
        return torch.square(self.head(hidden)[..., 0] - values[:, 1:]).mean(1)

    def blocks(self) -> Sequence[nn.Module]:
        """The layers that are sharded and recomputed one by one."""
        return [self.gru]
