"""The contract between the training loop and an engine: the training step, and the state by tensor name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.reader import Reader
from orchestrator.parallel.losses import EvaluationSums
from orchestrator.parallel.step_clock import StepClock
from orchestrator.parallel.witness import Record
from orchestrator.train.distillation.teacher import PlacedTop
from workloads.workload import Batch, Workload


@dataclass(frozen=True)
class Metrics:
    """Metrics of one step over the global batch, the same on every rank except `busy_seconds`.

    Attributes:
        loss: mean over predicted tokens, in nats; None if the step predicts nothing.
        grad_norm: global norm of the gradients before clipping.
        extra: other metrics of the workload, each a mean over the global batch. A mean of no values is left out.
        busy_seconds: time this rank computed before it waited for the gradients of others; 0 if its layout makes ranks
            wait for each other earlier.
        layers: statistics by layer, if the step collects them.
    """

    loss: float | None
    grad_norm: float
    extra: dict[str, float] = field(default_factory=dict)
    busy_seconds: float = 0.0
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class StepCheck(Protocol):
    """Compares a step with what other ranks computed, between its parts.

    Attributes:
        exact: whether bits are compared, see `Witness.begin`.
        giver, taker: the rank whose update this rank computes again, and the rank that computes this rank's update
            again; None to compute none again.
    """

    exact: bool
    giver: int | None
    taker: int | None

    def gradients(self, record: Record) -> None:
        """Compare the messages of the forward and backward passes, before the update. Raises ComputedWrongly."""

    def update(self, copies: Record, own_shards: Record, giver_shards: Record) -> None:
        """Compare updated weights and optimizer states. Raises ComputedWrongly.

        Args:
            copies: of the shards that `taker` holds too.
            own_shards: of this rank's other shards.
            giver_shards: of those of `giver`, as this rank computes them.
        """


class Engine(Protocol):
    """Computes steps under one layout. The contract is a full step, because pipeline schedules and DeepSpeed run the
    backward pass themselves.

    The state is one flat namespace in fp32 under any layout: `model.<name>`, `optim.<name>.<slot>`, the scalar
    `optim.step`, if the job has a moving average of its weights `average.<name>` for every parameter, and of pruned
    matrices `prune.<name>.<slot>`, whose masks are boolean. Layers keep the numbers of the whole model.

    Attributes:
        clock: the time of the last step by part.
        before_change: called before weights or optimizer states change in place. Whoever still reads the pieces of
            `state` sets it, and returns once it has read them.
    """

    clock: StepClock
    before_change: Callable[[], None]

    def train_step(
        self, micro_batches: Sequence[Batch], lr: float, check: StepCheck | None = None
    ) -> Metrics:
        """Do one optimizer step over this rank's micro-batches. All ranks call it together.

        Args:
            micro_batches: the rows of this rank.
            lr: the learning rate.
            check: compares the step with what other ranks computed; None in a step that is not verified.
        """

    def compute_again(self, micro_batches: Sequence[Batch], exact: bool) -> Record:
        """Compute the gradients of micro-batches that may be another rank's, and return the messages of that.

        All ranks call it together. No state changes, except gradients, which the next step computes anew. Replicas do
        not sum them.

        Args:
            micro_batches: the rows.
            exact: see `Witness.begin`.
        """

    def test_device(self, seed: int) -> list[str]:
        """Return a line for each test of this rank's device with a wrong result, see `burn_in`."""

    def damage(self, kind: str, seed: int, bit: int | None = None) -> None:
        """Make this rank compute wrongly from now on. An injected fault; for the arguments see `Flaw`.

        Args:
            kind: what is wrong: product, gradient or update.
            seed: chooses the layer, the number and the bit.
            bit: the bit; None to let the seed choose.
        """

    def eval_step(self, micro_batches: Sequence[Batch]) -> EvaluationSums:
        """Return the sums of a forward pass over all ranks' micro-batches, at least one each. No state changes."""

    def take_baseline(self, sums: EvaluationSums) -> None:
        """Set the baseline of rewards for further calls of `eval_step`, from the sums of a first one (KTO only)."""

    def next_logits(self, micro_batches: Sequence[Batch]) -> list[tuple[int, Tensor]]:
        """Return every label in all ranks' micro-batches with the logits at its position, fp32 [vocabulary].

        Each label is returned on one rank. Every rank passes at least one micro-batch. No state changes.
        """

    def log_probabilities(self, micro_batches: Sequence[Batch]) -> list[Tensor]:
        """Return the log-probabilities of both answers of each row, fp32 [B, 2] for each micro-batch.

        Of the ranks that compute the same micro-batches one returns them, and the others return an empty list. No
        state changes.
        """

    def token_log_probabilities(
        self, micro_batches: Sequence[Batch], of_reference: bool = False
    ) -> list[Tensor]:
        """Return the log-probabilities of the labels, fp32 [B, L] for each micro-batch; 0 where nothing is predicted.

        Every rank passes its micro-batches of a step. In a pipeline only the last stage returns values; the others
        return zeros. No state changes.

        Args:
            micro_batches: rows with generated answers, see `workloads.objectives.rewarded`.
            of_reference: whether to use the reference model that `hold_reference` keeps.
        """

    def hold_reference(self, seed: int) -> None:
        """Initialise the weights, and keep a copy as the reference model of steps and evaluations."""

    def hold_teacher(self, workload: Workload, base: str) -> None:
        """Hold a frozen teacher at this layout, which training and evaluation steps learn from.

        Args:
            workload: the teacher, for the student's objective and vocabulary.
            base: checksum of its weights.
        """

    def release_teacher(self) -> None:
        """Free the teacher's memory, if there is one."""

    def teacher_logits(self, micro_batches: Sequence[Batch], k: int, temperature: float) -> list[PlacedTop]:
        """Return the teacher's largest logits for each micro-batch. No state changes.

        Args:
            micro_batches: the micro-batches of this rank.
            k: number of logits per token.
            temperature: the temperature that divides the logits before the log-sum over the vocabulary.

        Returns:
            One entry per micro-batch. Of the ranks that compute the same micro-batches one returns them, and the others
            return an empty list.
        """

    def swap_average(self) -> None:
        """Exchange the weights and their moving average, on all ranks together.

        A second call restores the same bits. Between the two calls only `eval_step` may be called.
        """

    def initialise(self, seed: int) -> None:
        """Initialise the weights from (seed, parameter name) as in the model's paper, and clear the optimizer state."""

    def state(self) -> Iterable[TensorPiece]:
        """Return the pieces that this rank saves; those of all ranks cover every element once.

        They keep their values until `before_change` is called: forward and backward passes do not change them.
        """

    def load(self, reader: Reader) -> None:
        """Load a commit. Raises InputError if it belongs to another model."""

    def poison(self) -> None:
        """Set this rank's weights to NaN, so that the next step's numbers are NaN on all ranks. An injected fault."""

    def close(self) -> None:
        """Free the engine's memory."""
