"""The teacher's logits of a run's training samples, which teacher workers compute and store while the student trains.

A part of the samples is a unit of work. Parts are in the order in which steps first read them, so the first step waits
for one part. Each process computes a part alone, in passes of equally many samples: its bits do not depend on which
process that is, nor on the layout of the student. If a run has no room for a teacher worker, its ranks compute all
parts before the first step, by the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from cluster.workers.worker_context import WorkerContext
from orchestrator.data.samples.first_use import FirstUse
from orchestrator.data.samples.sections.published import StoppedWaiting
from orchestrator.data.samples.teacher_table import MOST, TeacherTable, TopRecords, part_size
from orchestrator.models.base import Base
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import Mesh
from orchestrator.parallel.rank_messages import gather_json
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.distillation.config import LogitsSpec, rows_of_pass
from orchestrator.train.distillation.part_requests import PartRequests
from orchestrator.train.distillation.taught_samples import PartLogits, TaughtSamples, with_logits
from orchestrator.train.distillation.teacher import Teacher
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import compute_passes
from orchestrator.train.rollouts.work_queue import QueueClient, Work, work_until_stopped
from orchestrator.train.task import Task
from workloads.workload import Workload

LONGEST_PAUSE = 0.5
"""The longest time between two looks for a part that a step waits for, in seconds."""
OVERDUE = 2.0
"""Seconds after which a rank asks for such a part itself: nobody else may have asked for it."""


class WorkerLogits:
    """The logits of a run's samples that teacher workers compute. Every rank and every teacher worker has one."""

    def __init__(
        self,
        key: str,
        data: str,
        inputs: TrainingInputs,
        teacher: Workload,
        logits: LogitsSpec,
        base: Base,
        task: Task,
        device: Device,
        context: WorkerContext,
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
            task: says where teacher workers are found.
            device: this process's device.
            context: this process's connection to the controller.
            retry: how to retry reads.
        """
        spec = inputs.job.spec
        self._teacher = teacher
        self._train = train = spec.train
        self._temperature = logits.temperature
        self._base = base
        self._task = task
        self._device = device
        self._context = context
        self._rows = rows_of_pass(train.global_batch, train.bitwise_shards, spec.data.sequence_length)
        self._taught = taught = TaughtSamples(inputs, teacher, logits)
        self._requests: PartRequests | None = None
        self._own_client: QueueClient | None = None
        self._own_asked: set[int] = set()
        order = None
        if not task.makes_rollouts:
            skipped = sum(skip["count"] for skip in task.skips)
            order = FirstUse(
                inputs.text[0].order,
                taught.number,
                positions=spec.reading.samples * train.steps + skipped,
                size=max(self._rows, part_size(taught.length, taught.k, min(train.global_batch, MOST))),
            )
        self._table = TeacherTable(
            data,
            f"{key}-{self._rows}",  # on which the last bits depend
            taught.number,
            length=taught.length,
            k=taught.k,
            retry=retry,
            order=order,
        )
        self._missing: list[int] = []
        if order is not None:
            self._missing = gather_json(self._table.missing() if dist.get_rank() == 0 else [])[0]

    @property
    def are_complete(self) -> bool:
        """Whether the ranks need not compute any logits; equal on every rank."""
        return self._task.rollout_address is not None or not self._missing

    @property
    def are_growing(self) -> bool:
        """Whether steps may have to wait for logits; equal on every rank."""
        return self._task.rollout_address is not None and bool(self._missing)

    def compute(
        self,
        engine: Engine,
        layout: Layout,
        context: WorkerContext,
        heeds_stop: bool,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Compute the missing parts on the ranks, each of which holds the whole teacher meanwhile.

        Args:
            engine: not used: the ranks compute as teacher workers do, whatever the layout.
            layout: not used.
            context: this rank's number and its connection to the controller.
            heeds_stop: whether a stop ends the computation early.
            between: called after each part; tests inject faults there.
        """
        info = context.rank_info
        own = self._missing[info.rank :: info.world_size]
        passes = [range(n, n + 1) for n in range(-(-len(self._missing) // info.world_size))]
        teacher = self._whole_teacher(info.world_size)

        def compute_parts(numbers: range) -> None:
            for number in own[numbers.start : numbers.stop]:
                self._make(teacher, self._table.name(number), self._table.parts[number])
            between()

        context.begin_work("logits of the teacher", "parts", len(passes))
        is_complete = compute_passes(passes, context, heeds_stop, compute_parts)
        context.end_work()
        teacher.close()
        if is_complete:
            dist.barrier()
            if info.rank == 0:
                self._taught.finish(self._table, self._base)
            self._missing = []

    def joined(self, inputs: TrainingInputs) -> TrainingInputs:
        """Return the inputs with the logits added to every training sample, once they are there.

        Rank 0 asks teacher workers for all missing parts, in a thread.
        """
        address = self._task.rollout_address
        if address is None:
            return with_logits(inputs, self._table.read)
        if self._context.rank_info.rank == 0:
            contents = {self._table.name(number): self._table.parts[number] for number in self._missing}
            self._requests = PartRequests(
                address, self._task.attempt, contents, lambda: self._taught.finish(self._table, self._base)
            )
        return with_logits(inputs, self._awaited)

    def serve(self) -> int:
        """Compute parts for the ranks of the run until this teacher worker is stopped. Return how many."""
        teacher = self._whole_teacher(1)

        def make(queue: QueueClient, work: Work) -> bool:
            self._context.set_waiting(False)
            self._context.lives()
            self._make(teacher, work.name.split("/")[0], work.content["samples"])
            queue.give(work.name, None)
            return True

        return work_until_stopped(self._task, self._context, make)

    def _whole_teacher(self, world: int) -> Teacher:
        """Return the teacher, whole on each of so many ranks."""
        layout = Layout(dp=world, micro_batch=self._rows)
        mesh = Mesh(layout)
        return Teacher(
            self._teacher, layout, mesh, device=self._device, train=self._train, base=self._base.digest
        )

    def _make(self, teacher: Teacher, name: str, samples: Sequence[int] | np.ndarray) -> None:
        """Compute and store the part of this name, unless it is there."""
        if self._table.has(name, len(samples)):
            return
        logits = PartLogits(len(samples), self._taught)
        for first in range(0, len(samples), self._rows):
            batch = self._taught.batch(samples, first, self._rows)
            (placed,) = teacher.top([batch], self._taught.k, self._temperature)
            logits.put(first, placed)
            self._context.lives()
        self._taught.store(self._table, name, samples, logits)

    def _awaited(self, samples: np.ndarray) -> TopRecords:
        """Return the records of samples, once teacher workers have made them. The controller limits this wait.

        Raises:
            StoppedWaiting: if this rank is asked to stop.
        """
        began = time.monotonic()
        pause = LONGEST_PAUSE / 64
        while missing := self._table.lacks(samples):
            if self._requests is not None:
                self._requests.check()
            if self._context.stop_requested():
                raise StoppedWaiting("logits of the teacher are not stored yet")
            if time.monotonic() - began > OVERDUE:
                self._ask_for(missing)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self._table.read(samples)

    def _ask_for(self, missing: Sequence[int]) -> None:
        """Ask for parts that this rank waits for, each once."""
        address = self._task.rollout_address
        assert address is not None
        if self._own_client is None:
            self._own_client = QueueClient(address.address, address.token)
        rank = self._context.rank_info.rank
        units = {
            f"{self._table.name(number)}/{rank}": {"samples": list(map(int, self._table.parts[number]))}
            for number in missing
            if number not in self._own_asked
        }
        self._own_asked.update(missing)
        if units:
            self._own_client.ask(self._task.attempt, units)
