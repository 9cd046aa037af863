"""The reference of objectives that compare the model with the one that the run began with: its log-probabilities of all
answers, computed by the ranks under their layout before the first step, and kept beside the data.

The ranks do it, and no task of the data stage, because they can hold any model that can be trained, and have its
weights already: the reference is what the run begins with. Where all are there, the base is not needed any more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from cluster.workers.worker_context import WorkerContext
from orchestrator.config.errors import InputError
from orchestrator.config.records import REFERENCED
from orchestrator.config.spec import JobSpec
from orchestrator.data.samples.reference_table import ReferenceTable
from orchestrator.data.samples.sample_reader import SampleReader
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import agree
from orchestrator.resolve.base import Base
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.storage.retry import Retry
from orchestrator.train.engines.engine import Engine
from orchestrator.train.eval_sharding import shares
from orchestrator.train.task import Task

TRAINING = ""
"""The name of the samples of training, among those of the sets."""


class References:
    """The reference of all samples of a task; every rank makes one, and only rank 0 reads and writes files."""

    def __init__(self, spec: JobSpec, task: Task, inputs: TrainingInputs, base: Base, retry: Retry) -> None:
        self._spec, self._readers = spec, _readers(task, inputs)
        self._tables = {}
        for name, read in self._readers.items():
            data = task.sets.get(name, task.data)
            key = _key(spec, base, name if data == task.data else None)
            self._tables[name] = ReferenceTable(data, key, len(read), retry)
        self._values = {name: _read(table) for name, table in self._tables.items()}

    @property
    def are_complete(self) -> bool:
        """Whether nothing is left to compute; the same on every rank."""
        return all(bool(values.isfinite().all()) for values in self._values.values())

    def compute(
        self,
        engine: Engine,
        layout: Layout,
        context: WorkerContext,
        heeds_stop: bool,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Compute what is missing; the engine has the weights of the base. Less, if it `heeds_stop`, and the gang was
        asked to stop. `between` is called after each part; faults are injected there."""
        rank = layout.coordinate(context.rank_info.rank)["dp"]
        for name, table in self._tables.items():
            read, values = self._readers[name], self._values[name]
            for number, part in enumerate(table.parts):
                if bool(values[part.start : part.stop].isfinite().all()):
                    continue
                found = torch.zeros(len(part), 2)
                for mine in shares(
                    len(part), layout.micro_batch, self._spec.train.global_batch, layout.dp, rank
                ):
                    context.set_waiting(True)
                    if agree(0, heeds_stop and context.stop_requested()).stop:
                        context.set_waiting(False)
                        return
                    self._compute_pass(engine, read, part, mine, layout.micro_batch, found)
                    context.set_waiting(False)
                    context.progressed()
                dist.all_reduce(found)
                values[part.start : part.stop] = found
                if context.rank_info.rank == 0:
                    table.write(number, found.numpy())
                dist.barrier()
                between()

    def joined(self, inputs: TrainingInputs) -> TrainingInputs:
        """The inputs whose samples have their reference."""
        found = {
            name: read.beside("reference", self._values[name].numpy())
            for name, read in _all_readers(inputs).items()
            if name in self._values
        }
        batches, sets = inputs.text
        if TRAINING in found:
            batches = batches.reading(found[TRAINING])
        sets = {
            name: dataclasses.replace(held, read=found[name]) if name in found else held
            for name, held in sets.items()
        }
        return dataclasses.replace(inputs, batches=batches, sets=sets)

    @staticmethod
    def _compute_pass(
        engine: Engine, read: SampleReader, part: range, mine: range, size: int, found: torch.Tensor
    ) -> None:
        """The micro-batches of one pass; those beyond the part's last sample are computed for the other ranks' sake."""
        numbers = [
            [part.start + min(n, len(part) - 1) for n in range(each * size, (each + 1) * size)]
            for each in mine
        ]
        said = engine.log_probabilities([read.collate(ids, 0) for ids in numbers])
        for each, values in zip(mine, said, strict=bool(said)):
            there = max(min(len(part) - each * size, size), 0)
            found[each * size : each * size + there] = values[:there].float().cpu()


def references_of(
    spec: JobSpec, task: Task, inputs: TrainingInputs, base: Base | None, retry: Retry
) -> References | None:
    """The reference of a job whose objective compares the model with one, unless the engine holds it. Raises
    InputError if there is none."""
    if spec.workload.objective not in REFERENCED:
        return None
    if base is None:
        what = f"{spec.workload.objective} compares with the model that the run began with, and there is none"
        raise InputError(what, "workload.init_from", "name a run or an export")
    return References(spec, task, inputs, base, retry) if spec.train.reference == "precomputed" else None


def _all_readers(inputs: TrainingInputs) -> dict[str, SampleReader]:
    batches, sets = inputs.text
    return {TRAINING: batches.read} | {name: held.read for name, held in sets.items()}


def _readers(task: Task, inputs: TrainingInputs) -> Mapping[str, SampleReader]:
    """The samples that a task reads, by the names of their sets."""
    found = _all_readers(inputs)
    if task.evaluate_only:
        del found[TRAINING]
    return found


def _read(table: ReferenceTable) -> torch.Tensor:
    """What is there of a table, as rank 0 finds it."""
    values = torch.zeros(table.samples, 2)
    if dist.get_rank() == 0:
        values = torch.from_numpy(np.array(table.read(), dtype=np.float32))
    dist.broadcast(values, 0)
    return values


def _key(spec: JobSpec, base: Base, name: str | None) -> str:
    """A hash of what, beside the data in whose folder they are, determines the log-probabilities of the samples of a
    set; `name` is that of a part of the data, such as what is held out of it."""
    workload, data = spec.workload, spec.data
    share = data.validation.share if data.validation and name is not None else None
    model = "" if workload.model.startswith("hf:") else workload.model
    adapter = workload.adapter and workload.adapter.model_dump(
        mode="json"
    )  # which may begin with more than nothing
    known = [
        *(base.digest, name, share, model, workload.changes),
        *(workload.objective, workload.options.get("truncate"), workload.mup, adapter),
        *(data.sequence_length, spec.seed, spec.train.dtype),
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(known, sort_keys=True).encode())
