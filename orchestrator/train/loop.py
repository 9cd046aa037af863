"""The program of one rank: open a device, build the model, restore a commit, train step by step and commit.

`main` is the entry point of every gang: Ray actors, local processes and torchrun.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from cluster.workers.clock import wall
from cluster.workers.injected_faults import FaultSpec
from cluster.workers.machine import this_machine
from cluster.workers.worker_context import WorkerContext
from orchestrator.checkpoint.averaged import facts_of
from orchestrator.checkpoint.evaluations import measure_of
from orchestrator.checkpoint.identity import CODE, TEACHER
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.config.errors import InputError
from orchestrator.config.own_code import check_same_code, find_code
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.samples.batches import Batches, Prefetch, StepSamples, slices
from orchestrator.data.samples.receipt import add, roll
from orchestrator.data.samples.skips import lr_factor, merged, start_of
from orchestrator.data.store.tokens import Tokens
from orchestrator.optim.learning_rate import learning_rate
from orchestrator.parallel.device import Device, close_device, make_ready, open_device, peak_memory  # noqa: F401  (standbys call make_ready)
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import agree
from orchestrator.prune.structure import with_chosen_parts
from orchestrator.resolve.base import Base, base_of
from orchestrator.resolve.teacher import check_same_teacher
from orchestrator.resolve.training_inputs import TrainingInputs, digest_of, training_inputs
from orchestrator.storage.retry import patient
from orchestrator.storage.row_line import Row
from orchestrator.storage.row_types import EvaluationRow, StepRow
from orchestrator.train.commits import Commits
from orchestrator.train.committed_state import TrainingProgress
from orchestrator.train.distillation.compose import distilled_of
from orchestrator.train.distillation.stored_logits import StoredLogits
from orchestrator.train.engines.engine import Engine, Metrics
from orchestrator.train.engines.torch_engine import TorchEngine
from orchestrator.train.evaluation import Evaluator
from orchestrator.train.instability import check_stable
from orchestrator.train.mfu import mfu, model_flops_per_second
from orchestrator.train.profile import StepProfiler
from orchestrator.train.reference_model import References, references_of
from orchestrator.train.rollouts.compose import rollouts_of
from orchestrator.train.rollouts.rollouts import Rollouts
from orchestrator.train.sequence_warmup import shortened
from orchestrator.train.task import Task
from workloads import load as _load  # noqa: F401  (imported before the fork, so that ranks start sooner)
from workloads.adapters.frozen import after
from workloads.hf.hf_config import FolderConfig
from workloads.model.dropout import KEYS, row_keys
from workloads.model.kernels import noting
from workloads.workload import Batch, Workload


def make_engine(spec: JobSpec, workload: Workload, layout: Layout, device: Device, base: str = "") -> Engine:
    """Return the engine that the layout names.

    Args:
        spec: the job.
        workload: the model and its objective.
        layout: how the ranks divide the work; it names the engine.
        device: this rank's device.
        base: checksum of the base weights, see `TorchEngine`.

    Raises:
        InputError: if a package that the engine needs is not installed.
    """
    if layout.engine == "deepspeed":  # imported on demand, because it takes seconds
        from orchestrator.train.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, workload, layout, device)
    return TorchEngine(spec, workload, layout, device, base)


class RankRecord:
    """The fields of metric rows that describe this rank: its peak memory, machine and attention kernels."""

    def __init__(self, memory_before: int) -> None:
        """`memory_before`: bytes in use before the model was built, see `peak_memory`."""
        self._memory_before = memory_before
        self._last_memory: tuple[int, ...] = ()  # of every rank, in the last row; empty before the first
        self._kernels: set[str] = set()

    @contextmanager
    def watch_step(self) -> Iterator[None]:
        """Wrap every step. During the first one, note which kernels compute attention."""
        if self._last_memory:
            yield
            return
        with noting() as self._kernels:
            yield

    @property
    def memory(self) -> int:
        """Peak memory of this rank so far, in bytes."""
        return peak_memory(self._memory_before)

    def row(self, memory: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields for a step's row, given the peak bytes of all ranks.

        The first row also has the machine and the attention kernels. Later rows repeat the bytes of all ranks only
        when they have changed.
        """
        fields: dict[str, Any] = {"memory_bytes": memory[0]}
        if not self._last_memory:
            fields["machine"] = this_machine()
            fields["attention_kernels"] = sorted(self._kernels)
        if memory != self._last_memory:
            fields["memory_bytes_by_rank"] = memory
            self._last_memory = memory
        return fields


class StepRows(NamedTuple):
    """The rows that a rank trains on in a step, the sum of their receipt digests, and further fields of the step's
    row.
    """

    batches: list[Batch]
    digest: int
    metrics: dict[str, float]


LONGEST_PAUSE = 0.5
"""Maximum seconds between two checks for new samples."""


def await_samples(prefetched: Prefetch[Any], context: WorkerContext) -> bool:
    """Wait until all ranks have the samples of the next step.

    The wait has no limit here: the controller ends a gang that waits while no data is being prepared.

    Returns:
        False if any rank must stop before the samples are ready. All ranks get the same answer.
    """
    context.set_waiting(True)
    pause = LONGEST_PAUSE / 128
    while not (agreed := agree(0, context.stop_requested(), ready=prefetched.is_ready)).ready:
        if agreed.stop:
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    context.set_waiting(False)
    return agreed.ready


def is_growing(streaming: bool, is_complete: bool) -> bool:
    """Whether streamed data is still incomplete on some rank. All ranks get the same answer."""
    return streaming and not agree(0, False, ready=is_complete).ready


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for a step. Randomness depends on (seed, step, rank) only, so commits need no random state."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Train as one rank, up to a commit.

    After an error the process group and the device's memory stay as they are: the caller must end the process.

    Args:
        config: the fields of a `Task`.
        context: this rank's number, its store, and its connection to the controller.

    Returns:
        {"step", "ended"}. `ended` is "steps" (the job is complete), "until" (the task's last step), "plateau" or
        "stop". A task that only evaluates returns {"step", "ended", "evaluation"}.

    Raises:
        InputError: if the job cannot run here.
    """
    task = Task(**config)
    spec = parse(task.job)
    layout = Layout.from_json(task.layout)
    memory_before = peak_memory()
    find_code(spec.own_code, task.code, task.code_roots)
    device = open_device(spec.train, spec.resources.per_worker, context)
    patience = patient(spec.limits.unsaved, context.stop_requested)
    tokens = Tokens.open(task.data, patience, spec.data.node_cache_bytes)
    if task.shards not in ("", digest_of(spec.data, tokens)):
        raise InputError(
            "these token shards differ from the run's (checksum)",
            task.data,
            "put data.cache on storage that all nodes share",
        )
    task = dataclasses.replace(task, cleaned_by=tokens.manifest.code)
    base = Base(**task.base) if task.base else None
    # A restored run has its weights in the commit, and reads the base only if the job uses it beyond the start.
    needed_base = base if task.restore is None or spec.needs_base else None
    folder_config = FolderConfig(**task.folder_config) if task.folder_config else None
    inputs = training_inputs(spec, tokens, task.sets, needed_base, folder_config)
    references = references_of(spec, task, inputs, base, patience)
    if references and needed_base is None and base and not references.are_complete:
        # The base is the reference model, and some of its log-probabilities are still to be computed.
        reopened_base = base_of(spec.workload, spec.needs_base, dataclasses.asdict(base), False)
        inputs = training_inputs(spec, tokens, task.sets, reopened_base, folder_config)
    inputs = with_chosen_parts(inputs, task.run, device.device, context, patience, writes=task.commit)

    # A task that only evaluates measures the student, which needs no teacher.
    distilled = None if task.evaluate_only else distilled_of(spec.distill, inputs, tokens, patience)
    if distilled is not None:
        inputs = distilled.inputs
        task = dataclasses.replace(task, teacher=distilled.base.digest)
    rollouts = rollouts_of(
        inputs, tokens, layout=layout, device=device, context=context, roots=task.code_roots
    )

    def make(step: int) -> Engine:
        shared = base.digest if base and spec.reads_base else ""
        engine = make_engine(spec, after(inputs.workload, step), layout, device, shared)
        if spec.train.reference == "held":
            engine.hold_reference(spec.seed)
        if distilled is not None and distilled.teacher is not None:
            engine.hold_teacher(distilled.teacher, distilled.base.digest)
        return engine

    rank = Rank(
        task=task,
        spec=spec,
        layout=layout,
        context=context,
        make=make,
        inputs=inputs,
        memory_before=memory_before,
        references=references,
        stored=distilled.stored if distilled is not None else None,
        rollouts=rollouts,
        pinned=device.pinned,
        growing=is_growing(spec.data.streaming, tokens.sections is None),
    )
    result = rank.evaluate() if task.evaluate_only else rank.train()
    # Skipped after an error: leaving the process group may wait forever for collectives that peers have not joined,
    # and the error would never be reported. The parent ends this process.
    rank.close()
    close_device()
    return result


class Rank:
    """One rank of a gang, from the restored commit to the end of its task.

    All ranks take the same decisions at the same step, because each follows from values that `agree` has combined.
    """

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
        stored: StoredLogits | None = None,
        rollouts: Rollouts | None = None,
        pinned: Callable[[Batch], Batch] = lambda batch: batch,
        growing: bool = False,
    ) -> None:
        """Build the engine and restore the commit, or initialise the weights.

        Args:
            task: what this gang does, from which commit to which step.
            spec: the job.
            layout: how the ranks divide the work.
            context: this rank's number and its connection to the controller.
            make: returns the engine that continues after the given number of steps.
            inputs: the workload and its batches.
            memory_before: bytes in use before the model was built.
            references: log-probabilities of the reference model, if the objective needs them.
            stored: stored logits of a teacher, if the job learns from them.
            rollouts: makes the rows of a step, if the objective learns from rewards.
            pinned: moves a batch into page-locked memory if the device is a GPU.
            growing: whether some of the data is still being prepared.
        """
        self._task = task
        self._spec = spec
        self._layout = layout
        self._context = context
        self._make = make
        self._rollouts = rollouts
        self._pinned = pinned
        self._growing = growing
        self._engine = make(task.restore or 0)
        self._faults = [FaultSpec.parse(text) for text in task.faults]
        self._stopped = False  # whether a stop came while values were computed that training needs
        if references is not None:
            if not references.are_complete:
                self._engine.initialise(spec.seed)
            inputs = self._with_values(inputs, references)
        if stored is not None:
            inputs = self._with_values(inputs, stored)
        self._batches = inputs.batches
        self._make_evaluator: Callable[[Engine], Evaluator] = lambda engine: Evaluator(
            spec,
            layout,
            context=context,
            engine=engine,
            inputs=inputs,
            rollouts=rollouts,
            between=lambda step: self._inject(step, in_evaluation=True),
        )
        self._evaluator = self._make_evaluator(self._engine)
        self._last = min(-(-task.until // self._steps_together) * self._steps_together, spec.train.steps)
        self._record = RankRecord(memory_before)
        self._commits = Commits(task, spec, layout, context, self._engine)
        self._weight_facts: dict[
            str, Any
        ] = {}  # facts about the restored weights, for an evaluation-only row
        self._progress = self._origin = self._restore()
        self._evaluations: list[EvaluationRow] = []  # evaluations since the last step's row

    def train(self) -> dict[str, Any]:
        """Train to the end of the task. The last commit is published when this returns."""
        profiler = self._profiler = StepProfiler(self._context, self._task, lambda: self._engine.clock)
        prefetch = Prefetch(self._samples, self._progress.step, self._batches.ahead, self._last)
        with self._commits, profiler, prefetch as prefetched:
            # An evaluation may be due now: before the first step, or because a stop cut it short in the last attempt.
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
        if step >= self._spec.train.steps:
            ended = "steps"
        elif stop:
            ended = "stop"
        elif self._progress.is_on_plateau(self._spec.stop_when):
            ended = "plateau"
        else:
            ended = "until"
        return {"step": step, "ended": ended}

    def close(self) -> None:
        """Free the engine's memory, and end the processes that compute rewards."""
        self._engine.close()
        if self._rollouts is not None:
            self._rollouts.close()

    def _thaw(self) -> None:
        """Continue with more trained parameters.

        Waits for the commit of this step and restores it into a new engine, exactly as another attempt would.
        """
        step = self._progress.step
        self._commits.finish(dataclasses.asdict(self._progress))
        self._context.set_waiting(True)
        self._engine.close()
        self._engine = self._make(step)
        self._evaluator = self._make_evaluator(self._engine)
        self._commits.go_on(self._engine)
        self._engine.load(self._commits.open(step)[1])
        self._context.set_waiting(False)

    def _with_values(self, inputs: TrainingInputs, values: References | StoredLogits) -> TrainingInputs:
        """Return the inputs with another model's outputs for every sample; compute what is missing now.

        A stop cuts the computation short. The values so far are kept, and this gang does not train.
        """
        if not values.are_complete:
            values.compute(
                self._engine,
                self._layout,
                self._context,
                not self._task.evaluate_only,
                lambda: self._inject(0, in_evaluation=True),
            )
            self._stopped = not values.are_complete
        return values.joined(inputs)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate the restored commit, whether or not an evaluation is due."""
        step = self._progress.step
        row = self._evaluator.evaluate(step, self._task.attempt, heeds_stop=False)
        evaluation = {**(row or {}), **self._weight_facts}
        return {"step": step, "ended": "last_evaluation_step", "evaluation": evaluation}

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
            check_same_code(
                self._spec.own_code, self._spec.accept_code, manifest.meta.get(CODE) or {}, self._task.run
            )
            check_same_teacher(manifest.meta.get(TEACHER), self._task.teacher, self._spec.distill)
            self._engine.load(reader)
            self._weight_facts = facts_of(reader)
        except CorruptCommit as error:
            # The controller reads the step from the exception, and restores the commit before it.
            raise CorruptCommit(str(error), self._task.restore) from None
        return TrainingProgress.of_commit(
            step=manifest.step,
            position=manifest.position,
            receipt=manifest.receipt,
            meta=manifest.meta,
            skips=self._task.skips,
            measured=measure_of(self._spec.evaluate, self._spec.checkpoint.averaged),
        )

    def _step(self, prefetched: Prefetch[StepSamples]) -> bool:
        """Do one optimizer step, write its row and, if due, evaluate and commit. Return whether to stop now."""
        started = time.perf_counter()
        done = self._progress.step  # steps before this one
        self._inject(done + 1)
        self._profiler.next(done + 1)
        self._context.set_waiting(True)
        samples = prefetched.next()
        self._context.set_waiting(False)
        waited = time.perf_counter() - started
        made = self._roll_out(samples)
        train = self._spec.train
        lr = learning_rate(train.optimizer, done, train.steps, self._progress.schedule_from(train))
        lr *= lr_factor(done + 1, self._progress.skips)
        seed_step(self._spec.seed, done, self._context.rank_info.rank)
        metrics = self._compute(made.batches, lr)
        parts = self._engine.clock.take()
        computed = time.perf_counter()
        busy = waited + metrics.busy_seconds if metrics.busy_seconds else 0.0
        # One small all-gather on the CPU. After it every rank knows the same, and so decides the same.
        agreed = agree(
            digest=made.digest,
            stop=self._context.stop_requested(),
            failures=self._commits.failures,
            ready=self._commits.ready,
            failed_step=self._commits.failed_step,
            busy=busy,
            memory=self._record.memory,
        )
        if len(agreed.busy) > 1:
            parts["agreement"] = time.perf_counter() - computed
        self._refuse_unstable(metrics)
        self._advance(agreed.digest, metrics.loss)
        row = self._row(metrics, lr, time.perf_counter() - started, waited)
        if samples.padding is not None:
            row["padding"] = samples.padding
        row |= made.metrics
        row["busy_seconds"] = agreed.busy if busy else ()
        row |= self._record.row(agreed.memory)
        row |= {f"{part}_seconds": round(seconds, 6) for part, seconds in parts.items()}
        stop = agreed.stop and not self._is_within_rollout
        if not stop or self._progress.step == self._last:
            stop |= not self._evaluate()
            row["time"] = wall()
        row["evaluation_seconds"] = sum(each["seconds"] for each in self._evaluations)
        if self._evaluations:
            row["evaluations"] = self._evaluations
            self._evaluations = []
        progress = dataclasses.asdict(self._progress)
        final = stop or self._is_over
        row["commit_seconds"] = self._commits.after_step(
            progress, row, agreed, final=final, may_save=not self._is_within_rollout
        )
        row["saves"] = self._commits.outcomes()
        self._context.report(self._progress.step, row if self._context.rank_info.rank == 0 else None)
        return stop

    def _roll_out(self, samples: StepSamples) -> StepRows:
        """Return the rows of a step: its samples, or the answers to its prompts."""
        if self._rollouts is None:
            return StepRows(samples.batches, samples.digest, {})
        step = self._progress.step
        made = self._rollouts.rows(self._engine, step, samples.prompts)
        self._rollouts.keep(step + 1, made, self._task)
        batches = [self._pinned(batch) for batch in made.batches]
        return StepRows(batches, made.digest, made.metrics)

    def _evaluate(self) -> bool:
        """Evaluate if an evaluation is due after this step and not done yet.

        Returns:
            False, on all ranks, if a stop cut the evaluation short. Training must then end at this step, and the
            next attempt evaluates its commit.
        """
        step = self._progress.step
        # A task that does not commit is a replay, which compares training only.
        is_due = self._task.commit and self._evaluator.is_due(step)
        if not is_due or self._progress.last_evaluation_step == step:
            return True
        # No attempt follows the last step, so a stop does not cut its evaluation short.
        heeds_stop = step < self._last and not self._is_within_rollout
        row = self._evaluator.evaluate(step, self._task.attempt, heeds_stop=heeds_stop)
        if row is not None:
            self._evaluations.append(row)
            self._progress = self._progress.with_evaluation(row["sets"], self._evaluator.stop_when(step))
        return row is not None

    def _inject(self, step: int, in_evaluation: bool = False) -> None:
        """Apply the injected faults of this rank and step. A fault that asks for it sets the weights to NaN."""
        info = self._context.rank_info
        for fault in self._faults:
            if fault.apply(info.rank, info.world_size, step, self._task.attempt, in_evaluation):
                self._engine.poison()

    def _compute(self, micro_batches: list[Batch], lr: float) -> Metrics:
        """Run the engine's step; add a note with the step and the pipeline stage to an error."""
        try:
            with self._record.watch_step():
                return self._engine.train_step(micro_batches, lr)
        except Exception as error:
            stage = self._layout.coordinate(self._context.rank_info.rank)["pp"]
            error.add_note(f"at step {self._progress.step + 1}, pipeline stage {stage}")
            raise

    def _samples(self, step: int) -> StepSamples:
        """Return this rank's samples of a step. `Prefetch` calls this in a background thread.

        The ranks of a tensor, context or pipeline group read the same samples, so only the first of them counts the
        digest. The share of padding is computed here too, because the order of samples is not thread-safe.
        """
        size = self._spec.samples_per_step
        coordinate = self._layout.coordinate(self._context.rank_info.rank)
        origin = self._origin
        start = start_of(origin.position, step - origin.step, size, origin.skips)
        if self._rollouts is not None:
            assert isinstance(self._batches, Batches)  # own samples come with their own objective
            starts = self._starts_of_rollout(step)
            return StepSamples(
                [], 0, None, [self._rollouts.prompts(self._batches, each, size) for each in starts]
            )
        mine = slices(start, size, coordinate["dp"], self._layout.dp, self._layout.micro_batch)
        parts = [self._batches.batch(position, count) for position, count in mine]
        if self._spec.workload.draws:
            for (position, count), (batch, _) in zip(mine, parts, strict=True):
                batch[KEYS] = row_keys(self._spec.seed, position, count)
        if length := self._row_length(step):
            parts = [(shortened(batch, length), digest) for batch, digest in parts]
        is_first = coordinate["pp"] == coordinate["cp"] == coordinate["tp"] == 0
        reports_padding = self._batches.packed and self._context.rank_info.rank == 0
        return StepSamples(
            batches=[self._pinned(batch) for batch, _ in parts],
            digest=add(digest for _, digest in parts) if is_first else 0,
            padding=self._batches.padding(start, size) if reports_padding else None,
        )

    def _starts_of_rollout(self, step: int) -> list[int]:
        """Return the positions at which the steps of a rollout begin, if one begins after `step` steps."""
        together = self._steps_together
        size = self._spec.samples_per_step
        origin = self._origin
        if step % together:
            return []
        numbers = range(step - origin.step, step - origin.step + together)
        return [start_of(origin.position, number, size, origin.skips) for number in numbers]

    @property
    def _steps_together(self) -> int:
        """Number of steps that one rollout serves. Between them nothing is saved, and no task ends."""
        return self._spec.rollout.steps if self._spec.rollout else 1

    @property
    def _is_within_rollout(self) -> bool:
        return self._progress.step % self._steps_together != 0

    def _row_length(self, step: int) -> int | None:
        """Return the tokens of a row in the step after `step` steps; None without a warm-up of the sequence length."""
        warmup = self._spec.train.sequence_warmup
        return warmup.at(step, self._spec.data.sequence_length) if warmup else None

    def _advance(self, digest: int, loss: float | None) -> None:
        """Count the step that was just done."""
        size = self._spec.samples_per_step
        before = self._progress
        stability = self._spec.train.stability
        losses = before.losses if loss is None else (*before.losses, loss)
        self._progress = dataclasses.replace(
            before,
            step=before.step + 1,
            position=start_of(before.position, 0, size, before.skips) + size,
            tokens=before.tokens + self._spec.train.global_batch * self._spec.data.sequence_length,
            receipt=roll(before.receipt, digest),
            losses=() if stability.spike is None else losses[-stability.window :],
        )

    def _refuse_unstable(self, metrics: Metrics) -> None:
        """Raise NonFinite or LossSpike if the step's numbers show that training is unstable."""
        train = self._spec.train
        before = self._progress
        check_stable(
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            before=before.losses,
            stability=train.stability,
            step=before.step + 1,
            position=start_of(before.position, 0, self._spec.samples_per_step, before.skips),
        )

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
            # Shorter rows during the warm-up of the sequence length cost their share of a full row's FLOPs.
            row_length = self._row_length(self._progress.step - 1) or 0
            flops = model_flops_per_second(
                self._task.flops_per_token,
                tokens_per_second=row["tokens_per_second"],
                share=row_length / self._spec.data.sequence_length or 1.0,
            )
            row["model_flops_per_second"] = flops
            if self._task.peak_flops:
                row["mfu"] = mfu(flops, self._task.peak_flops, ranks=self._layout.world)
        if length := self._row_length(self._progress.step - 1):
            row["sequence_length"] = length
        return {**row, **metrics.extra}
