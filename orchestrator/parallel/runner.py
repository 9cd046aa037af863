"""Run the micro-batches of a step: one after the other, through a pipeline, or compared with each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from orchestrator.parallel.collectives import gathered
from orchestrator.parallel.ddp import Ddp
from orchestrator.parallel.device import Device
from orchestrator.parallel.fsdp import reshard
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.parameter_shard import DataParallel
from orchestrator.parallel.pipeline import Pipeline
from orchestrator.parallel.step_clock import BACKWARD, FORWARD, StepClock
from orchestrator.parallel.zero1 import Zero1
from workloads.own.network import Losses
from workloads.own.rows import COUNTED
from workloads.workload import Batch, Workload


def add_rows(tables: Iterable[nn.Embedding]) -> None:
    """Make tables of embeddings add their gradients to the sum row by row.

    The gradient of an embedding is dense: torch fills a tensor of the table's size with zeros for every micro-batch,
    and adds all of it to the sum. For a vocabulary of 30,000 and short micro-batches that takes as long as a layer, and
    the memory of the whole table. A sparse gradient of the rows of tokens that occur adds the same bits. This is so on
    CPUs alone: a GPU would have to wait until the number of rows is read back.

    Args:
        tables: a forward pass reads each of them once, and nothing else reads them: sums in another order would have
            other bits.
    """
    for table in tables:
        table.forward = partial(_embed, table)  # type: ignore[method-assign]


def _embed(module: nn.Embedding, ids: Tensor) -> Tensor:
    weight = module.weight
    # A trace has no values, so the number of rows is unknown there. Without a sum, the gradient would stay sparse.
    is_traced = isinstance(ids, FakeTensor)
    if not is_traced and torch.is_grad_enabled() and weight.is_leaf and weight.grad is not None:
        result: Tensor = _RowGradient.apply(weight, ids)
        return result
    return F.embedding(ids, weight)


class _RowGradient(torch.autograd.Function):
    """`F.embedding` with a sparse gradient, of one row for each token that occurs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.shape = weight.shape
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        unique_ids, inverse = ids.unique(return_inverse=True)
        # The sums of each row first, as the dense gradient has them, so that the bits are the same.
        sums = torch.ops.aten.embedding_dense_backward(
            gradient.contiguous(), inverse, len(unique_ids), -1, False
        )
        rows = torch.sparse_coo_tensor(
            unique_ids.unsqueeze(0), sums, ctx.shape, check_invariants=False, is_coalesced=True
        )
        return rows, None


class WholeBatch:
    """Forward and backward passes for a loss that compares all samples of the global batch (contrastive losses).

    The loss of a sample depends on the features of all G samples, so it is known only after every forward pass. To
    hold one micro-batch's graph at a time, a step runs in three passes (gradient cache: Gao et al., 2021, section 3.2):

    1. forward passes without graphs; the features fp32 [G, E] of all ranks are gathered
    2. the losses [G] of all samples and their gradient with respect to the features, dL/df [G, E]
    3. for each micro-batch the forward pass again, and a backward pass from f . dL/df

    With one micro-batch a rank, the graph of the first pass is kept and the third skips its forward pass. Samples are
    compared in the order of the global batch under any layout; each rank has a contiguous part of it.
    """

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        mesh: Mesh,
        data: DataParallel,
        losses: StepLosses,
        device: Device,
        clock: StepClock,
    ) -> None:
        self._model = model
        self._workload = workload
        self._group = mesh.data
        self._data = data
        self._losses = losses
        self._device = device
        self._clock = clock

    def train(self, micro_batches: Sequence[Batch]) -> None:
        """Compute this rank's gradients of the step."""
        count = len(micro_batches)
        if count == 1:
            self._data.micro_batch(last=True)
        batches, outputs = self._forward(micro_batches, keep=count == 1)
        losses, gradients = self._compare(batches, outputs)
        # A new scope of casts: those of the first pass were made without a graph.
        with self._device.casting_once():
            for number, (batch, output) in enumerate(zip(batches, outputs, strict=True), start=1):
                if count > 1:
                    self._clock.switch(FORWARD)
                    self._data.micro_batch(number == count)
                    with self._device.autocast():
                        output = self._model(batch)
                # Zero in value, with the gradient dL/df for the features: [B, E] x [B, E] -> [B].
                through = (output.losses.float() * gradients[number - 1]).sum(1)
                sample_losses = losses[number - 1] + (through - through.detach())
                loss = self._losses.of(output._replace(losses=sample_losses), batch, count)
                self._clock.switch(BACKWARD)
                loss.backward()

    def evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the losses only."""
        batches, outputs = self._forward(micro_batches, keep=False)
        features, counted = self._gather(batches, outputs)
        losses = self._own_rows(self._workload.compared(features, counted), batches)
        for batch, output, sample_losses in zip(batches, outputs, losses, strict=True):
            self._losses.of(output._replace(losses=sample_losses), batch, len(batches))

    def _forward(self, micro_batches: Sequence[Batch], keep: bool) -> tuple[list[Batch], list[Losses]]:
        """Return the batches on the device and their features [B, E]; `keep` keeps the graph for the backward pass."""
        self._clock.switch(FORWARD)
        batches = [self._losses.prepare(batch) for batch in micro_batches]
        outputs = []
        for batch in batches:
            with contextlib.nullcontext() if keep else torch.no_grad(), self._device.autocast():
                outputs.append(self._model(batch))
        if not keep:
            reshard(self._model)  # the passes with a graph gather the weights themselves
        return batches, outputs

    def _compare(self, batches: list[Batch], outputs: list[Losses]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the losses [B] of this rank's samples and the gradients [B, E] of their features, by micro-batch."""
        features, counted = self._gather(batches, outputs)
        features.requires_grad_()
        losses = self._workload.compared(features, counted)
        total = losses.masked_fill(~counted, 0.0).sum()
        (gradient,) = torch.autograd.grad(total, features)
        return self._own_rows(losses.detach(), batches), self._own_rows(gradient, batches)

    def _gather(self, batches: list[Batch], outputs: list[Losses]) -> tuple[Tensor, Tensor]:
        """Return the features of the global batch, fp32 [G, E], and whether each sample counts, bool [G]."""
        features = torch.cat([output.losses.detach().float() for output in outputs])
        counted = torch.cat([batch[COUNTED] for batch in batches]).to(torch.uint8)
        all_features = gathered(features, 0, self._group)
        return all_features.detach(), gathered(counted, 0, self._group).bool()

    def _own_rows(self, full: Tensor, batches: list[Batch]) -> list[Tensor]:
        """Return this rank's rows of a tensor [G, ...], by micro-batch."""
        sizes = [len(batch[COUNTED]) for batch in batches]
        first = self._group.index * sum(sizes)
        return list(full[first : first + sum(sizes)].split(sizes))


class Accumulation:
    """Forward and backward pass of one micro-batch after the other; gradients add up in the parameters.

    Gradients are reduced over the replicas in the backward pass of the last micro-batch only (`DataParallel`).
    """

    def __init__(
        self, model: nn.Module, data: DataParallel, losses: StepLosses, device: Device, clock: StepClock
    ) -> None:
        # On a GPU adding rows has no fixed order. Other kinds of data parallelism keep gradients elsewhere.
        if device.device.type == "cpu" and isinstance(data, Ddp | Zero1):
            add_rows(getattr(model, "tables_read_once", list)())
        self._model = model
        self._data = data
        self._losses = losses
        self._device = device
        self._clock = clock

    def train(self, micro_batches: Sequence[Batch]) -> None:
        """Compute this rank's gradients of the step."""
        with self._device.casting_once():
            for number, batch in enumerate(micro_batches, start=1):
                self._clock.switch(FORWARD)
                self._data.micro_batch(number == len(micro_batches))
                batch = self._losses.prepare(batch)
                with self._device.autocast():
                    output = self._model(batch, in_chunks=self._losses.in_chunks(batch))
                    loss = self._losses.of(output, batch, len(micro_batches))
                self._clock.switch(BACKWARD)
                loss.backward()

    def evaluate(self, micro_batches: Sequence[Batch]) -> None:
        """Compute the losses only."""
        for batch in micro_batches:
            batch = self._losses.prepare(batch)
            with self._device.autocast():
                output = self._model(batch, in_chunks=self._losses.in_chunks(batch))
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
    """Return the runner of this rank's stages: a pipeline if the layout has one, else what the loss needs.

    Args:
        stages: this rank's stages, in order.
        workload: the model and its objective.
        layout: how the ranks divide the work.
        mesh: its process groups.
        data: reduces gradients over the replicas; a pipeline's stages have their own hooks.
        losses: the losses of a step.
        device: this rank's device.
        clock: measures the parts of a step.
    """
    if layout.pp > 1:
        return Pipeline(
            stages=stages,
            workload=workload,
            layout=layout,
            mesh=mesh,
            losses=losses,
            device=device,
            clock=clock,
        )
    if workload.compares:
        return WholeBatch(
            model=stages[0],
            workload=workload,
            mesh=mesh,
            data=data,
            losses=losses,
            device=device,
            clock=clock,
        )
    return Accumulation(stages[0], data, losses, device, clock)
