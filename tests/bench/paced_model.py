"""A model that sleeps for each sample in place of a device's work, its samples, and what the planner adds for it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from orchestrator.parallel.layout import Layout
from orchestrator.planner.simulation.step import StepTime


class Points:
    """Points and a number for each."""

    def __len__(self) -> int:
        return 100_000

    def sample(self, number: int, rng: np.random.Generator) -> dict[str, Any]:
        """One point."""
        point = rng.standard_normal(16).astype(np.float32)
        return {"point": point, "value": float(np.sin(point).sum())}


class Paced(nn.Module):
    """Two layers, and a pause of `seconds` for each sample."""

    def __init__(self, seconds: float, width: int = 64) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ModuleList([nn.Linear(16, width), nn.Linear(width, 1)])

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """See `workloads.own.protocols.Model`."""
        time.sleep(self.seconds * len(batch["point"]))
        found = self.layers[1](torch.tanh(self.layers[0](batch["point"])))[:, 0]
        return (found - batch["value"]).square()


def seconds_of(layout: Layout, step: StepTime, memory: float, seconds: float, batch: int) -> float:
    """The pauses of a step, see `orchestrator.planner.own_cost.Cost`."""
    return seconds * batch / layout.dp
