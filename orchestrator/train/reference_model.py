"""Log-probabilities of all answers under the reference (the initial model), for objectives such as DPO.

The ranks compute them under their layout before the first step, and they are stored next to the data. Ranks can hold
any model that can be trained, and already have the reference's weights, so no separate task is needed. Once all values
are stored, the base is not read any more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.errors import InputError
from orchestrator.config.records import REFERENCED
from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.data.samples.reference_table import ReferenceTable
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.models.base import Base
from orchestrator.parallel.layout import Layout
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.config import Precision, TrainSpec
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import compute_passes, shares
from orchestrator.train.task import Task


def reference_key(
    name: str | None,
    *,
    workload: WorkloadSpec,
    data: DataSpec,
    seed: int,
    precision: Precision,
    base: Base,
) -> str:
    """Return a hash of everything that determines a set's log-probabilities besides the data.

    The data is identified by the folder in which the values are stored. `name` is the name of a part of that data,
    such as its held-out part, else None.

    Args:
        name: of a part of the run's data, such as its held-out part; None for data of its own.
        workload: the model and its objective.
        data: the data as the job names it.
        seed: of the run, by which held-out text is divided from training text.
        precision: dtype of the model's products.
        base: the weights that the run began with.
    """
    share = data.validation.share if data.validation and name is not None else None
    model = "" if workload.model.startswith("hf:") else workload.model
    # An adapter's initial values may change the model.
    adapter = workload.adapter and workload.adapter.model_dump(mode="json")
    inputs = [
        *(base.digest, name, share, model, workload.changes),
        *(workload.objective, workload.options.get("truncate"), workload.mup, adapter),
        *(data.sequence_length, seed, precision),
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(inputs, sort_keys=True).encode())


TRAINING = ""
"""Name of the training samples among the names of held-out sets."""


class References:
    """The reference's log-probabilities of all samples of a task. Every rank has one; rank 0 reads and writes files."""

    def __init__(
        self,
        key_of: Callable[[str | None], str],
        global_batch: int,
        task: Task,
        inputs: TrainingInputs,
        retry: Retry,
        seed: int,
    ) -> None:
        """Open the files of values.

        Args:
            key_of: returns what identifies the values of a part of the run's data, or of other data for None.
            global_batch: samples of a global batch.
            task: names the data.
            inputs: the samples.
            retry: how to retry reads.
            seed: the seed of the run, from which its first weights follow.
        """
        self._global_batch = global_batch
        self._seed = seed
        self._readers = _readers(task, inputs)
        self._tables = {}
        for name, read in self._readers.items():
            data = task.sets.get(name, task.data)
            key = key_of(name if data == task.data else None)
            self._tables[name] = ReferenceTable(data, key, len(read), retry)
        self._values = {name: _read(table) for name, table in self._tables.items()}

    @property
    def are_complete(self) -> bool:
        """Whether all values are computed; equal on every rank."""
        return all(bool(values.isfinite().all()) for values in self._values.values())

    def compute(
        self,
        engine: Engine,
        layout: Layout,
        context: WorkerContext,
        heeds_stop: bool,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Compute the missing values, part by part, and store each part.

        Args:
            engine: gets the weights of the base.
            layout: its layout.
            context: this rank's number and its connection to the controller.
            heeds_stop: whether a stop ends the computation early.
            between: called after each part; tests inject faults there.
        """
        engine.initialise(self._seed)
        rank = layout.coordinate(context.rank_info.rank)["dp"]
        global_batch = self._global_batch

        def passes_of(part: range) -> list[range]:
            return shares(len(part), layout.micro_batch, global_batch, layout.dp, rank)

        batches = sum(len(passes_of(part)) for name in self._tables for _, part in self._missing(name))
        context.begin_work("log-probabilities of the reference model", "batches", batches)
        for name, table in self._tables.items():
            read = self._readers[name]
            values = self._values[name]
            for number, part in self._missing(name):
                computed = torch.zeros(len(part), 2)  # zeros for the samples of other ranks
                compute = partial(
                    self._compute_pass, engine, read, part, size=layout.micro_batch, computed=computed
                )
                if not compute_passes(passes_of(part), context, heeds_stop, compute):
                    context.end_work()
                    return
                dist.all_reduce(computed)
                values[part.start : part.stop] = computed
                if context.rank_info.rank == 0:
                    table.write(number, computed.numpy())
                dist.barrier()
                between()
        context.end_work()

    def _missing(self, name: str) -> list[tuple[int, range]]:
        """Return the parts of a set of samples that lack values, each with its number."""
        values = self._values[name]
        return [
            (number, part)
            for number, part in enumerate(self._tables[name].parts)
            if not bool(values[part.start : part.stop].isfinite().all())
        ]

    def joined(self, inputs: TrainingInputs) -> TrainingInputs:
        """Return the inputs with the log-probabilities added to every sample."""
        readers = {
            name: read.with_values("reference", self._values[name].numpy())
            for name, read in _all_readers(inputs).items()
            if name in self._values
        }
        batches, sets = inputs.text
        if TRAINING in readers:
            batches = batches.with_reader(readers[TRAINING])
        sets = {
            name: dataclasses.replace(held_out, read=readers[name]) if name in readers else held_out
            for name, held_out in sets.items()
        }
        return dataclasses.replace(inputs, batches=batches, sets=sets)

    @staticmethod
    def _compute_pass(
        engine: Engine,
        read: SampleReader,
        part: range,
        micro_batches: range,
        *,
        size: int,
        computed: torch.Tensor,
    ) -> None:
        """Compute `micro_batches` of a part, each of `size` samples, into `computed` [samples of the part, 2].

        Rows beyond the part's last sample repeat it: other ranks need this rank's collectives.
        """
        numbers = [
            [part.start + min(n, len(part) - 1) for n in range(number * size, (number + 1) * size)]
            for number in micro_batches
        ]
        # [B, 2] of each micro-batch: both answers of a row, each summed over its tokens.
        answers = engine.log_probabilities([read.collate(ids, 0) for ids in numbers])
        for number, values in zip(micro_batches, answers, strict=bool(answers)):
            count = max(min(len(part) - number * size, size), 0)
            computed[number * size : number * size + count] = values[:count].float().cpu()


def references_of(
    task: Task,
    inputs: TrainingInputs,
    base: Base | None,
    retry: Retry,
    *,
    workload: WorkloadSpec,
    data: DataSpec,
    train: TrainSpec,
    seed: int,
) -> References | None:
    """Return the reference of a job whose objective needs one; None if not, or if the engine holds the reference.

    Args:
        task: names the data.
        inputs: the samples.
        base: the weights that the run began with; None if they were drawn.
        retry: how to retry reads.
        workload: the model and its objective.
        data: the data as the job names it.
        train: whether the values are computed before the first step, and in which precision.
        seed: the seed of the run.

    Raises:
        InputError: if the objective needs a reference and the run has no base.
    """
    if workload.objective not in REFERENCED:
        return None
    if base is None:
        problem = f"{workload.objective} compares with the initial model, and this run has none"
        raise InputError(problem, "workload.init_from", "name a run or an export")
    if train.reference != "precomputed":
        return None
    key_of = partial(
        reference_key,
        workload=workload,
        data=data,
        seed=seed,
        precision=train.dtype,
        base=base,
    )
    return References(key_of, train.global_batch, task, inputs, retry, seed=seed)


def _all_readers(inputs: TrainingInputs) -> dict[str, SampleReader]:
    batches, sets = inputs.text
    return {TRAINING: batches.read} | {name: held_out.read for name, held_out in sets.items()}


def _readers(task: Task, inputs: TrainingInputs) -> Mapping[str, SampleReader]:
    """Return the readers of the samples that a task reads, by the names of their sets."""
    readers = _all_readers(inputs)
    if task.evaluate_only:
        del readers[TRAINING]
    return readers


def _read(table: ReferenceTable) -> torch.Tensor:
    """Return a table's values, NaN where missing; rank 0 reads the file and broadcasts it."""
    values = torch.zeros(table.samples, 2)
    if dist.get_rank() == 0:
        values = torch.from_numpy(np.array(table.read(), dtype=np.float32))
    dist.broadcast(values, 0)
    return values
