"""Which samples a rank reads in each step, and the tensors that they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from orchestrator.data.samples.batches import Batches, StepSamples, slices
from orchestrator.data.samples.mixture.passes import AnyOrder, is_long_enough
from orchestrator.data.samples.own_samples import OwnBatches
from orchestrator.data.samples.receipt import add
from orchestrator.data.samples.skips import start_of
from orchestrator.parallel.arithmetic import Arithmetic
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.row_lengths import FULL_LENGTH, RowLengths, dealing_order, lengths_of
from orchestrator.train.config import Reading, TrainSpec
from orchestrator.train.engines.engine import Engine
from orchestrator.train.rollouts.rollouts import Rollouts
from orchestrator.train.sequence_warmup import shortened
from orchestrator.train.task import Task
from orchestrator.train.training_progress import TrainingProgress
from orchestrator.train.unlabelled import filled_up
from workloads.model.dropout import KEYS, ROW_TOKENS, position_keys
from workloads.workload import Batch, Workload


@dataclass(frozen=True)
class StepPlan:
    """Describes the samples that a step reads. It is the same on every rank.

    Attributes:
        seed: seeds the random numbers of rows.
        train: how the run trains: its steps, the rows of each, their learning rates, and what counts as unstable.
        reading: which samples of data a step reads.
        sequence_length: tokens of a row.
        draws: whether rows need keys for random numbers.
        noise: whether embeddings get noise, which is scaled by the number of tokens of a row.
        staleness: how many rollouts ahead answers are generated.
    """

    seed: int
    train: TrainSpec
    reading: Reading
    sequence_length: int
    draws: bool
    staleness: int = 0
    noise: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step, those that a warm-up of the sequence length leaves out included."""
        return self.train.global_batch * self.sequence_length

    def row_length(self, step: int) -> int | None:
        """Return the tokens of a row in the step after `step` steps; None without a warm-up of the sequence length."""
        warmup = self.train.sequence_warmup
        return warmup.at(step, self.sequence_length) if warmup else None

    def rollout_batches(self, step: int) -> int:
        """Return how many batches of prompts are read after `step` steps, where a rollout begins: also the next one's.

        The run needs no rollout after its last step, unless it may be extended: then it must have the commit that a
        longer run has.
        """
        ends = step + self.reading.steps
        settled = self.train.optimizer.settled(self.train.steps) or 0
        is_needed = ends < self.train.steps or ends <= settled
        return self.reading.batches * (1 + self.staleness * is_needed)

    def lengths(
        self, workload: Workload, layout: Layout, *, on_gpu: bool, packed: bool, has_means: bool
    ) -> RowLengths:
        """Return how the samples of a step become rows, see `row_lengths.lengths_of`.

        Args:
            workload: the model and its objective.
            layout: how the ranks divide the work.
            on_gpu: whether ranks compute on GPUs.
            packed: whether rows are filled with whole documents.
            has_means: whether a teacher adds means over a micro-batch to the loss.
        """
        return lengths_of(workload, layout, self.train, on_gpu=on_gpu, packed=packed, has_means=has_means)


class StepRows(NamedTuple):
    """The rows that a rank trains on in a step, the sum of their receipt digests, and further fields of the step's
    row.
    """

    batches: list[Batch]
    digest: int
    metrics: dict[str, float]


class StepReader:
    """Reads one rank's samples of any step."""

    def __init__(
        self,
        plan: StepPlan,
        layout: Layout,
        rank: int,
        batches: Batches | OwnBatches,
        origin: TrainingProgress,
        others: Callable[[int], Sequence[int]] = lambda step: (),
        pinned: Callable[[Batch], Batch] = lambda batch: batch,
        rollouts: Rollouts | None = None,
        lengths: RowLengths = FULL_LENGTH,
    ) -> None:
        """Make ready to read.

        Args:
            plan: what a step reads.
            layout: how the ranks divide the work.
            rank: this rank's number.
            batches: the samples by position.
            origin: the progress from which the steps of this task continue.
            others: returns the indices on the data axis whose samples this rank reads besides its own, for the number
                of a step. See `Verification.replicas_to_read`.
            pinned: moves a batch into page-locked memory if the device is a GPU.
            rollouts: makes the rows of a step from prompts, if the objective learns from rewards.
            lengths: how the samples of a step become rows.
        """
        self._others = others
        self._plan = plan
        self._batches = batches
        self._layout = layout
        self._rank = rank
        self._origin = origin
        self._pinned = pinned
        self._rollouts = rollouts
        if rollouts is not None:
            rollouts.begin(has_read_answers=origin.arithmetic >= Arithmetic.READ_ANSWERS)
        self._lengths = lengths if origin.arithmetic >= Arithmetic.CUT_ROWS else FULL_LENGTH

    @property
    def ahead(self) -> int:
        """Number of steps whose samples may be read ahead."""
        return self._batches.ahead

    def __call__(self, step: int) -> StepSamples:
        """Return this rank's samples of a step. `Prefetch` calls this in a background thread.

        The ranks of a tensor, context or pipeline group read the same samples, so only the first of them counts the
        digest. The share of padding is computed here too, because the order of samples is not thread-safe.
        """
        size = self._plan.reading.samples
        coordinate = self._layout.coordinate(self._rank)
        if self._rollouts is not None:
            assert isinstance(self._batches, Batches)  # own samples come with their own objective
            starts = self._starts_of_rollout(self._batches.order, step)
            return StepSamples(
                [],
                0,
                None,
                prompts=[self._rollouts.prompts(self._batches, position, size) for position in starts],
            )
        start = self._start_of_batch(self._batch_number(step))
        parts = self._parts(step, start, coordinate["dp"])
        others = [self._parts(step, start, replica) for replica in self._others(step + 1)]
        is_first = coordinate["pp"] == coordinate["cp"] == coordinate["tp"] == 0
        reports_padding = self._batches.packed and self._rank == 0
        return StepSamples(
            batches=[self._pinned(batch) for batch, _ in parts],
            digest=add(digest for _, digest in parts) if is_first else 0,
            padding=self._batches.padding(start, size) if reports_padding else None,
            share=self._share([batch for batch, _ in parts], step),
            others=[[self._pinned(batch) for batch, _ in position] for position in others],
        )

    def _parts(self, step: int, start: int, replica: int) -> list[tuple[Batch, int]]:
        """Return the micro-batches of a replica, each with the sum of its receipt digests.

        Args:
            step: steps done.
            start: position of the first sample of the global batch.
            replica: index on the data axis.
        """
        positions_by_batch = self._positions(start, replica)
        parts = [self._batches.at(positions) for positions in positions_by_batch]
        if self._plan.draws:
            for positions, (batch, _) in zip(positions_by_batch, parts, strict=True):
                # By the position in the data, not by the row or rank: dropout is the same under any layout and after
                # any restart.
                batch[KEYS] = position_keys(self._plan.seed, torch.from_numpy(positions))
        parts = [(self._lengths.cut(batch), digest) for batch, digest in parts]
        if length := self._plan.row_length(step):
            parts = [(shortened(batch, length), digest) for batch, digest in parts]
        if self._plan.noise:
            for batch, _ in parts:
                batch[ROW_TOKENS] = batch.get("padding", torch.ones_like(batch["tokens"])).sum(1)
        count = self._layout.accumulation(self._plan.reading.samples)
        batches = filled_up([batch for batch, _ in parts], count, self._layout.micro_batch)
        digests = [digest for _, digest in parts] + [0] * (count - len(parts))
        return list(zip(batches, digests, strict=True))

    def _positions(self, start: int, replica: int) -> list[np.ndarray]:
        """Return the positions of the samples of each of a replica's micro-batches."""
        size = self._plan.reading.samples
        ranges = slices(0, size, replica, self._layout.dp, self._layout.micro_batch)
        positions = np.arange(start, start + size)
        if self._lengths.deals:
            assert isinstance(self._batches, Batches)  # own samples have no known lengths
            lengths = self._batches.lengths(positions)
            order = dealing_order(lengths, self._layout.micro_batch, self._layout.dp, self._origin.arithmetic)
            positions = positions[order]
        return [positions[first : first + count] for first, count in ranges]

    def _share(self, batches: list[Batch], step: int) -> float:
        """Return the mean length of rows as a share of the full length; 1 where rows are not cut to their samples."""
        if not self._lengths.cuts or self._plan.row_length(step):
            return 1.0
        rows = [batch["padding"].shape for batch in batches if "padding" in batch]
        full_tokens = sum(count for count, _ in rows) * self._plan.sequence_length
        return sum(count * length for count, length in rows) / full_tokens if full_tokens else 1.0

    def _batch_number(self, step: int) -> int:
        """Return the number of a step's batch, counted from this task's first one."""
        reading = self._plan.reading
        return reading.batch_of(step) - reading.batch_of(self._origin.step)

    def _start_of_batch(self, number: int) -> int:
        """Return the position of the first sample of a batch, by its `_batch_number`."""
        return start_of(self._origin.position, number, self._plan.reading.samples, self._origin.skips)

    def _starts_of_rollout(self, order: AnyOrder, step: int) -> list[int]:
        """Return where the batches of a rollout begin, if one begins after `step` steps; see `rollout_batches`.

        The batches of the next rollout are left out if samples are skipped before one of them. A commit that is older
        than the skip has the answers to the skipped prompts, and the weights that would have generated others are
        gone. So a rollout after a skip comes from its own weights, whichever commit the run goes back to. They are also
        left out if the data ends before them, because all sources reach max_passes.
        """
        reading = self._plan.reading
        size = reading.samples
        if step % reading.steps:
            return []
        first = self._batch_number(step)
        starts = list(map(self._start_of_batch, range(first, first + self._plan.rollout_batches(step))))
        is_next_whole = all(after == start + size for start, after in pairwise(starts[reading.batches - 1 :]))
        if is_next_whole and is_long_enough(order, starts[-1] + size):
            return starts
        return starts[: reading.batches]

    def rows(self, samples: StepSamples, engine: Engine, step: int, task: Task) -> StepRows:
        """Return the rows that a step trains on: its samples, or the answers to its prompts.

        Args:
            samples: what the step reads.
            engine: generates the answers.
            step: steps done.
            task: says whether rollouts are kept, and where.
        """
        if self._rollouts is None:
            return StepRows(samples.batches, samples.digest, {})
        rollout = self._rollouts.rows(engine, step, samples.prompts)
        self._rollouts.keep(step + 1, rollout, task)
        batches = [self._pinned(batch) for batch in rollout.batches]
        return StepRows(batches, rollout.digest, rollout.metrics)

    def collect(self, step: int) -> dict[str, float]:
        """Wait for answers that the commit after `step` steps stores. Return fields of the step's row."""
        return self._rollouts.collect(step) if self._rollouts is not None else {}


MakeReader = Callable[[Batches | OwnBatches, TrainingProgress, Callable[[int], Sequence[int]]], StepReader]
"""Returns what reads the samples of the steps that continue from a progress, with `others` as of `StepReader`."""


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for a step. Randomness depends on (seed, step, rank) only, so commits need no random state.

    Args:
        seed: of the run.
        step: steps done.
        rank: whose random numbers are drawn.
    """
    # Mixed radix with primes: no two of a million steps and 65,537 ranks share a number.
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)
