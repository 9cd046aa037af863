"""What torch draws within a step."""

from __future__ import annotations

import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for a step: randomness is a function of (seed, step, rank), so that no random state must be saved."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)
