"""The rank program: take a device, build the model, restore a commit, train step by step, commit, end.

`main` is the entry point of every gang: Ray actors, local processes and torchrun.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cluster.workers.clock import wall
from cluster.workers.injected_faults import FaultSpec
from cluster.workers.machine import this_machine
from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.averaged import facts_of
from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.identity import CODE
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_code, find_code
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.samples.batches import Prefetch, StepSamples, slices
from orchestrator.data.samples.receipt import add, roll
from orchestrator.data.samples.skips import lr_factor, merged, start_of
from orchestrator.data.store.tokens import Tokens
from orchestrator.optim.learning_rate import learning_rate
from orchestrator.parallel.device import Device, close_device, make_ready, open_device, peak_memory  # noqa: F401  (standbys call it)
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import agree
from orchestrator.resolve.base import Base, base_of
from orchestrator.resolve.training_inputs import TrainingInputs, digest_of, training_inputs
from orchestrator.storage.retry import patient
from orchestrator.storage.row_line import Row
from orchestrator.storage.row_types import EvaluationRow, StepRow
from orchestrator.train.commits import Commits
from orchestrator.train.engines.engine import Engine, Metrics
from orchestrator.train.engines.torch_engine import TorchEngine
from orchestrator.train.evaluation import Evaluator
from orchestrator.train.instability import check_stable
from orchestrator.train.profile import StepProfiler
from orchestrator.train.progress import TrainingProgress
from orchestrator.train.reference_model import References, references_of
from orchestrator.train.sequence_warmup import shortened
from orchestrator.train.task import Task
from workloads import load as _load  # noqa: F401  (a fork of what has it imported begins sooner)
from workloads.adapters.frozen import after
from workloads.hf.hf_config import FolderConfig
from workloads.model.dropout import KEYS, row_keys
from workloads.model.kernels import noting
from workloads.workload import Batch, Workload


def make_engine(spec: JobSpec, workload: Workload, layout: Layout, device: Device, base: str = "") -> Engine:
    """The engine that the layout names; `base` as in `TorchEngine`. Raises InputError if what it needs is not
    installed."""
    if layout.engine == "deepspeed":  # imported here because it takes seconds
        from orchestrator.train.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, workload, layout, device)
    return TorchEngine(spec, workload, layout, device, base)


class RankRecord:
    """Memory, see `peak_memory`, which was `before` the model was built; the kernels of attention."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._told: tuple[int, ...] = ()
        self._kernels: set[str] = set()

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Around every step: of the first it notes by which kernels attention is computed."""
        if self._told:
            yield
            return
        with noting() as self._kernels:
            yield

    @property
    def memory(self) -> int:
        """Bytes that this rank has needed at most."""
        return peak_memory(self._before)

    def row(self, memory: tuple[int, ...]) -> dict[str, Any]:
        """What a row tells, given the bytes of all ranks: of each where they have changed, and first of all on which
        machine this rank is, and which kernels of attention it has."""
        found: dict[str, Any] = {"memory_bytes": memory[0]}
        if not self._told:
            found["machine"] = this_machine()
            found["attention_kernels"] = sorted(self._kernels)
        if memory != self._told:
            found["memory_bytes_by_rank"] = self._told = memory
        return found


LONGEST = 0.5
"""Seconds between two looks, at most."""


def await_samples(prefetched: Prefetch[Any], context: WorkerContext) -> bool:
    """Wait until all ranks have the samples of the next step. Returns False if any is to stop before; all ranks get the
    same. The controller ends a gang that waits while no part is prepared."""
    context.set_waiting(True)
    pause = LONGEST / 128
    while not (agreed := agree(0, context.stop_requested(), ready=prefetched.is_ready)).ready:
        if agreed.stop:
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
    context.set_waiting(False)
    return agreed.ready


def is_growing(streaming: bool, all_there: bool) -> bool:
    """Whether data that is streamed is not all there for some rank; all ranks get the same."""
    return streaming and not agree(0, False, ready=all_there).ready


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for a step: randomness is a function of (seed, step, rank), so that no random state must be saved."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Train as one rank, up to a commit. Returns {"step", "ended"}; ended is "steps", "until" or "stop".

    What raises leaves the process group and the device's memory as they are, for the process is to end.
    """
    task = Task(**config)
    spec, layout = parse(task.job), Layout.from_json(task.layout)
    memory_before = peak_memory()
    find_code(spec, task.code, task.code_roots)
    device = open_device(spec, context)
    patience = patient(spec.limits.unsaved, context.stop_requested)
    tokens = Tokens.open(task.data, patience, spec.data.node_cache_bytes)
    if task.shards not in ("", digest_of(spec, tokens)):
        raise InputError("these token shards are not the run's", task.data, "let all nodes see one folder")
    task = dataclasses.replace(task, cleaned_by=tokens.manifest.code)
    base = Base(**task.base) if task.base else None
    needed = base if task.restore is None or spec.needs_base else None
    kept = FolderConfig(**task.folder_config) if task.folder_config else None
    inputs = training_inputs(spec, tokens, task.sets, needed, kept)
    references = references_of(spec, task, inputs, base, patience)
    if references and needed is None and base and not references.are_complete:
        again = base_of(spec, dataclasses.asdict(base), False)
        inputs = training_inputs(spec, tokens, task.sets, again, kept)

    def make(step: int) -> Engine:
        shared = base.digest if base and spec.reads_base else ""
        engine = make_engine(spec, after(inputs.workload, step), layout, device, shared)
        if spec.train.reference == "held":
            engine.hold_reference(spec.seed)
        return engine

    told = (
        memory_before,
        references,
        device.pinned,
        is_growing(spec.data.streaming, tokens.sections is None),
    )
    rank = Rank(task, spec, layout, context, make, inputs, *told)
    result = rank.evaluate() if task.evaluate_only else rank.train()
    # Nothing of this after an error: leaving the group may wait for ever behind what peers have not joined in, and the
    # error would never be told. Whoever started this process ends it.
    rank.close()
    close_device()
    return result


class Rank:
    """One rank of a gang, from the restored commit to the end of its task."""

    def __init__(
        self,
        task: Task,
        spec: JobSpec,
        layout: Layout,
        context: WorkerContext,
        make: Callable[[int], Engine],
        inputs: TrainingInputs,
        memory_before: int = 0,
        references: References | None = None,
        pinned: Callable[[Batch], Batch] = lambda batch: batch,
        growing: bool = False,
    ) -> None:
        """`make` gives the engine that goes on after so many steps; `growing`: some of the data is still prepared."""
        self._pinned, self._growing = pinned, growing
        self._task, self._spec, self._layout, self._context = task, spec, layout, context
        self._make, self._engine = make, make(task.restore or 0)
        self._faults = [FaultSpec.parse(text) for text in task.faults]
        self._stopped = False
        if references is not None:
            inputs = self._compared(inputs, references)
        self._batches = inputs.batches
        self._evaluates: Callable[[Engine], Evaluator] = lambda engine: Evaluator(
            spec, layout, context, engine, inputs, lambda step: self._inject(step, True)
        )
        self._evaluator = self._evaluates(self._engine)
        self._last = min(task.until, spec.train.steps)
        self._record = RankRecord(memory_before)
        self._commits = Commits(task, spec, layout, context, self._engine)
        self._weights: dict[str, Any] = {}  # what the row of an evaluation alone says of them
        self._progress = self._origin = self._restore()
        self._evaluations: list[EvaluationRow] = []  # since the last step's row

    def train(self) -> dict[str, Any]:
        """Train to the end of the task. The last commit is published when this returns."""
        profiler = self._profiler = StepProfiler(self._context, self._task, lambda: self._engine.clock)
        made = Prefetch(self._samples, self._progress.step, self._batches.ahead, self._last)
        with self._commits, profiler, made as prefetched:
            # Before the first step, or when a stop came before it.
            stop = self._stopped or (not self._is_over and not self._evaluate())
            if not self._is_over:
                self._commits.before_training(dataclasses.asdict(self._progress))
            while not self._is_over and not stop:
                stop = self._growing and not await_samples(prefetched, self._context)
                stop = stop or self._step(prefetched)
                if not stop and not self._is_over and self._progress.step in self._spec.train.thaw:
                    self._thaw()
            self._commits.finish(dataclasses.asdict(self._progress))
        step = self._progress.step
        plateau = "plateau" if self._progress.is_on_plateau(self._spec.stop_when) else "until"
        ended = "steps" if step >= self._spec.train.steps else "stop" if stop else plateau
        return {"step": step, "ended": ended}

    def close(self) -> None:
        """Free the engine's memory."""
        self._engine.close()

    def _thaw(self) -> None:
        """Go on with more parameters, as another attempt would: from the commit of this step, which is waited for."""
        step = self._progress.step
        self._commits.finish(dataclasses.asdict(self._progress))
        self._context.set_waiting(True)
        self._engine.close()
        self._engine = self._make(step)
        self._evaluator = self._evaluates(self._engine)
        self._commits.go_on(self._engine)
        self._engine.load(self._commits.open(step)[1])
        self._context.set_waiting(False)

    def _compared(self, inputs: TrainingInputs, references: References) -> TrainingInputs:
        """The inputs with the log-probabilities of the reference, computed now where they are missing. A stop cuts that
        short: what is there is kept, and this gang only commits."""
        if not references.are_complete:
            self._engine.initialise(self._spec.seed)
            heeds_stop = not self._task.evaluate_only
            references.compute(
                self._engine, self._layout, self._context, heeds_stop, lambda: self._inject(0, True)
            )
            self._stopped = not references.are_complete
        return references.joined(inputs)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the commit that was restored, whether or not that is due."""
        step = self._progress.step
        row = self._evaluator.evaluate(step, self._task.attempt, heeds_stop=False)
        found = {**(row or {}), **self._weights}
        return {"step": step, "ended": "last_evaluation_step", "evaluation": found}

    @property
    def _is_over(self) -> bool:
        progress = self._progress
        return progress.step >= self._last or progress.is_on_plateau(self._spec.stop_when)

    def _restore(self) -> TrainingProgress:
        """Load the commit that the task names, or initialise the weights."""
        if self._task.restore is None:
            self._engine.initialise(self._spec.seed)
            return TrainingProgress(skips=merged(self._task.skips))
        try:
            manifest, reader = self._commits.open(self._task.restore)
            check_same_code(self._spec, manifest.meta.get(CODE) or {}, self._task.run)
            self._engine.load(reader)
            self._weights = facts_of(reader)
        except CorruptCommit as error:
            # The controller learns the step from the exception, and takes the commit before.
            raise CorruptCommit(str(error), self._task.restore) from None
        told = manifest.step, manifest.position, manifest.receipt, manifest.meta, self._task.skips
        return TrainingProgress.of_commit(*told, measure_of(self._spec))

    def _step(self, prefetched: Prefetch[StepSamples]) -> bool:
        """One optimiser step, its row of metrics and, if due, its commit. Returns whether to stop now."""
        began, at = time.perf_counter(), self._progress.step
        self._inject(at + 1)
        self._profiler.next(at + 1)
        self._context.set_waiting(True)
        micro_batches, digest, padding = prefetched.next()
        self._context.set_waiting(False)
        waited = time.perf_counter() - began
        train, begin = self._spec.train, self._progress.schedule_from(self._spec.train)
        lr = learning_rate(train.optimizer, at, train.steps, begin)
        lr *= lr_factor(at + 1, self._progress.skips)
        seed_step(self._spec.seed, at, self._context.rank_info.rank)
        metrics = self._compute(micro_batches, lr)
        parts = self._engine.clock.take()
        computed = time.perf_counter()
        busy = waited + metrics.busy_seconds if metrics.busy_seconds else 0.0
        commits, stopping = self._commits, self._context.stop_requested()
        told = commits.failures, commits.ready, commits.failed_step
        agreed = agree(digest, stopping, *told, busy, self._record.memory)
        parts |= {"agreement": time.perf_counter() - computed} if len(agreed.busy) > 1 else {}
        self._refuse_unstable(metrics)
        self._advance(agreed.digest, metrics.loss)
        row = self._row(metrics, lr, time.perf_counter() - began, waited)
        row |= {} if padding is None else {"padding": padding}
        row |= {"busy_seconds": agreed.busy if busy else (), **self._record.row(agreed.memory)}
        row |= {f"{part}_seconds": round(seconds, 6) for part, seconds in parts.items()}
        stop = agreed.stop
        if not stop or self._progress.step == self._last:
            stop |= not self._evaluate()
            row["time"] = wall()
        row["evaluation_seconds"] = sum(each["seconds"] for each in self._evaluations)
        if self._evaluations:
            row["evaluations"], self._evaluations = self._evaluations, []
        progress = dataclasses.asdict(self._progress)
        row["commit_seconds"] = self._commits.after_step(progress, row, agreed, stop or self._is_over)
        row["saves"] = self._commits.outcomes()
        self._context.report(self._progress.step, row if self._context.rank_info.rank == 0 else None)
        return stop

    def _evaluate(self) -> bool:
        """Evaluate if it is due after this step, and has not been done. Returns whether no stop has cut it short, of
        which all ranks know: training must then end at this very step, whose commit is evaluated later."""
        step = self._progress.step
        due = self._task.commit and self._evaluator.is_due(step)  # a replay is about training
        if not due or self._progress.last_evaluation_step == step:
            return True
        # That of the last step has no other chance.
        row = self._evaluator.evaluate(step, self._task.attempt, heeds_stop=step < self._last)
        if row is not None:
            self._evaluations.append(row)
            self._progress = self._progress.with_evaluation(row["sets"], self._evaluator.stop_when(step))
        return row is not None

    def _inject(self, step: int, in_evaluation: bool = False) -> None:
        rank, world = self._context.rank_info.rank, self._context.rank_info.world_size
        for fault in self._faults:
            if fault.apply(rank, world, step, self._task.attempt, in_evaluation):
                self._engine.poison()

    def _compute(self, micro_batches: list[Batch], lr: float) -> Metrics:
        """The engine's step; errors get a note with the step and pipeline stage."""
        try:
            with self._record.first_step():
                return self._engine.train_step(micro_batches, lr)
        except Exception as error:
            stage = self._layout.coordinate(self._context.rank_info.rank)["pp"]
            error.add_note(f"at step {self._progress.step + 1}, pipeline stage {stage}")
            raise

    def _samples(self, step: int) -> StepSamples:
        """This rank's samples of a step. The ranks of a tensor, context or pipeline group read the same ones; only the
        first has a digest. Padding is told here, since one thread at a time may ask for the order of samples."""
        size = self._spec.train.global_batch
        coordinate = self._layout.coordinate(self._context.rank_info.rank)
        origin = self._origin
        start = start_of(origin.position, step - origin.step, size, origin.skips)
        mine = slices(start, size, coordinate["dp"], self._layout.dp, self._layout.micro_batch)
        parts = [self._batches.batch(position, count) for position, count in mine]
        if self._spec.workload.draws:
            for (position, count), (batch, _) in zip(mine, parts, strict=True):
                batch[KEYS] = row_keys(self._spec.seed, position, count)
        if length := self._row_length(step):
            parts = [(shortened(batch, length), digest) for batch, digest in parts]
        counts = coordinate["pp"] == coordinate["cp"] == coordinate["tp"] == 0
        told = self._batches.packed and self._context.rank_info.rank == 0
        return StepSamples(
            [self._pinned(batch) for batch, _ in parts],
            add(digest for _, digest in parts) if counts else 0,
            self._batches.padding(start, size) if told else None,
        )

    def _row_length(self, step: int) -> int | None:
        """Tokens of a row in the step after `step` steps, None where they are those of a sample all along."""
        warmup = self._spec.train.sequence_warmup
        return warmup.at(step, self._spec.data.sequence_length) if warmup else None

    def _advance(self, digest: int, loss: float | None) -> None:
        size, before, stability = self._spec.train.global_batch, self._progress, self._spec.train.stability
        losses = before.losses if loss is None else (*before.losses, loss)
        self._progress = dataclasses.replace(
            before,
            step=before.step + 1,
            position=start_of(before.position, 0, size, before.skips) + size,
            tokens=before.tokens + size * self._spec.data.sequence_length,
            receipt=roll(before.receipt, digest),
            losses=() if stability.spike is None else losses[-stability.window :],
        )

    def _refuse_unstable(self, metrics: Metrics) -> None:
        train, before = self._spec.train, self._progress
        step, position = before.step + 1, start_of(before.position, 0, train.global_batch, before.skips)
        check_stable(metrics.loss, metrics.grad_norm, before.losses, train.stability, step, position)

    def _row(self, metrics: Metrics, lr: float, seconds: float, data_seconds: float) -> Row:
        tokens = self._spec.train.global_batch * self._spec.data.sequence_length
        row: StepRow = {
            "step": self._progress.step,
            "loss": metrics.loss,
            "lr": lr,
            "grad_norm": metrics.grad_norm,
            "tokens": self._progress.tokens,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "commit_seconds": 0.0,
            "samples": self._progress.receipt,
            "layout": str(self._layout),
            "attempt": self._task.attempt,
            "time": wall(),
        }
        if self._task.flops_per_token:
            padded = (self._row_length(self._progress.step - 1) or 0) / self._spec.data.sequence_length or 1.0
            flops = self._task.flops_per_token * row["tokens_per_second"] * padded
            row["model_flops_per_second"] = flops
            if self._task.peak_flops:
                row["mfu"] = flops / (self._task.peak_flops * self._layout.world)
        if length := self._row_length(self._progress.step - 1):
            row["sequence_length"] = length
        return {**row, **metrics.extra}
