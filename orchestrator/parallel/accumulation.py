"""Gradient accumulation over micro-batches, without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from orchestrator.parallel.device import Device
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.parameter_shard import DataParallel
from orchestrator.parallel.step_clock import BACKWARD, FORWARD, StepClock
from workloads.workload import Batch


class Accumulation:
    """Forward and backward of every micro-batch; gradients add up in the parameters."""

    def __init__(
        self, model: nn.Module, data: DataParallel, losses: StepLosses, device: Device, clock: StepClock
    ) -> None:
        self._model, self._data, self._losses, self._device = model, data, losses, device
        self._clock = clock

    def train(self, micro_batches: Sequence[Batch]) -> None:
        """Compute this rank's gradients of the step."""
        with self._device.casting_once():
            for number, batch in enumerate(micro_batches, start=1):
                self._clock.switch(FORWARD)
                self._data.micro_batch(number == len(micro_batches))
                batch = self._losses.prepare(batch)
                with self._device.autocast():
                    output = self._model(batch, in_chunks=self._losses.in_chunks)
                    loss = self._losses.of(output, batch, len(micro_batches))
                self._clock.switch(BACKWARD)
                loss.backward()

    def evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the losses only."""
        for batch in micro_batches:
            batch = self._losses.prepare(batch)
            with self._device.autocast():
                output = self._model(batch, in_chunks=self._losses.in_chunks)
                self._losses.of(output, batch, len(micro_batches))
