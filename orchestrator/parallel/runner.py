"""How the micro-batches of a step are run: through a pipeline, compared with each other, or one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orchestrator.parallel.collectives import gathered
from orchestrator.parallel.device import Device
from orchestrator.parallel.fsdp import reshard
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parameter_shard import DataParallel
from orchestrator.parallel.pipeline import Pipeline
from orchestrator.parallel.step_clock import BACKWARD, FORWARD, StepClock
from workloads.own.model import OwnWorkload
from workloads.own.network import Losses
from workloads.own.rows import COUNTED
from workloads.workload import Batch, Workload


class WholeBatch:
    """See `orchestrator.parallel.runner.Accumulation`. Samples are compared in the order of the global
    batch, whatever the layout: each rank has a stretch of it."""

    def __init__(
        self,
        model: nn.Module,
        workload: OwnWorkload,
        mesh: Mesh,
        data: DataParallel,
        losses: StepLosses,
        device: Device,
        clock: StepClock,
    ) -> None:
        self._model, self._workload, self._group, self._data = model, workload, mesh.data, data
        self._losses, self._device, self._clock = losses, device, clock

    def train(self, micro_batches: Sequence[Batch]) -> None:
        """Compute this rank's gradients of the step."""
        count = len(micro_batches)
        if count == 1:
            self._data.micro_batch(last=True)
        batches, outputs = self._forward(micro_batches, keep=count == 1)
        losses, gradients = self._compare(batches, outputs)
        # Not in the casts of the first pass, which have no graph.
        with self._device.casting_once():
            for number, (batch, output) in enumerate(zip(batches, outputs, strict=True), start=1):
                if count > 1:
                    self._clock.switch(FORWARD)
                    self._data.micro_batch(number == count)
                    with self._device.autocast():
                        output = self._model(batch)
                through = (output.losses.float() * gradients[number - 1]).sum(1)
                its = losses[number - 1] + (
                    through - through.detach()
                )  # the loss, and the gradient of features
                loss = self._losses.of(output._replace(losses=its), batch, count)
                self._clock.switch(BACKWARD)
                loss.backward()

    def evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the losses only."""
        batches, outputs = self._forward(micro_batches, keep=False)
        features, counted = self._everyone(batches, outputs)
        found = self._mine(self._workload.compared(features, counted), batches)
        for batch, output, its in zip(batches, outputs, found, strict=True):
            self._losses.of(output._replace(losses=its), batch, len(batches))

    def _forward(self, micro_batches: Sequence[Batch], keep: bool) -> tuple[list[Batch], list[Losses]]:
        """The batches on the device, and their features; with a graph if that is to be kept."""
        self._clock.switch(FORWARD)
        batches = [self._losses.prepare(batch) for batch in micro_batches]
        outputs = []
        for batch in batches:
            with contextlib.nullcontext() if keep else torch.no_grad(), self._device.autocast():
                outputs.append(self._model(batch))
        if not keep:
            reshard(self._model)  # what follows with a graph gathers its own weights
        return batches, outputs

    def _compare(self, batches: list[Batch], outputs: list[Losses]) -> tuple[list[Tensor], list[Tensor]]:
        """The losses of this rank's samples and the gradients of their features, by micro-batch."""
        features, counted = self._everyone(batches, outputs)
        features.requires_grad_()
        losses = self._workload.compared(features, counted)
        total = losses.masked_fill(~counted, 0.0).sum()
        (gradient,) = torch.autograd.grad(total, features)
        return self._mine(losses.detach(), batches), self._mine(gradient, batches)

    def _everyone(self, batches: list[Batch], outputs: list[Losses]) -> tuple[Tensor, Tensor]:
        """The features of the global batch, fp32 [G, E], and which samples count, bool [G]."""
        mine = torch.cat([output.losses.detach().float() for output in outputs])
        there = torch.cat([batch[COUNTED] for batch in batches]).to(torch.uint8)
        whole = gathered(mine, 0, self._group)
        return whole.detach(), gathered(there, 0, self._group).bool()

    def _mine(self, whole: Tensor, batches: list[Batch]) -> list[Tensor]:
        """This rank's rows, by micro-batch."""
        sizes = [len(batch[COUNTED]) for batch in batches]
        first = self._group.index * sum(sizes)
        return list(whole[first : first + sum(sizes)].split(sizes))


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


Runner = Accumulation | Pipeline | WholeBatch


def runner_of(
    stages: list[nn.Module],
    workload: Workload,
    layout: Layout,
    mesh: Mesh,
    data: DataParallel,
    losses: StepLosses,
    device: Device,
    clock: StepClock,
) -> Runner:
    """What runs the stages of this rank."""
    if layout.pp > 1:
        return Pipeline(stages, workload, layout, mesh, losses, device, clock)
    if isinstance(workload, OwnWorkload) and workload.compares:
        return WholeBatch(stages[0], workload, mesh, data, losses, device, clock)
    return Accumulation(stages[0], data, losses, device, clock)
