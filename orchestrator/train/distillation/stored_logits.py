"""The teacher's logits of all training samples, computed by the ranks before the first step and read by steps.

The ranks hold the teacher under their layout only while logits are missing. Once all are stored, the teacher is not
read any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from cluster.workers.worker_context import WorkerContext
from orchestrator.data.samples.teacher_table import TeacherTable, TopRecords
from orchestrator.models.base import Base
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.distillation.config import LogitsSpec
from orchestrator.train.distillation.teacher import PlacedTop
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import compute_passes, shares
from workloads.objectives.distillation import STORED
from workloads.workload import IGNORED, Batch, Workload


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
        self._logits = logits
        self._base = base
        self._global_batch = global_batch
        self._read = inputs.text[0].read
        example = self._read.collate([0], 0)
        self._labels = "sequence_labels" if "sequence_labels" in example else "labels"
        classes = int(getattr(teacher.config, "classes", 0)) if self._labels == "sequence_labels" else 0
        vocabulary = int(teacher.config.vocab_size)
        self._k = classes or min(logits.k, vocabulary)
        self._length = 1 if classes else example["labels"].shape[1]
        self._table = TeacherTable(data, key, len(self._read), length=self._length, k=self._k, retry=retry)
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
            computed = _Part(len(parts[number]), self._length, self._k)
            compute = partial(
                self._compute_pass, engine, parts[number], size=layout.micro_batch, computed=computed
            )
            if not compute_passes(passes_of(number), context, heeds_stop, compute):
                context.end_work()
                engine.release_teacher()
                return
            records = computed.over_ranks()
            if context.rank_info.rank == 0:
                mass, tokens = self._mass_of(parts[number], records)
                self._table.write(number, records, mass, tokens)
                if len(self._missing) == 1:
                    self._finish()
            # No rank may go on before the part is stored: after a failure `missing` tells what must be computed again.
            dist.barrier()
            del self._missing[0]
            between()
        context.end_work()
        engine.release_teacher()

    def joined(self, inputs: TrainingInputs) -> TrainingInputs:
        """Return the inputs with the stored logits added to every training sample."""
        batches, _ = inputs.text

        def entries(samples: np.ndarray) -> dict[str, np.ndarray]:
            return dict(zip(STORED, self._table.read(samples), strict=True))

        return dataclasses.replace(inputs, batches=batches.with_reader(batches.read.with_entries(entries)))

    def _finish(self) -> None:
        source = {"teacher": self._base.uri, "step": self._base.step, "digest": self._base.digest}
        mass = self._table.finish({**source, "temperature": self._logits.temperature})
        print(
            f"teacher: the {self._k} stored logits of a token cover {mass:.4f} of its probability", flush=True
        )

    def _compute_pass(
        self, engine: Engine, part: range, micro_batches: range, *, size: int, computed: _Part
    ) -> None:
        """Compute `micro_batches` of a part, each of `size` samples.

        Rows beyond the part's last sample repeat it: other ranks need this rank's collectives.
        """
        numbers = [range(number * size, (number + 1) * size) for number in micro_batches]
        batches: list[Batch] = [
            self._read.collate([part.start + min(n, len(part) - 1) for n in number], 0) for number in numbers
        ]
        logits = engine.teacher_logits(batches, self._k, self._logits.temperature)
        for number, placed in zip(numbers, logits, strict=bool(logits)):
            computed.put(number.start, placed)

    def _mass_of(self, part: range, records: TopRecords) -> tuple[float, int]:
        """Return the sum of the probabilities that are kept of a part's predicted tokens, and their number."""
        labels = self._read.collate(part, 0)[self._labels].numpy().reshape(len(part), -1)
        # [samples, L, k], in fp64: a sum over millions of tokens. exp(z / T - log_sum) is the softmax at temperature T,
        # though only k logits are stored.
        scaled = records.logits.astype(np.float64) / self._logits.temperature
        kept_mass = np.exp(scaled - records.log_sum[..., None]).sum(-1)
        is_predicted = labels != IGNORED
        return float(kept_mass[is_predicted].sum()), int(is_predicted.sum())


class _Part:
    """The logits of a part's samples; each rank fills in its own; zeros elsewhere."""

    def __init__(self, samples: int, length: int, k: int) -> None:
        self._tokens = torch.zeros(samples, length, k, dtype=torch.int32)
        self._logits = torch.zeros(samples, length, k)
        self._log_sum = torch.zeros(samples, length)

    def put(self, first: int, placed: PlacedTop) -> None:
        """Fill in a micro-batch that begins with sample `first`; rows beyond the last sample are left out."""
        count = max(min(len(self._tokens) - first, len(placed.top.tokens)), 0)
        positions = placed.places.cpu()
        rows = slice(first, first + count)
        for stored_values, values in ((self._tokens, placed.top.tokens), (self._logits, placed.top.logits)):
            stored_values[rows, positions] = values[:count].cpu()
        self._log_sum[rows, positions] = placed.top.log_sum[:count].cpu()

    def over_ranks(self) -> TopRecords:
        """Return the values of all ranks."""
        # A sum gathers them: every place is filled on one rank and zero on all others, so that nothing is rounded.
        for values in (self._tokens, self._logits, self._log_sum):
            dist.all_reduce(values)
        return TopRecords(self._tokens.numpy(), self._logits.numpy(), self._log_sum.numpy())
