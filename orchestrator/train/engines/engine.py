"""The seam between the loop and what computes: the training step, and the state by tensor name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.reader import Reader
from workloads.workload import Batch


@dataclass(frozen=True)
class Metrics:
    """Of one step over the whole global batch, the same on every rank.

    `loss` is the mean over predicted tokens in nats, `grad_norm` the global norm before clipping, `extra`
    whatever else the workload measured, each a mean over the global batch. `busy_seconds` alone is this rank's: how
    long it worked until it waited for the gradients of others, 0 where the layout has them wait for each other before.
    """

    loss: float
    grad_norm: float
    extra: dict[str, float] = field(default_factory=dict)
    busy_seconds: float = 0.0


class Engine(Protocol):
    """Computes steps under one layout. Schedules and DeepSpeed own the backward pass, so the step is the seam.

    State is one flat namespace in fp32, whatever the layout: `model.<name>`, `optim.<name>.<slot>` and the
    scalar `optim.step`, with the layers' original numbers.
    """

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> Metrics:
        """One optimiser step over this rank's micro-batches, as one member of the gang."""

    def eval_step(self, micro_batches: Sequence[Batch]) -> Metrics:
        """Loss only, nothing changes."""

    def initialise(self, seed: int) -> None:
        """Weights as published, from (seed, name) alone; optimiser state zero."""

    def state(self) -> Iterable[TensorPiece]:
        """The pieces that this rank must save: over all ranks they tile every tensor once."""

    def load(self, reader: Reader) -> None:
        """Take over a commit. Raises InputError if it is of another model."""

    def poison(self) -> None:
        """Make the numbers of the next step of all ranks NaN, by this rank's weights; for tests of what follows."""

    def close(self) -> None:
        """Release what the engine holds."""
