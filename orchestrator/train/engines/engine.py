"""The contract between the training loop and an engine: the training step, and the state by tensor name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.reader import Reader
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.step_clock import StepClock
from workloads.workload import Batch


@dataclass(frozen=True)
class Metrics:
    """Metrics of one step over the global batch, the same on every rank except `busy_seconds`.

    Attributes:
        loss: mean over predicted tokens, in nats; None if the step predicts nothing.
        grad_norm: global norm of the gradients before clipping.
        extra: other metrics of the workload, each a mean over the global batch; without those that are of nothing.
        busy_seconds: time this rank computed before it waited for the gradients of others; 0 if its layout makes ranks
            wait for each other earlier.
    """

    loss: float | None
    grad_norm: float
    extra: dict[str, float] = field(default_factory=dict)
    busy_seconds: float = 0.0


class Engine(Protocol):
    """Computes steps under one layout. The contract is a full step, because pipeline schedules and DeepSpeed run the
    backward pass themselves.

    The state is one flat namespace in fp32 under any layout: `model.<name>`, `optim.<name>.<slot>`, the scalar
    `optim.step` and, of a job with a moving average of its weights, `average.<name>` for every parameter; with the
    layers' original numbers. `clock` has where the time of the last step went.
    """

    clock: StepClock

    def train_step(self, micro_batches: Sequence[Batch], lr: float) -> Metrics:
        """One optimiser step over this rank's micro-batches; all ranks call it together."""

    def eval_step(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """The sums of a forward pass over the micro-batches of all ranks, at least one each; no state changes."""

    def take_baseline(self, sums: EvaluationSums) -> None:
        """Of an objective whose rewards are counted from a mean over all samples (kto): count them from that in `sums`
        in further calls of `eval_step`."""

    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """The logits at the labels in the micro-batches of all ranks, at least one each: of every label itself and
        fp32 [vocabulary], each on one rank. No state changes."""

    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """The log-probabilities of both answers of each row, fp32 [B, 2] of each micro-batch, on one of the ranks that
        computed it and empty on the others. No state changes."""

    def hold_reference(self, seed: int) -> None:
        """Initialise the weights, and keep a copy as the reference with which steps and evaluations compare."""

    def swap_average(self) -> None:
        """Exchange the weights and their moving average, on all ranks together; a second time to go back to the same
        bits. Between the two calls only `eval_step` may be called."""

    def initialise(self, seed: int) -> None:
        """Initialise the weights from (seed, parameter name) as the model's paper says, and the optimiser state to
        zero."""

    def state(self) -> Iterable[TensorPiece]:
        """The pieces that this rank saves; over all ranks they tile every tensor once."""

    def load(self, reader: Reader) -> None:
        """Load a commit. Raises InputError if it is of another model."""

    def poison(self) -> None:
        """Set this rank's weights to NaN, so that the next step's numbers are NaN on all ranks. An injected fault."""

    def close(self) -> None:
        """Free the engine's memory."""
