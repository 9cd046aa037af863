"""A frozen teacher on the ranks of its student, in evaluation mode, without an optimizer.

It has the student's layout, but its weights may be sharded over the data-parallel ranks where the student's are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from orchestrator.parallel.collectives import gathered
from orchestrator.parallel.context import positions_of, slice_batch
from orchestrator.parallel.device import Device
from orchestrator.parallel.distilling import shards_of
from orchestrator.parallel.fsdp import local_of
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.losses import StepLosses
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.parallelize import parallelize
from orchestrator.parallel.runner import runner_of
from orchestrator.parallel.step_clock import FORWARD, StepClock
from orchestrator.train.config import TrainSpec
from orchestrator.train.engines.frozen_weights import FrozenWeights
from workloads.adapters.frozen import parameters_of
from workloads.objectives.distillation import (
    TEACHER_LOGITS,
    TEACHER_SHOWN,
    WHOLE,
    Shards,
    Top,
    log_sum,
    top_of,
)
from workloads.workload import Batch, Workload


def top_over_ranks(logits: Tensor, k: int, temperature: float, shards: Shards, tp: ProcessGroup) -> Top:
    """Return the k largest logits of each row, in order, on all ranks of the group.

    Each rank sends its own k largest, never its part of the vocabulary.

    Args:
        logits: this rank's logits [n, V of this rank].
        k: number of logits to return per token.
        temperature: the temperature T that divides the logits before the log-sum.
        shards: how the vocabulary is cut.
        tp: the group over which it is cut.
    """
    if shards is WHOLE:
        return top_of(logits, k, temperature)
    logits = logits.float()
    # Parts may differ by one token. Equal shapes are gathered: what a rank lacks is -inf.
    own_count = min(k, logits.shape[-1])
    values, tokens = logits.topk(own_count)
    values = torch.nn.functional.pad(values, (0, k - own_count), value=-torch.inf)
    tokens = torch.nn.functional.pad(tokens + shards.start, (0, k - own_count))
    # [n, k x tp]: the k largest of the vocabulary are among the k largest of each part.
    all_values = gathered(values, 1, tp)
    top_values, indices = all_values.topk(k)
    log_sums = log_sum(logits / temperature, shards)
    return Top(gathered(tokens, 1, tp).gather(1, indices).int(), top_values, log_sums)


class PlacedTop(NamedTuple):
    """A teacher's largest logits [B, l, k] of a micro-batch, at the positions int64 [l] of its sequences."""

    top: Top
    places: Tensor


class Teacher:
    """A model whose logits, hidden states and relations a student learns. It never changes."""

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        mesh: Mesh,
        device: Device,
        train: TrainSpec,
        base: str = "",
        shard: bool = False,
    ) -> None:
        """Build this rank's part of the teacher, and read its weights.

        Args:
            workload: the teacher, for the student's objective and vocabulary.
            layout: the student's; nothing of the teacher is recomputed or offloaded.
            mesh: its process groups.
            device: this rank's device.
            train: the job's training options.
            base: checksum of the teacher's weights. The ranks of a machine share one copy of them.
            shard: whether the data-parallel ranks divide the weights, whatever the student's ZeRO stage is.
        """
        workload = dataclasses.replace(cast(Any, workload), frozen=frozenset(parameters_of(workload)))
        # Nothing has a gradient, so only ZeRO 3, which shards weights, differs from plain copies.
        layout = layout.but(
            recompute="none",
            recompute_layers=0,
            offload="none",
            sequence=False,
            zero=3 if layout.zero == 3 or shard else 0,
        )
        layout = layout if layout.zero else layout.but(shard=0)
        device = device.at_zero_stage(layout.zero, getattr(workload.config, "shared_layers", False))
        train = train.model_copy(update={"compile": False, "determinism": "rerun"})
        self._layout = layout
        self.gathers = layout.zero == 3 and mesh.data.size > 1
        """Whether a pass gathers weights from other ranks, and so waits for them."""
        self._mesh = mesh
        self._clock = mesh.clock or StepClock(device.device)
        self._parallel = parallelize(workload, layout, mesh, device, train=train)
        for stage in self._parallel.stages:
            stage.eval()
        self._collector = _OutputCollector(workload, mesh, device)
        table = workload.shapes.get("tokens.weight")
        is_cut = mesh.tp.size > 1 and table and getattr(workload.config, "head", "") in ("language", "masked")
        self._vocabulary = table[0] if is_cut and table else 0
        self._runner = runner_of(
            stages=self._parallel.stages,
            workload=workload,
            layout=layout,
            mesh=mesh,
            data=self._parallel.data,
            losses=cast(StepLosses, self._collector),
            device=device,
            clock=self._clock,
        )
        self._weights = FrozenWeights(workload, self._parallel, device, base)
        with torch.no_grad():
            self._weights.fill(seed=0)
            for stage in self._parallel.stages:
                for name, buffer in stage.named_buffers():
                    if name in workload.shapes:
                        buffer.copy_(workload.initial(name, 0))

    def taught(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches with the teacher's outputs for them.

        The teacher reads a micro-batch when it is asked for, so that its logits live as long as their micro-batch. The
        stages of a pipeline read all of them first.
        """
        if self._layout.pp == 1:
            return _TaughtBatches(self, micro_batches)
        return [
            {**batch, **outputs}
            for batch, outputs in zip(micro_batches, self.outputs(micro_batches), strict=True)
        ]

    @torch.no_grad()
    def outputs(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """Return the teacher's outputs for micro-batches: nothing except on a pipeline's last stage."""
        before = self._clock.switch(FORWARD)
        self._collector.begin()
        self._runner.evaluate(micro_batches)
        self._clock.switch(before)
        return self._collector.outputs or [{} for _ in micro_batches]

    def top(self, micro_batches: Sequence[Batch], k: int, temperature: float) -> list[PlacedTop]:
        """Return the teacher's `k` largest logits for micro-batches.

        Of the ranks that compute the same, one returns them, and the others an empty list.

        Args:
            micro_batches: as for `outputs`.
            k: logits of each token.
            temperature: divides the logits in the log-sum that is stored with them.
        """
        result = []
        shards = shards_of(self._vocabulary, self._mesh.tp)
        for batch in micro_batches:
            (outputs,) = self.outputs([batch])
            if not outputs:  # another stage of the pipeline has them
                continue
            logits = outputs[TEACHER_LOGITS]
            # [B, classes] of a classifier becomes [B, 1, classes]: a row with one prediction.
            rows = logits.unsqueeze(1) if logits.dim() == 2 else logits
            top = top_over_ranks(rows.flatten(0, 1), k, temperature, shards, self._mesh.tp)
            length = rows.shape[1] * self._mesh.cp.size
            # A rank of a context-parallel group has two chunks of the row that are not neighbours, see
            # `parallel.context`.
            positions = positions_of(length, self._mesh.cp, rows.device) if self._mesh.cp.size > 1 else None
            shape = rows.shape[:2]
            result.append(
                PlacedTop(
                    Top(*(values.unflatten(0, shape) for values in top)),
                    torch.arange(length, device=rows.device) if positions is None else positions,
                )
            )
        return result if self._mesh.tp.index == 0 else []

    def resident_tensors(self) -> list[Tensor]:
        """Return the teacher's weights on this rank."""
        return [local_of(p) for stage in self._parallel.stages for p in stage.parameters()]

    def close(self) -> None:
        """Free the weights. Modules and their hooks refer to each other, so storages are emptied here."""
        for tensor in self.resident_tensors():
            storage = tensor.untyped_storage()
            if storage.resizable():  # memory mapped from a file is not
                storage.resize_(0)
        self._weights.close()


class _TaughtBatches(Sequence[Batch]):
    """Micro-batches that get the teacher's outputs when they are read."""

    def __init__(self, teacher: Teacher, micro_batches: Sequence[Batch]) -> None:
        self._teacher = teacher
        self._batches = micro_batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: Any) -> Any:
        (outputs,) = self._teacher.outputs([self._batches[number]])
        return {**self._batches[number], **outputs}

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


class _OutputCollector:
    """Stands for the losses of a runner, and keeps the teacher's outputs instead."""

    def __init__(self, workload: Workload, mesh: Mesh, device: Device) -> None:
        self._config = workload.config
        self._mesh = mesh
        self._device = device
        self.outputs: list[Batch] = []

    def begin(self) -> None:
        """Forget what was taken."""
        self.outputs = []

    def prepare(self, batch: Batch) -> Batch:
        """Move a micro-batch to the device and cut it to this context-parallel rank's positions, as `StepLosses`."""
        batch = {name: tensor.to(self._device.device, non_blocking=True) for name, tensor in batch.items()}
        return slice_batch(batch, self._config, self._mesh.cp)

    def in_chunks(self, _: Batch) -> None:
        """Return None: the head returns logits."""

    def of(self, output: Any, _: Batch, __: int) -> Tensor:
        """Keep an output; the result means nothing."""
        logits = output.logits if output.sentence is None else output.sentence
        outputs: Batch = {} if logits is None else {TEACHER_LOGITS: logits}
        outputs |= {f"{TEACHER_SHOWN}_{n:03d}": hidden for n, hidden in enumerate(output.shown or ())}
        self.outputs.append(outputs)
        return torch.zeros(())
