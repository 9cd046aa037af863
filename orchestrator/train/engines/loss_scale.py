"""Dynamic loss scaling, so that small gradients survive fp16 (Micikevicius et al., 2018, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.reader import Reader

INITIAL_SCALE = 2.0**16
"""Loss scale of the first step."""
MIN_SCALE = 1.0
"""Minimum loss scale; an overflow at this scale is an error."""
GROW_AFTER = 2000
"""Steps without overflow after which the scale doubles."""


class LossScale:
    """The loss scale: halved after an overflow, doubled after 2000 steps without one. It is part of the saved state."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = INITIAL_SCALE if enabled else 1.0
        self._good = 0

    def overflow(self) -> bool:
        """Halve the scale after an overflow.

        Returns:
            Whether the step may be skipped; False once the scale is at its minimum.
        """
        if not self.enabled or self.value <= MIN_SCALE:
            return False
        # Powers of two: scaling and unscaling change only the exponent, so gradients have the same bits at any scale
        # that neither over- nor underflows.
        self.value = self.value / 2
        self._good = 0
        return True

    def succeed(self) -> None:
        """Count a step without overflow."""
        self._good += self.enabled
        if self._good == GROW_AFTER:
            self.value = self.value * 2
            self._good = 0

    def pieces(self) -> Iterator[TensorPiece]:
        """The pieces for a commit."""
        if self.enabled:
            yield full_piece("optim.loss_scale", torch.tensor(self.value))
            yield full_piece("optim.good_steps", torch.tensor(self._good, dtype=torch.int64))

    def load(self, reader: Reader) -> None:
        """Load from a commit. A commit of a run in another precision has no loss scale, and changes nothing."""
        if self.enabled and "optim.loss_scale" in reader.manifest.tensors:
            self.value = float(reader.read("optim.loss_scale"))
            self._good = int(reader.read("optim.good_steps"))
