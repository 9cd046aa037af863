"""The teacher's logits of all training samples, computed by the ranks before the first step and read by steps.

The ranks hold the teacher under their layout only while logits are missing. Once all are stored, the teacher is not
read any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch.distributed as dist

from cluster.workers.worker_context import WorkerContext
from orchestrator.data.samples.teacher_table import TeacherTable
from orchestrator.models.base import Base
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.distillation.config import LogitsSpec
from orchestrator.train.distillation.taught_samples import PartLogits, TaughtSamples, with_logits
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import compute_passes, shares
from workloads.workload import Workload


class StoredLogits:
    """The stored logits of a run's training samples. Every rank has one; rank 0 writes files."""

    def __init__(
        self,
        key: str,
        data: str,
        inputs: TrainingInputs,
        teacher: Workload,
        logits: LogitsSpec,
        base: Base,
        global_batch: int,
        retry: Retry,
    ) -> None:
        """Open the files.

        Args:
            key: what identifies the values, see `logits_key`.
            data: URI of the prepared data.
            inputs: the training samples.
            teacher: the teacher for the student's objective.
            logits: what of the logits is kept.
            base: the teacher's weights.
            global_batch: samples of a global batch.
            retry: how to retry reads.
        """
        self._teacher = teacher
        self._temperature = logits.temperature
        self._base = base
        self._global_batch = global_batch
        self._taught = taught = TaughtSamples(inputs, teacher, logits)
        self._table = TeacherTable(data, key, taught.number, length=taught.length, k=taught.k, retry=retry)
        self._missing: list[int] = gather_json(self._table.missing() if dist.get_rank() == 0 else [])[0]

    @property
    def are_complete(self) -> bool:
        """Whether all logits are stored; equal on every rank."""
        return not self._missing

    def compute(
        self,
        engine: Engine,
        layout: Layout,
        context: WorkerContext,
        heeds_stop: bool,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Compute the missing logits, part by part, and store each part. The engine keeps the teacher until then.

        Args:
            engine: the student's engine.
            layout: its layout.
            context: this rank's number and its connection to the controller.
            heeds_stop: whether a stop ends the computation early.
            between: called after each part; tests inject faults there.
        """
        engine.hold_teacher(self._teacher, self._base.digest)
        rank = layout.coordinate(context.rank_info.rank)["dp"]
        parts = self._table.parts

        def passes_of(number: int) -> list[range]:
            return shares(len(parts[number]), layout.micro_batch, self._global_batch, layout.dp, rank)

        context.begin_work("logits of the teacher", "batches", sum(len(passes_of(n)) for n in self._missing))
        while self._missing:
            number = self._missing[0]
            computed = PartLogits(len(parts[number]), self._taught)
            compute = partial(
                self._compute_pass, engine, parts[number], size=layout.micro_batch, computed=computed
            )
            if not compute_passes(passes_of(number), context, heeds_stop, compute):
                context.end_work()
                engine.release_teacher()
                return
            # A sum gathers them: every place is filled on one rank and zero on all others, so that nothing is rounded.
            for values in computed.values:
                dist.all_reduce(values)
            if context.rank_info.rank == 0:
                self._taught.store(self._table, self._table.name(number), parts[number], computed)
                if len(self._missing) == 1:
                    self._taught.finish(self._table, self._base)
            # No rank may go on before the part is stored: after a failure `missing` tells what must be computed again.
            dist.barrier()
            del self._missing[0]
            between()
        context.end_work()
        engine.release_teacher()

    def joined(self, inputs: TrainingInputs) -> TrainingInputs:
        """Return the inputs with the stored logits added to every training sample."""
        return with_logits(inputs, self._table.read)

    def _compute_pass(
        self,
        engine: Engine,
        part: Sequence[int] | np.ndarray,
        micro_batches: range,
        *,
        size: int,
        computed: PartLogits,
    ) -> None:
        """Compute `micro_batches` of a part, each of `size` samples.

        Numbers beyond the part's last sample are computed too: other ranks need this rank's collectives.
        """
        batches = [self._taught.batch(part, number * size, size) for number in micro_batches]
        logits = engine.teacher_logits(batches, self._taught.k, self._temperature)
        for number, placed in zip(micro_batches, logits, strict=bool(logits)):
            computed.put(number * size, placed)
