"""A reference model that an engine holds: the initial weights, with which preferences and rewards compare answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from orchestrator.config.records import REWARDED
from orchestrator.parallel.parameter_shard import DataParallel
from orchestrator.train.engines.forward_passes import ForwardPasses
from workloads.objectives.preferences import REFERENCE
from workloads.objectives.rewarded import REFERENCE_TOKENS
from workloads.workload import Batch, Workload


class HeldReference:
    """A copy of the initial weights, sharded like the parameters. Empty unless the job keeps a reference model."""

    def __init__(
        self,
        is_held: bool,
        workload: Workload,
        data: DataParallel,
        passes: ForwardPasses,
        before_change: Callable[[], None],
    ) -> None:
        """Allocate the copy; `hold` fills it.

        Args:
            is_held: whether the job keeps a reference model.
            workload: the model and its objective.
            data: this rank's shards of the trained parameters.
            passes: compute log-probabilities under the model's weights.
            before_change: called before the weights are exchanged, see `Engine`.
        """
        self._per_token = workload.objective.name in REWARDED
        self._data = data
        self._passes = passes
        self._before_change = before_change
        # One copy of the trained parameters alone: the frozen ones are the reference's too.
        self.tensors = [torch.empty_like(shard.parameter) for shard in data.shards] if is_held else []

    @torch.no_grad()
    def hold(self) -> None:
        """Copy the present weights."""
        for copy, shard in zip(self.tensors, self._data.shards, strict=False):
            copy.copy_(shard.parameter)

    @contextlib.contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Context manager in which the model computes with the reference; the weights have the same bits afterwards."""
        self._swap()
        yield
        # Not after an exception: other ranks may not be there, and publishing would wait for them.
        self._swap()

    def add_to(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches with their answers' log-probabilities under the reference, if this rank holds it."""
        if not self.tensors or micro_batches[0].keys() & {REFERENCE, REFERENCE_TOKENS}:
            return micro_batches
        if self._per_token:
            with self.in_place_of_weights():
                values = self._passes.token_log_probabilities(micro_batches)
            return [
                {**batch, REFERENCE_TOKENS: log_probabilities}
                for batch, log_probabilities in zip(micro_batches, values, strict=True)
            ]
        with self.in_place_of_weights():
            answers = self._passes.answer_log_probabilities(micro_batches, on_every_rank=True)
        # Only a pipeline's last stage computes and reads them. The other stages add zeros of the same shape, so that
        # the key is there and this pass does not run a second time for the same micro-batches.
        answers = answers or [torch.zeros(len(batch["tokens"]), 2) for batch in micro_batches]
        return [
            {**batch, REFERENCE: log_probabilities}
            for batch, log_probabilities in zip(micro_batches, answers, strict=True)
        ]

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the weights and the reference; a second call restores the same bits."""
        self._before_change()
        for copy, shard in zip(self.tensors, self._data.shards, strict=True):
            weight = shard.parameter.clone()
            shard.parameter.copy_(copy)
            copy.copy_(weight)
        # Ranks hold slices of the exchanged weights; the model computes with the gathered ones.
        self._data.publish()
